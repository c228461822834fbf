"""The state of a run: its schedule, by --minutes or by steps, and what it saves."""

import re
import time
from types import SimpleNamespace

import pytest
import tiny
import torch

import train
from folio.cli import process
from folio.cli.errors import UserError
from folio.distributed.world import gather_on_cpu
from folio.training.evaluation import evaluation_cost, is_evaluation_due
from folio.training.run import Run, Timer
from train import learning_rate_at

BUDGET = {"minutes": 1, "max_iters": 1000, "eval_interval": 100, "eval_iters": None}


@pytest.fixture
def seconds(monkeypatch):
    """Replaces the wall clock. `seconds.now` is the time since the start of the process."""
    seconds = SimpleNamespace(now=0.0)
    monkeypatch.setattr(process, "STARTED", 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: seconds.now)
    return seconds


def simulate(run, seconds, step_s):
    """Acts like train.train, if a step takes so many seconds, and evaluations what Run expects.

    Returns Run.schedule_step() of each step and of each evaluation.
    """
    steps, evaluations = [], []
    run.timer.start()
    while True:
        schedule_step = run.schedule_step()
        if is_evaluation_due(run, schedule_step):
            with run.timer.pause():
                seconds.now += step_s * evaluation_cost(run)
            evaluations.append(schedule_step)
            run.progress.record({"loss": 1.0, "val_windows": 1}, schedule_step)
        if run.progress.is_finished(run.settings):
            return steps, evaluations
        steps.append(schedule_step)
        seconds.now += step_s
        run.progress.add_step(1)


def test_a_run_whose_limits_are_passed_is_evaluated_at_once(verse):
    run = tiny.new_run(max_iters=10)
    run.progress.record({"loss": 1.0, "val_windows": 1}, schedule_step=10)
    run.progress.add_step(1)
    assert is_evaluation_due(run, 10)


@pytest.mark.parametrize("step_s", [0.02, 0.3, 2.0])
@pytest.mark.parametrize("eval_iters", [None, 4])
def test_a_run_ends_with_its_minutes_and_evaluates_on_the_way(verse, seconds, step_s, eval_iters):
    run = tiny.new_run(**BUDGET | {"eval_iters": eval_iters})
    seconds.now = 3.0  # the start of the process
    steps, evaluations = simulate(run, seconds, step_s)
    if eval_iters is None:
        seconds.now += step_s * evaluation_cost(run, final=True)
    assert seconds.now == pytest.approx(60, abs=2 * step_s) or len(steps) == 1000
    assert steps == sorted(steps)
    assert evaluations[-1] == 1000
    assert 2 <= len(evaluations) <= 11
    assert learning_rate_at(steps[-1], run.settings) < 0.11 * run.settings.learning_rate


def test_evaluations_take_about_a_tenth_of_the_minutes(verse, seconds):
    run = tiny.new_run(**BUDGET | {"eval_iters": 10})
    assert evaluation_cost(run) == pytest.approx((40 + 20) / 4 / 3)  # of 4 windows each
    _, evaluations = simulate(run, seconds, step_s=0.2)
    assert evaluations == pytest.approx([0, 180, 360, 540, 720, 900, 1000], abs=40)


def test_on_a_slow_machine_the_first_and_last_evaluations_fit_into_the_minutes(
    verse, seconds, monkeypatch
):
    monkeypatch.setattr(Run, "peak_step_s", lambda run: 0.5)  # a quarter of a step
    run = tiny.new_run(**BUDGET | {"eval_interval": 1000, "gradient_accumulation_steps": 20})
    run.dataset = SimpleNamespace(train=range(10**6), val=range(10**6))
    assert evaluation_cost(run) == pytest.approx(0.05 * 30)  # steps of 2 s
    _, evaluations = simulate(run, seconds, step_s=2.0)
    assert evaluations == [0, 1000]
    assert seconds.now + 2 * evaluation_cost(run, final=True) == pytest.approx(60, abs=4)


def test_a_resumed_run_keeps_the_windows_of_its_first_estimate(verse, monkeypatch):
    settings = {"minutes": 1000, "max_iters": 4, "eval_interval": 100, "eval_iters": None}
    for speed, changes in ((1, {"stop_at": 2}), (9, {"init_from": "resume"})):
        monkeypatch.setattr(Run, "peak_step_s", lambda run, speed=speed: 750 / speed)
        train.main(tiny.flags(**settings, **changes))
    events = [event for event in tiny.log_events() if event["event"] == "val"]
    # 20 steps of 3,000 s, of which a tenth are 2 batches of 4 windows
    assert [event["val_windows"] for event in events] == [8, 8]


def test_without_minutes_the_schedule_is_that_of_the_steps(verse, seconds):
    run = tiny.new_run(max_iters=7, eval_interval=3)
    steps, evaluations = simulate(run, seconds, step_s=1000)
    assert steps == list(range(7))
    assert evaluations == [0, 3, 6, 7]


@pytest.fixture
def steady_time(monkeypatch):
    """Makes each step of a run take 0.1 s, and evaluations no time."""
    monkeypatch.setattr(Timer, "elapsed_s", lambda timer: 0.1 * timer.progress.step)
    for module in ("run", "evaluation"):
        name = f"folio.training.{module}.evaluation_cost"
        monkeypatch.setattr(name, lambda run, final=False: 0)


def test_a_resumed_run_continues_with_the_minutes_that_are_left(verse, steady_time, capsys):
    short = {"minutes": 0.05, "max_iters": 1000, "eval_interval": 200, "warmup_iters": 0}
    train.main(tiny.flags(out_dir="out-a", **short, stop_at=7))
    train.main(tiny.flags(out_dir="out-a", **short, init_from="resume"))
    train.main(tiny.flags(out_dir="out-b", **short))
    assert tiny.differences("out-a", "out-b") == []
    assert tiny.load("last.pt", "out-a")["iter_num"] == 30
    out = capsys.readouterr().out
    assert out.count("30 of 1,000 steps fitted into --minutes\n") == 2
    # 970 steps of 0.1 s
    assert out.count("\nall steps would take about --minutes=2, and the text improves until") == 2


def test_a_finished_run_continues_with_more_minutes_or_steps(verse, steady_time, capsys):
    def run(**changes):
        short = {"minutes": 0.05, "max_iters": 100, "eval_interval": 10, "init_from": "auto"}
        train.main(tiny.flags(**short | changes))
        advice = re.findall("^finished at .* increase (.*)", capsys.readouterr().out, re.M)
        return tiny.load("last.pt")["iter_num"], advice

    assert run() == (30, [])
    with pytest.MonkeyPatch.context() as patch:  # a process that starts faster
        patch.setattr(Timer, "elapsed_s", lambda timer: 0.05 * timer.progress.step)
        assert run() == (30, ["--minutes"])
    assert run(minutes=0.1) == (60, [])
    evaluated = [event["step"] for event in tiny.log_events() if event["event"] == "val"]
    assert evaluated == [0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 36, 42, 48, 54, 60]
    assert run(minutes=None) == (100, [])
    assert run(minutes=1) == (100, ["--max_iters"])


def test_a_resumed_run_with_fewer_steps_uses_the_minutes_that_are_left(verse, steady_time):
    short = {"minutes": 0.05, "eval_interval": 10}
    train.main(tiny.flags(**short, max_iters=1000, stop_at=20))
    train.main(tiny.flags(**short, max_iters=40, init_from="resume"))
    assert tiny.load("last.pt")["iter_num"] == 30


def test_minutes_that_are_over_at_the_start_are_an_error_and_the_earlier_run_is_kept(verse):
    train.main(tiny.flags(max_iters=1))
    with pytest.raises(UserError, match="--minutes=1e-06 is over before the first step"):
        train.main(tiny.flags(minutes=1e-6, overwrite=True))
    assert tiny.load("ckpt.pt")["iter_num"] == 1


# Saving


def test_gathered_values_are_equal_and_tied_weights_are_tied():
    tensor = torch.arange(6.0).view(2, 3)
    tree = {"a": [tensor, tensor.T, {"b": tensor[0]}], "c": (1, "x"), "d": [0.5], "e": None}
    assert tiny.equal(gather_on_cpu(tree), tree)
    weights = gather_on_cpu(tiny.random_model().state_dict(keep_vars=True))
    assert weights["transformer.wte.weight"] is weights["lm_head.weight"]


def test_resuming_does_not_save_the_same_state_again(verse):
    train.main(tiny.flags(stop_at=4, checkpoint_interval=2))
    run = tiny.new_run(init_from="resume", checkpoint_interval=2)
    assert not run.is_save_due()
    run.progress.step = 6
    assert run.is_save_due()
