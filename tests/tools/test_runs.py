"""tools.plot.runs: logs, and groups of runs that differ in their seed only."""

import math

import pytest
import tiny
from tiny import write_run

import train
from tools.plot.runs import Run, group_runs, read_run, read_runs


def run(folder, loss):
    return Run(folder, val=[{"step": 0, "loss": loss}] if loss else [])


def test_runs_that_differ_in_their_seed_only_are_grouped_best_first():
    names = ["a/seed=1,n=2", "a/seed=2,n=2", "a/seed=1,n=4", "b/seed=1,n=2", "a/seed=11,n=2"]
    groups = group_runs(map(run, [f"runs/{name}" for name in names], (3, 4, 1, None, 5)))
    assert [group.name for group in groups] == ["a/seed=1,n=4", "a/seed=*,n=2", "b/seed=1,n=2"]
    assert [group.mean_loss for group in groups] == [1, 4, math.inf]


def test_log_of_train_is_read(verse):
    train.main(tiny.flags())
    run = read_run("out")
    assert (run.parameters, run.settings["n_embd"]) == (3632, 16)
    assert run.best()["loss"] == pytest.approx(tiny.load()["best_val_loss"])
    assert [event["tokens"] for event in run.val] == [0, 3 * 32, 6 * 32]
    assert [event["step"] for event in run.train] == list(range(6))


def test_folder_of_runs_stands_for_its_runs(folder):
    write_run("out-sweep/a", [3.0])
    write_run("out-sweep/b", [2.0])
    runs = read_runs(["out-sweep"])
    assert [run.folder for run in runs] == ["out-sweep/a", "out-sweep/b"]
    assert [run.folder for run in read_runs(["out-sweep/a/"])] == ["out-sweep/a"]


def test_resuming_changes_settings_and_incomplete_lines_are_skipped(folder):
    write_run("out-a", [4.0, 2.5])
    run = read_run("out-a")
    lines = [
        '{"step": 1, "spl{"step": 2, "split": "val"}',
        '{"step": 1, "split": "resume", "changed": {"seed": [1, 5]}}',
        '{"step": 0, "event": "val", "tok',
    ]
    with open("out-a/log.jsonl", "a") as log:
        log.write("\n".join(lines))
    run.settings["seed"] = 5
    assert read_run("out-a") == run
