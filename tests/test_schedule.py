"""tools.schedule: which runs a sweep promotes."""

import math

import pytest
import tiny

from folio.errors import UserError
from tools.schedule import promoted, rung_steps


@pytest.mark.parametrize(("count", "expected"), [(27, 9), (9, 3), (5, 1), (2, 1), (1, 1)])
def test_the_best_third_is_promoted(count, expected):
    losses = {f"run {number}": -number for number in range(count)}
    best = [f"run {number}" for number in reversed(range(count))]
    assert promoted(losses, 3) == best[:expected]


def test_failed_runs_are_not_promoted():
    assert promoted({"a": math.inf, "b": 2.0, "c": math.inf}, 1) == ["b"]
    assert promoted({"a": math.inf}, 3) == promoted({}, 3) == []


def test_a_factor_of_three_takes_less_than_a_third_of_the_steps():
    steps = rung_steps(tiny.settings(max_iters=1000, eval_interval=50), 3)
    assert 27 * steps[0] + 9 * (steps[1] - steps[0]) + 3 * (1000 - steps[1]) < 27 * 1000 / 3


def test_rungs_are_multiples_of_the_evaluation_interval():
    settings = tiny.settings(max_iters=1000, eval_interval=150)
    assert rung_steps(settings, 3) == [150, 300, 1000]
    assert rung_steps(settings, None) == [1000]
    assert rung_steps(tiny.settings(max_iters=1000, eval_interval=200), 2) == [200, 400, 1000]
    with pytest.raises(UserError, match="--eval_interval=200"):
        rung_steps(tiny.settings(max_iters=1000, eval_interval=201), 3)
    with pytest.raises(UserError, match="--max_iters=5"):
        rung_steps(tiny.settings(max_iters=4, eval_interval=1), 3)
