"""The state of a training run: what its steps change, its clock, and saving it."""

import dataclasses
import math
import signal
import time
from contextlib import ExitStack, contextmanager

import torch

from folio.checkpoint.format import Checkpoint, load_weights
from folio.checkpoint.progress import Progress
from folio.cli import process
from folio.cli.errors import UserError
from folio.cli.files import lock_folder
from folio.cli.settings import names_affecting
from folio.distributed.sharding import full_tensor, gather_on_cpu
from folio.training.evaluation import evaluation_cost
from folio.training.run_log import RunLog, start_wandb
from folio.training.timer import Timer

MAX_ENDING_SHARE = 1 / 4  # of --minutes that is left for the evaluations at the end


class Run:
    """A run's plan, and the state that its steps change: model, optimizers, scaler, progress."""

    def __init__(self, plan, model, optimizers, scaler, forward):
        """Starts at step 0, or with the progress of plan.resumed.

        `optimizers` are {name: optimizer}. forward(x, y, temperature) returns the loss; its
        backward pass averages gradients over the processes of the run.
        """
        self.plan, self.settings, self.dataset = plan, plan.settings, plan.dataset
        self.world, self.machine, self.run_dir = plan.world, plan.machine, plan.run_dir
        self.model, self.forward = model, forward
        self.optimizers, self.scaler = optimizers, scaler
        self.progress = plan.resumed.progress if plan.resumed else Progress()
        self.saved_step = None
        self.timer = Timer(self.machine, self.progress)
        if plan.resumed:
            self._restore(plan.resumed)
        # DDP needs the same gradient tensors in each step.
        self.can_free_gradients = plan.is_sharded or not self.world.is_launched
        self.graph = None  # a CudaGraph of update_weights, which train_step makes
        self.stop_signal = process.StopSignal("stopping after this micro-batch")

    def _restore(self, checkpoint):
        """Restores a checkpoint's progress. If its best model is lost, the search begins again."""
        saved = checkpoint.settings
        self.saved_step = self.progress.step
        if (self.settings.minutes or math.inf) > (saved.get("minutes") or math.inf):
            self.progress.evaluated_at = min(self.progress.evaluated_at, self.clock())
        if self.settings.always_save_checkpoint:
            return
        try:
            self._load_best()
        except UserError as error:
            print(f"evaluating again: {error}")  # at once
            self.progress.evaluated_at, self.progress.best_val_loss = -1.0, math.inf
            self.progress.evaluations_since_best = 0

    def _load_best(self):
        """Returns the Checkpoint in ckpt.pt. Raises UserError if it is not the best. Collective."""
        checkpoint = self.world.call_together(self.run_dir.load_best)
        best, own = checkpoint.progress, self.progress
        is_best = (best.step, best.best_val_loss) == (own.best_step, own.best_val_loss)
        # After a kill, it can be later than last.pt. It is written again at the same step.
        is_later_best = best.step == best.best_step and best.step > own.step
        if not (is_best or is_later_best):
            reason = f"is not the best model of this run, that of step {own.best_step}"
            raise UserError(f"{self.run_dir.best} {reason}")
        return checkpoint

    # The clock, of which a run has one: it decides the learning rate, the evaluations and the end.

    def clock(self):
        """Returns the step, or max_iters times the part of --minutes that has passed, if greater.

        It ends at max_iters, early enough for the evaluations at the end. Collective.
        """
        settings, step = self.settings, self.progress.step
        if not settings.minutes:
            return step
        budget_s = 60 * settings.minutes
        ending_s = self.timer.step_s * evaluation_cost(self)
        if settings.has_final_evaluation:
            ending_s += self.timer.step_s * evaluation_cost(self, step)
        part = self.elapsed_s() / (budget_s - min(ending_s, MAX_ENDING_SHARE * budget_s))
        part = self.world.from_main(part)  # the same in all processes
        return max(step, settings.max_iters * min(part, 1))

    def elapsed_s(self):
        """Returns the seconds that the run has taken, including earlier processes."""
        return round(self.progress.elapsed_s + time.monotonic() - process.STARTED, 3)

    def is_stopped(self):
        """Whether any process of the run has received a stop signal. Collective."""
        is_stopped = self.world.any(bool(self.stop_signal))
        if is_stopped:
            self.stop_signal.request(signal.SIGTERM)  # if it was another process
        return is_stopped

    # Saving

    def is_save_due(self):
        """Whether checkpoint_interval requests a save at this step."""
        step, interval = self.progress.step, self.settings.checkpoint_interval
        return interval is not None and step % interval == 0 and self.saved_step != step

    def save(self, best=False):
        """Writes the state to last.pt or, if it is the best, to ckpt.pt. Collective.

        Raises UserError if a weight is not finite, or if writing fails. The files then have the
        earlier state.
        """
        norm = torch.nn.utils.get_total_norm(self.model.state_dict().values())
        self.check_finite(norm_of_the_weights=full_tensor(norm))
        state = gather_on_cpu(self.state_dict(), self.world.is_main)
        self.world.call_together(self._write, state, best)
        self.saved_step = self.progress.step

    def _write(self, state, best):
        if not self.world.is_main:
            return
        checkpoint = Checkpoint(
            progress=dataclasses.replace(self.progress, elapsed_s=self.elapsed_s()),
            settings=dataclasses.asdict(self.settings),
            tokenizer=self.dataset.tokenizer.to_dict(),
            data=self.dataset.fingerprint,
            log_bytes=self.run_dir.log_size(),
            **state,
        )
        is_evaluated = self.progress.evaluated_step == self.progress.step
        self.run_dir.save(checkpoint, best, self.settings.keep_checkpoints and is_evaluated)

    def state_dict(self):
        """Returns references to the state. Tensors are sharded if the model is."""
        return {
            "config": self.model.config,
            "weights": self.model.state_dict(keep_vars=True),  # tied weights are one object
            "optimizers": {name: opt.state_dict() for name, opt in self.optimizers.items()},
            "scaler": self.scaler.state_dict(),
        }

    def save_and_stop(self):
        """Saves the state of a run that is not finished. Raises Interrupted after a signal."""
        step, number = self.progress.step, self.stop_signal.number
        if self.saved_step != step:
            self.save()
        how = "with --init_from=resume" + ("" if number else ", without --stop_at")
        state = f"stopped at step {step}, saved in {self.run_dir.folder}"
        message = f"{state}; to continue, run the same command {how}"
        if number:
            raise process.Interrupted(number, message)
        print(message)

    def load_best_weights(self):
        """Raises UserError if ckpt.pt is no longer the file that this run has written."""
        if self.progress.best_step != self.progress.step:
            self.world.call_together(load_weights, self.model, self._load_best())

    def check_step(self, loss, grad_norm):
        """Raises UserError if a step has diverged."""
        # While the loss scale can be reduced, an overflow only skips the step.
        can_skip = self.scaler.get_scale() > 1
        self.check_finite(loss=loss, gradient_norm=0.0 if can_skip else grad_norm)

    def check_finite(self, **values):
        """Raises UserError if a value is not finite, because the run has diverged."""
        if not all(math.isfinite(value) for value in values.values()):
            pairs = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
            raise UserError(
                f"training diverged at step {self.progress.step} or shortly before: "
                f"{pairs.replace('_', ' ')}. The last save is older. Lower --learning_rate, "
                "increase --warmup_iters or set --grad_clip=1"
            )


@contextmanager
def open_log(run):
    """A context in which a run writes to its folder, which it locks. Yields its RunLog. Collective.

    Raises UserError if another process has the lock, if Weights & Biases cannot start, or if
    --minutes are over. An earlier run in the folder is then not moved or deleted.
    """
    minutes = run.settings.minutes
    if minutes and not run.progress.step and run.clock() >= run.settings.max_iters:
        raise UserError(f"--minutes={minutes:g} is over before the first step: increase it")
    with ExitStack() as stack:
        yield run.world.call_together(_open_log, run, stack)


def _open_log(run, stack):
    """Locks the folder, starts Weights & Biases, moves an earlier run away, and logs the start."""
    if run.world.is_main:
        stack.enter_context(lock_folder(run.run_dir.folder))
    resumed, settings = run.plan.resumed, dataclasses.asdict(run.settings)
    for name in names_affecting(type(run.settings), "files"):
        del settings[name]
    log = RunLog(run, start_wandb(run.settings, settings) if run.world.is_main else None)
    stack.callback(log.close)
    # Last, because it deletes or moves files.
    moved_to = run.run_dir.begin(run.settings, resumed) if run.world.is_main else None
    if moved_to:
        advice = "--init_from=resume to continue a run, or --overwrite=True to replace it"
        log.say(f"moved the earlier run in {run.settings.out_dir} to {moved_to}; use {advice}")
    if not run.run_dir.log_size():  # a new run, or nanoGPT's
        log.start(settings)
    if resumed:
        log.resume(resumed, settings)
    run.timer.start()
    return log
