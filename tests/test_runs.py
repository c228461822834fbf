"""tools.runs: logs, and groups of runs that differ in their seed only."""

import math

import pytest

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
