"""Deterministic batch sampling and device transfer."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from folio.device import kind_of
from folio.memory import memory_bytes

GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)  # its fractional part, times 2^64
DATA_SHARE = 1 / 8  # of a GPU's memory; weights, optimizer state and activations need the rest


def batch_starts(seed, step, count, num_starts):
    """Returns the start positions of a step's windows: (count,) int64 in range(num_starts).

    Start n of a run is (phase + n * golden ratio) mod 1, times num_starts: a Kronecker sequence,
    whose values are nearly evenly spaced at every length (Niederreiter 1992, "Random Number
    Generation and Quasi-Monte Carlo Methods"). The seed sets the phase. The result depends on the
    arguments alone, so nothing has to be saved to resume.
    """
    first = step * count
    indices = np.arange(first, first + count, dtype=np.uint64)
    phase = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    fractions = (indices * GOLDEN_RATIO + phase) / 2.0**64  # the integers wrap modulo 2^64
    return np.minimum((fractions * num_starts).astype(np.int64), num_starts - 1)


def dropout_seed(seed, step):
    """Returns a seed for torch; those of different steps are statistically independent."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0])


class Split:
    """The token ids of a split, cut into windows on a device.

    If a GPU has room for the ids, they stay in its memory and a batch is one gather. Otherwise they
    stay in their file and windows are copied.
    """

    def __init__(self, ids, device):
        """ids: (N,) uint16, usually a memory map."""
        self.ids, self.device = ids, device
        self.resident = None
        if kind_of(device) != "cpu" and 4 * len(ids) <= DATA_SHARE * (memory_bytes(device) or 0):
            self.resident = torch.from_numpy(ids.astype(np.int32)).to(device)

    def __len__(self):
        return len(self.ids)

    def windows(self, starts, block_size):
        """Returns inputs and targets, (B, block_size) int64 each, for `starts`, (B,) int64."""
        if self.resident is None:
            tokens = self.ids[starts[:, None] + np.arange(block_size + 1)].astype(np.int64)
            tokens = self._to_device(tokens)
        else:
            offsets = torch.arange(block_size + 1, device=self.device)
            tokens = self.resident[self._to_device(starts)[:, None] + offsets].long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _to_device(self, array):
        """Copies without waiting for a GPU to receive the data."""
        tensor = torch.from_numpy(array)
        if kind_of(self.device) == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)


def to_device(dataset, device):
    """Returns the Dataset with a Split on `device` in place of the ids of each split."""
    return dataclasses.replace(
        dataset, train=Split(dataset.train, device), val=Split(dataset.val, device)
    )


class Batches:
    """The micro-batches of each step, a function of the seed and the step.

    If a GPU's windows come from a file, those of the next step are read during the current one.
    """

    def __init__(self, split, settings):
        self.split, self.settings = split, settings
        self._ahead = {}  # {step: future of its micro-batches}
        reads_ahead = split.resident is None and kind_of(split.device) != "cpu"
        self._reader = ThreadPoolExecutor(max_workers=1) if reads_ahead else None

    def at(self, step):
        """Returns gradient_accumulation_steps pairs of (batch_size, block_size) int64 tensors."""
        ready = self._ahead.pop(step, None)
        if self._reader:
            self._ahead = {step + 1: self._reader.submit(self._read, step + 1)}
        return ready.result() if ready else self._read(step)

    def _read(self, step):
        settings = self.settings
        count = settings.batch_size * settings.gradient_accumulation_steps
        num_starts = len(self.split) - settings.block_size
        starts = batch_starts(settings.seed, step, count, num_starts)
        micro_batches = np.split(starts, settings.gradient_accumulation_steps)
        return [self.split.windows(each, settings.block_size) for each in micro_batches]
