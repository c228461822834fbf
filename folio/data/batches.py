"""Deterministic batch sampling and device transfer."""

import dataclasses

import numpy as np
import torch

from folio.distributed.world import SINGLE_PROCESS
from folio.hardware.device import device_type

GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)  # its fractional part times 2^64
MAX_RESIDENT_BYTES = 2**30  # copying a larger split to a GPU would delay the start
# An evaluation's windows depend on them. When a run is resumed, they can change.
EVALUATION_SETTINGS = {"batch_size", "eval_interval", "eval_iters", "gradient_accumulation_steps"}


def window_starts(seed, first, count, num_starts):
    """Returns the start positions of windows `first` to `first + count - 1` of a run, int64.

    Start n is ((phase + n * golden ratio) mod 1) * num_starts: a Kronecker sequence,
    whose values are nearly evenly spaced at every length (Niederreiter 1992, "Random Number
    Generation and Quasi-Monte Carlo Methods"). The seed sets the phase. The result depends on the
    arguments alone, so nothing has to be saved to resume.
    """
    indices = np.arange(first, first + count, dtype=np.uint64)
    phase = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    fractions = (indices * GOLDEN_RATIO + phase) / 2.0**64  # the integers wrap modulo 2^64
    return np.minimum((fractions * num_starts).astype(np.int64), num_starts - 1)


def dropout_seed(seed, step, rank=0):
    """Returns a seed for torch. Seeds of other steps or ranks are statistically independent."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0])


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
        val_iters = steps * settings.gradient_accumulation_steps // 5
    return max(1, trained // 20), max(1, val_iters)


def evaluation_starts(split, settings, iters):
    """Returns the start positions of the windows of an evaluation, (count,) int64.

    They are evenly spaced: `iters` batches, or the whole split if that is less. The windows do not
    overlap, so at most block_size - 1 tokens of a whole split are left out.
    """
    count = _count_windows(split, settings, iters)
    return np.linspace(0, len(split) - 1 - settings.block_size, count).astype(np.int64)


def _count_windows(split, settings, iters):
    return min((len(split) - 1) // settings.block_size, iters * settings.batch_size)


def evaluation_windows(dataset, settings, steps=None):
    """Returns how many windows of each split an evaluation has; see evaluation_iters."""
    pairs = zip((dataset.train, dataset.val), evaluation_iters(settings, steps), strict=True)
    return [_count_windows(split, settings, iters) for split, iters in pairs]


def val_bytes(dataset, settings, iters):
    """Returns the mean bytes of the validation targets in an evaluation; None if unknown."""
    if dataset.byte_lengths is None:
        return None
    total, starts = 0, evaluation_starts(dataset.val, settings, iters) + 1
    for start in starts:  # one gather of all targets would need much more memory
        total += int(
            dataset.byte_lengths[dataset.val.ids[start : start + settings.block_size]].sum()
        )
    return total / (len(starts) * settings.block_size)


class Split:
    """The token ids of a split, cut into windows on a device.

    On a GPU, up to MAX_RESIDENT_BYTES of ids are copied to its memory once, and a batch is one
    gather. Otherwise the ids stay in their file, and each window is copied.
    """

    def __init__(self, ids, device):
        """ids: (N,) uint16 or uint32, usually a memory map."""
        self.ids, self.device = ids, device
        self.resident = None
        if device_type(device) != "cpu" and 4 * len(ids) <= MAX_RESIDENT_BYTES:
            self.resident = torch.from_numpy(ids.astype(np.int32)).to(device)

    def __len__(self):
        return len(self.ids)

    def windows(self, starts, block_size):
        """Returns inputs and targets at positions `starts`, (B,); each is (B, block_size) int64."""
        if self.resident is None:
            windows = self.ids[starts[:, None] + np.arange(block_size + 1)]
            tokens = self._to_device(windows.astype(np.int64))
        else:
            offsets = torch.arange(block_size + 1, device=self.device)
            tokens = self.resident[self._to_device(starts)[:, None] + offsets].long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _to_device(self, array):
        """Returns a tensor of an array, without waiting until a GPU has received it."""
        tensor = torch.from_numpy(array)
        if device_type(self.device) == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)


def to_device(dataset, device):
    """Returns a copy of a Dataset whose splits are Splits on `device`."""
    return dataclasses.replace(
        dataset, train=Split(dataset.train, device), val=Split(dataset.val, device)
    )


class Batches:
    """The micro-batches of each step, a function of the seed and the step.

    Each process of a run has the same number of them, `count` per step.
    """

    def __init__(self, split, settings, world=SINGLE_PROCESS):
        self.split, self.settings, self.world = split, settings, world
        self.count = settings.gradient_accumulation_steps // world.size

    def at(self, step):
        """Yields this process's micro-batches, pairs of (batch_size, block_size) int64 tensors.

        A GPU computes one while the next one is read.
        """
        batch_size, block_size = self.settings.batch_size, self.settings.block_size
        num_starts = len(self.split) - block_size
        first = (step * self.world.size + self.world.rank) * self.count
        for index in range(first, first + self.count):  # among those of all steps and processes
            starts = window_starts(self.settings.seed, index * batch_size, batch_size, num_starts)
            yield self.split.windows(starts, block_size)
