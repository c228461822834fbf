"""Saves the state of a run: copied to host memory, then written by another thread."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import torch

from folio.checkpoint.format import Checkpoint
from folio.cli.errors import UserError
from folio.cli.process import Interrupted
from folio.distributed.sharding import full_tensor


class Saver:
    """Saves the state of a run. Training waits for the copy of the state, not for the file.

    At most one write is in flight: the next save, an evaluation and the end of the context wait for
    it. If it failed, they print a warning and restore the best loss, which stays that of ckpt.pt.
    All processes of a run call the same methods; only rank 0 has a copy and writes.
    """

    def __init__(self, trainer, tracking):
        """`trainer` is a train.Trainer, `tracking` its Tracking."""
        self.trainer, self.plan, self.tracking = trainer, trainer.plan, tracking
        self.writer = ThreadPoolExecutor(max_workers=1)
        self.in_flight = None  # future of a write
        self.saved_step = None  # of the last save, unless it failed
        self.progress_before = None  # before the evaluation that the write contains

    def __enter__(self):
        return self

    def __exit__(self, _, error, __):
        """Waits for the write in flight, except after a second Ctrl-C."""
        if not isinstance(error, KeyboardInterrupt) and (message := self._result()):
            self.tracking.warn(message)
        self.writer.shutdown(wait=False)

    def save(self):
        """Saves to last.pt."""
        self._finish_previous()
        self._start(best=False)

    def save_evaluation(self, val_loss):
        """Records the validation loss and saves: to ckpt.pt if it is the best, else to last.pt.

        At step 0 and at the end of the run, waits and raises UserError if writing fails.
        """
        self._finish_previous()
        progress, settings = self.trainer.progress, self.trainer.settings
        is_best = progress.record(val_loss)
        self._start(best=is_best or settings.always_save_checkpoint)
        must_succeed = progress.step == 0 or progress.is_finished(settings)
        if must_succeed and (message := self._wait()):
            raise UserError(message)

    def save_and_stop(self, number):
        """Saves the state of a run that is not finished, and waits.

        Raises Interrupted if `number` is that of a signal, UserError if writing fails.
        """
        if self.saved_step != self.trainer.progress.step:
            self.save()
        if message := self._wait():
            consequence = "progress since the last save is lost"
            raise UserError(f"stopped without saving ({message}): {consequence}")
        how = "--init_from=resume" if number else "--init_from=resume, without --stop_at"
        message = f"stopped at step {self.trainer.progress.step}, saved in {self.plan.run_dir.last}"
        message += f"; to continue, run the same command with {how}"
        if number:
            raise Interrupted(number, message)
        self.tracking.say(message)

    def _start(self, best):
        """Copies the state and starts to write it. Raises UserError if the run diverged."""
        trainer, plan = self.trainer, self.plan
        trainer.divergence.check()
        self.saved_step = trainer.progress.step
        state = host_copy(trainer.state_dict(), plan.world.is_main)
        if plan.world.is_main:
            checkpoint = Checkpoint(
                progress=dataclasses.replace(trainer.progress, elapsed_s=trainer.elapsed_s()),
                settings=dataclasses.asdict(plan.settings),
                tokenizer=plan.dataset.tokenizer.to_dict(),
                data=plan.dataset.fingerprint,
                log_bytes=plan.run_dir.log_size(),
                **state,
            )
            self.in_flight = self.writer.submit(plan.run_dir.save, checkpoint, best)

    def _finish_previous(self):
        """Waits for the write in flight, if any. Warns if it failed."""
        if message := self._wait():
            self.tracking.warn(f"{message}; training continues and retries at the next save")
        self.progress_before = dataclasses.replace(self.trainer.progress)

    def _wait(self):
        """Waits for the write in flight, if any. Returns the message if it failed.

        All processes of a run must call it, because a failure changes their progress.
        """
        message = self.plan.world.from_main(self._result())
        if message:
            progress, before, self.saved_step = self.trainer.progress, self.progress_before, None
            progress.best_step, progress.best_val_loss = before.best_step, before.best_val_loss
            progress.evaluations_since_best = before.evaluations_since_best
        return message

    def _result(self):
        """Waits for the write in flight, if any. Returns the message of its error, or None."""
        future, self.in_flight = self.in_flight, None
        try:
            return future and future.result()
        except UserError as error:
            return str(error)
        finally:
            del future  # its traceback refers to this function and to the copy of the state


def host_copy(tree, is_main=True):
    """Returns a copy of nested dicts and lists, with tensors on the CPU; other values are shared.

    Tied weights, which are one object, are tied in the copy, too. Sharded tensors are gathered one
    by one, which all processes must do, but only rank 0 keeps the copies. A GPU copies to pinned
    memory, which torch reuses.
    """
    copies = {}

    def copy(value):
        if isinstance(value, dict):
            return {key: copy(item) for key, item in value.items()}
        if isinstance(value, list):
            return [copy(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in copies:
            full = full_tensor(value.detach())
            copies[id(value)] = None
            if is_main:
                target = torch.empty_like(full, device="cpu", pin_memory=full.is_cuda)
                copies[id(value)] = target.copy_(full, non_blocking=full.is_cuda)
        return copies[id(value)]

    copied = copy(tree)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # until the data has arrived
    return copied
