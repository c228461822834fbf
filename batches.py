"""Batches: which windows of a split a step sees, and their way to the device that trains."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from device import kind_of, memory_bytes

GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)  # its fraction, in 2^-64 of a turn
SHARE_FOR_DATA = 1 / 8  # of a GPU's memory; the model, its moments and activations need the rest


def batch_starts(seed, step, count, choices):
    """Where the windows of a step's global batch begin: `count` places in range(choices), int64.

    The seed's phase plus multiples of the golden ratio (Kronecker's sequence): however many places
    there are so far, they lie about evenly over the text, so that each batch sees all of it in
    small, and no part much more often than another. A pure function of its arguments:
    no state to save, and the same batch however it is cut into micro-batches.
    """
    first = step * count
    indices = np.arange(first, first + count, dtype=np.uint64)
    phase = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    turns = indices * GOLDEN_RATIO + phase  # modulo 2^64, one turn
    places = (turns / 2.0**64 * choices).astype(np.int64)
    return np.minimum(places, choices - 1)  # rounding may reach a whole turn


class Split:
    """The ids of a split, cut into windows on a device.

    A GPU keeps the ids in its own memory where there is room, so that one gather there makes a
    batch. Otherwise they stay in their file, and only windows travel.
    """

    def __init__(self, ids, device):
        """ids: (N,) uint16, a file's memory map as a rule."""
        self.ids, self.device = ids, device
        self.resident = None
        if kind_of(device) != "cpu" and 4 * len(ids) <= SHARE_FOR_DATA * memory_bytes(device):
            self.resident = torch.from_numpy(ids.astype(np.int32)).to(device)

    def __len__(self):
        return len(self.ids)

    def windows(self, starts, block_size):
        """Inputs and targets of the windows that begin at `starts`: (B, block_size) int64 each."""
        if self.resident is None:
            tokens = self.ids[starts[:, None] + np.arange(block_size + 1)].astype(np.int64)
            tokens = self._sent(tokens)
        else:
            offsets = torch.arange(block_size + 1, device=self.device)
            tokens = self.resident[self._sent(starts)[:, None] + offsets].long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _sent(self, array):
        """An array as a tensor on the device; no one waits for a GPU to have it."""
        tensor = torch.from_numpy(array)
        if kind_of(self.device) == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)


def on_device(dataset, device):
    """The same Dataset with a Split in the place of each split's ids."""
    splits = {name: Split(getattr(dataset, name), device) for name in ("train", "val")}
    return dataclasses.replace(dataset, **splits)


class Batches:
    """The global batch of each step, in micro-batches, as a function of the seed and the step.

    Where a GPU's windows come from a file, those of the next step are read during this one.
    """

    def __init__(self, split, config):
        self.split, self.config = split, config
        self.ahead = {}  # step: its micro-batches, on their way
        reads_ahead = split.resident is None and kind_of(split.device) != "cpu"
        self.reader = ThreadPoolExecutor(max_workers=1) if reads_ahead else None

    def of(self, step):
        """[(inputs, targets), …]: gradient_accumulation_steps of (batch_size, block_size) int64."""
        ready = self.ahead.pop(step, None)
        if self.reader:
            self.ahead = {step + 1: self.reader.submit(self._read, step + 1)}
        return ready.result() if ready else self._read(step)

    def _read(self, step):
        config = self.config
        count = config.batch_size * config.gradient_accumulation_steps
        choices = len(self.split.ids) - config.block_size
        starts = batch_starts(config.seed, step, count, choices)
        micro_batches = np.split(starts, config.gradient_accumulation_steps)
        return [self.split.windows(each, config.block_size) for each in micro_batches]
