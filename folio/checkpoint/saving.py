"""Saves the state of a run."""

import dataclasses

import torch

from folio.checkpoint.format import Checkpoint
from folio.cli.errors import UserError
from folio.cli.process import Interrupted
from folio.distributed.sharding import full_tensor


class Saver:
    """Saves the state of a run. Training waits until the file is written.

    If writing fails, training continues, and the next save tries again; exceptions are below. All
    processes of a run call the same methods; only rank 0 writes.
    """

    def __init__(self, trainer, tracking):
        """`trainer` is a train.Trainer, `tracking` its Tracking."""
        self.trainer, self.plan, self.tracking = trainer, trainer.plan, tracking
        self.saved_step = None  # of the last save, unless it failed

    def save(self):
        """Saves to last.pt."""
        if message := self._write(best=False):
            self._warn(message)

    def save_evaluation(self, val_loss):
        """Records the validation loss and saves: to ckpt.pt if it is the best, else to last.pt.

        At step 0 and at the end of the run, raises UserError if writing fails.
        """
        progress, settings = self.trainer.progress, self.trainer.settings
        before = dataclasses.replace(progress)
        is_best = progress.record(val_loss)
        message = self._write(best=is_best or settings.always_save_checkpoint)
        if message and (progress.step == 0 or progress.is_finished(settings)):
            raise UserError(message)
        if message:  # the best loss stays that of ckpt.pt
            progress.best_step, progress.best_val_loss = before.best_step, before.best_val_loss
            progress.evaluations_since_best = before.evaluations_since_best
            self._warn(message)

    def save_and_stop(self, number):
        """Saves the state of a run that is not finished.

        Raises Interrupted if `number` is that of a signal, UserError if writing fails.
        """
        step = self.trainer.progress.step
        if self.saved_step != step and (message := self._write(best=False)):
            consequence = "progress since the last save is lost"
            raise UserError(f"stopped without saving ({message}): {consequence}")
        how = "--init_from=resume" if number else "--init_from=resume, without --stop_at"
        message = f"stopped at step {step}, saved in {self.plan.run_dir.last}"
        message += f"; to continue, run the same command with {how}"
        if number:
            raise Interrupted(number, message)
        self.tracking.say(message)

    def _write(self, best):
        """Writes the state. Returns the message of an error, or None.

        Raises UserError if a weight is not finite.
        """
        trainer, plan, message = self.trainer, self.plan, None
        trainer.check_weights()
        state = gather_on_cpu(trainer.state_dict(), plan.world.is_main)
        if plan.world.is_main:
            checkpoint = Checkpoint(
                progress=dataclasses.replace(trainer.progress, elapsed_s=trainer.elapsed_s()),
                settings=dataclasses.asdict(plan.settings),
                tokenizer=plan.dataset.tokenizer.to_dict(),
                data=plan.dataset.fingerprint,
                log_bytes=plan.run_dir.log_size(),
                **state,
            )
            try:
                plan.run_dir.save(checkpoint, best)
            except UserError as error:
                message = str(error)
        message = plan.world.from_main(message)  # a failure changes the progress of all processes
        self.saved_step = None if message else trainer.progress.step
        return message

    def _warn(self, message):
        self.tracking.warn(f"{message}; training continues and retries at the next save")


def gather_on_cpu(tree, is_main=True):
    """Returns nested dicts and lists with their tensors on the CPU; all else is shared.

    Tied weights, which are one object, stay tied. Sharded tensors are gathered one by one, which
    all processes must do, but only rank 0 keeps them.
    """
    gathered = {}

    def gather(value):
        if isinstance(value, dict):
            return {key: gather(item) for key, item in value.items()}
        if isinstance(value, list):
            return [gather(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in gathered:
            full = full_tensor(value.detach())
            gathered[id(value)] = full.cpu() if is_main else None
        return gathered[id(value)]

    return gather(tree)
