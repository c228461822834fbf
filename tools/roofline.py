"""Where the time of a step of training or sampling goes, beside what the machine could do at best.

The bounds are those of the roofline model (Williams et al. 2009): the products at the rate of large
matrix products, and the bytes that must move at that of a long copy.
"""

import re
import time
from functools import partial
from statistics import median

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

import sample
import train
from batches import Batches
from config import load
from device import DTYPES, accelerator, explained_lack_of_memory, resolve_device
from report import less_memory

WARM_UP_STEPS, PROFILED_STEPS = 10, 20
PRODUCTS = r"mm\b|mm_|attention|gemm|matmul|linear_pointwise"  # in names of operations and kernels


def profile(arguments):
    """Print the time of a step of train.py with `arguments`, by operation, and the bounds."""
    config = load(train.TrainConfig, arguments, {"device": resolve_device})
    with explained_lack_of_memory(config.device, less_memory(config)):
        profile_steps(config)


def profile_steps(config):
    dataset, model_config = train.load_fitting(config, None)
    config, machine, dataset, state, model = train.made_ready(config, dataset, model_config, None)
    batches = Batches(dataset.train, config)

    def steps(count):
        machine.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            loss, norm = train.gradient(model, state, batches.of(state.step), config, machine)
            train.update(state, norm, config.learning_rate, config)
        machine.synchronize()
        return (time.perf_counter() - start) / count

    steps(WARM_UP_STEPS)
    seconds = median(steps(1) for _ in range(PROFILED_STEPS))
    gpu = machine.device.startswith("cuda")
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * gpu
    with torch.profiler.profile(activities=activities) as events:
        steps(PROFILED_STEPS)
    print(f"\na step takes {seconds * 1e3:.2f} ms (median of {PROFILED_STEPS})\n")
    print_operations(events.key_averages(), gpu, PROFILED_STEPS)
    if gpu:
        print(f"\nmemory: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB at most")
    print_bounds(model, batches.of(0), state, config, machine)


def profile_sampling(arguments):
    """Print the time of a step of sample.py, which draws a token of each text, and the bound."""
    config = load(sample.SampleConfig, arguments, {"device": resolve_device})
    checkpoint, tokenizer = sample.opened(config)
    with explained_lack_of_memory(config.device, "try fewer texts"):
        model, machine = sample.ready(checkpoint, config)
        rows = len(list(sample.texts_to_write(config, tokenizer, stops=[])))
        draw = partial(sample.drawn, model, tokenizer, config, accelerator(machine))

        def write():
            texts = list(sample.texts_to_write(config, tokenizer, stops=[]))
            machine.synchronize()
            start = time.perf_counter()
            for _ in draw(texts):
                pass
            machine.synchronize()
            return (time.perf_counter() - start) / config.max_new_tokens

        seconds = median(write() for _ in range(4))
        gpu = machine.device.startswith("cuda")
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * gpu
        with torch.profiler.profile(activities=activities) as events:
            write()
    print(
        f"\n{rows:,} texts of {config.max_new_tokens:,} tokens: a step takes {seconds * 1e3:.2f} "
        f"ms, {rows / seconds:,.0f} tokens/s\n"
    )
    print_operations(events.key_averages(), gpu, config.max_new_tokens)
    shape, speed = checkpoint.model_config, read_bandwidth(machine)
    weights = 12 * shape.n_layer * shape.n_embd**2 + shape.vocab_size * shape.n_embd
    bound = weights * DTYPES[machine.dtype].itemsize / speed
    print(
        f"\nat best: {bound * speed / 1e6:.4g} MB of weights, read at {speed / 1e9:.3g} GB/s: "
        f"{bound * 1e3:.2f} ms, {rows / bound:,.0f} tokens/s; "
        f"{100 * bound / seconds:.0f} % of that is reached"
    )


def print_bounds(model, micro_batches, state, config, machine):
    """The least that a step can take, by its products and by its bytes."""
    flops = train.flops_per_token(state.model.config) * train.tokens_per_step(config)
    peak, source = machine.peak
    print(
        f"\nat best: {flops / 1e9:.3g} GFLOP in products at {peak / 1e9:.4g} GFLOP/s ({source}): "
        f"{flops / peak * 1e3:.2f} ms"
    )
    moved, speed = bytes_of_step(model, micro_batches, state, machine), bandwidth(machine)
    print(
        f"at best: {moved / 1e6:.4g} MB of weights, moments and kept activations at "
        f"{speed / 1e9:.3g} GB/s, were no cache there: {moved / speed * 1e3:.2f} ms"
    )


def print_operations(averages, gpu, steps, rows=12):
    """A table of the operations that take longest, and the share of matrix products in all."""
    clock = "self_device_time_total" if gpu else "self_cpu_time_total"
    if gpu:  # what runs there, and not what started it
        averages = [each for each in averages if each.device_type == DeviceType.CUDA]
    total = sum(getattr(each, clock) for each in averages)
    print("| operation | calls a step | ms a step | share, % |\n| --- | --- | --- | --- |")
    for each in sorted(averages, key=lambda each: -getattr(each, clock))[:rows]:
        took = getattr(each, clock)
        calls, ms = each.count / steps, took / 1e3 / steps
        print(f"| {each.key} | {calls:g} | {ms:.2f} | {100 * took / total:.1f} |")
    products = sum(getattr(each, clock) for each in averages if re.search(PRODUCTS, each.key))
    print(f"| all matrix products | | | {100 * products / total:.1f} |")


def bytes_of_step(model, micro_batches, state, machine):
    """Bytes a step must move: weights, moments and activations in and out, gradients once."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x, y = micro_batches[0]
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, machine.autocast():
        model(x, y)
    weights = sum(p.nbytes for p in state.model.parameters())
    states = [of for each in state.optimizers.values() for of in each.state.values()]
    moments = sum(tensor.nbytes for of in states for tensor in of.values())
    return 3 * weights + 2 * moments + 2 * len(micro_batches) * sum(kept.values())


def read_bandwidth(machine, mib=256):
    """Bytes/s of the median of a few sums of an array that no cache holds."""
    source, seconds = torch.ones(mib * 2**18, device=machine.device), []
    for _ in range(7):
        machine.synchronize()
        start = time.perf_counter()
        source.sum()
        machine.synchronize()
        seconds.append(time.perf_counter() - start)
    return source.nbytes / median(seconds)


def bandwidth(machine, mib=256):
    """Bytes/s of the median of a few copies of an array that no cache holds."""
    source = torch.ones(mib * 2**18, device=machine.device)
    target, seconds = torch.empty_like(source), []
    for _ in range(7):
        machine.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        machine.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / median(seconds)
