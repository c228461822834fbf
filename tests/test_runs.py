"""tools.runs: logs, and groups of runs that differ in their seed only."""

import math

import pytest
import tiny
from tiny import write_run

import train
from tools import runs
from tools.runs import Group, Run, grouped


def run(folder, loss=None, bits=None, **settings):
    val = [{"step": 0, "loss": loss}] if loss is not None else []
    val = val if bits is None else [val[0] | {"bits_per_byte": bits}]
    return Run(folder, {"seed": 1, "n_layer": 2, "wandb_run_name": folder} | settings, val=val)


def folders(runs):
    return [[run.folder for run in group.runs] for group in grouped(runs)]


def test_runs_that_differ_in_seed_or_display_only_are_grouped_best_first():
    runs = [run("a", 3.0), run("b", 2.5, n_layer=4), run("c"), run("d", 1.0, seed=2)]
    assert folders(runs) == [["a", "d"], ["b"], ["c"]]
    assert [group.mean for group in grouped(runs)] == [2.0, 2.5, math.inf]


def test_a_run_with_the_same_seed_is_no_repeat():
    runs = [run("a/1"), run("a/2", seed=2), run("b/1"), run("b/2", seed=2)]
    assert folders(runs) == [["a/1", "a/2"], ["b/1", "b/2"]]


def test_runs_in_different_folders_are_not_grouped():
    """Such as those of two versions of the code, one of which has more seeds."""
    runs = [run(f"{parent}/{seed}", seed=seed) for parent in ("a", "b") for seed in (1, 2, 3)]
    assert folders(runs[1:]) == [["a/2", "a/3"], ["b/1", "b/2", "b/3"]]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["out-a"], "out-a"),
        (["s/seed=1", "s/seed=2"], "s/seed=*"),
        (["s/n=2,seed=1337,x=1", "s/n=2,seed=1338,x=1"], "s/n=2,seed=*,x=1"),
        (["s/seed=11", "s/seed=21"], "s/seed=*"),
        (["s/seed=1", "s/seed=11"], "s/seed=*"),
        (["a", "b"], "*"),
    ],
)
def test_name_of_a_group_is_a_pattern(names, expected):
    assert Group(list(map(run, names))).name == expected


def test_groups_are_sorted_by_their_measure():
    runs = [run(f"a{seed}", 1 + seed / 9, bits=2 + seed / 9, seed=seed) for seed in (1, 2, 3)]
    runs += [run(f"b{seed}", 1.0, bits=1.0, seed=seed, n_layer=4) for seed in (1, 2)]
    runs += [run("b3", 0.0, seed=3, n_layer=4)]  # without bits per byte
    best, other = grouped(runs, "bits_per_byte")
    assert (best.losses, other.mean) == ([1.0, 1.0], pytest.approx(2 + 2 / 9))
    best, other = grouped(runs)
    assert best.losses == [1.0, 1.0, 0.0]


def test_log_of_train_is_read(verse):
    train.main(tiny.flags())
    run = runs.read("out")
    assert (run.parameters, run.settings["n_embd"]) == (3632, 16)
    assert run.best()["loss"] == pytest.approx(tiny.saved()["best_val_loss"])
    assert [event["tokens"] for event in run.val] == [0, 3 * 32, 6 * 32]
    assert [event["step"] for event in run.train] == list(range(6))


def test_folder_of_runs_stands_for_its_runs(folder):
    write_run("out-sweep/a", [3.0])
    write_run("out-sweep/b", [2.0])
    found = runs.read_all(["out-sweep"])
    assert [run.folder for run in found] == ["out-sweep/a", "out-sweep/b"]
    assert [run.folder for run in runs.read_all(["out-sweep/a/"])] == ["out-sweep/a"]


def test_resuming_changes_settings_and_damaged_lines_are_skipped(folder):
    write_run("out-a", [4.0, 2.5])
    before = runs.read("out-a")
    lines = [
        "5", "null", "{}", "[" * 100_000, '{"split": "start"}', '{"split": "resume"}',
        '{"split": "val", "step": 3, "tokens": 1, "loss": NaN, "elapsed_s": 1}',
        '{"split": "val", "step": 3, "tokens": 1, "loss": "x", "elapsed_s": 1}',
        '{"split": "train", "step": 3, "tokens": 1, "loss": 1, "elapsed_s": 1}',
        '{"split": "start", "parameters": null, "settings": {}}',
        '{"step": 1, "split": "resume", "changed": {"seed": [1, 5]}}',
        '{"step": 0, "split": "val", "tok',
    ]  # fmt: skip
    with open("out-a/log.jsonl", "a") as log:
        log.write("\n".join(lines))
    before.settings["seed"] = 5
    assert runs.read("out-a") == before
