"""tools.groups: runs that differ in their seed only, and Welch's t-test."""

import math

import pytest

from tools.groups import Group, grouped, two_sided_p, welch_p
from tools.runs import Run


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


def test_groups_differ_if_their_means_differ_by_more_than_noise():
    best = Group([run("a", 1.0), run("b", 1.1), run("c", 0.9)])
    assert not Group([run("a", 1.2), run("b", 1.1), run("c", 1.0)]).differs_from(best)
    assert Group([run("a", 1.5), run("b", 1.6), run("c", 1.7)]).differs_from(best)
    assert not Group([run("a", 9.0), run("b")]).differs_from(best)  # a single loss


def test_groups_are_sorted_and_tested_by_their_measure():
    runs = [run(f"a{seed}", 1 + seed / 9, bits=2 + seed / 9, seed=seed) for seed in (1, 2, 3)]
    runs += [run(f"b{seed}", 1.0, bits=1.0, seed=seed, n_layer=4) for seed in (1, 2)]
    runs += [run("b3", 0.0, seed=3, n_layer=4)]  # without bits per byte
    best, other = grouped(runs, "bits_per_byte")
    assert (best.losses, other.mean) == ([1.0, 1.0], pytest.approx(2 + 2 / 9))
    assert other.differs_from(best)
    best, other = grouped(runs)
    assert best.losses == [1.0, 1.0, 0.0]
    assert not other.differs_from(best)


@pytest.mark.parametrize(
    ("freedom", "t", "p"),
    [  # from the tables of Student's distribution
        (1, 12.706, 0.05),
        (1, 1.0, 0.5),
        (2, 4.303, 0.05),
        (3, 5.841, 0.01),
        (4, -2.132, 0.1),
        (10, 2.228, 0.05),
        (30, 2.750, 0.01),
        (120, 1.980, 0.05),
        (1000, 1.962, 0.05),
        (5, 0.0, 1.0),
    ],
)
def test_p_values_are_those_of_tables(freedom, t, p):
    assert two_sided_p(t, freedom) == pytest.approx(p, rel=1e-3)


def test_p_values_of_few_degrees_of_freedom_are_exact():
    for t in (0.1, 1.0, 3.0, 20.0):
        assert two_sided_p(t, 1) == pytest.approx(1 - 2 * math.atan(t) / math.pi, abs=1e-6)
        assert two_sided_p(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), abs=1e-6)


def test_welch_p_allows_for_unequal_variances():
    a, b = [1.0, 2.0, 3.0], [4.0, 6.0, 8.0]  # squared standard errors: 1/3 and 4/3
    expected = two_sided_p(4 / math.sqrt(5 / 3), freedom=50 / 17)
    assert welch_p(a, b) == welch_p(b, a) == pytest.approx(expected)
    assert welch_p([1.0, 1.0], [1.0, 1.0]) == 1
    assert welch_p([1.0, 1.0], [2.0, 2.0]) == 0
