"""tools.schedule: which runs a sweep promotes."""

import math

import pytest
import tiny

from folio.errors import UserError
from tools.schedule import Halving, rung_steps


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
    tasks = trained(Halving(range(27), 3), lambda run, rung: run)
    assert sorted(tasks[:27]) == [(run, 0) for run in range(27)]
    assert sorted(tasks[27:36]) == [(run, 1) for run in range(9)]
    assert sorted(tasks[36:]) == [(0, 2), (1, 2), (2, 2)]


def test_a_factor_of_three_takes_less_than_a_third_of_the_steps():
    steps = [0, *rung_steps(tiny.settings(max_iters=1000, eval_interval=50), 3)]
    tasks = trained(Halving(range(27), 3), lambda run, rung: run)
    assert sum(steps[rung + 1] - steps[rung] for _, rung in tasks) < 27 * 1000 / 3


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_best_run_is_trained_to_the_end_even_if_there_are_few(count):
    tasks = trained(Halving(range(count), 3), lambda run, rung: -run)
    assert [run for run, rung in tasks if rung == 2] == [count - 1]


def test_failed_runs_are_not_promoted():
    tasks = trained(Halving("abc", 3), lambda run, rung: {"a": math.inf, "b": 2.0, "c": 1.0}[run])
    assert tasks[3:] == [("c", 1), ("c", 2)]
    assert len(trained(Halving("ab", 3), lambda run, rung: math.inf)) == 2


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("jobs", [2, 4, 8])
def test_jobs_promote_runs_only_when_none_is_left_to_start(sign, jobs):
    tasks = trained(Halving(range(27), 3), lambda run, rung: sign * run, jobs)
    assert [rung for _, rung in tasks[:27]] == [0] * 27
    best = sorted(range(27), key=lambda run: sign * run)
    for rung, count in ((1, 9), (2, 3)):
        promoted = [run for run, reached in tasks if reached == rung]
        assert set(promoted) >= set(best[:count])
        assert len(promoted) == len(set(promoted)) <= count + jobs - 1


def test_a_free_job_promotes_a_run_before_its_rung_is_complete():
    scheduler = Halving(range(4), 3)
    started = [scheduler.next()[0] for _ in range(4)]
    assert scheduler.next() is None
    for loss, run in enumerate(started[:3]):
        scheduler.report(run, 0, loss)
    assert scheduler.next() == (started[0], 1)
    assert scheduler.next() is None  # a second one would be more than a third
    scheduler.report(started[3], 0, -1.0)
    assert scheduler.next() == (started[3], 1)


def test_rungs_are_multiples_of_the_evaluation_interval():
    settings = tiny.settings(max_iters=1000, eval_interval=150)
    assert rung_steps(settings, 3) == [150, 300, 1000]
    assert rung_steps(settings, None) == [1000]
    assert rung_steps(tiny.settings(max_iters=1000, eval_interval=200), 2) == [200, 400, 1000]
    with pytest.raises(UserError, match="at step 200 of 1000, .* use --eval_interval=200 or less"):
        rung_steps(tiny.settings(max_iters=1000, eval_interval=201), 3)
    with pytest.raises(UserError, match="--halving needs --max_iters=5 or more"):
        rung_steps(tiny.settings(max_iters=4, eval_interval=1), 3)
