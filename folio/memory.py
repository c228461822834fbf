"""Device memory: how much there is, whether a model fits, and what to change if it does not."""

import ctypes
import os
import sys
from contextlib import contextmanager, suppress

import torch

from folio.device import kind_of
from folio.errors import UserError
from model import num_params

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt(3)


def memory_bytes(device):
    """Returns the total memory of a device, or None if the system does not report it."""
    if kind_of(device) == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not hasattr(os, "sysconf"):  # Windows
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def keep_freed_memory():
    """Makes glibc keep the memory that a training step frees, for the next step.

    By default it returns large blocks to the system and requests them again, page by page. For
    the small Shakespeare model, the 3,000 page faults take a third of the time of each step.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)  # bytes; the largest value
            libc.mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # also the largest value


def check_memory(config, settings):
    """Raises UserError if weights, gradients, moments and logits exceed the memory.

    An evaluation has weights and logits only.

    Args:
        config: the model's GPTConfig.
        settings: a TrainConfig with its device resolved.
    """
    tokens = settings.batch_size * settings.block_size
    copies = 3 if settings.optimizer == "muon" else 4  # weights, gradients and moments
    if settings.eval_only:
        copies = 1
    model = 4 * copies * num_params(config)  # bytes
    needed = model + 2 * tokens * config.vocab_size  # 16-bit logits
    available = memory_bytes(settings.device)
    if available and needed > available:
        advice = memory_advice(settings) if model < available else "decrease --n_layer or --n_embd"
        raise UserError(
            f"the model needs more than {needed >> 30:,} GiB of memory, but {settings.device} has "
            f"{available >> 30:,} GiB: {advice}"
        )


def memory_advice(settings):
    """Returns which settings reduce memory, if possible with the same tokens per step."""
    size = settings.batch_size
    factor = next((n for n in range(2, size + 1) if size % n == 0), None)
    others = "decrease --block_size, --n_layer or --n_embd"
    if not factor:
        return others
    return (
        f"use --batch_size={size // factor} --gradient_accumulation_steps="
        f"{settings.gradient_accumulation_steps * factor} for the same tokens per step, with "
        f"--eval_iters={settings.eval_iters * factor} for the same evaluation; or {others}"
    )


@contextmanager
def explained_out_of_memory(device, advice):
    """Turns an out-of-memory error into a UserError with advice."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"{device} is out of memory: {advice}") from error


def is_out_of_memory(error):
    """Whether an exception reports a lack of memory, for which torch has no single class."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
