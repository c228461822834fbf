"""Device memory: how much there is, how much a run has used, and what fits into it."""

import math
import os
from contextlib import suppress
from pathlib import Path

import torch

CONTAINER_LIMITS = "/sys/fs/cgroup"


def memory_bytes(device):
    """Returns the memory that a process may use on a device, or None if that is unknown."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not hasattr(os, "sysconf"):  # Windows
        return None
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroups 2 and 1
        with suppress(OSError, ValueError):  # no such file, or "max" for no limit
            limits.append(int(Path(CONTAINER_LIMITS, name).read_text()))
    return min(limits)


def max_micro_batch(device):
    """Returns how many sequences of 1,024 tokens a micro-batch of GPT-2 124M may have, at most 64.

    It is a power of two. On an H100, a step of 12 sequences, compiled as a whole, took 7.25 GiB and
    one of 32 15.6 GiB, so each sequence took 0.42 GiB; 0.6 leaves a reserve. Other devices do not
    compile by default and share their memory, so that they get 4.
    """
    if torch.device(device).type != "cuda":
        return 4
    sequences = memory_bytes(device) / (0.6 * 2**30)
    return 2 ** max(0, min(6, int(math.log2(sequences))))


def peak_memory_gib(device):
    """Returns the most memory that tensors have taken on a GPU, in GiB; None on other devices."""
    if torch.device(device).type != "cuda":
        return None
    return round(torch.cuda.max_memory_allocated(device) / 2**30, 3)
