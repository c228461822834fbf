"""Windows of a split: their deterministic order in training, and their transfer to a device."""

import numpy as np
import torch

GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)  # its fractional part times 2^64
MAX_RESIDENT_BYTES = 2**30  # copying a larger split to a GPU would delay the start


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


class Split:
    """The token ids of a split, cut into windows on a device.

    On a GPU, up to MAX_RESIDENT_BYTES of ids are copied to its memory once, and a batch is one
    gather. Otherwise the ids stay in their file, and each window is copied.
    """

    def __init__(self, ids, device):
        """ids: (N,) uint16 or uint32, usually a memory map."""
        self.ids, self.device = ids, torch.device(device)
        self.resident = None
        if self.device.type != "cpu" and 4 * len(ids) <= MAX_RESIDENT_BYTES:
            self.resident = torch.from_numpy(ids.astype(np.int32)).to(device)

    def __len__(self):
        return len(self.ids)

    def batch(self, seed, number, batch_size, block_size):
        """Returns a micro-batch of a run; see train.micro_batches and `windows`."""
        num_starts = len(self) - block_size
        starts = window_starts(seed, number * batch_size, batch_size, num_starts)
        return self.windows(starts, block_size)

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
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)
