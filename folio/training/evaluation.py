"""Evaluations of a run: when they are due, over which windows, what they cost and return.

The windows are fixed, so that the losses of a run can be compared. An evaluation takes 5% of the
time of training since the one before, and the one of the best model at the end more.
"""

import math

import numpy as np
import torch

FORWARD_SHARE = 1 / 3  # of the time of a step


def is_evaluation_due(run, clock):
    """Whether the clock has ended, or has passed a multiple of eval_interval.

    With --minutes, evaluations are left out so that they take at most a tenth of the time.
    """
    settings, progress = run.settings, run.progress
    if clock >= settings.max_iters:
        return progress.evaluated_at < clock
    interval = settings.eval_interval
    is_due = clock // interval > progress.evaluated_at // interval
    if settings.minutes and progress.evaluated_at >= 0:
        steps = progress.step - progress.evaluated_step
        is_due = is_due and steps >= 10 * evaluation_cost(run)
    return is_due


def evaluation_cost(run, steps=None):
    """Returns how many steps take as long as an evaluation; see evaluate."""
    settings = run.settings
    train_iters, val_iters = evaluation_iters(settings, steps)
    windows = count_windows(run.dataset.train, settings, train_iters)
    windows += count_windows(run.dataset.val, settings, val_iters)
    return FORWARD_SHARE * windows * settings.block_size / settings.tokens_per_step


def evaluate(run, steps=None):
    """Returns the losses of both splits, or None after a stop signal.

    Keys: "train_loss" in nats per token; of the validation split "loss" in nats per token,
    "perplexity", "val_windows", their number, and, if it is known, "bits_per_byte". In its final
    evaluation, a run passes its number of steps: the evaluation then covers more text.
    """
    train_iters, val_iters = evaluation_iters(run.settings, steps)
    train_loss = split_loss(run, run.dataset.train, train_iters)
    loss = split_loss(run, run.dataset.val, val_iters)
    if loss is None:
        return None
    train_loss, loss = float(train_loss), float(loss)  # waits for a GPU only once
    losses = {"train_loss": train_loss, "loss": loss, "perplexity": math.exp(min(loss, 700))}
    losses["val_windows"] = count_windows(run.dataset.val, run.settings, val_iters)
    if bytes_per_token := val_bytes(run.dataset, run.settings, val_iters):
        losses["bits_per_byte"] = loss / math.log(2) / bytes_per_token
    return losses


@torch.no_grad()
def split_loss(run, split, iters):
    """Returns the mean loss over at most `iters` batches of a split, a scalar tensor, or None.

    The processes of a run share the windows. All compute the same number of batches, so the
    last ones are filled with repeated windows, whose targets are ignored.
    """
    B, T, world = run.settings.batch_size, run.settings.block_size, run.world
    starts = evaluation_starts(split, run.settings, iters)
    rows = torch.arange(B, device=run.machine.device).unsqueeze(1)
    total = torch.zeros((), device=run.machine.device)
    run.model.eval()
    for first in range(0, len(starts), world.size * B):
        if run.is_stopped():
            return None
        own_starts = starts[first + world.rank * B :][:B]
        x, y = split.windows(np.resize(own_starts, B), T)  # repeats them up to B
        loss = run.forward(x, y.masked_fill(rows >= len(own_starts), -1))
        if len(own_starts):
            total += loss * len(own_starts)
    run.model.train()
    return world.sum(total) / len(starts)


# Windows


def evaluation_iters(settings, steps=None):
    """Returns how many batches of the training and of the validation split an evaluation has.

    A forward pass takes a third of the time of a training step. So, without eval_iters, evaluations
    take 5% of the time of training, and the final one, after `steps` steps, at most 7% of theirs.
    """
    if settings.eval_iters:
        return settings.eval_iters, settings.eval_iters
    trained = settings.eval_interval * settings.gradient_accumulation_steps  # batches
    val_iters = trained // 10
    if steps is not None:
        val_iters = max(val_iters, steps * settings.gradient_accumulation_steps // 5)
    return max(1, trained // 20), max(1, val_iters)


def evaluation_starts(split, settings, iters):
    """Returns the start positions of the windows of an evaluation, (count,) int64.

    They are evenly spaced: `iters` batches, or the whole split if that is less. The windows do not
    overlap, so at most block_size - 1 tokens of a whole split are left out.
    """
    count = count_windows(split, settings, iters)
    return np.linspace(0, len(split) - 1 - settings.block_size, count).astype(np.int64)


def count_windows(split, settings, iters):
    return min((len(split) - 1) // settings.block_size, iters * settings.batch_size)


def val_bytes(dataset, settings, iters):
    """Returns the mean bytes of the validation targets in an evaluation; None if unknown."""
    if dataset.byte_lengths is None:
        return None
    starts, size = evaluation_starts(dataset.val, settings, iters) + 1, settings.block_size
    # One gather of all targets would need much more memory.
    lengths = (dataset.byte_lengths[dataset.val.ids[start : start + size]] for start in starts)
    return sum(int(length.sum()) for length in lengths) / (len(starts) * size)
