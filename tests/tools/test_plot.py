"""tools.plot: comparing runs in a table and a plot, drawing attention and embeddings."""

import copy
import json
import sys
from pathlib import Path

import pytest
import tiny
import torch
from tiny import write_run

import train
from folio.cli.errors import UserError
from folio.cli.settings import load_settings
from folio.hardware.device import Machine
from folio.hardware.optimize import optimize_for_inference
from tools.plot import __main__ as plot
from tools.plot.models import (
    MAX_DRAWN_TOKENS,
    NEXT_TOKENS,
    compute_attention,
    draw_attention,
    draw_embeddings,
)
from tools.plot.runs import compare_groups, draw_losses, group_runs, read_run, read_runs
from tools.table import format_table

is_math_text = pytest.importorskip("matplotlib.cbook").is_math_text
pytestmark = pytest.mark.usefixtures("folder")


def read_groups(*folders):
    return group_runs(read_runs(folders))


def make_table(*folders):
    return format_table(compare_groups(read_groups(*folders)))


# Runs


def test_log_of_train_is_read(verse):
    train.main(tiny.flags())
    run = read_run("out")
    assert (run.parameters, run.settings["n_embd"]) == (3632, 16)
    assert run.loss == pytest.approx(tiny.load()["best_val_loss"])
    assert [event["tokens"] for event in run.val] == [0, 3 * 32, 6 * 32]
    assert [event["step"] for event in run.train] == list(range(6))


def test_events_that_follow_change_the_run():
    write_run("out", [4.0, 2.0])
    common = {"step": 10, "tokens": 1000, "elapsed_s": 5.0}
    events = [
        common | {"event": "final", "loss": 2.125},
        common | {"event": "resume", "changed": {"seed": [1, 5]}},
        common | {"event": "val", "loss": 1.5, "val_windows": 5},
        common | {"event": "val", "loss": 2.5, "val_windows": 3},  # not comparable with the last
    ]
    for event, loss in zip(events, (2.125, 2.125, 1.5, 2.0), strict=True):
        with open("out/log.jsonl", "a") as log:
            log.write(json.dumps(event) + '\n{"step": 1, "eve{"step": 2, "event": "val"}\n')
            log.write(f'5\n"event"\n{{"event": "val"}}\n{{"event": "start"}}\n{"[" * 10**5}\n')
        assert read_run("out").loss == loss
    assert read_run("out").settings["seed"] == 5


def test_a_model_that_was_lost_does_not_count(verse):
    train.main(tiny.flags(eval_interval=2, learning_rate=0.0, min_lr=0.0, stop_at=3))
    Path("out/ckpt.pt").unlink()
    train.main(tiny.flags(eval_interval=2, init_from="resume", min_lr=0.0))  # other windows
    run, progress = read_run("out"), tiny.load("last.pt")
    assert (run.best["step"], run.loss) == (progress["best_step"], progress["best_val_loss"])


def test_of_two_evaluations_of_a_step_the_last_counts():
    write_run("out", [2.0, 1.0])
    common = {"event": "val", "step": 10, "tokens": 1000, "elapsed_s": 5.0, "best_step": 10}
    with open("out/log.jsonl", "a") as log:
        log.write(json.dumps(common | {"loss": 1.5}) + "\n")
    assert (read_run("out").best["loss"], read_run("out").loss) == (1.5, 1.5)


def test_a_log_that_has_lost_all_but_the_final_evaluation_counts(verse):
    train.main(tiny.flags(eval_iters=None))
    Path("out/log.jsonl").unlink()
    train.main(tiny.flags(eval_iters=None, init_from="resume"))
    assert make_table("out")[2].split(" | ")[1:3] == [f"{read_run('out').loss:13.4f}", f"{6:7}"]


# Tables


TABLE = """\
| run      | best val loss | deviation | seeds |                            above the best |
| -------- | ------------: | --------: | ----: | ----------------------------------------: |
| a,seed=* |        1.5000 |    0.0100 |     3 |                                           |
| c,seed=0 |        1.5100 |           |     1 | 0.0100; seeds differ by 0.0200: no result |
| b,seed=* |        1.6000 |    0.0100 |     3 |  0.1000; seeds differ by 0.0200: a result |

| run      |    seed | n_head |
| -------- | ------: | -----: |
| a,seed=* | 0, 1, 2 |  a\\x1b |
| c,seed=0 |       0 |  c\\x1b |
| b,seed=* | 0, 1, 2 |  b\\x1b |
"""
SINGLE = """\
| run      | best val loss | at step | time, s | tokens/s | parameters | steps |
| -------- | ------------: | ------: | ------: | -------: | ---------: | ----: |
| c,seed=0 |        1.5100 |      10 |       6 |      510 |      1,000 |    20 |
"""


def test_table_has_best_runs_first_and_only_columns_that_differ():
    for name, losses in {"a": [1.49, 1.5, 1.51], "b": [1.61, 1.6, 1.59], "c": [1.51]}.items():
        for number, loss in enumerate(losses):
            folder, losses = f"out-s/{name},seed={11 * number}", [4.0 + number, loss, 1.75]
            write_run(folder, losses, seed=number, n_head=f"{name}\x1b")
    write_run("out-s/d", [], n_layer=3)  # is left out
    assert make_table("out-s") == TABLE.splitlines()
    assert make_table("out-s/c,seed=0/") == SINGLE.splitlines()


def test_bits_per_byte_are_compared_but_not_losses_of_different_datasets_and_tokenizers():
    write_run("out-a", [2.0, 1.0], dataset="b", tokenizer="char")
    write_run("out-b", [4.0, 2.5], bits=[1.75, 1.5], dataset="a", tokenizer="bpe")
    write_run("out-c", [3.0, 3.5], bits=[1.25, 1.75], dataset="a", tokenizer="bpe")
    write_run("out-d", [2.5], bits=[2.0], dataset="a", tokenizer="char")
    head, _, *rows = make_table("out-a", "./out-a", "out-b", "out-c", "out-d")[:6]
    assert head.split(" | ")[1:3] == ["best val loss", "bits per byte"]
    cells = [[cell.strip() for cell in row.split("|")[1:4:2]] for row in rows]
    assert cells == [["out-b", "1.5000"], ["out-c", "1.2500"], ["out-d", "2.0000"], ["out-a", ""]]


def test_json_has_the_runs_and_nothing_else_is_printed(capsys):
    write_run("out/seed=1", [4.0, 2.5], seed=1)
    write_run("out/seed=2", [4.0, 2.25], bits=[3.0, 2.0], seed=2)
    plot.main(["out", "--json"])
    runs = json.loads(capsys.readouterr().out)
    assert [list(run) for run in runs] == 2 * [
        ["run", "row", "loss", "parameters", "seconds", "result", "settings"]
    ]
    assert [(run["run"], run["row"], run["loss"]) for run in runs] == [
        ("out/seed=1", "seed=*", 2.5),
        ("out/seed=2", "seed=*", 2.25),
    ]
    assert runs[1]["result"]["bits_per_byte"] == runs[1]["settings"]["seed"] == 2
    assert not Path("runs.png").exists()


# Loss curves


def read_curves(figure):
    """Returns {label in the legend: points of each line of its color}."""
    [axes] = figure.axes
    legend, curves = axes.get_legend(), {}
    for line in axes.lines:
        curves.setdefault(line.get_color(), []).append(line.get_xydata().tolist())
    labels = [text.get_text() for text in legend.get_texts()]
    assert not any(map(is_math_text, labels))
    labels = [label.strip().replace("\\$", "$") for label in labels]
    colors = [handle.get_color() for handle in legend.legend_handles]
    return {label: curves[color] for label, color in zip(labels, colors, strict=True)}


@pytest.mark.parametrize(
    ("axis", "x"), [("steps", [0, 10, 20]), ("tokens", [0, 1000, 2000]), ("seconds", [2, 4, 6])]
)
def test_curve_of_a_group_is_the_mean_of_its_seeds(axis, x):
    write_run("out-s/n=2,seed=1", [4.0, 2.0, 3.0, 1.0])
    write_run("out-s/n=2,seed=2", [6.0, 4.0, 3.0])
    write_run("out-s/n=2,seed=3", [])
    write_run("out-s/n=4,seed=1", [5.0, 4.0])
    figure = draw_losses(read_groups("out-s"), axis)
    curves = read_curves(figure)
    training, validation, best = curves["n=2,seed=*"]
    assert validation == [[x[0], 5.0], [x[1], 3.0], [x[2], 3.0]]
    assert training == [[a, pytest.approx(loss - 0.1)] for a, loss in validation]
    assert best == [[1.5 * x[2] - 0.5 * x[1], 2.0]]  # of steps 20 and 30, as in the table
    assert curves["n=4,seed=1"][1] == [[x[0], 5.0], [x[1], 4.0]]
    assert "band" in figure.axes[0].get_legend().get_title().get_text()
    [band] = figure.axes[0].collections  # this group has a single run
    corners = {tuple(point) for point in band.get_paths()[0].vertices.round(4)}
    assert corners == {(x[0], 3.5858), (x[0], 6.4142), (x[1], 1.5858), (x[1], 4.4142), (x[2], 3.0)}
    figure.draw_without_rendering()
    legend = figure.axes[0].get_legend().get_window_extent()  # beside the curves
    assert not legend.overlaps(figure.axes[0].get_window_extent())


def test_curves_of_runs_that_were_evaluated_at_other_steps_are_interpolated():
    write_run("out-s/seed=1", [4.0, 2.0, 3.0])
    write_run("out-s/seed=2", [4.0, 2.0, 3.0])
    log = Path("out-s/seed=2/log.jsonl")
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if '"step": 10,' not in line))
    _, validation, best = read_curves(draw_losses(read_groups("out-s"), "steps"))["seed=*"]
    assert validation == [[0, 4.0], [10, 2.75], [20, 3.0]]
    assert best == [[15, 2.5]]
    log.write_text("".join(line for line in lines if '"event": "train"' not in line))
    assert read_curves(draw_losses(read_groups("out-s"), "steps"))["seed=*"][0] == []
    late = [line.replace('"step": ', '"step": 9') for line in lines]  # no step in common
    log.write_text("".join([lines[0], *late[1:]]))
    assert read_curves(draw_losses(read_groups("out-s"), "seconds"))["seed=*"][:2] == [[], []]


def test_only_the_best_groups_are_drawn():
    for number in range(12):
        write_run(f"out-s/_$x${number:02}", [4.0, 2.0 + number / 10])
    figure = draw_losses(read_groups("out-s"), "steps")
    assert list(read_curves(figure)) == [f"_$x${number:02}" for number in range(10)]
    title = figure.axes[0].get_legend().get_title().get_text()
    assert title.splitlines()[2:] == ["faint: training", "the first 10 of 12"]  # no band


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
        ([], "name the runs"),
        (["out-b"], "there is no log out-b.log.jsonl; available runs: out-a"),
        (["out-empty"], "the runs have no loss yet"),
        (["out-a", "--out=gone/a.png"], "cannot write gone.a.png: No such file"),
        (["out-a", "--out=a.pdf"], "--out=a.pdf must be the name of a PNG file"),
        (["--attention", "--embeddings", "out-a"], "one with --attention or --embeddings"),
        (["--attention", "--json", "out-a"], "one with --attention or --embeddings"),
        (["--attention", "out-b"], "there is no checkpoint out-b.ckpt.pt"),
    ],
)
def test_mistakes_raise_user_error(argv, message):
    write_run("out-a", [4.0, 2.5])
    write_run("out-empty", [])
    with pytest.raises(UserError, match=message):
        plot.main(argv)


# Attention


@pytest.mark.parametrize("window", [0, 3])
def test_attention_weights_are_those_of_the_model(window):
    model = tiny.random_model(position="rotary", qk_norm=True, window=window)
    ids = tiny.random_ids(model, rows=1)[0].tolist()
    config, T = model.config, len(ids)
    weights, logits = compute_attention(model, ids)
    assert torch.allclose(logits, model.logits(torch.tensor([ids]))[0, -1], atol=1e-5)
    assert weights.shape == (config.n_layer, config.n_head, T, T)
    assert torch.allclose(weights.sum(dim=-1), torch.ones(()))
    assert (weights.triu(1) == 0).all()
    assert (weights.tril(-(window or T)) == 0).all()
    packed = optimize_for_inference(copy.deepcopy(model), Machine("cpu", "float32", False))
    assert torch.allclose(compute_attention(packed, ids)[0], weights, atol=1e-5)


def find_heads(figure):
    return [axes for axes in figure.get_axes() if axes.get_title().startswith("layer")]


def test_picture_of_attention_is_labeled(verse):
    train.main(tiny.flags(max_iters=1, n_layer=2, out_dir="out-x"))
    prompt = "--start=thee to a day\n"  # longer than the context of 8 tokens
    settings = load_settings(plot.PlotConfig, ["--attention", "out-x", prompt])
    figure = plot.plot_model("out-x", settings)
    assert len(find_heads(figure)) == 4
    for axes in find_heads(figure):
        assert [label.get_text() for label in axes.get_xticklabels()] == [*"o␣a␣day", "\\n"]
    plot.main(["--attention", "out-x", prompt, "--layer=1", "--out=one.png"])
    assert Path("one.png").read_bytes().startswith(b"\x89PNG")
    plot.main(["--embeddings", "out-x"])
    assert Path("embeddings.png").exists()
    with pytest.raises(UserError, match="^there is no layer 2, because n_layer is 2"):
        plot.main(["--attention", "out-x", "--layer=2"])
    train.main(tiny.flags(max_iters=1, n_layer=0))
    with pytest.raises(UserError, match="no layer 0"):
        plot.main(["--attention", "out"])


def test_of_a_long_prompt_the_last_tokens_are_drawn(trained):
    trained.model = tiny.random_model(block_size=200).bfloat16()
    ids = [number % 37 for number in range(200)]
    figure = draw_attention(trained, ids, "a title")
    assert f"last {MAX_DRAWN_TOKENS} of 200 tokens" in figure.get_suptitle()
    weights, logits = compute_attention(trained.model, ids)
    weights = weights.flatten(0, 1)
    images = [axes.get_images()[0] for axes in find_heads(figure)]
    for image, expected in zip(images, weights, strict=True):
        assert torch.equal(torch.tensor(image.get_array()), expected)
        assert image.get_clim() == (0, weights.max())
    widths = [patch.get_width() for patch in figure.get_axes()[-1].patches]
    assert widths == logits.float().softmax(0).topk(NEXT_TOKENS).values.tolist()
    trained.model.transformer.ln_f.weight.data.fill_(torch.inf)
    with pytest.raises(UserError, match="not finite"):
        draw_attention(trained, ids, "a title")


def test_similarities_of_embeddings_are_drawn(trained):
    figure = draw_embeddings(trained, "a title", [*range(30), 2, 1])
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert trained.tokenizer.encode("".join(labels)).tolist() == [*range(30)]
    drawn = torch.tensor(figure.axes[0].get_images()[0].get_array())
    weight = trained.model.transformer.wte.weight[:30]
    expected = torch.cosine_similarity(weight[:, None], weight, dim=-1)
    assert torch.allclose(drawn, expected, atol=1e-5)
