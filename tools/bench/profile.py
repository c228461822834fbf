"""Prints where the time of a step of train.py goes, by kind of operation."""

import dataclasses
import re
import time
from collections import Counter
from typing import Any

import torch

from folio.cli.settings import load_settings
from folio.distributed.world import SINGLE_PROCESS
from folio.hardware.device import resolve_device
from tools.table import format_table
from train import TrainConfig, make_run, train_step

STEPS = 10
MAX_ROWS = 12
NAME_LENGTH = 70
# Patterns of the names of a GPU's kernels and of a CPU's operations. The first match counts: the
# name of a compiled kernel lists all operations in it.
KINDS = {
    "loss": r"log_?softmax|softmax_warp|cunn_softmax|nll_loss|cross_entropy",
    "attention": r"attention|flash|fmha|sdpa",
    "products": r"gemm|gemv|nvjet|cutlass|cublas|triton_tem|aten::(mm|addmm|bmm|baddbmm)$",
    "optimizer, clipping": r"multi_tensor|adam|foreach|vector_norm|Optimizer",
    "casts, copies": r"mem(cpy|set)|copy_kernel|CatArray|triton_poi_fused(__to_copy|_t|_view)+_\d+$"
    r"|aten::(copy_|_to_copy|cat|stack|contiguous|clone|fill_|zero_)$",
    "elementwise, norms": r"triton|elementwise|norm|GammaBeta|gelu|relu|silu|dropout|embedding"
    r"|softmax|reduce|index|aten::(add|mul|sub|div|addcmul|lerp|random)_?$",
}


def profile_training(arguments):
    """Prints the time of a step of train.py, by kind and by operation.

    On a GPU, operations are kernels.
    """
    settings = load_settings(TrainConfig, arguments, {"device": resolve_device})
    run = make_run(settings, SINGLE_PROCESS)

    def train_steps():
        for step in range(STEPS):
            train_step(run, step, settings.learning_rate)
        run.machine.synchronize()

    if run.machine.cuda_graph:
        print(f"as a CUDA graph, a step takes {time_steps(train_steps):.2f} ms; without it:")
        run.machine = dataclasses.replace(run.machine, cuda_graph=False)
    step_ms = time_steps(train_steps)
    print(f"a step takes {step_ms:.2f} ms")
    with torch.profiler.profile() as profiler:
        train_steps()
    operations = sum_operations(profiler, run.machine.kind == "cuda")
    kinds: Any = Counter()  # of milliseconds; its type allows only int
    for name, ms in operations.items():
        kinds[kind_of(name)] += ms
    # On a CPU, the profiler makes operations slower, so that there can be no rest.
    kinds["gaps"] = max(0.0, step_ms - kinds.total())
    for title, times in (("kind", kinds), ("operation", operations)):
        rows = [[title, "ms per step", "share"]]
        for name, ms in times.most_common(MAX_ROWS):
            rows.append([name[:NAME_LENGTH], f"{ms:.3f}", f"{ms / kinds.total():.1%}"])
        print("", *format_table(rows), sep="\n")


def time_steps(train_steps):
    """Returns the milliseconds per step of train_steps()."""
    train_steps()  # the first call may compile or capture
    start = time.perf_counter()
    train_steps()
    return 1e3 * (time.perf_counter() - start) / STEPS


def sum_operations(profiler, on_gpu):
    """Returns the milliseconds per step of each operation in a profile."""
    operations: Any = Counter()
    for event in profiler.key_averages():
        is_kernel = event.device_type == torch.autograd.DeviceType.CUDA
        if on_gpu and is_kernel and not event.is_user_annotation:  # a name for several kernels
            operations[event.key] += event.self_device_time_total / 1e3 / STEPS
        elif not on_gpu:
            operations[event.key] += event.self_cpu_time_total / 1e3 / STEPS
    return operations


def kind_of(name):
    """Returns the kind, of KINDS, of an operation."""
    return next((k for k, pattern in KINDS.items() if re.search(pattern, name, re.I)), "other")
