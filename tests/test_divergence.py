"""Runs whose loss or gradient is not finite: they stop, and keep the last sound state."""

import copy
import math
import os
import signal
from pathlib import Path

import pytest
import tiny
import torch

import train
from folio.batches import Batches, to_device
from folio.device import choose_machine
from folio.errors import UserError
from folio.plan import model_config
from train import Learner


def saved_step():
    """Returns the step of last.pt, whose weights must be finite."""
    last = tiny.saved("last.pt")
    assert all(weight.isfinite().all() for weight in last["model"].values())
    return last["iter_num"]


def hook_head(monkeypatch, install):
    """Calls install(lm_head) on the model of each run."""
    real = Learner.__init__

    def init(self, *args):
        real(self, *args)
        install(self.model.lm_head)

    monkeypatch.setattr(Learner, "__init__", init)


def initial_scale(monkeypatch, scale):
    real = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *a, **k: real(*a, **k, init_scale=scale))


@pytest.mark.parametrize("interval", [1, 3])
def test_divergence_ends_the_run_and_keeps_the_last_sound_state(verse, interval):
    flags = tiny.flags(learning_rate=1e30, warmup_iters=0, eval_interval=interval)
    with pytest.raises(UserError, match=r"diverged at step \d: .*(nan|inf).*--learning_rate"):
        train.main(flags)
    assert saved_step() == 0
    train.main(tiny.flags(init_from="resume"))
    assert saved_step() == 6


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("log_interval", [1, 100])
def test_nothing_is_saved_after_a_step_that_diverged(verse, monkeypatch, where, log_interval):
    steps = iter(range(100))

    def diverge(tensor):
        return tensor * (math.inf if next(steps) == 4 else 1)

    def install(head):
        if where == "loss":
            head.register_forward_hook(lambda *a: diverge(a[2]) if a[0].training else None)
        else:
            head.weight.register_hook(diverge)

    hook_head(monkeypatch, install)
    flags = tiny.flags(max_iters=9, eval_interval=6, checkpoint_interval=2)
    with pytest.raises(UserError, match=r"at step 4: loss .*, gradient norm (nan|inf)"):
        train.main([*flags, f"--log_interval={log_interval}"])
    assert saved_step() == 2
    assert all(math.isfinite(event["loss"]) for event in tiny.log_events()[1:])


def test_nothing_is_saved_if_a_run_that_diverged_is_stopped(verse, monkeypatch):
    hook_head(monkeypatch, lambda head: head.weight.register_hook(lambda grad: grad * math.inf))
    real = Learner.update

    def update(*args):
        real(*args)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Learner, "update", update)
    with pytest.raises(UserError, match="training diverged at step 0"):
        train.main(tiny.flags(log_interval=100))
    assert saved_step() == 0


def test_evaluation_that_is_not_finite_ends_the_run(verse, monkeypatch):
    losses = iter([3.0, 3.0, 1.0, math.nan])
    monkeypatch.setattr(Learner, "split_loss", lambda *_: next(losses))
    with pytest.raises(UserError, match="diverged at step 3: train loss 1, val loss nan"):
        train.main(tiny.flags())
    assert saved_step() == 0


def test_steps_that_the_loss_scaler_skips_do_not_end_a_run(verse, monkeypatch):
    initial_scale(monkeypatch, 2.0**40)
    train.main(tiny.flags(dtype="float16", max_iters=40, eval_interval=40))
    norms = [event["grad_norm"] for event in tiny.log_events() if event["split"] == "train"]
    assert norms[0] is None
    assert 0 < norms[-1] < 100
    assert tiny.saved("last.pt")["scaler"]["scale"] < 2.0**40
    assert "Infinity" not in Path("out/log.jsonl").read_text()


def test_infinite_float16_gradient_at_scale_1_ends_the_run(verse, monkeypatch):
    initial_scale(monkeypatch, 1.0)
    hook_head(monkeypatch, lambda head: head.weight.register_hook(lambda grad: grad * math.inf))
    with pytest.raises(UserError, match="training diverged at step 0"):
        train.main(tiny.flags(dtype="float16"))


def test_float16_overflow_of_one_optimizer_skips_all(verse):
    settings = tiny.settings(dtype="float16", optimizer="muon")
    learner = Learner(
        model_config(settings, verse.tokenizer),
        settings,
        choose_machine("cpu", "float16", False),
    )
    learner.init_weights()
    batches = Batches(to_device(verse, "cpu").train, settings)
    for norm in (1.0, math.nan):
        before = copy.deepcopy([learner.model.state_dict(), learner.state_dict()["optimizers"]])
        learner.gradient(batches.at(0), 0)
        learner.update(torch.tensor(norm), 0.1)
        after = [learner.model.state_dict(), learner.state_dict()["optimizers"]]
        assert tiny.same(after, before) == math.isnan(norm)
