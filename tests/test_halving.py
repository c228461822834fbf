"""tools/halving.py: which runs a sweep promotes."""

import math

import pytest
import tiny

from folio.errors import UserError
from tools.halving import Halving, rung_steps


def trained(scheduler, loss_of, jobs=1):
    """Trains with the given losses. Returns the tasks (run, rung) in the order of their start."""
    active, started = [], []
    while True:
        while len(active) < jobs and (task := scheduler.next()):
            active.append(task)
            started.append(task)
        if not active:
            return started
        run, rung = active.pop(0)
        scheduler.report(run, rung, loss_of(run, rung))


def test_without_a_factor_each_run_is_trained_once():
    assert trained(Halving("abc"), lambda run, rung: 1.0) == [("a", 0), ("b", 0), ("c", 0)]


def test_a_third_of_the_runs_is_promoted_after_all_have_been_compared():
    tasks = trained(Halving(range(24), 3), lambda run, rung: run)
    assert tasks[:24] == [(run, 0) for run in range(24)]
    assert sorted(tasks[24:32]) == [(run, 1) for run in range(8)]
    assert sorted(tasks[32:]) == [(0, 2), (1, 2)]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_best_run_is_trained_to_the_end_even_if_there_are_few(count):
    tasks = trained(Halving(range(count), 3), lambda run, rung: -run)
    assert [run for run, rung in tasks if rung == 2] == [count - 1]


def test_failed_runs_are_not_promoted():
    tasks = trained(Halving("abc", 3), lambda run, rung: {"a": math.inf, "b": 2.0, "c": 1.0}[run])
    assert tasks[3:] == [("c", 1), ("c", 2)]
    assert trained(Halving("ab", 3), lambda run, rung: math.inf) == [("a", 0), ("b", 0)]


def test_asynchronous_promotion_starts_before_a_rung_is_complete():
    tasks = trained(Halving(range(27), 3, is_asynchronous=True), lambda run, rung: -run, jobs=2)
    assert max(at for at, task in enumerate(tasks) if task[1] == 0) > tasks.index(
        next(task for task in tasks if task[1] == 1)
    )
    assert {run for run, rung in tasks if rung == 1} >= set(range(18, 27))
    assert {run for run, rung in tasks if rung == 2} >= set(range(24, 27))
    assert len(tasks) == len(set(tasks)) < 27 + 9 + 3 + 8  # few too many are promoted


def test_rungs_are_multiples_of_the_evaluation_interval():
    settings = tiny.settings(max_iters=1000, eval_interval=50)
    assert rung_steps(settings, 3) == [100, 300, 1000]
    assert rung_steps(settings, None) == [1000]
    with pytest.raises(UserError, match="--halving=3 .* use --eval_interval=111 or less"):
        rung_steps(tiny.settings(max_iters=1000, eval_interval=250), 3)
