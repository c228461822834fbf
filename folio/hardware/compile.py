"""Faster execution of a model: torch.compile, CUDA graphs, packed linear layers."""

import sys
import time
from contextlib import contextmanager

import torch
from torch import nn

from folio.cli.errors import cause_of
from folio.hardware.device import device_type, uses_cuda_graphs
from folio.hardware.memory import is_out_of_memory

PACKED_BATCH_SIZE = 16  # a hint for oneDNN; no other value is faster for 10 or more rows
# Activations that oneDNN fuses with a matrix product, as (its name, variant).
FUSIBLE = {"gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", "none")}


def compile_model(model, machine, batch):
    """Returns `model` compiled for training and evaluation, or `model` if compilation fails.

    With CUDA graphs, every parameter gets a gradient tensor, which must be kept. Otherwise autograd
    would use the output of a graph as the gradient, which the next run of the graph overwrites.

    batch: the arguments of forward() in a training step; an evaluation passes the first two.
    """
    mode = machine.compile if uses_cuda_graphs(machine.compile) else None
    # On a CPU, C++ calls the kernels, which takes less time than calling them from Python.
    options = {"cpp_wrapper": True} if device_type(machine.device) == "cpu" and not mode else None
    forward, start = model, time.monotonic()
    with continue_on_failure("compilation"):
        # The shapes never change.
        compiled = torch.compile(model, mode=mode, options=options, dynamic=False)
        # The first calls run the compiler. Training is last because an evaluation with FSDP leaves
        # some parameters gathered, and then zero_grad() misses their gradients.
        for training in (False, True):
            model.train(training)
            with machine.autocast(), torch.set_grad_enabled(training):
                loss = compiled(*batch) if training else compiled(*batch[:2])
        loss.backward()
        forward = compiled
    if forward is not model:
        print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    model.train()
    for parameter in model.parameters():
        has_gradient = mode and parameter.requires_grad  # a teacher's parameters do not
        parameter.grad = torch.zeros_like(parameter) if has_gradient else None
    return forward


@contextmanager
def continue_on_failure(action):
    """A context that prints exceptions to stderr and suppresses them, except out-of-memory ones."""
    try:
        yield
    except Exception as error:  # a missing or broken toolchain can raise anything
        if is_out_of_memory(error):
            raise
        print(f"{action} failed; continuing without it ({cause_of(error)})", file=sys.stderr)


def step_accelerator(machine):
    """Returns a function accelerate(step, *arguments), or None if the machine has no use for it.

    It returns a faster version of `step` for tensors with the shapes of the arguments.
    """
    on_cuda = device_type(machine.device) == "cuda"
    if not (machine.compile or on_cuda):
        return None

    def accelerate(step, *arguments):
        fast = step
        if machine.compile:
            with continue_on_failure("compilation"):
                compiled = torch.compile(step)
                compiled(*arguments)  # runs the compiler
                fast = compiled
        if on_cuda:
            with continue_on_failure("CUDA graph capture"):
                return capture_cuda_graph(fast, *arguments)
        return fast

    return accelerate


def capture_cuda_graph(step, *arguments):
    """Returns a function that runs `step` as a CUDA graph, which launches all kernels at once."""
    inputs = [argument.clone() for argument in arguments]  # a graph always uses the same addresses
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # one-time initialization must not be captured
        for _ in range(3):
            step(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step(*inputs)

    def replay(*arguments):
        for target, source in zip(inputs, arguments, strict=True):
            target.copy_(source)
        graph.replay()
        return tuple(output.clone() for output in outputs)

    return replay


class PackedLinear(nn.Module):
    """A linear layer and its activation, with weights in oneDNN's blocked layout.

    On two AMD cores, products with 10 rows took 1/2 of nn.Linear's time in float32 and 2/3 in
    bfloat16.
    """

    def __init__(self, linear, activation="none", variant="none"):
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight, PACKED_BATCH_SIZE)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias, self.activation, self.variant = linear.bias, activation, variant
        self.product = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x):
        return self.product(x, self.weight, self.bias, self.activation, [], self.variant)


@torch.no_grad()
def optimize_for_inference(model):
    """Makes a GPT faster for inference, in place, and unfit for training. Returns the model.

    Removes dropout and, on a CPU, packs linear layers.
    """
    model.eval()
    weight = model.transformer.wte.weight
    can_pack = weight.device.type == "cpu" and supports_packing(weight.dtype)
    if can_pack and model.config.activation in FUSIBLE:
        activation, variant = FUSIBLE[model.config.activation]
        for block in model.transformer.h:
            block.mlp.c_fc = PackedLinear(block.mlp.c_fc, activation, variant)
            block.mlp.activation = identity
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Dropout):
                delattr(module, name)  # a function is called in less time than a module
                setattr(module, name, identity)
            elif can_pack and isinstance(child, nn.Linear):
                setattr(module, name, PackedLinear(child))
    return model


def identity(x):
    return x


def supports_packing(dtype):
    """Whether oneDNN has packed products in a dtype on this CPU, which must be x86 with MKL."""
    if dtype == torch.bfloat16 and torch.backends.mkl.is_available():
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 and torch.backends.mkl.is_available()
