"""Experiment trackers: TensorBoard itself and a mock of wandb."""

import os
import sys
from unittest.mock import Mock

import pytest
import tiny

import train
from folio.cli.errors import UserError
from folio.cli.files import LOCK_FILE

WANDB = {"wandb_log": True, "wandb_project": "verses", "wandb_run_name": "first"}


@pytest.fixture
def wandb(monkeypatch):
    module = Mock()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def tracked_numbers(event):
    """Returns the numbers of an event under the names that trackers use."""
    return {f"{event['event']}/{k}": v for k, v in event.items() if k not in ("step", "event")}


def test_wandb_receives_the_numbers_of_the_log(verse, wandb):
    train.main(tiny.flags(**WANDB))
    settings = wandb.init.call_args.kwargs
    assert (settings["project"], settings["name"]) == ("verses", "first")
    assert settings["config"]["n_embd"] == 16
    run = wandb.init.return_value
    logged = [call.args[0] for call in run.log.call_args_list]
    events = [event for event in tiny.log_events() if event["event"] in ("train", "val")]
    assert logged == [{"step": event["step"]} | tracked_numbers(event) for event in events]
    assert {"train/loss", "train/lr", "train/mfu", "train/tokens_per_s"} < set(logged[1])
    run.finish.assert_called_once()


def test_resumed_run_continues_the_newest_run_of_wandb(verse, wandb, folder):
    train.main(tiny.flags(**WANDB, max_iters=3))
    for name in ("run-20260101_000000-older", "offline-run-20260102_000000-a-b", "latest-run"):
        (folder / "out" / "wandb" / name).mkdir(parents=True)
    train.main(tiny.flags(**WANDB, init_from="resume"))
    train.main(tiny.flags(**WANDB))
    assert [call.kwargs["id"] for call in wandb.init.call_args_list] == [None, "a-b", None]


@pytest.mark.parametrize("call", ["log", "finish"])
def test_wandb_that_fails_later_does_not_end_the_run(verse, wandb, call, capsys):
    getattr(wandb.init.return_value, call).side_effect = RuntimeError(f"{call} is broken\nmore")
    train.main(tiny.flags(**WANDB))
    captured = capsys.readouterr()
    assert f"{call} is broken" in captured.err
    assert captured.err.count("wandb_log failed") == 1
    assert "done; best val loss" in captured.out
    assert tiny.log_events()[-1]["step"] == 6


@pytest.mark.parametrize(
    ("module", "setting"), [("wandb", "wandb_log"), ("torch.utils.tensorboard", "tensorboard")]
)
def test_missing_package_is_reported_before_training(verse, monkeypatch, module, setting):
    monkeypatch.setitem(sys.modules, module, None)
    package = module.split(".")[-1]
    message = f"{setting} cannot start: .*run pip install {package}, or set"
    with pytest.raises(UserError, match=message):
        train.main(tiny.flags(**{setting: True}))
    assert os.listdir("out") == [LOCK_FILE]
    train.main(tiny.flags(max_iters=1))
    with pytest.raises(UserError, match=message):
        train.main(tiny.flags(overwrite=True, **{setting: True}))
    assert tiny.load("last.pt")["iter_num"] == 1  # the earlier run is still there


def read_scalars(folder):
    """Returns {name: [(step, value)]} as TensorBoard reads them."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = accumulators.EventAccumulator(str(folder))
    reader.Reload()
    names = reader.Tags()["scalars"]
    return {name: [(s.step, s.value) for s in reader.Scalars(name)] for name in names}


def test_tensorboard_receives_the_numbers_of_the_log_and_hides_repeated_steps(verse, folder):
    train.main(tiny.flags(tensorboard=True, max_iters=3))
    checkpoint = (folder / "out" / "last.pt").read_bytes()
    train.main(tiny.flags(tensorboard=True, init_from="resume"))
    (folder / "out" / "last.pt").write_bytes(checkpoint)  # as if killed before the next save
    train.main(tiny.flags(tensorboard=True, init_from="resume"))
    (log_dir,) = (folder / "out" / "tensorboard").iterdir()
    series = read_scalars(log_dir)
    assert [step for step, _ in series["train/loss"]] == [0, 1, 2, 3, 3, 4, 5]
    assert [step for step, _ in series["val/loss"]] == [0, 3, 6]
    for event in tiny.log_events()[1:]:  # the first has the settings
        if event["event"] == "val":
            assert dict(series["val/loss"])[event["step"]] == pytest.approx(event["loss"], rel=1e-6)
