"""The state of a training run: what its steps change, its schedule and time, and saving it."""

import dataclasses
import math
import signal
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from folio.checkpoint.format import Checkpoint
from folio.checkpoint.progress import Progress
from folio.checkpoint.run_dir import RunDir
from folio.cli import process
from folio.cli.errors import UserError, as_user_error
from folio.cli.files import lock_folder
from folio.data.dataset import Dataset
from folio.distributed.world import World, full_tensor, gather_on_cpu
from folio.hardware.device import Machine, ThreadTuner
from folio.training.evaluation import EXPECTED_MFU, MAX_ENDING_SHARE, count_windows, evaluation_cost
from folio.training.run_log import RunLog
from model import GPT


class Timer:
    """Measures how long a run and its steps take. Pauses, such as evaluations, are not steps."""

    def __init__(self, machine: Machine, progress: Progress):
        self.machine, self.progress = machine, progress
        self.start()

    def start(self):
        """Begins to measure steps."""
        self.first_step = self.lap_step = self.progress.step
        self.started_at = time.monotonic()  # about when the first step began
        self.resumed_at = self.started_at  # end of the last pause
        self.steps_s = 0.0  # time of the steps until then
        self.lap_s = 0.0  # time of the steps until the last lap

    def elapsed_s(self):
        """Returns the seconds that the run has taken, including earlier processes."""
        return round(self.progress.elapsed_s + time.monotonic() - process.STARTED, 3)

    @property
    def step_s(self):
        """The mean time of a step of this process; 0 before the first."""
        steps = self.progress.step - self.first_step
        return (self.steps_s + time.monotonic() - self.resumed_at) / steps if steps else 0.0

    @contextmanager
    def pause(self):
        """A context whose time does not count as that of steps."""
        self.machine.synchronize()
        self.steps_s += time.monotonic() - self.resumed_at
        yield
        self.resumed_at = time.monotonic()
        if self.progress.step == self.first_step:  # an evaluation before the first step
            self.started_at, self.steps_s = self.resumed_at, 0.0

    def lap(self):
        """Called at the end of a step. Returns the mean time of the steps since the last call."""
        self.machine.synchronize()
        seconds, steps = self.steps_s + time.monotonic() - self.resumed_at, self.progress.step + 1
        per_step = (seconds - self.lap_s) / (steps - self.lap_step)
        self.lap_s, self.lap_step = seconds, steps
        return per_step

    def wall_step_s(self):
        """Called at the end of a step. Returns the mean time of steps, with their pauses."""
        steps = self.progress.step + 1 - self.first_step
        return (time.monotonic() - self.started_at) / steps


@dataclass
class Run:
    """A training run: what train.py has made of its settings, and the state that steps change."""

    settings: Any  # a TrainConfig
    dataset: Dataset  # whose train and val are Splits on the machine's device
    machine: Machine
    world: World
    model: GPT
    loss_fn: Any  # loss_fn(x, y, temperature); its backward pass averages gradients over the world
    optimizers: dict  # {name: optimizer}
    scaler: torch.amp.GradScaler  # of the loss, for float16
    resumed: Checkpoint | None = None  # the run continues this one

    def __post_init__(self):
        self.run_dir = RunDir(self.settings.out_dir)
        self.progress = self.resumed.progress if self.resumed else Progress()
        self.saved_step = self.progress.step if self.resumed else None
        self.timer = Timer(self.machine, self.progress)
        self.thread_tuner = ThreadTuner(self.machine)
        self.graph = None  # a CudaGraph of update_weights, which train_step makes
        self.stop_signal = process.StopSignal("stopping after this micro-batch")
        if self.settings.minutes and not self.resumed:
            steps = EXPECTED_MFU * 60 * self.settings.minutes / self.peak_step_s()
            self.progress.steps_in_time = self.world.all_gather_object(steps)[0]  # rank 0's
        if self.resumed:
            # With other limits, the schedule begins at another step.
            limits = {name: getattr(self.settings, name) for name in ("minutes", "max_iters")}
            if not limits.items() <= self.resumed.settings.items():
                evaluated = self.progress.evaluated_schedule_step
                self.progress.evaluated_schedule_step = min(evaluated, self.schedule_step())
            if self.progress.evaluated_schedule_step < 0:
                self.progress.best_val_loss = math.inf  # nanoGPT's, over other windows
            elif self.progress.best_step >= 0 and not self.settings.eval_only:
                self._check_best()

    def _check_best(self):
        """Begins the search for the best model again if ckpt.pt of a resumed run is lost.

        With always_save_checkpoint, a finished run is evaluated again if ckpt.pt is older.
        """
        progress, settings = self.progress, self.settings
        try:
            found_step = self._load_best().progress.step
        except UserError:
            print(f"evaluating again: the best model is not in {self.run_dir.best}")
            progress.evaluated_schedule_step, progress.best_val_loss = -1.0, math.inf
            progress.evaluations_since_best = 0
            return
        is_older = found_step < progress.evaluated_step
        if settings.always_save_checkpoint and is_older and progress.is_finished(settings):
            progress.evaluated_schedule_step, progress.evaluated_step = -1.0, 0

    def replaces_best(self):
        """Whether the next evaluation of a resumed run replaces the best model, whatever it is."""
        progress, settings = self.progress, self.settings
        has_best = math.isfinite(progress.best_val_loss) and not progress.is_finished(settings)
        if not self.resumed or not has_best:
            return False
        if settings.always_save_checkpoint:
            return not self.resumed.settings.get("always_save_checkpoint")
        return progress.val_windows not in (0, count_windows(self, "val"))

    def _load_best(self):
        """Returns the Checkpoint in ckpt.pt. Raises UserError if it is another one. Collective."""
        with self.world.share_errors():
            checkpoint, own = self.run_dir.load_best(), self.progress
            found = checkpoint.progress
            steps = {own.best_step}
            if self.settings.always_save_checkpoint:
                steps.add(own.evaluated_step)
            if found.step not in steps or found.best_val_loss != own.best_val_loss:
                raise UserError(
                    f"{checkpoint.path} is not this run's model of step {own.best_step}"
                )
        return checkpoint

    def load_best_weights(self):
        """Raises UserError if ckpt.pt is no longer the file that this run has written."""
        if self.progress.best_step != self.progress.step:
            with as_user_error("resume the run to evaluate it again", UserError):
                checkpoint = self._load_best()
            with self.world.share_errors():
                checkpoint.load_into(self.model)

    # The schedule, which decides the learning rate, the evaluations and the end.

    def schedule_step(self):
        """Returns the step, or max_iters times the part of --minutes that has passed, if greater.

        It ends at max_iters, early enough for the evaluations at the end. Collective.
        """
        settings, step = self.settings, self.progress.step
        if not settings.minutes:
            return step
        budget_s = 60 * settings.minutes
        ending_s = self.timer.step_s * evaluation_cost(self)
        if settings.has_final_evaluation:
            ending_s += self.timer.step_s * evaluation_cost(self, final=True)
        part = self.timer.elapsed_s() / (budget_s - min(ending_s, MAX_ENDING_SHARE * budget_s))
        part = self.world.all_gather_object(part)[0]  # rank 0's, in all processes
        return max(step, settings.max_iters * min(part, 1))

    def peak_step_s(self):
        """Returns the seconds that a step takes at the peak speed of the machine."""
        flops = self.model.flops_per_token() * self.settings.tokens_per_step
        return flops / self.machine.peak_flops / self.world.size

    @property
    def micro_batches_per_process(self):
        return self.settings.gradient_accumulation_steps // self.world.size

    def is_stopped(self):
        """Whether any process of the run has received a stop signal. Collective."""
        # On the CPU, so that nothing waits for a GPU's queue.
        signals = self.world.sum(torch.tensor(float(bool(self.stop_signal))))
        if signals:
            self.stop_signal.request(signal.SIGTERM)  # if it was another process
        return bool(signals)

    # Saving

    def settings_used(self):
        """Returns the settings as a dict, with the values that were used for them."""
        chosen = {"dtype": self.machine.dtype, "compile": self.machine.compile}
        if not self.world.is_launched:  # with one process, there is nothing to divide
            chosen["parallel"] = "ddp"
        if self.resumed and "init_from" in self.resumed.settings:
            chosen["init_from"] = self.resumed.settings["init_from"]  # what the run started from
        return dataclasses.asdict(self.settings) | chosen

    def is_save_due(self):
        """Whether checkpoint_interval requests a save at this step."""
        step, interval = self.progress.step, self.settings.checkpoint_interval
        return interval is not None and step % interval == 0 and self.saved_step != step

    def save(self, best=False):
        """Writes the state to last.pt or, if it is the best, to ckpt.pt. Collective.

        Raises UserError, and keeps the files, if a weight is not finite or writing fails.
        """
        weights = self.model.state_dict(keep_vars=True)  # tied weights are one object
        norm = torch.nn.utils.get_total_norm([weight.detach() for weight in weights.values()])
        self.check_finite(norm_of_the_weights=full_tensor(norm))
        optimizers = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        weights, optimizers = gather_on_cpu([weights, optimizers], self.world.is_main)
        with self.world.share_errors():
            if self.world.is_main:
                self._write(weights, optimizers, best)
        self.saved_step = self.progress.step

    def _write(self, weights, optimizers, best):
        checkpoint = Checkpoint(
            config=self.model.config,
            weights=weights,
            progress=dataclasses.replace(self.progress, elapsed_s=self.timer.elapsed_s()),
            settings=self.settings_used(),
            optimizers=optimizers,
            scaler=self.scaler.state_dict(),
            tokenizer=self.dataset.tokenizer.to_dict(),
            start=self.dataset.tokenizer.start,
            data=self.dataset.fingerprint,
        )
        is_evaluated = self.progress.evaluated_step == self.progress.step
        self.run_dir.save(checkpoint, best, self.settings.keep_checkpoints and is_evaluated)

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

    # Divergence

    def check_step(self, loss, grad_norm):
        """Raises UserError if a step has diverged."""
        # While the loss scale can be reduced, an overflow only skips the step.
        can_skip = self.scaler.get_scale() > 1
        self.check_finite(loss=loss, gradient_norm=0.0 if can_skip else grad_norm)

    def check_finite(self, **values):
        """Raises UserError if a value is not finite, because the run has diverged."""
        if not all(math.isfinite(value) for value in values.values()):
            pairs = [f"{name.replace('_', ' ')} {value:.3g}" for name, value in values.items()]
            cause = f"training diverged at step {self.progress.step} or shortly before"
            advice = "Lower --learning_rate, increase --warmup_iters or set --grad_clip=1"
            raise UserError(f"{cause}: {', '.join(pairs)}. The last save is older. {advice}")


@contextmanager
def lock_run(settings, world: World):
    """A context in which no other process writes to the run's folder. Collective.

    It begins before checkpoints are read. Raises UserError if another process has the lock.
    """
    with ExitStack() as stack:
        with world.share_errors():
            if world.is_main and not settings.eval_only:
                stack.enter_context(lock_folder(RunDir(settings.out_dir).folder))
        yield


@contextmanager
def open_log(run: Run):
    """A context in which a run writes to its folder. Yields its RunLog. Collective.

    Raises UserError if Weights & Biases cannot start, or if --minutes are over. An earlier run in
    the folder is then not moved or deleted.
    """
    minutes, is_new = run.settings.minutes, not run.progress.step
    if minutes and is_new and run.schedule_step() >= run.settings.max_iters:
        raise UserError(f"--minutes={minutes:g} is over before the first step: increase it")
    with ExitStack() as stack:
        with run.world.share_errors():
            log = RunLog(run)
            stack.callback(log.close)
            log.begin()
        run.timer.start()
        yield log
