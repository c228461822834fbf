"""tools.plot, runs, table and attention: reading logs, comparing runs, drawing attention."""

import builtins
import copy
import io
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny
import torch
from tiny import write_run

import train
from folio.compile import optimize_for_inference
from folio.errors import UserError
from folio.scoring import likely_next
from tools import attention, plot, runs
from tools.runs import grouped
from tools.table import compared, table

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.usefixtures("folder")


# Reading and comparing runs


TABLE = """\
| run   | best val loss | at step | time, s | tokens/s | parameters | steps | n_layer | seed |
| ----- | ------------: | ------: | ------: | -------: | ---------: | ----: | ------: | ---: |
| out-b |        1.5000 |      10 |       4 |      505 |      1,000 |    10 |       4 |    2 |
| out-a |        2.0000 |      20 |       8 |      515 |      1,000 |    30 |       2 |    1 |
| out-c |               |         |         |          |      1,000 |       |       2 |    1 |
"""
WIDTH = TABLE.index("\n")


def test_table_has_best_run_first_and_only_settings_that_differ():
    write_run("out-a", [4.0, 2.5, 2.0, 2.25])
    write_run("out-b", [4.0, 1.5], n_layer=4, seed=2)
    write_run("out-c", [])
    lines = table(grouped(runs.read_all(["out-a", "out-b", "out-c"])))
    assert "\n".join(lines) == TABLE.strip()
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert compared(grouped(runs.read_all(["out-a", "out-b", "out-c"]))) == [header, *rows]


def headings(lines):
    return [cell.strip() for cell in lines[0].split("|")[1:-1]]


@pytest.mark.parametrize(
    ("columns", "shown", "note"),
    [
        (WIDTH, 9, []),
        (WIDTH - 1, 8, ["1 more column: add --all to python -m tools.plot"]),
        (60, 5, ["4 more columns: add --all to python -m tools.plot"]),
        (1, 2, ["7 more columns: add --all to python -m tools.plot"]),
    ],
)
def test_table_fits_into_the_terminal(columns, shown, note, monkeypatch, capsys):
    write_run("out-a", [4.0, 2.5])
    write_run("out-b", [4.0, 1.5], n_layer=4, seed=2)
    found = grouped(runs.read_all(["out-a", "out-b"]))
    monkeypatch.setenv("COLUMNS", str(columns))
    assert table(found) == table(found, fit=False)  # not a terminal
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    whole, lines = table(found, fit=False), table(found)
    assert headings(lines) == headings(whole)[:shown]
    assert lines[4:] == note
    if shown > 2:
        assert max(map(len, lines)) <= columns
    first = headings(table(found, ["seed", "n_layer"]))
    assert first[:4] == ["run", "seed", "n_layer", "best val loss"]
    plot.main(["out-a", "out-b", "--all"])
    assert capsys.readouterr().out.splitlines()[:4] == whole


def write_seeds(name, losses, **settings):
    """Writes a run for each seed, whose last loss is one of `losses`."""
    for seed, loss in enumerate(losses):
        write_run(f"{name},seed={seed}", [4.0 + seed, loss], seed=seed, **settings)


REPEATED_TABLE = """\
| run            | n_layer |   best val loss | seeds | at step |
| -------------- | ------: | --------------: | ----: | ------: |
| out-s/a,seed=* |       2 | 1.5000 ± 0.0100 |     3 |      10 |
| out-s/b,seed=* |       4 | 1.5050 ± 0.0100 |     3 |      10 |
| out-s/d,seed=0 |       8 | 1.5100          |     1 |      10 |
| out-s/c,seed=* |       6 | 1.6000 ± 0.0100 |     3 |      10 |
"""


def test_table_has_a_row_for_runs_that_differ_in_their_seed_only():
    write_seeds("out-s/a", [1.49, 1.5, 1.51])
    write_seeds("out-s/b", [1.495, 1.505, 1.515], n_layer=4, wandb_run_name="b")
    write_seeds("out-s/c", [1.61, 1.6, 1.59], n_layer=6)
    write_seeds("out-s/d", [1.51], n_layer=8)
    lines = table(grouped(runs.read_all(["out-s"])), ["n_layer", "seed"])
    width = REPEATED_TABLE.index("\n")
    assert [line[:width] for line in lines] == REPEATED_TABLE.splitlines()


BITS_TABLE = """\
| run   | best val bits per byte | at step | time, s | tokens/s | parameters | steps |
| ----- | ---------------------: | ------: | ------: | -------: | ---------: | ----: |
| out-b |                 1.2500 |      20 |       6 |      510 |      1,000 |    20 |
| out-a |                 2.0000 |      10 |       4 |      505 |      1,000 |    10 |
| out-c |                        |         |       4 |      505 |      1,000 |       |
"""


def test_table_of_bits_per_byte_has_their_best_first(capsys):
    write_run("out-a", [2.0, 1.0], bits=[4.0, 2.0])
    write_run("out-b", [4.0, 3.0, 3.5], bits=[1.75, 1.5, 1.25])
    write_run("out-c", [4.0, 0.5], bits=[4.0])  # the last evaluation has none
    plot.main(["out-a", "out-b", "out-c", "--y=bits_per_byte"])
    assert capsys.readouterr().out.startswith(BITS_TABLE)
    plot.main(["out-a", "out-b", "out-c"])
    rows = capsys.readouterr().out.splitlines()[2:5]
    assert [row[:24].split()[1:4:2] for row in rows] == [
        ["out-c", "0.5000"], ["out-a", "1.0000"], ["out-b", "3.0000"]
    ]  # fmt: skip


def test_settings_changed_on_resuming_replace_earlier_ones():
    write_run("out-a", [4.0])
    with open("out-a/log.jsonl", "a") as log:
        log.write('{"step": 1, "split": "resume", "changed": {"seed": [1, 5]}}')
    assert runs.read("out-a").settings["seed"] == 5


def test_incomplete_lines_are_skipped():
    write_run("out-a", [4.0, 2.5])
    with open("out-a/log.jsonl", "a") as log:
        log.write('{"step": 0, "split": "val", "tok')
    assert len(runs.read("out-a").val) == 2


def test_log_of_train_is_read(verse):
    train.main(tiny.flags())
    run = runs.read("out")
    assert (run.parameters, run.settings["n_embd"]) == (3632, 16)
    assert run.best()["loss"] == pytest.approx(tiny.saved()["best_val_loss"])
    assert [event["tokens"] for event in run.val] == [0, 3 * 32, 6 * 32]
    assert [event["step"] for event in run.train] == list(range(6))


def test_folder_of_runs_stands_for_its_runs():
    write_run("out-sweep/a", [3.0])
    write_run("out-sweep/b", [2.0])
    found = runs.read_all(["out-sweep"])
    assert [run.folder for run in found] == ["out-sweep/a", "out-sweep/b"]
    assert [run.folder for run in runs.read_all(["out-sweep/a/"])] == ["out-sweep/a"]


# Loss curves


def drawn(figure):
    """Returns {label in the legend: points of each line of its color}."""
    [axes] = figure.axes
    legend, curves = axes.get_legend(), {}
    for line in axes.lines:
        curves.setdefault(line.get_color(), []).append(line.get_xydata().tolist())
    pairs = zip(legend.get_texts(), legend.legend_handles, strict=True)
    return {text.get_text(): curves[handle.get_color()] for text, handle in pairs}


@pytest.mark.parametrize(
    ("axis", "x"), [("steps", [0, 10, 20]), ("tokens", [0, 1000, 2000]), ("seconds", [2, 4, 6])]
)
def test_picture_has_curves_of_each_run(axis, x):
    write_run("out-a", [4.0, 2.0, 2.25])
    write_run("out-b", [4.0, 3.5])
    curves = drawn(plot.draw_losses(grouped(runs.read_all(["out-a", "out-b"])), axis))
    training, validation, best = curves["out-a"]
    assert curves["out-b"][1] == [[x[0], 4.0], [x[1], 3.5]]
    assert validation == [[x[0], 4.0], [x[1], 2.0], [x[2], 2.25]]
    assert training == [[a, pytest.approx(b - 0.1)] for a, b in validation]
    assert best == [validation[1]]


def test_picture_of_bits_per_byte_has_the_runs_that_have_them():
    write_run("out-a", [4.0, 2.0])
    write_run("out-b", [3.0, 1.0], bits=[2.5, 1.5])
    found = grouped(runs.read_all(["out-a", "out-b"]), "bits_per_byte")
    figure = plot.draw_losses(found, "steps")
    _, validation, best = drawn(figure)["out-b"]
    assert list(drawn(figure)) == ["out-b"]
    assert (validation, best) == ([[0, 2.5], [10, 1.5]], [[10, 1.5]])
    assert figure.axes[0].get_ylabel() == "bits per byte"
    with pytest.raises(UserError, match="the runs have no bits per byte yet"):
        plot.main(["out-a", "--y=bits_per_byte"])


def test_curve_of_a_group_is_the_mean_of_its_seeds():
    write_run("out-a1", [4.0, 2.0, 3.0, 1.0], seed=1)
    write_run("out-a2", [6.0, 4.0, 3.0], seed=2)
    write_run("out-a3", [], seed=3)
    write_run("out-b", [5.0, 4.0], n_layer=4)
    figure = plot.draw_losses(
        grouped(runs.read_all(["out-a1", "out-a2", "out-a3", "out-b"])), "steps"
    )
    training, validation, best = drawn(figure)["out-a*"]
    assert validation == [[0, 5.0], [10, 3.0], [20, 3.0]]
    assert training == [[x, pytest.approx(loss - 0.1)] for x, loss in validation]
    assert best == [validation[1]]
    [band] = figure.axes[0].collections  # the other group has a single run
    corners = {tuple(point) for point in band.get_paths()[0].vertices.round(4)}
    assert corners == {(0, 3.5858), (0, 6.4142), (10, 1.5858), (10, 4.4142), (20, 3.0)}


def test_long_training_curves_are_averaged():
    write_run("out-a", [4 + (-1) ** n for n in range(1000)])
    training = drawn(plot.draw_losses(grouped([runs.read("out-a")]), "steps"))["out-a"][0]
    assert len(training) == plot.POINTS
    assert [loss for _, loss in training] == pytest.approx([3.9] * plot.POINTS)


@pytest.mark.parametrize(("count", "every"), [(2, 1), (11, 1), (12, 2), (21, 2), (34, 4)])
def test_ticks_are_at_evaluations_of_the_longest_run(count, every):
    write_run("out-a", [4.0] * count)
    write_run("out-b", [3.0])
    found = grouped(runs.read_all(["out-a", "out-b"]))
    for axis, size in (("steps", 10), ("tokens", 1000)):
        [axes] = plot.draw_losses(found, axis).axes
        assert axes.get_xticks().tolist() == list(range(0, size * count, size * every))


def test_a_folder_with_dollar_signs_is_no_formula():
    write_run("out-$\\frac$", [4.0, 2.0])
    figure = plot.draw_losses(grouped(runs.read_all(["out-$\\frac$"])), "steps")
    figure.savefig(io.BytesIO())


def test_plot_writes_picture_and_prints_table(capsys):
    write_run("out-a", [4.0, 2.5])
    plot.main(["out-a", "--out=here.png"])
    assert Path("here.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "| out-a " in out
    assert "wrote here.png" in out


def test_table_is_printed_without_matplotlib(monkeypatch, capsys):
    write_run("out-a", [4.0, 2.5])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        plot.main(["out-a"])
    assert "| out-a |" in capsys.readouterr().out
    assert not Path("runs.png").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "specify the run folders to compare, or --attention"),
        (["out-b"], "there is no log out-b.log.jsonl; available runs: out-a"),
        (["a" * 300], "cannot read a"),
        (["out-empty"], "the runs have no loss yet"),
        (["out-a", "--out=a.jpg"], "--out must end in .png"),
        (["out-a", "--out=gone/a.png"], "cannot write gone.a.png"),
        (["--attention", "out-a", "out-b"], "--attention takes one run"),
        (["--attention", "out-a", "--out_dir=out-b"], "--attention takes one run"),
        (["--attention", "--out_dir=out-b"], "there is no checkpoint out-b.ckpt.pt"),
    ],
)
def test_mistakes_raise_user_error(argv, message):
    write_run("out-a", [4.0, 2.5])
    write_run("out-empty", [])
    with pytest.raises(UserError, match=message):
        plot.main(argv)


# Attention


@pytest.mark.parametrize("changes", tiny.SHAPES, ids=str)
def test_attention_weights_are_those_of_the_model(changes):
    model = tiny.random_model(**changes)
    idx = tiny.random_ids(model, rows=1)[0]
    weights = attention.attention_weights(model, idx)
    config, T = model.config, len(idx)
    assert weights.shape == (config.n_layer, config.n_head, T, T)
    assert torch.allclose(weights.sum(dim=-1), torch.ones(weights.shape[:3]))
    assert (weights.triu(1) == 0).all()
    if config.window:
        assert (weights.tril(-config.window) == 0).all()
    packed = optimize_for_inference(copy.deepcopy(model))
    assert torch.allclose(attention.attention_weights(packed, idx), weights, atol=1e-5)
    last = attention.attention_weights(model, idx, [*range(config.n_layer)][-1:])
    assert torch.equal(last, weights[-1:])


def heads_of(figure):
    return [axes for axes in figure.get_axes() if axes.get_title().startswith("layer")]


def test_picture_of_attention_is_labeled(verse):
    train.main(tiny.flags(max_iters=1, n_layer=2, out_dir="out-x"))
    figure = plot.draw_attention("out-x", "thee to a day\n")  # longer than the context of 8 tokens
    assert len(heads_of(figure)) == 4
    for axes in heads_of(figure):
        assert [label.get_text() for label in axes.get_xticklabels()] == [*"o␣a␣day", "\\n"]
    plot.main(["--attention", "out-x", "--start=thou"])
    plot.main(["--attention", "--out_dir=out-x", "--start=thou", "--out=same.png"])
    assert Path("attention.png").read_bytes().startswith(b"\x89PNG")
    assert Path("attention.png").read_bytes() == Path("same.png").read_bytes()
    plot.main(["--attention", "out-x", "--start=thou", "--layer=1"])
    assert Path("attention.png").read_bytes() != Path("same.png").read_bytes()
    with pytest.raises(UserError, match="^out-x: there is no layer 2; the last is layer 1$"):
        plot.main(["--attention", "out-x", "--layer=2"])


def test_texts_of_the_smallest_picture_are_inside(verse):
    folder = f"out-{'x' * 60}"
    train.main(tiny.flags(max_iters=1, n_head=1, out_dir=folder))
    figure = plot.draw_attention(folder, "a day")
    figure.draw_without_rendering()
    box = figure.get_tightbbox()
    assert 0 <= box.x0 <= box.x1 <= figure.get_figwidth()


@pytest.mark.parametrize(("heads", "columns"), [(1, 1), (4, 4), (5, 3), (12, 4)])
def test_heads_of_one_layer_are_wrapped(trained, heads, columns):
    trained.model = tiny.random_model(n_head=heads, n_embd=4 * heads)
    drawn = heads_of(attention.draw(trained, [1, 2, 3], "a title", layers=[1]))
    assert [axes.get_title() for axes in drawn] == [f"layer 1, head {n}" for n in range(heads)]
    assert max(axes.get_subplotspec().colspan.stop for axes in drawn) == columns
    expected = attention.attention_weights(trained.model, torch.tensor([1, 2, 3]))[1]
    assert all(
        (axes.images[0].get_array() == weights.numpy()).all()
        for axes, weights in zip(drawn, expected, strict=True)
    )


def test_a_bfloat16_model_is_drawn_in_any_thread(trained):
    trained.model.bfloat16()
    with ThreadPoolExecutor(1) as pool:
        figure = pool.submit(attention.draw, trained, list(range(30)), "a title").result()
    assert len(heads_of(figure)) == 4
    bars = figure.get_axes()[-1]
    widths = [patch.get_width() for patch in bars.patches]
    assert widths == [p for _, p in likely_next(trained, list(range(30)), attention.TOP)]


def test_attention_of_a_bigram_model_is_refused(verse):
    train.main(tiny.flags(max_iters=1, n_layer=0))
    with pytest.raises(UserError, match="has no layers"):
        plot.draw_attention("out")


@pytest.mark.parametrize(
    "line",
    [
        "5", "null", "{}", "[" * 100_000, '{"split": "start"}', '{"split": "resume"}',
        '{"split": "val", "step": 3, "tokens": 1, "loss": NaN, "elapsed_s": 1}',
        '{"split": "val", "step": 3, "tokens": 1, "loss": "x", "elapsed_s": 1}',
        '{"split": "train", "step": 3, "tokens": 1, "loss": 1, "elapsed_s": 1}',
        '{"split": "start", "parameters": null, "settings": {}}',
    ],
)  # fmt: skip
def test_damaged_lines_of_a_log_are_skipped(verse, line):
    train.main(tiny.flags(max_iters=1))
    before = runs.read("out")
    with open("out/log.jsonl", "a") as log:
        log.write(f"{line}\n")
    assert runs.read("out") == before


def test_matplotlib_without_a_writable_folder_is_an_error(monkeypatch):
    failure = OSError("Matplotlib requires access to a writable cache directory")
    real = builtins.__import__

    def fail(name, *arguments, **keywords):
        if name == "matplotlib.figure":
            raise failure
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(UserError, match="matplotlib cannot be imported: Matplotlib requires"):
        plot.check_matplotlib()
