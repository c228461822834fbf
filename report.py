"""What a run tells: a progress bar, console lines in nanoGPT's shape, and out_dir/log.jsonl."""

import dataclasses
import errno
import json
import math
import os
import re
import shlex
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from tqdm import tqdm

from config import STARTED, UserError, changed
from safety import refusal, replacing
from trackers import Trackers

LOG = "log.jsonl"


class Log:
    """log.jsonl: one JSON object a line, and never a part of one.

    Events have `step` and `split`: "start" for the settings and the size of the model, "train" for
    a step's loss, "val" for an evaluation, "resume" for settings that changed when the run was
    resumed; and elapsed_s, the seconds of all processes of the run, but what was lost when one was
    killed. What the disk refuses waits for the next call.
    """

    def __init__(self, path, check=lambda: None):
        """`check` raises UserError where the log must not be written for now."""
        self.path, self.check, self.waiting = Path(path), check, []

    def cut(self, step, evaluated, settings):
        """Drop what a run that goes on from `step` tells again, and a line that was cut short.

        `evaluated` is the step of the last evaluation that it does not repeat; `settings` are those
        of the state it goes on from. Raises UserError where the disk refuses.
        """
        try:
            lines = re.findall(rb"[^\n]*\n|[^\n]+", self.path.read_bytes())
        except FileNotFoundError:
            return
        except OSError as error:
            raise refusal("read", self.path, error) from error

        events = [(line, _event(line)) for line in lines if line.endswith(b"\n")]
        # Changes told at this very step stay up to the last one that was saved.
        saved = [i for i, (_, event) in enumerate(events) if _is_saved(event, step, settings)]

        def stays(place, event):
            if event["split"] == "resume" and event["step"] == step:
                return bool(saved) and place <= saved[-1]
            return event["step"] < (evaluated + 1 if event["split"] == "val" else step)

        kept = [line for i, (line, event) in enumerate(events) if not event or stays(i, event)]
        if len(kept) < len(lines):
            with replacing(self.path) as [file]:
                file.writelines(kept)

    def write(self, event):
        """Append an event; return the UserError where the disk refuses it for now, else None."""
        self.waiting.append(json.dumps(event).encode() + b"\n")
        return self.flush()

    def flush(self, durable=False):
        """Append what waits, and have it on disk if it is to be durable; return like `write`."""
        size = None
        try:
            self.check()
            with open(self.path, "ab") as file:  # anew each time: a folder may come back
                size = file.tell()
                file.write(b"".join(self.waiting))
                file.flush()
                if durable:
                    os.fsync(file.fileno())
        except UserError as error:
            return error
        except OSError as error:
            with suppress(OSError):
                if size is not None:
                    os.truncate(self.path, size)
            return refusal("write", self.path, error)
        self.waiting.clear()
        return None


def _event(line):
    """A line as an event that a run may tell again, or None where it is no such."""
    with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        event = json.loads(line)
        known = type(event["step"]) is int and event["split"] in ("train", "val", "resume")
        if known and event["split"] == "resume":
            known = all(len(pair) == 2 for pair in event["changed"].values())
        return event if known else None
    return None


def _is_saved(event, step, settings):
    """Whether an event tells of changes at that step which are those of the settings."""
    if not event or event["split"] != "resume" or event["step"] != step:
        return False
    return all(settings.get(name) == new for name, (_, new) in event["changed"].items())


class Report:
    """Tells of steps and evaluations as they come. Speeds are means since the line before."""

    def __init__(self, config, machine, claim, resumed, tokens_per_step, flops_per_token, size):
        """`resumed`: the checkpoint that the run goes on from, or None; `size`: parameters."""
        self.config, self.machine, self.claim, self.size = config, machine, claim, size
        self.elapsed_before = resumed.elapsed_s if resumed else 0.0
        self.tokens_per_step = tokens_per_step
        self.flops_per_step = flops_per_token * tokens_per_step
        self.seconds, self.steps = 0.0, 0  # of training since the last line
        self.evaluation_s = 0.0
        self.log = Log(Path(config.out_dir, LOG), claim.check)
        self.log_refused = False
        step = resumed.step if resumed else 0
        self.trackers = Trackers(config, settings_of(config), resumed, self.tell)
        # Where all that is printed is on a terminal, the bar says what lines say elsewhere.
        self.on_terminal = is_terminal(sys.stdout) and is_terminal(sys.stderr)
        self.bar = tqdm(
            total=config.max_iters,
            initial=step,
            bar_format="step {n:,}/{total:,}{desc} |{bar:20}|",
            leave=False,
            disable=not self.on_terminal,
        )
        self.counted_at = time.perf_counter()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.bar.close()
        self.trackers.close()
        if (error := self.log.flush()) and not kind:
            raise error

    def started(self):
        """Begin the log with the settings, and how many parameters the model has."""
        settings = settings_of(self.config)
        self._log({"step": 0, "split": "start", "parameters": self.size, "settings": settings})

    def resumed(self, state, checkpoint, changes):
        """Go on with the log of a run, of which some settings {name: (before, now)} changed."""
        self.log.cut(state.step, state.evaluated, checkpoint.config)
        if not self.log.path.exists():  # nanoGPT wrote none
            self.started()
        pairs = [f"{name} {before!r} → {now!r}" for name, (before, now) in changes.items()]
        about = f"; changed: {', '.join(pairs)}" if pairs else ""
        if changes:
            self._log({"step": state.step, "split": "resume", "changed": changes})
        self.say(f"resumed {checkpoint.path} at step {state.step}{about}")

    def _count_time(self):
        """Add the time since the last call to that of training, once the device is done."""
        self.machine.synchronize()
        now = time.perf_counter()
        self.seconds += now - self.counted_at
        self.counted_at = now

    @contextmanager
    def paused(self):
        """A context for what no step's time includes."""
        self._count_time()
        yield
        self.counted_at = time.perf_counter()

    @contextmanager
    def evaluating(self):
        """A context for evaluating and saving, whose time is reckoned with in what is left."""
        with self.paused():
            start = time.perf_counter()
            yield
            self.evaluation_s = time.perf_counter() - start

    def evaluated(self, step, losses, rate):
        event = {"step": step, "split": "val", "tokens": step * self.tokens_per_step}
        event |= {"loss": losses["val"], "lr": rate, "train_loss": losses["train"]}
        rest = ("perplexity", "bits_per_byte")
        self._log(event | {name: losses[name] for name in rest if name in losses})
        self.say(evaluation_line(step, losses))

    def stepped(self, step, loss, norm, rate):
        with self._telling():
            self.bar.update()
        self.steps += 1
        if step % self.config.log_interval:
            return
        self._count_time()
        per_step = self.seconds / self.steps
        self.seconds, self.steps = 0.0, 0
        tokens_per_s = self.tokens_per_step / per_step
        mfu = self.flops_per_step / per_step / self.machine.peak[0]
        loss, norm = float(loss), float(norm)
        event = {"step": step, "split": "train", "tokens": (step + 1) * self.tokens_per_step}
        event |= {"loss": loss, "lr": rate, "tokens_per_s": tokens_per_s, "mfu": mfu}
        # JSON has no infinity, which is the norm where float16's scaler skips a step
        self._log(event | {"grad_norm": norm if math.isfinite(norm) else None})
        speed = f"{tokens_per_s:,.0f} tokens/s"
        left = f"{tqdm.format_interval(self._seconds_left(step + 1, per_step))} left"
        with self._telling():
            self.bar.set_description_str(f", loss {loss:.4f}, {speed}, {left}", refresh=False)
        if not self.on_terminal:
            self.say(
                f"iter {step}: loss {loss:.4f}, time {per_step * 1000:.2f}ms, "
                f"mfu {mfu * 100:.2f}%, {speed}, {left}"
            )

    def _seconds_left(self, step, per_step):
        steps = self.config.max_iters - step
        evaluations = math.ceil(steps / self.config.eval_interval)
        return steps * per_step + evaluations * self.evaluation_s

    def elapsed_s(self):
        """Seconds that the run has taken, earlier processes included."""
        return round(self.elapsed_before + time.monotonic() - STARTED, 3)

    def _log(self, event):
        event = event | {"elapsed_s": self.elapsed_s()}
        error = self.log.write(event)
        self.refused(None if self.log_refused else error)
        self.log_refused = bool(error)
        if event["split"] in ("train", "val"):
            self.trackers.log(event)

    def say(self, line):
        with self._telling():
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def refused(self, error):
        """Tell of a UserError that training outlives; None is none."""
        if error:
            self.tell(f"{error}; training goes on, and tries again when it next writes")

    def tell(self, message):
        """Print a line on stderr of what is not as it should be."""
        with self._telling():
            tqdm.write(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)

    @contextmanager
    def _telling(self):
        """Where a full disk or a lost terminal refuses a line, the line is lost, not the run."""
        try:
            yield
        except OSError as error:
            if error.errno == errno.EPIPE:  # who reads it has left
                raise


def is_terminal(stream):
    """Whether it is one that a line can be drawn on: tqdm draws none where the size is unknown."""
    try:
        return stream.isatty() and min(os.get_terminal_size(stream.fileno())) > 0
    except OSError:
        return False


def settings_of(config):
    """The settings that make a run what it is: {name: value}."""
    about_files = ("out_dir", "init_from", "overwrite")
    return {k: v for k, v in dataclasses.asdict(config).items() if k not in about_files}


def evaluation_line(step, losses):
    line = f"step {step}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}"
    line += f", val perplexity {losses['perplexity']:.2f}"
    if "bits_per_byte" in losses:
        line += f", val bits per byte {losses['bits_per_byte']:.4f}"
    return line


def print_start(config, dataset, parameters, machine, tokens_per_step):
    """Say what is about to be trained, on what, and how."""
    told_below = ("device", "dtype", "compile")
    pairs = [f"{name}={value}" for name, value in changed(config).items() if name not in told_below]
    print(f"settings: {' '.join(pairs) or 'all at their defaults'}")
    print(
        f"dataset: {config.dataset}, {len(dataset.train):,} train and {len(dataset.val):,} "
        f"validation tokens, vocabulary {dataset.tokenizer.vocab_size:,}"
    )
    print(
        f"model: {parameters:,} parameters; {config.max_iters:,} steps of "
        f"{tokens_per_step:,} tokens"
    )
    peak, source = machine.peak
    print(f"machine: {machine.summary}, peak {peak / 1e12:.3g} TFLOP/s ({source})")
    sys.stdout.flush()


def print_end(config, state, path):
    """Say how far a run came, and where its best model is and how to use it."""
    if state.step < config.max_iters:
        print(f"stopped at step {state.step}: no better val loss since step {state.best_step}")
    best = f"best val loss {state.best_val_loss:.4f} at step {state.best_step}"
    kept = "newest" if config.always_save_checkpoint else "best"
    print(f"done; {best}; the {kept} model is in {path}")
    print(f"write with it: python sample.py --out_dir={shlex.quote(config.out_dir)}")


def less_memory(config):
    """What to change for a run that needs less memory: batches of the same tokens, if they can."""
    parts = next((n for n in range(2, config.batch_size + 1) if config.batch_size % n == 0), None)
    others = "a smaller --block_size, --n_layer or --n_embd needs less"
    if not parts:
        return others
    return (
        f"--batch_size={config.batch_size // parts} "
        f"--gradient_accumulation_steps={config.gradient_accumulation_steps * parts} trains alike, "
        f"with as many tokens a step (and --eval_iters={config.eval_iters * parts} evaluates "
        f"alike); {others}, too"
    )
