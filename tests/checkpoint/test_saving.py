"""Saver: states are copied, then written by another thread while training goes on."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch

from folio.checkpoint import run_dir
from folio.checkpoint.format import load_checkpoint
from folio.checkpoint.saving import Saver, host_copy
from folio.cli.errors import UserError
from folio.cli.process import Interrupted
from folio.data.batches import Batches

FULL = "No space left"


class Disk:
    """Holds writes of checkpoints until `free` is set; `error`, a message, makes them fail."""

    def __init__(self, monkeypatch):
        self.busy, self.free, self.error = threading.Event(), threading.Event(), None
        self.written = []  # (name, step)
        real = run_dir.save_checkpoint

        def save(path, checkpoint):
            self.busy.set()
            assert self.free.wait(10)
            if self.error:
                raise UserError(self.error)
            real(path, checkpoint)
            self.written.append((path.name, checkpoint.progress.step))

        monkeypatch.setattr(run_dir, "save_checkpoint", save)


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


@pytest.fixture
def trainer(verse, folder):
    """A Trainer after its first step."""
    trainer = tiny.new_trainer(max_iters=30)
    (folder / "out").mkdir()
    take_step(trainer)
    return trainer


def take_step(trainer):
    step, batches = trainer.progress.step, Batches(trainer.plan.dataset.train, trainer.settings)
    _, grad_norm = trainer.forward_backward(batches.at(step), step)
    trainer.clip_and_step(grad_norm, 0.01)
    trainer.progress.step += 1


def make_saver(trainer):
    """Returns a Saver whose `tracking.warnings` has the messages that Tracking would print."""
    warnings = []
    tracking = SimpleNamespace(warnings=warnings, warn=warnings.append, say=warnings.append)
    return Saver(trainer, tracking)


# The copy


def test_copy_has_equal_values_of_its_own():
    tensor = torch.arange(6.0).view(2, 3)
    tree = {"a": [tensor, tensor.T, {"b": tensor[0]}], "c": (1, "x"), "d": [0.5], "e": None}
    copied = host_copy(tree)
    assert tiny.equal(copied, tree)
    before = [tensor.clone() for tensor in copied["a"][:2]]
    tensor += 1
    tree["d"].append(1)
    assert tiny.equal(copied["a"][:2], before)
    assert copied["d"] == [0.5]


def test_copy_of_tied_weights_is_tied():
    weights = host_copy(tiny.random_model().state_dict(keep_vars=True))
    assert weights["transformer.wte.weight"] is weights["lm_head.weight"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_copy_from_a_gpu_is_complete_and_pinned():
    tensor = torch.randn(4000, 4000, device="cuda")
    expected = tensor.cpu()
    copied = host_copy([tensor])[0]
    tensor.zero_()
    assert copied.is_pinned()
    assert torch.equal(copied, expected)


# Writing in the background


def test_state_that_is_written_is_that_of_the_save_while_training_goes_on(trainer, disk):
    with make_saver(trainer) as saver:
        saver.save()
        expected = host_copy(trainer.state_dict())
        assert disk.busy.wait(10)
        trainer.plan.run_dir.append({"step": 1})
        for _ in range(3):
            take_step(trainer)
        assert disk.written == []
        disk.free.set()
    saved = load_checkpoint("out/last.pt")
    assert (saved.progress.step, saved.log_bytes) == (1, None)
    assert tiny.equal(saved.weights, dict(expected["weights"]))
    assert tiny.equal(saved.optimizers, expected["optimizers"])
    assert not tiny.equal(saved.weights, dict(trainer.model.state_dict()))


def test_failed_write_is_reported_at_the_next_save_and_its_evaluation_does_not_count(trainer, disk):
    disk.free.set()
    progress = trainer.progress
    with make_saver(trainer) as saver:
        saver.save_evaluation(2.0)
        take_step(trainer)
        saver.in_flight.result()
        disk.error = FULL
        saver.save_evaluation(1.0)
        assert (progress.best_step, progress.best_val_loss) == (2, 1.0)
        take_step(trainer)
        assert str(saver.in_flight.exception()) == FULL
        disk.error = None
        assert saver.tracking.warnings == []
        saver.save_evaluation(1.5)
    [warning] = saver.tracking.warnings
    assert warning.startswith("No space left; training continues")
    assert disk.written == [("ckpt.pt", 1), ("ckpt.pt", 3)]
    best = load_checkpoint("out/ckpt.pt").progress
    assert (best.step, best.best_step, best.best_val_loss) == (3, 3, 1.5)


def test_a_stop_after_an_evaluation_does_not_save_the_state_again(trainer, disk):
    disk.free.set()
    with make_saver(trainer) as saver:
        saver.save_evaluation(2.0)
        with pytest.raises(Interrupted):
            saver.save_and_stop(2)
    assert disk.written == [("ckpt.pt", 1)]
    assert Path("out/last.pt").samefile("out/ckpt.pt")


@pytest.mark.parametrize(("error", "count"), [(ZeroDivisionError(), 1), (Interrupted(2), 0)])
def test_only_a_second_ctrl_c_loses_the_write_in_flight(trainer, disk, error, count):
    def save_and_fail(saver):
        with saver:
            saver.save()
            raise error

    timer = threading.Timer(0.05, disk.free.set)
    if count:
        timer.start()
    with pytest.raises(type(error)):
        save_and_fail(make_saver(trainer))
    assert len(disk.written) == count
    disk.free.set()
