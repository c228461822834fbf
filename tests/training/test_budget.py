"""Time budgets: --minutes."""

import copy
from types import SimpleNamespace

import pytest
import tiny
from hypothesis import given, settings, strategies

import train
from folio.checkpoint.format import Progress
from folio.cli.errors import UserError
from folio.distributed.world import SINGLE_PROCESS
from folio.training import budget
from folio.training.budget import (
    TimeBudget,
    plan_steps,
    seconds_per_step,
    start_budget,
    steps_per_evaluation,
)

SHORT = {"minutes": 0.01, "max_iters": 1000, "eval_interval": 500, "warmup_iters": 0}


class SimulatedRun:
    """Has what budget.py needs of a Trainer and of a Tracking. Steps take `step_s` seconds."""

    def __init__(self, step_s=1.0, resumed=None, **changes):
        self.settings = tiny.settings(**changes)
        tokens = range(10 * self.settings.tokens_per_step)
        splits = SimpleNamespace(train=tokens, val=tokens)
        self.plan = SimpleNamespace(dataset=splits, resumed=resumed, world=SINGLE_PROCESS)
        self.world = SINGLE_PROCESS
        self.progress = copy.copy(resumed.progress) if resumed else Progress()
        self.step_s, self.seconds, self.trained_s = step_s, 0.0, 0.0
        self.evaluations, self.pauses_s = 0, 0.0

    def elapsed_s(self):
        return self.seconds

    def train_seconds(self):
        return self.trained_s

    def train(self, speeds):
        """Acts like train.run_steps. `speeds` are those of equal parts of the budget.

        Returns the positions of the evaluations.
        """
        progress, settings, evaluations = self.progress, self.settings, []
        time_budget = TimeBudget(self, self)
        cost = steps_per_evaluation(self)
        while True:
            part = int(self.seconds / (60 * settings.minutes) * len(speeds))
            step_s = self.step_s / speeds[min(part, len(speeds) - 1)]
            if progress.is_evaluation_due(settings):
                evaluations.append(progress.position)
                self.seconds += cost * step_s
                self.pauses_s += cost * step_s
                self.evaluations += 1
                progress.record(1.0)
            if progress.is_finished(settings):
                return evaluations
            time_budget.adapt()
            self.seconds += step_s
            self.trained_s += step_s
            progress.advance(settings)


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    monkeypatch.setattr(budget, "seconds_per_step", lambda trainer: trainer.step_s)


@settings(max_examples=100, deadline=None)
@given(
    minutes=strategies.floats(5, 100),
    max_iters=strategies.integers(1, 30).map(lambda n: 1000 * n),
    eval_iters=strategies.integers(1, 10),
    speeds=strategies.lists(strategies.sampled_from((0.2, 0.5, 1.0, 2.0)), min_size=1, max_size=4),
)
def test_a_run_takes_its_budget_or_all_steps(minutes, max_iters, eval_iters, speeds):
    changes = {"minutes": minutes, "max_iters": max_iters, "eval_interval": max_iters // 10}
    run = SimulatedRun(eval_iters=eval_iters, warmup_iters=0, **changes)
    start_budget(run)
    evaluations = run.train(speeds)
    fraction = run.seconds / (60 * minutes)
    assert fraction < 1.1
    assert fraction > 0.9 or run.progress.step == max_iters
    assert run.progress.step <= max_iters
    assert run.progress.position == pytest.approx(max_iters)
    assert evaluations[0] == 0
    assert 2 <= len(evaluations) <= 11
    assert evaluations[-2] < 0.95 * evaluations[-1] == pytest.approx(0.95 * max_iters)


def test_all_processes_plan_the_steps_of_the_first():
    run = SimulatedRun(minutes=2, max_iters=600, eval_interval=100)
    run.world = SimpleNamespace(from_main=lambda steps: 70.5)  # measured by another process
    plan_steps(run, step_s=1.0, evaluation_s=0.0)
    assert run.progress.num_steps == 70


def test_without_a_budget_the_position_is_the_step():
    run = SimulatedRun(max_iters=7, eval_interval=3)
    start_budget(run)
    evaluated = []
    while not run.progress.is_finished(run.settings):
        if run.progress.is_evaluation_due(run.settings):
            evaluated.append(run.progress.step)
            run.progress.record(1.0)
        else:
            run.progress.advance(run.settings)
        assert run.progress.position == run.progress.step
    assert evaluated == [0, 3, 6, 7]


@pytest.mark.parametrize(
    ("minutes", "line"),
    [(20, "time: all steps fit into --minutes; for"), (5, "time: 284 of 600 steps fit into")],
)
def test_the_plan_is_printed_before_the_run(minutes, line, capsys):
    run = SimulatedRun(minutes=minutes, max_iters=600, eval_interval=100, eval_iters=6)
    start_budget(run)
    assert capsys.readouterr().out.startswith(line)


def test_a_budget_that_is_too_short_is_an_error():
    with pytest.raises(UserError, match=r"--minutes=0.05 is too short after 0 s, for steps of"):
        start_budget(SimulatedRun(minutes=0.05, max_iters=600, eval_interval=100))


def test_a_resumed_run_keeps_its_plan_unless_the_request_changes():
    first = SimulatedRun(minutes=2, max_iters=600, eval_interval=100, eval_iters=1)
    start_budget(first)
    first.progress.step, first.progress.position = 50, 299.5

    def resumed(**changes):
        request = {"minutes": 2, "max_iters": 600, "eval_interval": 100, "eval_iters": 1}
        saved = SimpleNamespace(progress=first.progress, settings=request)
        run = SimulatedRun(step_s=2.0, resumed=saved, **request | changes)  # a slower machine
        start_budget(run)
        return run.progress

    assert resumed() == resumed(eval_interval=200) == first.progress
    assert resumed(minutes=None).num_steps is None
    assert resumed(minutes=None).position == 50
    assert resumed(minutes=4).position == resumed(max_iters=800).position == 50
    assert 150 < resumed(minutes=4).num_steps < 170


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_measuring_does_not_change_the_state(verse, optimizer):
    trainer = tiny.new_trainer(optimizer=optimizer, dropout=0.1, minutes=1e-3)
    before = copy.deepcopy(trainer.state_dict())
    assert seconds_per_step(trainer) > 0
    assert tiny.equal(trainer.state_dict(), before)


@pytest.fixture
def slow_steps(monkeypatch):
    """A function that sets the measured time of a step; no other time passes."""
    monkeypatch.setattr(train.Trainer, "elapsed_s", lambda trainer: 0.0)
    monkeypatch.setattr(TimeBudget, "adapt", lambda budget: None)

    def set_time(seconds):
        monkeypatch.setattr(budget, "seconds_per_step", lambda trainer: seconds)

    set_time(0.01)
    return set_time


def test_a_resumed_run_with_a_budget_equals_an_uninterrupted_one(verse, slow_steps, capsys):
    train.main(tiny.flags(out_dir="out-a", **SHORT, stop_at=7))
    slow_steps(0.02)  # another machine
    train.main(tiny.flags(out_dir="out-a", **SHORT, init_from="resume"))
    slow_steps(0.01)
    train.main(tiny.flags(out_dir="out-b", **SHORT))
    assert tiny.differences("out-a", "out-b") == []
    saved = tiny.load("last.pt", "out-a")
    assert saved["config"]["max_iters"] == 1000
    assert 7 < saved["num_steps"] == saved["iter_num"] < 60
    line = f"{saved['iter_num']} of 1,000 steps fitted into --minutes"
    assert capsys.readouterr().out.splitlines().count(line) == 2
    assert saved["position"] == pytest.approx(1000)


def test_a_finished_run_continues_after_a_greater_request(verse, slow_steps, capsys):
    def run(**changes):
        train.main(tiny.flags(**SHORT | {"init_from": "auto"} | changes))
        return tiny.load("last.pt")["iter_num"]

    steps = run()
    assert run() == steps
    end = capsys.readouterr().out.splitlines()[-1]
    assert end == f"finished at step {steps}; to continue, increase --minutes"
    assert run(minutes=0.02) > steps
