"""Time budgets: --minutes."""

import copy

import pytest
import tiny

import train
from folio import plan
from folio.batches import to_device
from folio.errors import UserError
from folio.plan import fit_to_minutes, seconds_per_step

SETTINGS = {"max_iters": 600, "eval_interval": 100, "warmup_iters": 50, "lr_decay_iters": 500}


class Saved:
    """A checkpoint's settings."""

    def __init__(self, **settings):
        self.settings = settings


@pytest.fixture
def one_second(monkeypatch):
    """Every step takes a second, and an evaluation none."""
    monkeypatch.setattr(plan, "seconds_per_step", lambda *_: 1.0)
    monkeypatch.setattr(plan, "evaluated_tokens", lambda *_: 0)


def fitted(verse, resumed=None, **changes):
    return fit_to_minutes(tiny.settings(**SETTINGS | changes), None, verse, resumed)


def counts(settings):
    return tuple(getattr(settings, name) for name in plan.STEP_COUNTS)


@pytest.mark.parametrize(
    ("minutes", "expected"),
    [(20, (600, 100, 50, 500)), (10, (600, 100, 50, 500)), (5, (300, 50, 25, 250))],
)
def test_step_counts_are_reduced_in_proportion(verse, one_second, minutes, expected):
    assert counts(fitted(verse, minutes=minutes)) == expected


def test_counts_that_are_none_or_zero_stay(verse, one_second):
    settings = fitted(verse, minutes=5, warmup_iters=0, lr_decay_iters=None)
    assert counts(settings) == (300, 50, 0, None)


def test_evaluations_count_as_forward_passes(verse, monkeypatch):
    monkeypatch.setattr(plan, "seconds_per_step", lambda *_: 1.0)
    tokens = tiny.settings().tokens_per_step  # the forward pass of a step takes a third of it
    monkeypatch.setattr(plan, "evaluated_tokens", lambda *_: 15 * tokens)  # of each split
    assert fitted(verse, minutes=5).max_iters == 300 - 7 * 10


def test_a_budget_that_is_too_small_is_an_error(verse, one_second):
    with pytest.raises(UserError, match=r"a step takes 1 s .*: use more than --minutes=0.1 for 7"):
        fitted(verse, minutes=0.1)


def test_a_resumed_run_keeps_its_steps_unless_the_budget_changes(verse, one_second):
    before = vars(fitted(verse, minutes=2))
    saved = Saved(**before)
    assert counts(fitted(verse, saved, minutes=2)) == (120, 20, 10, 100)
    assert fitted(verse, saved, minutes=4).max_iters == 240
    assert fitted(verse, saved, minutes=2, max_iters=60).max_iters == 60
    assert fitted(verse, Saved(max_iters=600), minutes=2).max_iters == 120  # before: no budget


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_measuring_does_not_change_a_learner(verse, optimizer):
    settings = tiny.settings(optimizer=optimizer, dropout=0.1)
    run = train.setup(settings)
    for step in range(2):
        learner = run.learner
        before = copy.deepcopy(learner.state_dict())
        assert seconds_per_step(settings, learner, to_device(verse, "cpu")) > 0
        assert tiny.same(learner.state_dict(), before)
        batches = train.Batches(run.dataset.train, settings).at(step)
        _, norm = learner.gradient(batches, step)
        learner.update(norm, 0.01)
        assert not tiny.same(learner.state_dict()["weights"], before["weights"])


def test_a_run_with_a_budget_equals_a_run_of_as_many_steps(verse, monkeypatch):
    monkeypatch.setattr(plan, "seconds_per_step", lambda *_: 0.01)
    budget = {"minutes": 0.01, "max_iters": 1000, "eval_interval": 500, "warmup_iters": 0}
    train.main(tiny.flags(out_dir="out-a", **budget, stop_at=7))
    monkeypatch.setattr(plan, "seconds_per_step", lambda *_: 0.02)  # a busy machine
    train.main(tiny.flags(out_dir="out-a", **budget, init_from="resume"))
    saved = tiny.saved(out_dir="out-a")["config"]
    assert 7 < saved["max_iters"] < 60
    counts = {name: saved[name] for name in ("max_iters", "eval_interval", "warmup_iters")}
    train.main(tiny.flags(out_dir="out-b", **counts))
    a, b = (tiny.saved("last.pt", folder) for folder in ("out-a", "out-b"))
    assert tiny.same(a["model"], b["model"])
    assert tiny.untimed_log("out-a")[1:] == tiny.untimed_log("out-b")[1:]


def test_a_finished_run_says_how_to_continue(verse, monkeypatch, capsys):
    monkeypatch.setattr(plan, "seconds_per_step", lambda *_: 0.01)
    arguments = tiny.flags(minutes=0.01, max_iters=1000, eval_interval=500, warmup_iters=0)
    train.main(arguments)
    train.main([*arguments, "--init_from=resume"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("to continue, use --minutes=None and a greater --max_iters")
