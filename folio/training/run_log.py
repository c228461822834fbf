"""The log of a training run: on the console, in log.jsonl and in experiment trackers."""

import dataclasses
import inspect
import math
import shlex
import shutil
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from tqdm import tqdm

from folio.checkpoint.format import empty_model
from folio.cli.files import lock_folder
from folio.cli.process import SIGPIPE, print_error
from folio.cli.settings import command_line, names_with_scope
from folio.hardware.device import SharedCores
from folio.hardware.memory import memory_bytes, peak_memory_gib
from folio.pretrained.load import RESUME_NAMES
from folio.training.evaluation import EVALUATION_SETTINGS
from folio.training.setup import state_bytes
from folio.training.trackers import Trackers

MAX_LOSS_RISE_NATS = 0.05  # rise of the validation loss from its lowest value
MIN_LOSS_FALL_NATS = 0.05  # of the validation loss in the second half of the evaluations
MIN_FALL_SHARE = 2 / 3  # of the training loss's fall in this half
MAX_GAP_GROWTH_NATS = 0.1  # in this half, of the gap between the losses
MANY_PASSES = 2  # over the training text
SLOW_STEP_S = 60


class RunLog:
    """Reports steps and evaluations of a run, whose folder it locks. For a `with` statement.

    Lines of log.jsonl have `step`, `event` and `elapsed_s`, on a GPU also `peak_memory_gib`. The
    event is "start" (settings and model size), "train" (a step), "val" (an evaluation), "final"
    (the evaluation of the best model at the end), "resume" (changed settings) or "threads" (fewer
    threads). Speeds are means since the previous report.
    """

    def __init__(self, run):
        self.run, self.settings, self.run_dir = run, run.settings, run.run_dir
        self.machine, self.is_main = run.machine, run.world.is_main
        self.first_step = self.reported_step = run.progress.step
        self.train_s = self.reported_s = 0.0  # of the steps of this process, and at the last report
        # If all output goes to a terminal, the progress bar replaces the lines of steps.
        has_size = min(shutil.get_terminal_size((0, 0))) > 0  # without one, tqdm draws nothing
        self.on_terminal = has_size and sys.stdout.isatty() and sys.stderr.isatty()
        self.bar = tqdm(
            total=self.settings.max_iters,
            initial=self.first_step,
            bar_format="step {n:,}/{total:,}{desc} |{bar:20}|",
            leave=False,
            disable=not self.on_terminal,
        )
        self.started_at = self.counted_at = time.perf_counter()
        self.cores = SharedCores(self.machine)

    def __enter__(self):
        with ExitStack() as stack:  # closes what has been opened if a process fails
            self.run.world.call_together(self._open, stack)
            self.stack = stack.pop_all()
        return self

    def _open(self, stack):
        """Locks the folder, starts the trackers, moves an earlier run away, and logs the start."""
        stack.callback(self.bar.close)
        if self.is_main:
            self.run_dir.lock = stack.enter_context(lock_folder(self.run_dir.folder))
        resumed, settings = self.run.plan.resumed, dataclasses.asdict(self.settings)
        for name in names_with_scope(type(self.settings), "files"):
            del settings[name]
        self.trackers = Trackers(self.settings, settings, resumed, self.warn)
        stack.callback(self.trackers.close)
        # Last, because it deletes or moves files.
        moved_to = self.run_dir.begin(self.settings, resumed) if self.is_main else None
        if moved_to:
            advice = "--init_from=resume to continue a run, or --overwrite=True to replace it"
            folder = self.settings.out_dir
            self.say(f"moved the earlier run in {folder} to {moved_to}; use {advice}")
        if not self.run_dir.log.exists():  # a new run, or nanoGPT's
            parameters = self.run.model.num_params()
            new = settings | {"tokenizer": self.run.dataset.tokenizer.name}
            self._log("start", parameters=parameters, settings=new)
        if resumed:
            self._log_changes(resumed, settings)

    def _log_changes(self, resumed, settings):
        """Logs the settings that differ from those of the resumed Checkpoint."""
        old, step = resumed.settings, self.run.progress.step
        changes = {k: (old[k], v) for k, v in settings.items() if k in old and old[k] != v}
        if changes:
            self._log("resume", changed=changes)
        pairs = ", ".join(f"{name} {a!r} → {b!r}" for name, (a, b) in changes.items())
        suffix = f"; changed: {pairs}" if pairs else ""
        self.say(f"resumed {resumed.path} at step {step}{suffix}")

    def __exit__(self, *_):
        self.stack.close()

    # Events

    def evaluation(self, losses, lr):
        """Reports the losses that evaluate returns."""
        self.run.check_finite(train_loss=losses["train_loss"], val_loss=losses["loss"])
        self._log("val", tokens=self.run.progress.tokens, lr=lr, **losses)
        self.say(format_losses(self.run.progress.step, losses))

    def final_evaluation(self, losses):
        progress = self.run.progress
        self._log("final", tokens=progress.tokens, **losses)
        self.say(f"final evaluation of the best model, {format_losses(progress.best_step, losses)}")

    def step(self, loss, grad_norm, lr):
        """Counts a step. Every log_interval steps, waits for the device and reports.

        Raises UserError if the loss or the norm is not finite.
        """
        step = self.run.progress.step
        if message := self.cores.check():
            self.warn(message)
            self._log("threads", threads=torch.get_num_threads())
        self._print(self.bar.update)
        if step == self.first_step:
            self.started_at = self.counted_at  # excludes the time before the first step
        if step % self.settings.log_interval:
            return
        train_s = self.train_seconds()
        seconds = (train_s - self.reported_s) / (step + 1 - self.reported_step)  # per step
        self.reported_step, self.reported_s = step + 1, train_s
        tokens = self.settings.tokens_per_step
        flops = self.run.model.flops_per_token() * tokens
        mfu = flops / seconds / self.machine.peak_flops / self.run.world.size
        loss, grad_norm = float(loss), float(grad_norm)
        # While the loss scale can be reduced, an overflow only skips the step.
        can_skip = self.run.scaler.get_scale() > 1
        self.run.check_finite(loss=loss, gradient_norm=0.0 if can_skip else grad_norm)
        # JSON has no infinity or NaN, the norm of a step that the loss scaler skips.
        grad_norm = grad_norm if math.isfinite(grad_norm) else None
        mfu = mfu if mfu <= 1 else None  # the peak was measured on a busy machine
        speeds = {"tokens_per_s": tokens / seconds, "mfu": mfu}
        tokens += self.run.progress.tokens
        self._log("train", tokens=tokens, loss=loss, lr=lr, grad_norm=grad_norm, **speeds)
        self.run.step_s = train_s / (step + 1 - self.first_step)
        per_step = (self.counted_at - self.started_at) / (step + 1 - self.first_step)
        left_s = per_step * (self.settings.max_iters - step - 1)
        if self.settings.minutes:
            left_s = min(left_s, max(0, 60 * self.settings.minutes - self.run.elapsed_s()))
        self.bar.total = step + 1 + round(left_s / per_step)
        speed = f"{speeds['tokens_per_s']:,.0f} tokens/s, {tqdm.format_interval(left_s)} left"
        self._print(self.bar.set_description_str, f", loss {loss:.4f}, {speed}", refresh=False)
        if not self.on_terminal:
            speed = speed if mfu is None else f"mfu {100 * mfu:.2f}%, {speed}"
            self.say(f"iter {step}: loss {loss:.4f}, time {1000 * seconds:.2f}ms, {speed}")

    def _log(self, event, **values):
        if not self.is_main:
            return
        if (peak := peak_memory_gib(self.machine.device)) is not None:
            values["peak_memory_gib"] = peak
        line = {
            "step": self.run.progress.step,
            "event": event,
            **values,
            "elapsed_s": self.run.elapsed_s(),
        }
        self.run_dir.append(line)
        if event in ("train", "val", "final"):
            self.trackers.log(line)

    # Time

    def train_seconds(self):
        """Waits for the device. Returns the time of the steps of this process."""
        self.machine.synchronize()
        now = time.perf_counter()
        self.train_s += now - self.counted_at
        self.counted_at = now
        return self.train_s

    @contextmanager
    def pause(self):
        """A context whose time does not count as training time."""
        self.train_seconds()
        yield
        self.counted_at = time.perf_counter()

    # Console

    def say(self, line):
        self._print(tqdm.write, line, file=sys.stdout)
        self._print(sys.stdout.flush)

    def warn(self, message):
        self.bar.clear()
        if self.is_main:
            print_error(message)

    def _print(self, function, *args, **kwargs):
        """Calls a function that prints. If output fails, only the line is lost."""
        try:
            function(*args, **kwargs)
        except BrokenPipeError:  # Ctrl-C ends a reader such as tee, too
            self.run.stop_signal.request(SIGPIPE)
        except OSError:  # a full disk
            pass


def format_losses(step, losses):
    """Returns a line with the losses that evaluate returns."""
    line = f"step {step}: train loss {losses['train_loss']:.4f}, val loss {losses['loss']:.4f}"
    line += f", val perplexity {losses['perplexity']:.5g}"
    if "bits_per_byte" in losses:
        line += f", val bits per byte {losses['bits_per_byte']:.4f}"
    return line


def print_start(plan):
    """Prints the arguments, the dataset, the model's size, the machine and the memory."""
    settings, dataset, machine, world = plan.settings, plan.dataset, plan.machine, plan.world
    peak, known = machine.peak_flops, machine.data_sheet_flops
    source = "data sheet" if known else "measured with a matrix product"
    model = empty_model(plan.config, "meta")
    size = state_bytes(plan.config, settings, world.size) / 2**20
    values = "weights, gradients and moments"
    work = f"{settings.max_iters:,} steps of {settings.tokens_per_step:,} tokens"
    if settings.eval_only:
        start = plan.resumed or plan.initial
        values, work = "weights", f"from {start.summary}" if start else "random weights"
    available = memory_bytes(machine.device)
    limit = f" of {available / 2**30:,.0f} GiB" if available else ""
    processes = f"{world.size} processes ({settings.parallel}), each on " if world.size > 1 else ""
    print(
        f"settings: {shlex.join(command_line(plan.arguments)) or 'defaults'}",
        f"dataset: {settings.dataset}, {len(dataset.train):,} training and {len(dataset.val):,} "
        f"validation tokens, vocabulary {dataset.tokenizer.vocab_size:,}",
        f"model: {model.num_params():,} parameters; {work}",
        f"machine: {processes}{machine.summary}, peak {peak / 1e12:.3g} TFLOP/s ({source})",
        f"memory: {size:,.1f} MiB{limit} for {values}; activations are not counted",
        sep="\n",
        flush=True,
    )
    if settings.eval_only:
        return
    if settings.keep_checkpoints:
        files = Path(settings.out_dir, "ckpt-STEP.pt")
        print(f"checkpoints: {4 * model.num_params():,} bytes at each evaluation, in {files}")
    warmup, steps = settings.warmup_iters, settings.max_iters
    if settings.decay_lr and warmup > steps:
        part = f"at the end, the learning rate is at {100 * steps / (warmup + 1):.0f}% of its peak"
        print(f"warmup: {part}, because --warmup_iters={warmup} is above --max_iters={steps}")
    step_s = model.flops_per_token() * settings.tokens_per_step / peak / world.size
    if step_s > SLOW_STEP_S:
        minutes = f"at least {step_s / 60:.0f} minutes"
        print(f"time: a step takes {minutes}; config/own_text.py has a smaller model", flush=True)


def print_finished(run):
    """Prints how to continue a run that has finished earlier."""
    step, settings = run.progress.step, run.settings
    name = "max_iters" if step >= settings.max_iters else "minutes"
    if run.progress.is_patience_exhausted(run.settings):
        name = "patience"
    print(f"finished at step {step}; to continue, increase --{name}")


def print_end(run, loss):
    """Prints where the best model is, its validation loss and how to use it."""
    progress, settings = run.progress, run.settings
    if progress.is_patience_exhausted(settings):
        print(f"stopped at step {progress.step}: no improvement since step {progress.best_step}")
    elif progress.step < settings.max_iters:
        print(f"{progress.step:,} of {settings.max_iters:,} steps fitted into --minutes")
    kept = "newest" if settings.always_save_checkpoint else "best"
    best = f"best val loss {loss:.4f} at step {progress.best_step}"
    print(f"done; {best}; the {kept} model is in {run.run_dir.best}")
    if (peak := peak_memory_gib(run.machine.device)) is not None:
        print(f"peak memory: {peak:.2f} GiB")
    events = run.run_dir.read_events()
    resumed = [i for i, e in enumerate(events) if EVALUATION_SETTINGS & e.get("changed", {}).keys()]
    comparable = events[max(resumed, default=0) :]  # evaluations of the same windows
    evaluations = [e for e in comparable if e["event"] == "val" and "train_loss" in e]
    epochs = progress.tokens / len(run.dataset.train)
    if advice := advice_on(evaluations, settings, epochs):
        text, changes = advice
        print(f"{text}: {next_command(run.plan, **changes)}" if changes else text)
    print(f"generate text: python sample.py --out_dir={shlex.quote(settings.out_dir)}")


def next_command(plan, **changes):
    """Returns the command of a new run like the one of a Plan, with some settings changed."""
    if plan.settings.init_from in RESUME_NAMES:
        changes = {"init_from": plan.origin} | changes
    script = Path(inspect.getfile(type(plan.settings)))  # sys.argv has another one in a notebook
    name = script.name if script.parent == Path.cwd() else str(script)
    return f"python {shlex.join([name, *command_line(plan.arguments, **changes)])}"


def advice_on(evaluations, settings, epochs):
    """Returns what a log shows, and the settings that would improve the model, as a dict.

    It is empty if the log does not decide. Returns None with fewer than 3 evaluations. That the
    validation loss falls at the end says little, because a decaying learning rate always has this
    effect. If it falls as the training loss does, the model still learns what holds for other
    texts, too. If the gap between them grows, it memorizes; whether more steps help is then open.

    Args:
        evaluations: their events in the log; the first is before any training.
        epochs: how often the run has read the training text.
    """
    if len(evaluations) < 3:
        return None
    best, last = min(evaluations, key=lambda event: event["loss"]), evaluations[-1]
    rise = last["loss"] - best["loss"]
    if rise > MAX_LOSS_RISE_NATS and last["train_loss"] > best["train_loss"]:
        text = f"both losses have risen since step {best['step']:,}; use a lower learning rate"
        return text, {"learning_rate": settings.learning_rate / 2}
    if rise > MAX_LOSS_RISE_NATS:
        text = f"the validation loss has risen by {rise:.2f} since step {best['step']:,}"
        dropout = round(min(settings.dropout + 0.1, 0.5), 3)
        return f"{text} (overfitting); use more text or more dropout", {"dropout": dropout}
    losses = f"training loss {last['train_loss']:.2f}, validation loss {last['loss']:.2f}"
    text = f"{epochs:.2g} passes over the text, {losses}"
    earlier = evaluations[len(evaluations) // 2]
    train_fall, fall = (earlier[name] - last[name] for name in ("train_loss", "loss"))
    if fall >= max(MIN_LOSS_FALL_NATS, MIN_FALL_SHARE * train_fall):
        names = ["minutes", "max_iters", "lr_decay_iters"]
        if settings.max_iters >= 2 * last["step"]:
            names = ["minutes"]  # which have ended the run
        changes = {name: 2 * getattr(settings, name) for name in names if getattr(settings, name)}
        return f"{text}; longer training would help most", changes
    if epochs >= MANY_PASSES and train_fall - fall > MAX_GAP_GROWTH_NATS:
        text += " (memorization); more text would help most"
    return text, {}
