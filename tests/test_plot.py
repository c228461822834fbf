"""tools.plot: what runs' logs tell, and what a model's attention looks at."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from test_scripts import ROOT

import checkpoint as ckpt
import train
from config import UserError
from tools import attention, plot, runs


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_run(name, losses, interval=10, **settings):
    """A log with these validation losses, and training losses that are 0.1 below."""
    Path(name).mkdir(parents=True)
    settings = {"n_layer": 2, "learning_rate": 1e-3, "seed": 1} | settings
    events = [{"step": 0, "split": "start", "parameters": 1000, "settings": settings}]
    for number, loss in enumerate(losses):
        step = number * interval
        common = {"step": step, "tokens": 100 * step, "elapsed_s": 2 + step / 5}
        events.append(common | {"split": "val", "loss": loss})
        events.append(common | {"split": "train", "loss": loss - 0.1, "tokens_per_s": 500 + step})
    lines = "".join(json.dumps(event) + "\n" for event in events)
    Path(name, "log.jsonl").write_text(lines)


def table(*names):
    """The table of runs as rows of cells."""
    lines = runs.table(runs.read_all(names))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_has_the_best_first_and_only_settings_that_differ():
    write_run("out-a", [4.0, 2.5, 2.0, 2.25])
    write_run("out-b", [4.0, 1.5], n_layer=4, learning_rate=3e-4)
    write_run("out-c", [])
    head, _, *rows = table("out-a", "out-b", "out-c")
    assert head == [
        "run", "n_layer", "learning_rate", "parameters", "best val loss", "at step", "steps",
        "time, s", "tokens/s",
    ]  # fmt: skip
    assert rows == [
        ["out-b", "4", "0.0003", "1,000", "1.5000", "10", "10", "4", "505"],
        ["out-a", "2", "0.001", "1,000", "2.0000", "20", "30", "8", "515"],
        ["out-c", "2", "0.001", "1,000", "", "", "", "", ""],
    ]


def test_a_setting_that_changed_on_resuming_is_the_last():
    write_run("out-a", [4.0])
    with open("out-a/log.jsonl", "a") as log:
        log.write('{"step": 1, "split": "resume", "changed": {"seed": [1, 5]}}\n{"step": 9, "spl')
    assert runs.read("out-a").settings["seed"] == 5


def test_a_real_run_is_read_as_it_went(verse):
    train.main(tiny.flags())
    run = runs.read("out")
    assert run.parameters == 3632
    assert run.settings["n_embd"] == 16
    assert run.best["loss"] == pytest.approx(tiny.saved()["best_val_loss"])
    for axis, last in (("steps", 6), ("tokens", 6 * 32)):
        x, losses = run.curve("val", axis)
        assert (len(losses), x[-1]) == (3, last)
    assert run.curve("train", "steps")[0] == list(range(6))


def test_a_folder_of_runs_stands_for_them():
    write_run("out-sweep/a", [3.0])
    write_run("out-sweep/b", [2.0])
    assert [row[0] for row in table("out-sweep", "out-sweep/a")[2:]] == [
        "out-sweep/b",
        "out-sweep/a",
    ]


@pytest.mark.parametrize("axis", ["steps", "tokens", "seconds"])
def test_curves_in_text_show_where_losses_are(axis):
    write_run("out-a", [4.0, 3.0, 2.0])
    write_run("out-b", [4.0, 3.5, 3.4])
    lines = plot.drawn_in_text(runs.read_all(["out-a", "out-b"]), axis, width=60, height=21)
    canvas = [line[line.index("|") + 1 :] for line in lines[:21]]
    rows = {letter: [n for n, line in enumerate(canvas) if letter in line] for letter in "ABab"}
    assert all(rows.values())
    assert max(rows["A"]) > max(rows["B"])  # A ends lower
    assert max(rows["a"]) > max(rows["A"])  # training is below validation
    assert "A out-a, B out-b" in lines[-1]
    assert lines[-3].endswith({"steps": "20", "tokens": "2,000", "seconds": "6"}[axis] + f" {axis}")
    assert len({len(line) for line in lines[:21]}) == 1


def test_many_steps_are_drawn_as_means():
    write_run("out-a", [4 + (-1) ** n for n in range(1000)])
    x, losses = plot.curves_of(runs.read("out-a"), "steps")["train"]
    assert len(x) == plot.BINS
    assert losses == pytest.approx(3.9)


def shown(figure):
    """{label in the legend: the points of its line}."""
    (axes,) = figure.axes
    legend = axes.get_legend()
    pairs = zip(legend.get_texts(), legend.legend_handles, strict=True)
    by_colour = {line.get_color(): line.get_xydata().tolist() for line in axes.lines[1::3]}
    return {text.get_text(): by_colour[handle.get_color()] for text, handle in pairs}


def test_the_picture_has_a_labelled_curve_for_each_run(capsys):
    pytest.importorskip("matplotlib")
    write_run("out-a", [4.0, 2.5, 2.0, 2.25])
    write_run("out-b", [4.0, 3.5])
    curves = shown(plot.picture(runs.read_all(["out-a", "out-b"]), "steps"))
    assert curves["out-a"] == [[0, 4.0], [10, 2.5], [20, 2.0], [30, 2.25]]
    assert curves["out-b"] == [[0, 4.0], [10, 3.5]]
    plot.main(["out-a", "out-b", "--out=here.png"])
    assert Path("here.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "wrote here.png" in out
    assert "| out-a |" in out


def test_any_name_of_a_folder_is_drawn_as_it_is():
    pytest.importorskip("matplotlib")
    names = ["out-$\\foo$", "_under", "out sp ace"]
    for name in names:
        write_run(name, [4.0, 2.5])
    plot.main([*names, "--out=a.png"])
    assert set(shown(plot.picture(runs.read_all(names), "steps"))) == set(names)


def test_a_log_is_read_as_far_as_it_is_one():
    write_run("out-a", [4.0, 2.5])
    event = '{"step": 0, "split": "val", "tokens": 1, "elapsed_s": 1, "loss": %s}'
    foreign = [event % "NaN", event % ("1" + "0" * 400), event % '"2"', "[]", "1", "{}"]
    with open("out-a/log.jsonl", "a") as log:
        log.write("\n".join(foreign))
    assert len(runs.read("out-a").val) == 2


def test_without_matplotlib_curves_are_drawn_in_text(monkeypatch, capsys):
    write_run("out-a", [4.0, 2.5])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plot.main(["out-a"])
    captured = capsys.readouterr()
    assert "pip install matplotlib" in captured.err
    assert "A out-a" in captured.out
    assert not Path("runs.png").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "name the folders of the runs to draw: out-a"),
        (["out-b"], "there is no run in out-b: .* did you mean out-a"),
        (["out-empty"], "these runs have no losses yet"),
        (["out-a", "--out=a.jpg"], "let its name end in .png"),
        (["out-a", "--out=gone/a.png"], "cannot write gone/a.png"),
        (["--attention", "--out_dir=out-a", "--x=tokens"], "no --text and no --x"),
        (["a" * 300], "cannot read a"),
        (["out-a", "--x=hours"], "--x must be steps, tokens or seconds"),
        (["--attention"], "--attention takes a run by --out_dir"),
        (["--attention", "out-a"], "--attention takes a run by --out_dir"),
        (["out-a", "--start=x"], "--out_dir and --start are for --attention"),
        (["--attention", "--out_dir=out-b"], "there is no checkpoint out-b/ckpt.pt"),
    ],
)
def test_mistakes_are_told_in_a_line(argv, message):
    pytest.importorskip("matplotlib")
    write_run("out-a", [4.0, 2.5])
    write_run("out-empty", [])
    with pytest.raises(UserError, match=message):
        plot.main(argv)


def test_curves_do_without_torch():
    write_run("out-a", [4.0, 2.5])
    probe = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tools import plot; "
        "plot.main(['out-a', '--text']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.stdout.split()[-1] == "False", done.stderr


# Attention


@pytest.mark.parametrize("changes", tiny.SHAPES, ids=str)
def test_attention_weights_are_those_of_the_model(changes):
    model = tiny.random_model(**changes)
    idx = tiny.random_ids(model, rows=1)[0]
    with torch.no_grad():
        weights, logits = attention.attention_weights(model, idx)
        assert torch.allclose(logits, model(idx[None])[0][0, -1], atol=1e-5)
    if model.config.n_layer:
        T, shape = len(idx), (model.config.n_layer, model.config.n_head)
        assert weights.shape == (*shape, T, T)
        assert torch.allclose(weights.sum(dim=-1), torch.ones(*shape, T))
        assert (weights.triu(1) == 0).all()
        if model.config.window:
            assert (weights.tril(-model.config.window) == 0).all()


@pytest.mark.parametrize("n_layer", [0, 2])
def test_the_picture_of_attention_is_labelled(verse, capsys, n_layer):
    pytest.importorskip("matplotlib")
    train.main(tiny.flags(max_iters=1, n_layer=n_layer))
    figure = attention.picture("out", "a day\n")
    titles = [axes.get_title() for axes in figure.get_axes()]
    assert len([title for title in titles if title.startswith("layer")]) == 2 * n_layer
    if n_layer:
        first = figure.get_axes()[0]
        labels = [label.get_text() for label in first.get_xticklabels()]
        assert labels == ["a", "␣", "d", "a", "y", "\\n"]
    plot.main(["--attention", "--out_dir=out", "--start=thou"])
    assert Path("attention.png").read_bytes().startswith(b"\x89PNG")


def test_what_the_font_lacks_is_named_by_its_code():
    pytest.importorskip("matplotlib")
    assert attention.drawable("a漢é") == "aU+6F22é"


def test_a_prompt_longer_than_the_context_is_cut_as_when_writing(verse):
    pytest.importorskip("matplotlib")
    train.main(tiny.flags(max_iters=1))
    figure = attention.picture("out", "Shall I compare thee")
    labels = [label.get_text() for label in figure.get_axes()[0].get_xticklabels()]
    assert len(labels) == ckpt.load("out/ckpt.pt").model_config.block_size
