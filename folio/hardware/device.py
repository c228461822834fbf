"""Device, data type, memory and peak speed of the machine, and what `auto` means."""

import ctypes
import glob
import math
import re
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from folio.cli.errors import UserError

DTYPES = {  # of activations
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.bfloat16,  # sample.py: weights of linear layers are int8
}
MIN_CORES_SHARE = 0.8  # of the runnable time of threads, in which they got a core
CORES_CHECK_INTERVAL_S = 3
CORES_RETRY_S = 30, 600  # before more threads are tried: at first, and at most; it doubles
MAX_GRAPH_S = 2e-3  # of a step at peak speed; real steps take at least twice as long
MAX_SINGLE_THREAD_PRODUCTS = 10**7  # per step, as for the fast preset's model with ten texts

# Pattern of a card's name, and its peak for 16-bit and for float32 matrix products (TF32 if it has
# that), from NVIDIA's data sheets; figures "with sparsity" are halved. Other cards are measured.
GPU_PEAKS_TFLOPS = (
    (r"\b(H100|H200|GH200)\b(?! PCIe| NVL)", 989, 494),  # SXM; the others are slower
    (r"\bA100\b", 312, 156),
    (r"\bL4\b", 121, 60),
    (r"\bT4\b", 65, 8.1),
    (r"\bRTX 4090$", 165.2, 82.6),
)


@dataclass(frozen=True)
class Machine:
    """A device and how to compute on it, with the reasons for its dtype and compilation."""

    device: str
    dtype: str
    compile: bool | str  # str: max-autotune
    cuda_graph: bool = False  # whether a training step is one; see optimize.CudaGraph
    dtype_reason: str = "as set"
    compile_reason: str = "as set"

    @property
    def kind(self):
        """The type of the device: cpu, cuda or mps."""
        return torch.device(self.device).type

    @property
    def torch_dtype(self):
        return DTYPES[self.dtype]

    @property
    def summary(self):
        name = "Apple GPU"
        if self.kind == "cuda":
            name = torch.cuda.get_device_name(self.device)
        elif self.kind == "cpu":
            gpu = "no GPU found; " if resolve_device("auto") == "cpu" else ""
            name = f"{gpu}threads: {torch.get_num_threads()}"
        compiled = f"{'compiled' if self.compile else 'not compiled'} ({self.compile_reason})"
        graph = ", each step a CUDA graph" if self.cuda_graph else ""
        return f"{self.device} ({name}), {self.dtype} ({self.dtype_reason}), {compiled}{graph}"

    @property
    def peak_summary(self):
        source = "data sheet" if self.data_sheet_flops else "measured with a matrix product"
        return f"peak {self.peak_flops / 1e12:.3g} TFLOP/s ({source})"

    @property
    def data_sheet_flops(self):
        """The FLOP/s of matrix products in `dtype` from the card's data sheet; None if unknown."""
        name = torch.cuda.get_device_name(self.device) if self.kind == "cuda" else ""
        for pattern, half, single in GPU_PEAKS_TFLOPS:
            if re.search(pattern, name) and "MIG" not in name:  # MIG: a partition of the card
                return 1e12 * (single if self.dtype == "float32" else half)
        return None

    @property
    def peak_flops(self):
        """The FLOP/s of matrix products in `dtype`, which are measured for unknown cards."""
        return self.data_sheet_flops or _measure_peak(self.device, self.torch_dtype)

    def synchronize(self):
        """Waits until the device has finished all queued work."""
        if self.kind != "cpu":
            torch.accelerator.synchronize(self.device)


def set_up_machine(device, dtype, compile, step_flops=None) -> Machine:
    """Returns the Machine for a resolved device and settings that may be "auto".

    Also makes the device the current one, allows TF32 for float32 products, where the device has
    it, and keeps freed memory. `step_flops` are the FLOPs of a training step, None if it cannot be
    a CUDA graph. A short step becomes one: launching its kernels takes as long as running them.
    """
    torch.set_float32_matmul_precision("high")
    keep_freed_memory()
    kind, reasons = torch.device(device).type, {}
    if kind == "cuda":
        torch.cuda.set_device(torch.device(device).index or 0)
    if dtype == "auto":
        dtype, reasons["dtype_reason"] = default_dtype(device)
    cuda_graph = False
    if step_flops and kind == "cuda" and dtype != "float16":  # float16 can skip steps
        cuda_graph = step_flops / Machine(device, dtype, False).peak_flops < MAX_GRAPH_S
    if compile == "auto":
        # On two CPU cores, compiling takes 25 to 35 s in the first run and 2 to 3 s in later ones,
        # which is more than short runs gain.
        compile = kind == "cuda" and not cuda_graph
        reasons["compile_reason"] = "short steps" if cuda_graph else f"default on {kind}"
    return Machine(device, dtype, compile, cuda_graph, **reasons)


def keep_freed_memory():
    """Makes glibc keep the memory that a training step frees, for the next step.

    By default it returns large blocks to the system and requests them again, page by page. For
    the small Shakespeare model, the 3,000 page faults take a third of the time of each step.
    """
    with suppress(AttributeError, OSError, TypeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD, in bytes; the largest value
        libc.mallopt(-3, 32 * 2**20)  # M_MMAP_THRESHOLD; also the largest value


@contextmanager
def one_thread_for_small(multiplications):
    """A context for a loop on a CPU that uses one thread if a step has few multiplications.

    More threads are not faster then, and wait for each other if another process uses the cores.
    """
    if multiplications > MAX_SINGLE_THREAD_PRODUCTS:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class ThreadTuner:
    """Adapts the number of torch's threads, for the rest of the process, if cores are shared.

    The threads of an operation wait for each other. If one of them has no core, because another
    program uses it, the others spin, and take the time of the core that it needs.
    """

    def __init__(self, machine: Machine):
        # Compiled code has a fixed number of threads.
        self.is_used = machine.kind == "cpu" and not machine.compile
        self.most = self.reported = torch.get_num_threads()
        self.retry_s, self.retry_at = CORES_RETRY_S[0], math.inf
        self.times, self.check_at = _thread_times(), time.perf_counter() + CORES_CHECK_INTERVAL_S

    def check(self):
        """Reduces the number of threads if they lack cores, and later tries more of them.

        Called after each step. Returns a message when the number reaches a new minimum, or None.
        """
        now = time.perf_counter()
        if not self.is_used or now < self.check_at:
            return None
        self.check_at = now + CORES_CHECK_INTERVAL_S
        threads, share = torch.get_num_threads(), self._share()
        if threads > 1 and share < MIN_CORES_SHARE:
            fewer = max(1, threads // 2, int(share * threads))
            torch.set_num_threads(fewer)
            if now >= self.retry_at:  # more threads have been tried in vain
                self.retry_s = min(2 * self.retry_s, CORES_RETRY_S[1])
            self.retry_at = now + self.retry_s
            if fewer < self.reported:
                self.reported = fewer
                used = f"{fewer} of {self.most} threads"
                return f"other programs use the cores: continuing with {used}"
        elif threads < self.most and now >= self.retry_at:
            torch.set_num_threads(min(2 * threads, self.most))
        return None

    def _share(self):
        """Returns what part of their time since the last call threads had a core."""
        earlier, self.times = self.times, _thread_times()
        # A thread that has ended is left out, because the time before the last check is unknown.
        since = [times - earlier.get(path, 0) for path, times in self.times.items()]
        running, waiting = sum(since, np.zeros(2))
        return 1 - waiting / max(running + waiting, 1)


def _thread_times():
    """Returns how long threads ran and waited for a core, {path: (2,) ns}; {} except on Linux."""
    times = {}
    for path in glob.glob("/proc/self/task/*/schedstat"):
        with suppress(OSError), open(path) as file:  # the thread may have ended
            times[path] = np.array(file.read().split()[:2], np.int64)
    return times


def resolve_device(name):
    """Returns an available device; "auto" becomes cuda, mps or cpu. Raises UserError otherwise."""
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    counts = {"cuda": cards, "mps": int(torch.backends.mps.is_available()), "cpu": 1}
    if name == "auto":
        return next(kind for kind, count in counts.items() if count)
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):
        raise UserError(f"device must be auto, cpu, cuda, cuda:N or mps, not {name!r}")
    kind, _, number = name.partition(":")
    count = counts[kind]
    if int(number or 0) >= count:
        gpu = f"{count or 'no'} {kind.upper()} GPU{'s' if count > 1 else ''}"
        raise UserError(f"device={name}, but this torch build finds {gpu}; use --device=auto")
    return name


def default_dtype(device):
    """Returns the default data type of a device, and why."""
    kind = torch.device(device).type
    if kind == "cuda":  # the current device
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        fallback = "float16", "with loss scaling; no bfloat16"
    else:
        capabilities = torch.cpu.get_capabilities() if kind == "cpu" else {}
        has_bfloat16 = any(map(capabilities.get, ("avx512_bf16", "amx_bf16", "bf16")))
        fallback = "float32", "no fast bfloat16"
    return ("bfloat16", "supported by the hardware") if has_bfloat16 else fallback


@cache
def _measure_peak(device, dtype):
    """Returns the FLOP/s of the fastest of a few square matrix products.

    On a CPU, it is that of one thread times their number, because threads can wait for each other.
    """
    is_cpu = torch.device(device).type == "cpu"
    size, threads = (512, torch.get_num_threads()) if is_cpu else (4096, 1)
    a = torch.randn(size, size, device=device).to(dtype)
    seconds = []
    with one_thread_for_small(0):
        for _ in range(5):
            time.sleep(0.015)  # other processes may use the cores for a while
            start = time.perf_counter()
            (a @ a)[0, 0].item()  # waits for the product
            seconds.append(time.perf_counter() - start)
    return threads * 2 * size**3 / min(seconds)  # other work on the machine can only add time
