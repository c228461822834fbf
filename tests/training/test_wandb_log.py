"""Weights & Biases, which a mock replaces."""

import sys
from unittest.mock import Mock

import pytest
import tiny

import train
from folio.cli.errors import UserError

WANDB = {"wandb_log": True, "wandb_project": "verses", "wandb_run_name": "first"}


@pytest.fixture
def wandb(monkeypatch):
    module = Mock()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def tracked_numbers(event):
    """Returns the numbers of an event under the names that wandb receives."""
    return {f"{event['event']}/{k}": v for k, v in event.items() if k not in ("step", "event")}


def test_wandb_receives_the_numbers_of_the_log(verse, wandb):
    train.main(tiny.flags(**WANDB))
    settings = wandb.init.call_args.kwargs
    assert (settings["project"], settings["name"]) == ("verses", "first")
    assert settings["config"]["n_embd"] == 16
    run = wandb.init.return_value
    logged = [(call.kwargs["step"], call.args[0]) for call in run.log.call_args_list]
    events = [event for event in tiny.log_events() if event["event"] in ("train", "val")]
    assert logged == [(event["step"], tracked_numbers(event)) for event in events]
    assert {"train/loss", "train/lr", "train/mfu", "train/tokens_per_s"} < set(logged[1][1])
    run.finish.assert_called_once()


@pytest.mark.parametrize("call", ["log", "finish"])
def test_wandb_that_fails_later_does_not_end_the_run(verse, wandb, call, capsys):
    getattr(wandb.init.return_value, call).side_effect = RuntimeError(f"{call} is broken\nmore")
    train.main(tiny.flags(**WANDB))
    captured = capsys.readouterr()
    assert f"{call} is broken" in captured.err
    assert captured.err.count("wandb_log failed") == 1
    assert "done; best val loss" in captured.out
    assert tiny.log_events()[-1]["step"] == 6


def test_a_missing_package_is_reported_before_training(verse, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    message = "wandb_log cannot start: .*run pip install wandb, or set"
    train.main(tiny.flags(max_iters=1))
    with pytest.raises(UserError, match=message):
        train.main(tiny.flags(overwrite=True, wandb_log=True))
    assert tiny.load("last.pt")["iter_num"] == 1  # the earlier run is still there
