"""Prints where the time of a step of train.py or sample.py goes, by kind of operation."""

import dataclasses
import re
import time
from collections import Counter

import torch

from folio.cli.settings import load_settings
from folio.data.batches import Batches
from folio.hardware.device import device_type, resolve_device
from folio.inference.completion import complete
from folio.inference.trained_model import load_trained
from folio.pretrained.load import load_best
from folio.training.setup import make_plan
from sample import SampleConfig, make_completions, read_prompts
from tools.plot.table import format_table
from train import TrainConfig, make_run, train_step

TRAINING_STEPS = 10
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
    """Prints the time of a step of train.py."""
    settings = load_settings(TrainConfig, arguments, {"device": resolve_device})
    run = make_run(make_plan(settings))
    batches = Batches(run.dataset.train, settings, run.world)

    def train_steps():
        for step in range(TRAINING_STEPS):
            train_step(run, batches.at(step), step, settings.learning_rate)

    if run.machine.cuda_graph:
        step_ms = time_steps(run.machine, train_steps, TRAINING_STEPS)
        print(f"as a CUDA graph, a step takes {step_ms:.2f} ms; without it:")
        run.machine = dataclasses.replace(run.machine, cuda_graph=False)
    print_profile(run.machine, train_steps, TRAINING_STEPS)


def profile_sampling(arguments):
    """Prints the time of a step of sample.py, one token of each text."""
    settings = load_settings(SampleConfig, arguments, {"device": resolve_device})
    checkpoint = load_best(settings.init_from, settings.out_dir)
    trained = load_trained(checkpoint, settings.device, settings.dtype, settings.compile)
    prompts = read_prompts(settings)

    def generate():
        batch = list(make_completions(trained.tokenizer, prompts, [], settings))
        for _ in complete(trained, batch, settings, settings.stream):
            pass

    print_profile(trained.machine, generate, settings.max_new_tokens)


def time_steps(machine, run_steps, steps):
    """Returns the milliseconds per step of run_steps(), which runs `steps` steps."""
    run_steps()  # the first call may compile or capture
    machine.synchronize()
    start = time.perf_counter()
    run_steps()
    machine.synchronize()
    return 1e3 * (time.perf_counter() - start) / steps


def print_profile(machine, run_steps, steps):
    """Prints the time of run_steps(), which runs `steps` steps, by kind and by operation.

    On a GPU, operations are kernels.
    """
    step_ms, on_gpu = time_steps(machine, run_steps, steps), device_type(machine.device) == "cuda"
    print(f"a step takes {step_ms:.2f} ms")
    with torch.profiler.profile() as profiler:
        run_steps()
        machine.synchronize()
    operations, kinds = Counter(), Counter()  # ms per step
    for event in profiler.key_averages():
        is_kernel = event.device_type == torch.autograd.DeviceType.CUDA
        if on_gpu and is_kernel and not event.is_user_annotation:  # a name for several kernels
            operations[event.key] += event.self_device_time_total / 1e3 / steps
        elif not on_gpu:
            operations[event.key] += event.self_cpu_time_total / 1e3 / steps
    for name, ms in operations.items():
        kinds[kind_of(name)] += ms
    # On a CPU, the profiler makes operations slower, so that there can be no rest.
    kinds["gaps"] = max(0.0, step_ms - kinds.total())
    for title, times in (("kind", kinds), ("operation", operations)):
        rows = [[title, "ms per step", "share"]]
        for name, ms in times.most_common(MAX_ROWS):
            rows.append([name[:NAME_LENGTH], f"{ms:.3f}", f"{ms / kinds.total():.1%}"])
        print("", *format_table(rows), sep="\n")


def kind_of(name):
    """Returns the kind, of KINDS, of an operation."""
    return next((k for k, pattern in KINDS.items() if re.search(pattern, name, re.I)), "other")
