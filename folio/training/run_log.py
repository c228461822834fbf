"""The log of a training run: on the console, in log.jsonl and in Weights & Biases."""

import math
import shlex
import shutil
import sys

from tqdm import tqdm

from folio.cli.errors import as_user_error
from folio.cli.process import SIGPIPE
from folio.cli.settings import changed_settings, names_affecting
from folio.hardware.memory import peak_memory_gib
from folio.training.evaluation import evaluation_cost, format_losses, val_bytes

MAX_LOSS_RISE_NATS = 0.05  # rise of the validation loss from its lowest value
MIN_LOSS_FALL_NATS = 0.05  # of the validation loss in the second half of the evaluations
MIN_FALL_SHARE = 2 / 3  # of the training loss's fall in this half
MAX_GAP_GROWTH_NATS = 0.1  # in this half, of the gap between the losses
MANY_PASSES = 2  # over the training text
LONG_WAIT_S, LONG_RUN_DAYS = 10, 1  # for the first step; for all


class RunLog:
    """Reports steps and evaluations of a run.

    Lines of log.jsonl have `step`, `event` and `elapsed_s`, on a GPU also `peak_memory_gib`. The
    event is "start" (settings and model size), "train" (a step, speeds since the last one), "val"
    (an evaluation), "final" (that of the best model at the end) or "resume" (changed settings).
    """

    def __init__(self, run):
        self.run, self.settings = run, run.settings
        self.final: dict = {}  # losses of the final evaluation
        self.peak_step_s = run.peak_step_s()
        # If all output goes to a terminal, the progress bar replaces the lines of steps.
        has_size = min(shutil.get_terminal_size((0, 0))) > 0  # without one, tqdm draws nothing
        self.on_terminal = has_size and sys.stdout.isatty() and sys.stderr.isatty()
        self.bar = tqdm(
            total=self.settings.max_iters,
            initial=run.progress.step,
            bar_format="step {n:,}/{total:,}{desc} |{bar:20}|",
            leave=False,
            disable=not self.on_terminal,
        )
        own = names_affecting(type(self.settings), "files")  # of this process, not of the run
        self.run_settings = {k: v for k, v in run.settings_used().items() if k not in own}
        is_wanted = run.world.is_main and self.settings.wandb_log
        self.wandb_run = start_wandb(self.settings, self.run_settings) if is_wanted else None

    def close(self):
        self.bar.close()
        if self.wandb_run:
            self.wandb_run.finish()

    def begin(self):
        """Moves an earlier run away, or continues its log. Reports the settings."""
        run, settings = self.run, self.settings
        moved_to = run.run_dir.begin(settings, run.resumed) if run.world.is_main else None
        if moved_to:
            advice = "--init_from=resume to continue a run, or --overwrite=True to replace it"
            self.say(f"moved the earlier run in {settings.out_dir} to {moved_to}; use {advice}")
        if not run.run_dir.kept_log():  # a new run, or nanoGPT's
            values = self.run_settings | {"tokenizer": run.dataset.tokenizer.name}
            self._log("start", parameters=run.model.num_params(), settings=values)
        if run.resumed:
            self._report_changes(run.resumed)
            if run.replaces_best():
                kept = run.run_dir.keep_best(run.progress.best_step) if run.world.is_main else None
                reason = "evaluations now cover other text"
                if settings.always_save_checkpoint:
                    reason = f"{run.run_dir.best} will be the newest model"
                self.say(f"{reason}; the best model so far stays in {kept}")
        for line in hints(run):
            self.say(line)
        if run.progress.is_finished(settings) or run.progress.step >= settings.max_iters:
            advice = f"to train longer, increase {self._limit()}"
            self.say(f"finished at step {run.progress.step}; {advice}")

    def _report_changes(self, resumed):
        """Reports the settings that differ from those of the resumed Checkpoint."""
        old = resumed.settings
        changes = {k: (old[k], v) for k, v in self.run_settings.items() if old.get(k, v) != v}
        if changes and not self.run.progress.is_finished(self.settings):  # else nothing follows
            self._log("resume", changed=changes)
        pairs = ", ".join(f"{name} {a!r} → {b!r}" for name, (a, b) in changes.items())
        suffix = f"; changed: {pairs}" if pairs else ""
        self.say(f"resumed {resumed.path} at step {self.run.progress.step}{suffix}")

    def _limit(self):
        """Returns the settings that have ended a finished run."""
        progress, names = self.run.progress, []
        if progress.is_patience_exhausted(self.settings):
            names.append("--patience")
        if progress.step >= self.settings.max_iters:
            names.append("--max_iters")
        return " and ".join(names) or "--minutes"

    def evaluation(self, losses, lr):
        """Reports the losses that evaluate returns."""
        progress = self.run.progress
        self._log("val", tokens=progress.tokens, lr=lr, best_step=progress.best_step, **losses)
        self.say(format_losses(progress.step, losses))

    def final_evaluation(self, losses):
        progress, self.final = self.run.progress, losses
        self._log("final", tokens=progress.tokens, best_step=progress.best_step, **losses)
        self.say(f"final evaluation of the best model, {format_losses(progress.best_step, losses)}")

    def end(self):
        """Prints the loss of the best model, advice, and how to use the model."""
        self.bar.close()
        run, progress, settings = self.run, self.run.progress, self.settings
        if progress.is_patience_exhausted(settings):
            since = f"no improvement since step {progress.best_step}"
            print(f"stopped at step {progress.step}: {since}")
        elif progress.step < settings.max_iters:
            print(f"{progress.step:,} of {settings.max_iters:,} steps fitted into --minutes")
        loss = self.final.get("loss", progress.best_val_loss)
        windows = self.final.get("val_windows", progress.val_windows)
        kept = "newest" if settings.always_save_checkpoint else "best"
        best = f"val loss {loss:.4f}"
        if windows and (bytes_per_token := val_bytes(run, windows)):
            # Losses of different tokenizers cannot be compared.
            best = f"val bits per byte {loss / math.log(2) / bytes_per_token:.4f} ({best})"
        best += f" at step {progress.best_step}"
        print(f"done; best {best}; the {kept} model is in {run.run_dir.best}")
        if (peak := peak_memory_gib(run.machine.device)) is not None:
            print(f"peak memory: {peak:.2f} GiB")
        evaluations = (event for event in run.run_dir.read_events() if event["event"] == "val")
        events = [event for event in evaluations if "train_loss" in event]
        same = [event for event in events if cover_same_text(event, events[-1])]
        if minutes := minutes_for_all_steps(events, progress, settings):
            time = f"all steps would take about --minutes={minutes}"
            advice = "add --init_from=resume to continue with this model"
            print(f"{time}, and the text improves until then: {advice}")
        elif advice := advice_on(same, settings, progress.tokens / len(run.dataset.train)):
            text, changes = advice
            flags = [f"--{name}={value}" for name, value in changes.items()]
            print(f"{text}: {' '.join(flags)}" if flags else text)
        print(f"generate text: python sample.py --out_dir={shlex.quote(settings.out_dir)}")

    def count_step(self):
        """Advances the progress bar. Called after each step."""
        self._print(self.bar.update)

    def step(self, loss, grad_norm, lr):
        """Reports a step with the speed since the last report. Waits for the device."""
        tokens, seconds = self.settings.tokens_per_step, self.run.timer.lap()
        tokens_per_s = tokens / seconds
        mfu = self.peak_step_s / seconds
        values = {
            "tokens": self.run.progress.tokens + tokens,
            "loss": loss,
            "lr": lr,
            # JSON has no infinity or NaN, the norm of a step that the loss scaler skips.
            "grad_norm": grad_norm if math.isfinite(grad_norm) else None,
            "tokens_per_s": tokens_per_s,
            "mfu": mfu if mfu <= 1 else None,  # the peak was measured on a busy machine
        }
        self._log("train", **values)
        self._show_step(values, seconds)

    def _show_step(self, values, seconds):
        """Shows the values of a step, which took so long, in the progress bar or in a line."""
        steps, loss, mfu = self.run.progress.step + 1, values["loss"], values["mfu"]
        per_step = self.run.timer.wall_step_s()
        left_s = per_step * (self.settings.max_iters - steps)
        if self.settings.minutes:
            left_s = min(left_s, max(0, 60 * self.settings.minutes - self.run.timer.elapsed_s()))
        self.bar.total = steps + round(left_s / per_step)
        speed = f"{values['tokens_per_s']:,.0f} tokens/s, {tqdm.format_interval(left_s)} left"
        self._print(self.bar.set_description_str, f", loss {loss:.4f}, {speed}", refresh=False)
        if not self.on_terminal:
            speed = speed if mfu is None else f"mfu {100 * mfu:.2f}%, {speed}"
            self.say(f"iter {steps - 1}: loss {loss:.4f}, time {1000 * seconds:.2f}ms, {speed}")

    def _log(self, event, **values):
        if not self.run.world.is_main:
            return
        if (peak := peak_memory_gib(self.run.machine.device)) is not None:
            values["peak_memory_gib"] = peak
        line = {"step": self.run.progress.step, "event": event, **values}
        line["elapsed_s"] = self.run.timer.elapsed_s()
        self.run.run_dir.append(line)
        if self.wandb_run and event in ("train", "val", "final"):
            numbers = {k: v for k, v in line.items() if isinstance(v, int | float) and k != "step"}
            self.wandb_run.log({f"{event}/{k}": v for k, v in numbers.items()}, step=line["step"])

    def say(self, line):
        self._print(tqdm.write, line, file=sys.stdout)
        self._print(sys.stdout.flush)

    def _print(self, function, *args, **kwargs):
        """Calls a function that prints. If output fails, only the line is lost."""
        try:
            function(*args, **kwargs)
        except BrokenPipeError:  # Ctrl-C ends a reader such as tee, too
            self.run.stop_signal.request(SIGPIPE)
        except OSError:  # a full disk
            pass


def start_wandb(settings, run_settings):
    """Returns a Weights & Biases run that stores `run_settings`. Raises UserError if that fails."""
    advice = "run python -m pip install wandb, or set wandb_log=False"
    with as_user_error(f"wandb_log cannot start: {advice}", Exception):  # it can raise anything
        import wandb

        return wandb.init(
            project=settings.wandb_project,
            name=settings.wandb_run_name,
            config=run_settings,
            dir=settings.out_dir,
        )


def hints(run):
    """Yields a line for each choice that is probably a mistake."""
    settings, steps, warmup = run.settings, run.settings.max_iters, run.settings.warmup_iters
    if settings.decay_lr and steps <= warmup:
        yield f"the run ends in the warmup of {warmup:,} steps: set --warmup_iters={steps // 20}"
    step_s = run.peak_step_s()
    wait_s, days = step_s * (1 + evaluation_cost(run)), steps * step_s / (24 * 60 * 60)
    is_size_given = changed_settings(settings).keys() & {"n_layer", "n_embd", "batch_size"}
    if days > LONG_RUN_DAYS and settings.init_from == "scratch" and not is_size_given:
        text = f"{steps:,} steps of GPT-2's size take {days:,.0f} days or more; for your own text,"
        yield f"{text} use python train.py config/own_text.py --dataset={settings.dataset}"
    if wait_s > LONG_WAIT_S:
        yield f"the first step ends after {tqdm.format_interval(wait_s)} or more"


def cover_same_text(event, other):
    """Whether two events of evaluations have as many windows. 0.2.0 did not log the training's."""
    names = "train_windows", "val_windows"
    return all(event.get(name, other.get(name)) == other.get(name) for name in names)


def minutes_for_all_steps(evaluations, progress, settings):
    """Returns how many all steps take, or None unless most did not fit and the loss still fell."""
    if len(evaluations) < 2 or not progress.best_step == progress.step < settings.max_iters / 2:
        return None
    steps, seconds = (evaluations[-1][key] - evaluations[0][key] for key in ("step", "elapsed_s"))
    remaining_s = (settings.max_iters - progress.step) * seconds / max(1, steps)
    return math.ceil(settings.minutes + remaining_s / 60)


def advice_on(evaluations, settings, epochs):
    """Returns what a log shows, and the settings that would improve the model, as a dict.

    It is empty if the log does not decide. Returns None with fewer than 3 `evaluations`, their
    events in the log, of which the first is before any training. That the validation loss falls at
    the end says little, because a decaying learning rate always has this effect. If it falls as
    the training loss does in few `epochs`, the model still learns what holds for other texts, too.
    If the gap between them grows in many, it memorizes; whether more steps help is then open.
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
    is_falling = fall >= max(MIN_LOSS_FALL_NATS, MIN_FALL_SHARE * train_fall)
    is_early = epochs < MANY_PASSES and last["step"] <= settings.max_iters  # a resume sets fewer
    if best["loss"] == last["loss"] and is_early and is_falling:
        names = ["minutes", "max_iters", "lr_decay_iters"]
        if settings.minutes and last["step"] < settings.max_iters:  # the time has ended the run
            names = ["minutes"]
        changes = {name: 2 * getattr(settings, name) for name in names if getattr(settings, name)}
        return f"{text}; longer training would help most", changes
    if epochs >= MANY_PASSES and train_fall - fall > MAX_GAP_GROWTH_NATS:
        text += " (memorization); more text would help most"
    return text, {}
