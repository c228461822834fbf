"""Device memory: how much there is and how much a run needs.

The estimate counts the tensors that torch allocates for `model.py`; docs/scale.md has its formulas.
Measured peaks on a CPU are within 15% of it (python -m tools.bench --memory).
"""

import ctypes
import os
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch

from folio.device import DTYPES, kind_of, resolve_dtype, uses_cuda_graphs
from folio.errors import RankError, UserError
from folio.recompute import head_parts
from folio.size import matrix_params, num_params
from model import mlp_widths

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt(3)
GATHERED_SHARE = 1 / 2  # of the host memory, for a copy of all weights and moments
PARTS = ("weights", "gradients", "optimizer", "activations", "saving")


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


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one process at the peak of a training step, in bytes."""

    weights: int  # with those gathered from other processes
    gradients: int
    optimizer: int
    activations: int  # with 16-bit copies of weights
    saving: int = 0  # the copy of weights and moments that a background save writes

    @property
    def total(self):
        return sum(getattr(self, name) for name in PARTS)

    def summary(self, available=None):
        """Returns the estimate as one line. `available` is the memory of the device in bytes."""
        unit, name = (2**30, "GiB") if self.total >= 2**30 else (2**20, "MiB")
        digits = 1 if name == "GiB" else 0
        sizes = {key: getattr(self, key) / unit for key in PARTS if getattr(self, key)}
        parts = ", ".join(f"{key} {size:.{digits}f}" for key, size in sizes.items())
        known = f" of {available / 2**30:.0f} GiB" if available else ""
        return f"memory per process: about {self.total / unit:.{digits}f} {name}{known} ({parts})"


def estimate(config, settings, world_size=1):
    """Returns the MemoryEstimate of each of `world_size` processes.

    Args:
        config: the model's GPTConfig.
        settings: a TrainConfig with device, dtype and compile resolved.
    """
    count = num_params(config)
    is_sharded = settings.parallel == "fsdp" and world_size > 1
    shards = world_size if is_sharded else 1
    weights, saving = 4 * count // shards, 0
    optimizer = gradients = 0
    activations = activation_bytes(config, settings)
    if is_sharded:
        weights += gathered_bytes(config, settings)
    else:
        activations += cast_bytes(config, settings)
    if not settings.eval_only:
        accumulates = settings.gradient_accumulation_steps > world_size
        # FSDP sums whole gradients until the last micro-batch of a step.
        gradients = 4 * count // (1 if accumulates else shards)
        optimizer = moment_bytes(config, settings) // shards
        last = bytes_with_all_gradients(config, settings)
        if uses_cuda_graphs(settings.compile):  # results of a graph are added to gradients
            activations = max(activations, gradients + last)
        elif world_size == 1 and not accumulates:  # gradients replace activations
            activations = max(activations - gradients, last)
        copies = not is_sharded or can_gather(config, settings)
        if copies and kind_of(settings.device) == "cpu":
            saving = 4 * count + moment_bytes(config, settings)
    return MemoryEstimate(weights, gradients, optimizer, activations, saving)


def can_gather(config, settings):
    """Whether this process's host memory has room for a copy of all weights and moments."""
    available = memory_bytes("cpu")
    size = 4 * num_params(config) + moment_bytes(config, settings)
    return available is None or size <= GATHERED_SHARE * available


def moment_bytes(config, settings):
    """Returns the size of the optimizer's state: two float32 per parameter, or one for Muon."""
    matrices = matrix_params(config) if settings.optimizer == "muon" else 0
    return 8 * num_params(config) - 4 * matrices


def cast_bytes(config, settings):
    """Returns the size of the 16-bit copies of the matrices that autocast makes in a step."""
    if settings.dtype == "float32":
        return 0
    return 2 * (matrix_params(config) + config.vocab_size * config.n_embd)


def gathered_bytes(config, settings):
    """Returns the size of the parameters that FSDP gathers at a time.

    These are the parameters outside of the blocks, and two blocks: one is used while the next is
    received.
    """
    root = num_params(replace(config, n_layer=0))
    block = num_params(replace(config, n_layer=1)) - root
    return DTYPES[settings.dtype].itemsize * (root + min(config.n_layer, 2) * block)


def activation_bytes(config, settings):
    """Returns the memory of activations and their gradients at the peak of a forward and backward.

    The peak is either at the gradient of the logits or in the backward pass of the last block.
    """
    C, item = config.n_embd, DTYPES[settings.dtype].itemsize
    block = saved_by_block(config, settings)
    # Compiled, the gradient of the logits overwrites them. Otherwise there are log-probabilities,
    # their gradient and that of the logits, in float32.
    logits = (item if settings.compile else 12) * config.vocab_size // head_parts(settings)
    logits += (4 + item) * C
    gradients = item * mlp_widths(config)[0] + 8 * C  # of the widest layer, the residual stream
    embedded = 4 * (config.smear + bool(config.dropout)) * C
    if settings.eval_only:
        peak = max(block, logits)
    elif settings.activation_checkpointing:
        peak = embedded + config.n_layer * 4 * C + max(block + gradients, logits)
    else:
        peak = embedded + config.n_layer * block + max(gradients, logits)
    return settings.batch_size * settings.block_size * peak


def bytes_with_all_gradients(config, settings):
    """Returns the memory of activations in the backward pass of the first block or the embedding.

    If weights are tied, the head's gradient, the embedding's and their sum exist together.
    """
    embedding = 8 * config.vocab_size * config.n_embd if config.tie_weights else 0
    tokens = settings.batch_size * settings.block_size
    return max(embedding, tokens * saved_by_block(config, settings))


def saved_by_block(config, settings):
    """Returns the bytes per token that a block saves for the backward pass.

    The residual stream is float32; `item` is the size of what matrix products take and return.
    """
    C, item = config.n_embd, DTYPES[settings.dtype].itemsize
    on_cpu = kind_of(settings.device) == "cpu"
    is_windowed = 0 < config.window < settings.block_size
    keys = 2 * config.window if is_windowed else settings.block_size
    # Fused attention does not save its scores. On a CPU it has no dropout and no mask; see also
    # attention.prefers_explicit_attention.
    explicit = settings.dtype == "bfloat16" and keys <= 512
    has_scores = on_cpu and (is_windowed or bool(config.dropout) or explicit)
    scores = config.n_head * keys * (3 if config.dropout else 1) if has_scores else 0

    norms = 2 * (2 if config.norm == "rmsnorm" and on_cpu and not settings.compile else 1)
    norms += 2 * config.qk_norm
    outer, inner = mlp_widths(config)
    mlp = {"relu": inner, "swiglu": outer + 2 * inner}.get(config.activation, outer + inner)
    qkv = 3 + 2 * is_windowed
    if (config.qk_norm or config.position == "rotary") and not (has_scores or is_windowed):
        qkv += 2  # queries and keys before and after
    masks = (item if on_cpu and not settings.compile else 1) * 2 * C if config.dropout else 0
    return 4 * norms * C + item * ((3 + qkv) * C + mlp + scores) + masks


def check_memory(config, settings, world_size=1):
    """Raises UserError if weights, gradients, moments and logits exceed the memory.

    An evaluation has weights and logits only. What else a step needs depends on the version of
    torch, so that it can only be estimated. Arguments are those of `estimate`, but dtype and
    compile may be "auto".
    """
    dtype = resolve_dtype(settings.dtype, settings.device)
    found = estimate(config, replace(settings, dtype=dtype), world_size)
    available = memory_bytes(settings.device)
    model = found.weights + found.gradients + found.optimizer
    tokens = settings.batch_size * settings.block_size
    needed = model + 2 * tokens * config.vocab_size // head_parts(settings)  # 16-bit logits
    if available and needed > available:
        fits = model < available
        advice = memory_advice(settings) if fits else "decrease --n_layer or --n_embd"
        raise UserError(
            f"the model needs more than {needed >> 30:,} GiB of memory, but {settings.device} has "
            f"{available >> 30:,} GiB: {advice}"
        )


def memory_advice(settings):
    """Returns which settings reduce memory, if possible with the same tokens per step."""
    size = settings.batch_size
    factor = next((n for n in range(2, size + 1) if size % n == 0), None)
    others = "decrease --block_size, --n_layer or --n_embd"
    if not settings.activation_checkpointing:
        others = f"use --activation_checkpointing=True; or {others}"
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
        raise RankError(f"{device} is out of memory: {advice}") from error


def is_out_of_memory(error):
    """Whether an exception reports a lack of memory, for which torch has no single class."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
