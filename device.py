"""What the machine at hand can do: device, number format, compiler, peak speed.

Each `auto` setting is resolved here, to a concrete value and the reason for it in a few words.
"""

import ctypes
import os
import re
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache

import torch

from config import UserError
from safety import cause_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Dense peak in TFLOP/s of 16-bit and of fp32 products (TF32 where the card has it), from NVIDIA's
# data sheets; a sheet's figures "with sparsity" are halved. The first pattern that fits counts.
GPU_PEAKS = (
    (r"\bB200\b", 2250, 1125),
    (r"\bH[12]00 NVL\b", 835, 417),
    (r"\bH100 PCIe\b", 756, 378),
    (r"\b(H100|H200|GH200)\b", 989, 494),
    (r"\bA100\b", 312, 156),
    (r"\bA40\b", 149.7, 74.8),
    (r"\bA10\b", 125, 62.5),
    (r"\bL40S\b", 362, 183),
    (r"\bL4\b", 121, 60),
    (r"\bV100-PCIE\b", 112, 14),
    (r"\bV100\b", 125, 15.7),
    (r"\bT4\b", 65, 8.1),
    (r"\bRTX 4090$", 165.2, 82.6),
    (r"\bRTX 3090$", 71, 35.6),
)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # names of settings in glibc's mallopt(3)


@dataclass(frozen=True)
class Machine:
    """A device and how to compute on it; `summary` says what was chosen and why, in one line."""

    device: str
    dtype: str
    compile: bool
    summary: str

    @property
    def peak(self):
        """(FLOP/s, source) of products in `dtype`; measured, once, where no data sheet is known."""
        return peak_flops(self.device, self.dtype)

    def autocast(self):
        """A context in which matrix products run in `dtype`."""
        if self.dtype == "float32":
            return nullcontext()
        return torch.autocast(kind_of(self.device), dtype=DTYPES[self.dtype])

    def synchronize(self):
        """Wait until the device has done what it was given; a CPU always has."""
        if kind_of(self.device) == "cuda":
            torch.cuda.synchronize(self.device)
        elif kind_of(self.device) == "mps":
            torch.mps.synchronize()


def choose_machine(device, dtype, compile):
    """The Machine for a resolved device and settings that may be 'auto'.

    Lets what stays in float32 use TF32, where the device has it, and a CPU keep its memory.
    """
    torch.set_float32_matmul_precision("high")
    if kind_of(device) == "cpu":
        keep_freed_memory()
    dtype, why_dtype = resolve_dtype(dtype, device)
    compile, why_compile = resolve_compile(compile, device)
    summary = (
        f"{device} ({describe_device(device)}), {dtype} ({why_dtype}), "
        f"{'compiled' if compile else 'not compiled'} ({why_compile})"
    )
    return Machine(device, dtype, compile, summary)


def resolve_device(name):
    """A device that is there: 'auto' becomes cuda, mps or cpu. Raises UserError for others."""
    if name == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):
        raise UserError(f"device must be auto, cpu, cuda, cuda:N or mps, not {name!r}")
    torch_here = f"this torch ({torch.__version__})"
    if name == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"device=mps, but {torch_here} sees no Apple GPU; use --device=auto")
    if name.startswith("cuda"):
        cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not cards:
            raise UserError(f"device={name}, but {torch_here} sees no CUDA GPU; use --device=auto")
        if int(name.partition(":")[2] or 0) >= cards:
            raise UserError(f"device={name}, but GPUs are numbered 0 to {cards - 1} here")
    return name


def describe_device(device):
    """The card's name, or, for a CPU, its threads and whether that is for lack of a GPU."""
    kind = kind_of(device)
    if kind == "cuda":
        return torch.cuda.get_device_name(device)
    if kind == "mps":
        return "Apple GPU"
    count = torch.get_num_threads()
    threads = f"{count} thread{'s' if count > 1 else ''}"
    return threads if resolve_device("auto") != "cpu" else f"no GPU found; {threads}"


def kind_of(device):
    """'cuda' for 'cuda:1', as torch's autocast and scaler want it."""
    return torch.device(device).type


def resolve_dtype(name, device):
    """(dtype name, reason): bf16 where the hardware multiplies in it, else fp16 or fp32."""
    kind = kind_of(device)
    if name != "auto":
        return name, "as set"
    if kind == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bfloat16", "the GPU multiplies in it"
        return "float16", "with a loss scaler, as the GPU has no bfloat16"
    if kind == "cpu" and _cpu_multiplies_bf16():
        return "bfloat16", "the CPU multiplies in it"
    return "float32", f"no fast bfloat16 on this {'CPU' if kind == 'cpu' else 'device'}"


def _cpu_multiplies_bf16():
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(unit, False) for unit in ("avx512_bf16", "amx_bf16", "bf16"))


def resolve_compile(setting, device):
    """(whether to compile, reason).

    On two cores it took 10 to 60 s, and then made the step of small models between a tenth shorter
    and a quarter longer: there --compile=True is for those who have tried it.
    """
    kind = kind_of(device)
    if setting != "auto":
        return setting, "as set"
    return (True, "worth it on cuda") if kind == "cuda" else (False, f"not worth it on {kind}")


def compile_or_fall_back(model, trial):
    """`model` compiled, or `model` itself with one line of warning where the compiler fails.

    The compiler works on first use, so `trial(compiled)` must use the model as training will.
    """
    with told_failure("compiling failed, so this run is not compiled"):
        compiled = torch.compile(model)
        trial(compiled)
        return compiled
    torch.compiler.reset()
    return model


@contextmanager
def told_failure(message):
    """A context whose failure is told in one line, but for a lack of memory."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a missing or broken tool chain raises
        print(f"{message} ({cause_of(error)})", file=sys.stderr)


def accelerator(machine):
    """What makes a function faster that does the same work each time; None where nothing does.

    It takes the function, of tensors to tensors, and arguments like those it will have; it returns
    the faster one, or None.
    """
    on_cuda = kind_of(machine.device) == "cuda"
    if not (machine.compile or on_cuda):
        return None

    def accelerate(step, *arguments):
        fast = step
        if machine.compile:
            fast = compile_or_fall_back(step, lambda compiled: compiled(*arguments))
        if on_cuda:
            message = "capturing a CUDA graph failed, so this run goes on without"
            with told_failure(message), torch.cuda.device(arguments[0].device):
                return captured(fast, *arguments)
        return fast if fast is not step else None

    return accelerate


def captured(step, *arguments):
    """`step` as a CUDA graph, whose kernels one call launches, and not one by one from Python."""
    places = [each.clone() for each in arguments]  # a graph reads and writes the same memory always
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what happens only the first time does not belong in the graph
        for _ in range(3):
            step(*places)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(*places)

    def replay(*arguments):
        for place, each in zip(places, arguments, strict=True):
            place.copy_(each)
        graph.replay()
        return tuple(each.clone() for each in results)

    return replay


def keep_freed_memory():
    """Make the C library keep what a step frees, since the next step takes as much again.

    glibc gives it back to the system, which hands it out anew page by page: in a step of the small
    Shakespeare model three thousand times, on two threads a third of its time. Other libraries
    have no such call.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)  # bytes, the most it takes
            libc.mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # likewise


def memory_bytes(device):
    """The memory of a device, or None where the system does not tell."""
    if kind_of(device) == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    names = getattr(os, "sysconf_names", {})  # Windows has none
    if not {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= set(names):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def explained_lack_of_memory(device, advice):
    """Turn a lack of memory into a UserError that says what needs less."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"{device} is out of memory: {advice}") from error


def is_out_of_memory(error):
    """Whether an exception says that no memory was left; torch has no one class for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def peak_flops(device, dtype):
    """(FLOP/s, source): the data sheet's dense peak where the GPU is known, else a measured one."""
    name = torch.cuda.get_device_name(device) if kind_of(device) == "cuda" else ""
    for pattern, half, single in GPU_PEAKS:
        if re.search(pattern, name) and "MIG" not in name:  # MIG: a slice of the card
            return (single if dtype == "float32" else half) * 1e12, f"data sheet, {name}"
    return _measured_peak(device, DTYPES[dtype]), "measured by a matrix product"


@cache
def _measured_peak(device, dtype, repeats=8):
    """FLOP/s of the fastest of a few square matrix products, large enough for the device."""
    size = 512 if kind_of(device) == "cpu" else 4096
    a = torch.randn(size, size, device=device).to(dtype)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        (a @ a)[0, 0].item()  # reading one number waits for the product
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)  # whatever else the machine does only adds to it
