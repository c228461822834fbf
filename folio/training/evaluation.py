"""Evaluations of a run: when they are due, over which windows, what they cost and return.

The windows are fixed, so that the losses of a run can be compared. The constants below decide how
much text an evaluation covers, unless eval_iters does, and how much time evaluations may take.
"""

import math

import numpy as np
import torch

# Batches of an evaluation, as a share of the training batches between two evaluations, or of those
# that fit into --minutes if they are fewer.
TRAIN_SHARE = 1 / 20
VAL_SHARE = 1 / 10
FINAL_VAL_SHARE = 1 / 5  # as a share of all training batches of the run

# Time. A forward pass takes a third of the time of a training step, so that evaluations take 5% of
# the time of training, and the final one at most 7% more.
FORWARD_SHARE = 1 / 3
MAX_TIME_SHARE = 1 / 10  # with --minutes: evaluations that would take more are left out
EXPECTED_MFU = 1 / 4  # of training, before a step is measured
MAX_ENDING_SHARE = 1 / 4  # of --minutes, for the evaluations at the end


def is_evaluation_due(run, schedule_step):
    """Whether the schedule has ended, or has passed a multiple of eval_interval."""
    settings, progress = run.settings, run.progress
    evaluated, interval = progress.evaluated_schedule_step, settings.eval_interval
    if schedule_step >= settings.max_iters:
        return not progress.is_finished(settings)
    is_due = schedule_step // interval > evaluated // interval
    if settings.minutes and evaluated >= 0:
        steps = progress.step - progress.evaluated_step
        is_due = is_due and steps * MAX_TIME_SHARE >= evaluation_cost(run)
    return is_due


def evaluation_cost(run, final=False):
    """Returns how many steps take as long as an evaluation."""
    windows = sum(count_windows(run, split, final) for split in ("train", "val"))
    return FORWARD_SHARE * windows * run.settings.block_size / run.settings.tokens_per_step


def evaluate(run, final=False):
    """Returns the losses of both splits, or None after a stop signal.

    Keys: "train_loss" in nats per token; of the validation split "loss" in nats per token,
    "perplexity" and, if it is known, "bits_per_byte". "train_windows" and "val_windows" are the
    numbers of windows. A final evaluation covers more of the validation split; see FINAL_VAL_SHARE.
    """
    train_loss = split_loss(run, "train", final)
    loss = split_loss(run, "val", final)
    if loss is None:
        return None
    train_loss, loss = float(train_loss), float(loss)  # waits for a GPU only once
    losses = {"train_loss": train_loss, "loss": loss, "perplexity": math.exp(min(loss, 700))}
    for split in ("train", "val"):
        losses[f"{split}_windows"] = count_windows(run, split, final)
    if bytes_per_token := val_bytes(run, losses["val_windows"]):
        losses["bits_per_byte"] = loss / math.log(2) / bytes_per_token
    return losses


def format_losses(step, losses):
    """Returns a line with the losses that evaluate returns."""
    line = f"step {step}: train loss {losses['train_loss']:.4f}, val loss {losses['loss']:.4f}"
    line += f", val perplexity {losses['perplexity']:.5g}"
    if "bits_per_byte" in losses:
        line += f", val bits per byte {losses['bits_per_byte']:.4f}"
    return line


@torch.no_grad()
def split_loss(run, split, final=False):
    """Returns the mean loss of a split's windows, a scalar tensor, or None after a stop signal.

    The processes of a run share the windows. All compute the same number of batches, so the
    last ones are filled with repeated windows, whose targets are ignored.
    """
    B, T, world = run.settings.batch_size, run.settings.block_size, run.world
    tokens = getattr(run.dataset, split)
    starts = evaluation_starts(run, split, count_windows(run, split, final))
    rows = torch.arange(B, device=run.machine.device).unsqueeze(1)
    total = torch.zeros((), device=run.machine.device)
    run.model.eval()
    for first in range(0, len(starts), world.size * B):
        if run.is_stopped():
            return None
        own_starts = starts[first + world.rank * B :][:B]
        x, y = tokens.windows(np.resize(own_starts, B), T)  # repeats them up to B
        loss = run.loss_fn(x, y.masked_fill(rows >= len(own_starts), -1))
        if len(own_starts):
            total += loss * len(own_starts)
    run.model.train()
    return world.sum(total) / len(starts)


def evaluation_starts(run, split, count):
    """Returns the starts of `count` windows, (count,) int64, evenly spaced and without overlap."""
    last = len(getattr(run.dataset, split)) - 1
    return np.linspace(0, last - run.settings.block_size, count).astype(np.int64)


def count_windows(run, split, final=False):
    """Returns the number of windows of an evaluation: the whole split if it has fewer."""
    settings = run.settings
    batches = settings.eval_iters
    if not batches:
        interval = min(settings.eval_interval, run.progress.steps_in_time)
        batches = interval * settings.gradient_accumulation_steps
        batches *= VAL_SHARE if split == "val" else TRAIN_SHARE
        if final and split == "val":  # an earlier part of the run may have had other batches
            max_tokens = settings.max_iters * settings.tokens_per_step
            tokens = max_tokens if settings.eval_only else run.progress.tokens
            trained = tokens / (settings.batch_size * settings.block_size)
            evaluated = math.ceil(run.progress.val_windows / settings.batch_size)
            batches = max(batches, evaluated, trained * FINAL_VAL_SHARE)
    whole = (len(getattr(run.dataset, split)) - 1) // settings.block_size
    return min(whole, max(1, int(batches)) * settings.batch_size)


def val_bytes(run, count):
    """Returns the mean bytes of the validation targets in `count` windows; None if unknown."""
    dataset, size = run.dataset, run.settings.block_size
    if dataset.byte_lengths is None:
        return None
    starts = evaluation_starts(run, "val", count) + 1
    # One gather of all targets would need much more memory.
    lengths = (dataset.byte_lengths[dataset.val.ids[start : start + size]] for start in starts)
    return sum(int(length.sum()) for length in lengths) / (len(starts) * size)
