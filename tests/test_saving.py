"""Saver: states are copied, then written by another thread while training goes on."""

import gc
import os
import signal
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch

import train
from folio import checkpoint as checkpoints
from folio import saving
from folio.errors import UserError
from folio.process import Interrupted
from folio.run_dir import RunDir
from folio.saving import Saver, host_copy
from train import Learner


class Disk:
    """Holds writes of checkpoints until `free` is set; `error`, a message, makes them fail."""

    def __init__(self, monkeypatch):
        self.busy, self.free, self.error = threading.Event(), threading.Event(), None
        self.written = []  # (name, step)
        real = checkpoints.save

        def save(path, checkpoint, canceled):
            self.busy.set()
            assert self.free.wait(10)
            if self.error:
                raise UserError(self.error)
            real(path, checkpoint, canceled)
            self.written.append((path.name, checkpoint.progress.step))

        monkeypatch.setattr(checkpoints, "save", save)


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


@pytest.fixture
def run(verse):
    """A Run after its first step."""
    run = train.setup(tiny.settings(max_iters=30))
    Path("out").mkdir()
    take_step(run)
    return run


def take_step(run):
    batches = train.Batches(run.dataset.train, run.settings)
    _, norm = run.learner.gradient(batches.at(run.progress.step), run.progress.step)
    run.learner.update(norm, 0.01)
    run.progress.step += 1


def saver_of(run):
    """Returns a Saver whose `tracking.warnings` has the messages that Tracking would print."""
    warnings = []
    tracking = SimpleNamespace(
        warnings=warnings,
        elapsed_s=lambda: 1.0,
        say=warnings.append,
        warn=lambda error: warnings.append(str(error)),
        report_save_error=lambda error: warnings.append(f"{error}; retries"),
    )
    return Saver(run, tracking)


FULL = "No space left"


# The copy


def test_copy_has_equal_values_of_its_own():
    tensor = torch.arange(6.0).view(2, 3)
    tree = {"a": [tensor, tensor.T, {"b": tensor[0]}], "c": (1, "x"), "d": [0.5], "e": None}
    copied = host_copy(tree)
    assert tiny.same(copied, tree)
    before = [each.clone() for each in copied["a"][:2]]
    tensor += 1
    tree["d"].append(1)
    assert tiny.same(copied["a"][:2], before)
    assert copied["d"] == [0.5]


def test_copy_of_tied_weights_is_tied():
    weights = host_copy(tiny.random_model().state_dict(keep_vars=True))
    embedding, head = weights["transformer.wte.weight"], weights["lm_head.weight"]
    assert embedding.data_ptr() == head.data_ptr()
    untied = host_copy(tiny.random_model(tie_weights=False).state_dict(keep_vars=True))
    assert untied["transformer.wte.weight"].data_ptr() != untied["lm_head.weight"].data_ptr()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_copy_from_a_gpu_is_complete_and_pinned():
    tensor = torch.randn(4000, 4000, device="cuda")
    expected = tensor.cpu()
    copied = host_copy([tensor])[0]
    tensor.zero_()
    assert copied.is_pinned()
    assert torch.equal(copied, expected)


def test_state_that_is_written_is_that_of_the_save(run, disk):
    with saver_of(run) as saver:
        saver.save()
        expected = host_copy(run.learner.state_dict())
        assert disk.busy.wait(10)
        run.run_dir.append({"step": 1})
        for _ in range(3):
            take_step(run)
        disk.free.set()
    saved = checkpoints.load("out/last.pt")
    assert saved.progress.step == 1
    assert tiny.same(dict(saved.weights), expected["weights"])
    assert tiny.same(saved.optimizers, expected["optimizers"])
    assert not tiny.same(expected["weights"], host_copy(run.learner.model.state_dict()))
    assert saved.log_bytes == 0


# Writing in the background


def test_training_goes_on_during_a_write(verse, disk, monkeypatch):
    real, written = Learner.gradient, []

    def gradient(learner, micro_batches, step, stop):
        if step == 1:
            disk.free.clear()  # before the save at step 4
        if step == 6:
            assert disk.busy.is_set()
            written.extend(disk.written)
            disk.free.set()
        return real(learner, micro_batches, step)

    disk.free.set()  # training waits for the state of step 0
    monkeypatch.setattr(Learner, "gradient", gradient)
    train.main(tiny.flags(max_iters=9, eval_interval=9, checkpoint_interval=4))
    assert written == [("ckpt.pt", 0)]
    assert disk.written[1:] == [("last.pt", 4), ("last.pt", 8), ("ckpt.pt", 9)]


def test_next_copy_waits_for_the_write_in_flight(verse, monkeypatch):
    events, real_copy, real_save = [], saving.host_copy, RunDir.save

    def copy(*args):
        events.append("copy")
        return real_copy(*args)

    def save(*args):
        time.sleep(0.01)
        error = real_save(*args)
        events.append("written")
        return error

    monkeypatch.setattr(saving, "host_copy", copy)
    monkeypatch.setattr(RunDir, "save", save)
    train.main(tiny.flags(checkpoint_interval=1))
    assert events == ["copy", "written"] * 7


# Writes that fail


def test_write_that_fails_is_reported_at_the_next_save_which_retries(run, disk):
    disk.free.set()
    with saver_of(run) as saver:
        disk.error = FULL
        saver.save()
        saver.writer.submit(int).result()  # waits until the write has failed
        disk.error = None
        assert saver.tracking.warnings == []
        saver.save()
        assert saver.tracking.warnings == ["No space left; retries"]
    assert disk.written == [("last.pt", 1)]


def test_best_evaluation_that_could_not_be_written_does_not_count(run, disk):
    disk.free.set()
    progress = run.progress
    with saver_of(run) as saver:
        saver.evaluated(2.0)
        take_step(run)
        saver._wait()
        disk.error = FULL
        saver.evaluated(1.0)
        assert (progress.best_step, progress.best_val_loss) == (2, 1.0)
        take_step(run)
        saver._report_previous()
        assert (progress.step, progress.evaluated) == (3, 1)
        assert (progress.best_step, progress.best_val_loss) == (1, 2.0)
        disk.error = None
        saver.evaluated(1.5)
    assert saver.tracking.warnings == ["No space left; retries"]
    assert disk.written == [("ckpt.pt", 1), ("ckpt.pt", 3)]
    best = checkpoints.load("out/ckpt.pt").progress
    assert (best.step, best.best_step, best.best_val_loss) == (3, 3, 1.5)


def test_failed_periodic_write_keeps_the_best_loss(run, disk):
    disk.free.set()
    with saver_of(run) as saver:
        saver.evaluated(2.0)
        take_step(run)
        saver._wait()
        disk.error = FULL
        saver.save()
    assert saver.tracking.warnings == ["No space left"]
    assert (run.progress.evaluated, run.progress.best_val_loss) == (1, 2.0)


@pytest.mark.parametrize("step", [0, 30])
def test_write_that_fails_at_the_start_or_the_end_is_an_error(run, disk, step):
    disk.free.set()
    disk.error, run.progress.step = FULL, step
    with saver_of(run) as saver, pytest.raises(UserError, match="No space left"):
        saver.evaluated(2.0)


def test_copy_is_freed_after_a_write(run, disk, monkeypatch):
    copies, real = [], saving.host_copy

    def copy(*args):
        copied = real(*args)
        copies.append(weakref.ref(copied["weights"]["lm_head.weight"]))
        return copied

    monkeypatch.setattr(saving, "host_copy", copy)
    disk.free.set()
    with saver_of(run) as saver:
        for disk.error in (None, FULL):
            saver.save()
            saver.writer.submit(int).result()  # waits until the thread has dropped the copy
            gc.collect()
            assert copies[-1]() is None


# The end of a run


def test_stopping_waits_for_the_write_in_flight_and_saves_the_newest_state(run, disk):
    with saver_of(run) as saver:
        saver.save()
        take_step(run)
        threading.Timer(0.05, disk.free.set).start()
        with pytest.raises(Interrupted, match="stopped at step 2, saved in out/last.pt"):
            saver.stopped(SimpleNamespace(number=15))
        assert disk.written == [("last.pt", 1), ("last.pt", 2)]


def test_stopping_without_saving_is_an_error(run, disk):
    disk.free.set()
    disk.error = FULL
    words = r"stopped without saving \(No space left\)"
    with saver_of(run) as saver, pytest.raises(UserError, match=words):
        saver.stopped(None)
    assert saver.tracking.warnings == []


def fail(error):
    raise error


def save_and_fail(saver, error):
    with saver:
        saver.save()
        raise error


@pytest.mark.parametrize("error", [None, FULL])
def test_exception_in_training_does_not_lose_the_write_in_flight(run, disk, error):
    disk.error, saver = error, saver_of(run)
    threading.Timer(0.05, disk.free.set).start()
    with pytest.raises(ZeroDivisionError):
        save_and_fail(saver, ZeroDivisionError())
    assert saver.tracking.warnings == ([FULL] if error else [])
    assert disk.written == ([] if error else [("last.pt", 1)])


def free_when_canceled(run, disk):
    run.run_dir.canceled.wait(10)
    disk.free.set()


def test_second_ctrl_c_in_a_step_cancels_the_write_in_flight(run, disk):
    threading.Thread(target=free_when_canceled, args=(run, disk)).start()
    saver = saver_of(run)
    with pytest.raises(Interrupted):
        save_and_fail(saver, Interrupted(signal.SIGINT))
    assert os.listdir("out") == ["log.jsonl"]
    assert saver.tracking.warnings == []


@pytest.mark.skipif(os.name != "posix", reason="sending SIGINT needs POSIX")
def test_ctrl_c_cancels_a_write_that_an_exception_waits_for(run, disk):
    def interrupt():
        disk.busy.wait(10)
        os.kill(os.getpid(), signal.SIGINT)
        free_when_canceled(run, disk)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        save_and_fail(saver_of(run), ZeroDivisionError())
    assert os.listdir("out") == ["log.jsonl"]


def test_no_number_of_interrupts_leaves_a_write_in_flight(run, disk, monkeypatch):
    interrupts, real, saver = [KeyboardInterrupt] * 3, saving.wait, saver_of(run)

    def wait(*args, **kwargs):
        return fail(interrupts.pop()) if interrupts else real(*args, **kwargs)

    threading.Thread(target=free_when_canceled, args=(run, disk)).start()
    saver.__enter__().save()
    monkeypatch.setattr(saving, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        saver.__exit__(None, None, None)
    assert (interrupts, saver.in_flight) == ([], None)
    assert os.listdir("out") == ["log.jsonl"]
