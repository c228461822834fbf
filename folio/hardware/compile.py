"""Faster execution of a model: torch.compile, CUDA graphs, packed linear layers."""

import sys
import time
from contextlib import contextmanager

import torch
from torch import nn

from folio.cli.errors import cause_of
from folio.hardware.device import device_type
from folio.hardware.memory import is_out_of_memory

PACKED_BATCH_SIZE = 16  # a hint for oneDNN; no other value is faster for 10 or more rows
MIN_PACKED_WEIGHTS = 140_000  # in float32: a call takes 15 us more, which smaller layers lose
# Activations that oneDNN fuses with a matrix product, as (its name, variant).
FUSIBLE = {"gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", "none")}


def compile_model(model, machine, batch):
    """Returns `model` compiled for training and evaluation, or `model` if compilation fails.

    batch: the arguments of forward() in a training step; an evaluation passes the first two.
    """
    mode = "max-autotune-no-cudagraphs" if machine.compile == "max-autotune" else None
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
            with torch.set_grad_enabled(training):
                loss = compiled(*batch) if training else compiled(*batch[:2])
        loss.backward()
        forward = compiled
    if forward is not model:
        print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    model.train()
    model.zero_grad()
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
        return CudaGraph(fast) if on_cuda else fast

    return accelerate


class CudaGraph:
    """A function of tensors whose kernels, from the fourth call on, are launched together.

    Each call must run the same operations with the same Python numbers; values that change must be
    in tensors. If capture fails, calls continue to launch each kernel.
    """

    def __init__(self, function):
        self.function, self.graph, self.has_failed = function, None, False
        self.warmup_calls = 3  # one-time initialization must not be captured
        self.stream = torch.cuda.Stream()  # capture needs another one than the default

    def __call__(self, *arguments):
        if self.warmup_calls:
            self.warmup_calls -= 1
            return self._call_on_stream(arguments)
        if not (self.graph or self.has_failed):
            self.has_failed = True
            with continue_on_failure("CUDA graph capture"):
                self._capture(arguments)
                self.has_failed = False
        if self.has_failed:
            return self.function(*arguments)
        for target, source in zip(self.inputs, arguments, strict=True):
            target.copy_(source)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)

    def _call_on_stream(self, arguments):
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            outputs = self.function(*arguments)
        torch.cuda.current_stream().wait_stream(self.stream)
        return outputs

    def _capture(self, arguments):
        """Records the kernels of a call, without running them."""
        self.inputs = [argument.clone() for argument in arguments]  # at fixed addresses
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self.outputs = self.function(*self.inputs)
        self.graph = graph


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
def optimize_for_inference(model, can_pack=True):
    """Makes a GPT faster for inference, in place, and unfit for training. Returns the model.

    Removes dropout and, on a CPU, packs linear layers, which cannot be compiled.
    """
    model.eval()
    activation = FUSIBLE.get(model.config.activation)
    for block in model.transformer.h:
        if can_pack and activation and should_pack(block.mlp.c_fc):
            block.mlp.c_fc = PackedLinear(block.mlp.c_fc, *activation)
            block.mlp.activation = identity
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Dropout):
                delattr(module, name)  # a function is called in less time than a module
                setattr(module, name, identity)
            elif can_pack and isinstance(child, nn.Linear) and should_pack(child):
                setattr(module, name, PackedLinear(child))
    return model


def identity(x):
    return x


def should_pack(linear):
    """Whether oneDNN has faster packed products for a layer. The CPU must be x86 with MKL."""
    dtype, is_large = linear.weight.dtype, linear.weight.numel() >= MIN_PACKED_WEIGHTS
    if linear.weight.device.type != "cpu" or not torch.backends.mkl.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 and is_large
