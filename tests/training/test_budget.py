"""Time budgets: --minutes."""

import copy
import dataclasses
from math import sqrt
from types import SimpleNamespace

import pytest
import tiny
from hypothesis import given, settings, strategies

import train
from folio.checkpoint.format import Progress
from folio.cli.errors import UserError
from folio.training import budget
from folio.training.budget import (
    fit_to_minutes,
    seconds_per_step,
    steps_per_evaluation,
    steps_within,
    with_max_iters,
)

SETTINGS = {"max_iters": 600, "eval_interval": 100, "warmup_iters": 50, "lr_decay_iters": 500}
SHORT = {"minutes": 0.01, "max_iters": 1000, "eval_interval": 500, "warmup_iters": 0}


@pytest.fixture
def one_second(monkeypatch):
    """Every step takes a second, and an evaluation none."""
    monkeypatch.setattr(budget, "seconds_per_step", lambda *_: 1.0)
    monkeypatch.setattr(budget, "steps_per_evaluation", lambda *_: 0)


def fitted(verse, resumed=None, **changes):
    """Returns the settings of a run after fit_to_minutes, and its progress."""
    requested = tiny.settings(**SETTINGS | changes)
    progress = resumed.progress if resumed else Progress()
    plan = SimpleNamespace(settings=requested, dataset=verse, resumed=resumed)
    return fit_to_minutes(SimpleNamespace(plan=plan, progress=progress)), progress


def counts(settings):
    return tuple(getattr(settings, name) for name in SETTINGS)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"minutes": 20}, (600, 100, 50, 500)),
        ({"minutes": 10}, (600, 100, 50, 500)),
        ({"minutes": 2.5}, (150, 50, 13, 125)),  # a quarter, with half as many evaluations
        ({"minutes": 2.5, "warmup_iters": 0, "lr_decay_iters": None}, (150, 50, 0, None)),
    ],
    ids=str,
)
def test_a_short_budget_has_fewer_steps(verse, one_second, changes, expected):
    assert counts(fitted(verse, **changes)[0]) == expected


def test_an_evaluation_is_a_forward_pass_of_both_splits(verse):
    settings, tokens = tiny.settings(eval_iters=2), tiny.settings().tokens_per_step
    splits = SimpleNamespace(train=range(10 * tokens), val=range(tokens))
    assert steps_per_evaluation(settings, splits) == pytest.approx((2 + 1) / 3)
    assert steps_per_evaluation(dataclasses.replace(settings, eval_iters=99), splits) == 11 / 3


@settings(max_examples=30)
@given(
    minutes=strategies.floats(0.01, 100),
    max_iters=strategies.integers(1, 3000),
    eval_interval=strategies.integers(1, 3000),
    cost=strategies.floats(0, 300),
)
def test_steps_and_evaluations_fit_into_the_budget(minutes, max_iters, eval_interval, cost):
    changes = {"warmup_iters": 0, "eval_interval": eval_interval}
    settings = tiny.settings(minutes=minutes, max_iters=max_iters, **changes)
    if 60 * minutes - 2 * cost < 1:
        with pytest.raises(UserError, match="too short"):
            steps_within(settings, 1.0, cost)
        return
    steps = steps_within(settings, 1.0, cost)
    assert 1 <= steps <= max_iters
    fitted = with_max_iters(steps, settings)
    evaluated = {*range(0, steps, fitted.eval_interval), steps}
    assert steps + cost * len(evaluated) <= 60 * minutes * (1 + 1e-9)
    if steps < max_iters:  # not one step more than necessary is left out
        interval = eval_interval * sqrt((steps + 1) / max_iters)
        assert (steps + 1) * (1 + cost / interval) + 2 * cost >= 60 * minutes * (1 - 1e-9)


def test_a_resumed_run_keeps_its_steps_unless_the_request_changes(verse, one_second):
    settings, progress = fitted(verse, minutes=2)
    progress.fitted_iters = 90  # on a slower machine

    def resumed(**changes):
        saved = SimpleNamespace(progress=copy.copy(progress), settings=SETTINGS | {"minutes": 2})
        return fitted(verse, saved, **changes)[0]

    assert settings.max_iters == 120
    assert resumed(minutes=2).max_iters == 90
    assert resumed(minutes=2, eval_interval=200).eval_interval == 78
    assert resumed(minutes=4).max_iters == 240
    assert resumed(minutes=2, max_iters=60).max_iters == 60
    assert resumed(minutes=None).max_iters == 600


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_measuring_does_not_change_the_state(verse, optimizer):
    trainer = tiny.new_trainer(optimizer=optimizer, dropout=0.1, minutes=1e-3)
    before = copy.deepcopy(trainer.state_dict())
    assert seconds_per_step(trainer) > 0
    assert tiny.equal(trainer.state_dict(), before)


def test_a_run_with_a_budget_equals_a_run_of_as_many_steps(verse, monkeypatch):
    monkeypatch.setattr(budget, "seconds_per_step", lambda *_: 0.01)
    train.main(tiny.flags(out_dir="out-a", **SHORT, stop_at=7))
    monkeypatch.setattr(budget, "seconds_per_step", lambda *_: 0.02)  # a busy machine
    train.main(tiny.flags(out_dir="out-a", **SHORT, init_from="resume"))
    saved = tiny.load("last.pt", "out-a")
    assert saved["config"]["max_iters"] == 1000
    assert 7 < saved["fitted_iters"] == saved["iter_num"] < 60
    settings = with_max_iters(saved["fitted_iters"], tiny.settings(**SHORT))
    fewer = {name: getattr(settings, name) for name in SHORT} | {"minutes": None}
    train.main(tiny.flags(out_dir="out-b", **fewer))
    assert tiny.equal(saved["model"], tiny.load("last.pt", "out-b")["model"])
    assert tiny.untimed_log("out-a")[1:] == tiny.untimed_log("out-b")[1:]


def test_a_finished_run_continues_after_a_greater_request(verse, monkeypatch, capsys):
    monkeypatch.setattr(budget, "seconds_per_step", lambda *_: 0.01)

    def run(**changes):
        train.main(tiny.flags(**SHORT | {"init_from": "auto"} | changes))
        return tiny.load("last.pt")["iter_num"]

    steps = run()
    assert run() == steps
    end = capsys.readouterr().out.splitlines()[-1]
    assert end == f"finished at step {steps}; to continue, increase --minutes"
    assert run(minutes=0.02) > steps
