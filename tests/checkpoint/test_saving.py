"""Saver: what is written, and what a failed write changes."""

from types import SimpleNamespace

import pytest
import tiny
import torch

from folio.checkpoint import run_dir
from folio.checkpoint.format import load_checkpoint
from folio.checkpoint.saving import Saver, gather_on_cpu
from folio.cli.errors import UserError
from folio.cli.process import Interrupted


@pytest.fixture
def disk(monkeypatch):
    """Has the names and steps of written checkpoints. `error`, a message, makes writes fail."""
    disk = SimpleNamespace(error=None, written=[])
    real = run_dir.save_checkpoint

    def save(path, checkpoint):
        if disk.error:
            raise UserError(disk.error)
        real(path, checkpoint)
        disk.written.append((path.name, checkpoint.progress.step))

    monkeypatch.setattr(run_dir, "save_checkpoint", save)
    return disk


@pytest.fixture
def saver(verse, folder):
    """A Saver of a run at step 1. `tracking.warnings` has what Tracking would print."""
    (folder / "out").mkdir()
    trainer, warnings = tiny.new_trainer(max_iters=30), []
    trainer.progress.step = 1
    tracking = SimpleNamespace(warnings=warnings, warn=warnings.append, say=warnings.append)
    return Saver(trainer, tracking)


def test_gathered_values_are_equal_and_tied_weights_are_tied():
    tensor = torch.arange(6.0).view(2, 3)
    tree = {"a": [tensor, tensor.T, {"b": tensor[0]}], "c": (1, "x"), "d": [0.5], "e": None}
    assert tiny.equal(gather_on_cpu(tree), tree)
    weights = gather_on_cpu(tiny.random_model().state_dict(keep_vars=True))
    assert weights["transformer.wte.weight"] is weights["lm_head.weight"]


def test_evaluation_whose_save_fails_does_not_count(saver, disk):
    progress = saver.trainer.progress
    saver.save_evaluation(2.0)
    progress.step, disk.error = 2, "No space left"
    saver.save_evaluation(1.0)
    assert (progress.best_step, progress.best_val_loss, saver.saved_step) == (1, 2.0, None)
    [warning] = saver.tracking.warnings
    assert warning.startswith("No space left; training continues")
    progress.step, disk.error = 3, None
    saver.save_evaluation(1.5)
    assert disk.written == [("ckpt.pt", 1), ("ckpt.pt", 3)]
    best = load_checkpoint("out/ckpt.pt").progress
    assert (best.step, best.best_step, best.best_val_loss) == (3, 3, 1.5)


def test_a_stop_after_an_evaluation_does_not_save_the_state_again(saver, disk):
    saver.save_evaluation(2.0)
    with pytest.raises(Interrupted):
        saver.save_and_stop(2)
    assert disk.written == [("ckpt.pt", 1)]
    assert saver.plan.run_dir.last.samefile(saver.plan.run_dir.best)
