"""What train.py prints at the end of a run, with the advice that its log allows."""

import shlex

from folio.hardware.memory import peak_memory_gib

MAX_LOSS_RISE_NATS = 0.05  # rise of the validation loss from its lowest value
MIN_LOSS_FALL_NATS = 0.05  # of the validation loss in the second half of the evaluations
MIN_FALL_SHARE = 2 / 3  # of the training loss's fall in this half
MAX_GAP_GROWTH_NATS = 0.1  # in this half, of the gap between the losses
MANY_PASSES = 2  # over the training text


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
    events = [event for event in run.run_dir.read_events() if event["event"] == "val"]
    evaluations = [event for event in events if event.get("val_windows") == progress.val_windows]
    epochs = progress.tokens / len(run.dataset.train)
    if advice := advice_on(evaluations, settings, epochs):
        text, changes = advice
        flags = [f"--{name}={value}" for name, value in changes.items()]
        print(f"{text}: {' '.join(flags)}" if flags else text)
    print(f"generate text: python sample.py --out_dir={shlex.quote(settings.out_dir)}")


def advice_on(evaluations, settings, epochs):
    """Returns what a log shows, and the settings that would improve the model, as a dict.

    It is empty if the log does not decide. Returns None with fewer than 3 `evaluations`, their
    events in the log, of which the first is before any training. That the validation loss falls at
    the end says little, because a decaying learning rate always has this effect. If it falls as
    the training loss does, the model still learns what holds for other texts, too. If the gap
    between them grows in many `epochs`, it memorizes; whether more steps help is then open.
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
        names = ("minutes", "max_iters", "lr_decay_iters")
        changes = {name: 2 * getattr(settings, name) for name in names if getattr(settings, name)}
        return f"{text}; longer training would help most", changes
    if epochs >= MANY_PASSES and train_fall - fall > MAX_GAP_GROWTH_NATS:
        text += " (memorization); more text would help most"
    return text, {}
