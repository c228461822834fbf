"""Faster execution of a model: torch.compile, CUDA graphs, packed linear layers."""

import sys
import time
from contextlib import contextmanager
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import nn

from folio.cli.errors import cause_of, is_out_of_memory
from folio.hardware.device import device_type

MAX_FEW_ROWS = 3
PACKED_BATCH_SIZE = 16  # a hint for oneDNN; no other value is faster for 10 or more rows
MIN_PACKED_WEIGHTS = 140_000  # in float32: a call takes 15 us more, which smaller layers lose
# Activations that oneDNN fuses with a matrix product, as (its name, variant).
FUSIBLE = {"gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", "none")}


def compile_model(model, machine):
    """Compiles the `compiled_methods` of a model's modules, in place. Returns whether it succeeds.

    Modules of a class share the code, so that a GPT compiles one block instead of all. The first
    calls run the compiler; see run_compiler. After torch.compiler.set_stance("force_eager"), the
    methods run without compilation.
    """
    mode = "max-autotune-no-cudagraphs" if machine.compile == "max-autotune" else None
    # On a CPU, C++ calls the kernels, which takes less time than calling them from Python.
    options = {"cpp_wrapper": True} if device_type(machine.device) == "cpu" and not mode else None

    @cache
    def compiled(method):
        # The shapes never change.
        return torch.compile(method, mode=mode, options=options, dynamic=False)

    with continue_on_failure("compilation"):
        for module in model.modules():
            for name in getattr(module, "compiled_methods", ()):
                setattr(module, name, partial(compiled(getattr(type(module), name)), module))
        return True
    return False


def run_compiler(forward, model, batch):
    """Makes the first calls of a compiled model, without a step. Returns whether they succeed.

    batch: the arguments of forward() in a training step; an evaluation passes the first two.
    """
    start, has_compiled = time.monotonic(), False
    with continue_on_failure("compilation"):
        # Training is last because an evaluation with FSDP leaves some parameters gathered, and then
        # zero_grad() misses their gradients.
        for training in (False, True):
            model.train(training)
            with torch.set_grad_enabled(training):
                loss = forward(*batch) if training else forward(*batch[:2])
        loss.backward()
        has_compiled = True
        print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    model.train()
    model.zero_grad()
    return has_compiled


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


# Inference


@torch.no_grad()
def optimize_for_inference(model, machine, rows=None):
    """Makes a GPT faster for inference, in place, and unfit for training. Returns the model.

    Removes dropout and, on a CPU, replaces linear layers by others for the dtype of the machine,
    which cannot be compiled. `rows` is the number of texts that are generated at a time; None:
    many.
    """
    model.eval()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Dropout):
                delattr(module, name)  # a function is called in less time than a module
                setattr(module, name, identity)
            elif isinstance(child, nn.Linear) and child.weight.is_cpu and not machine.compile:
                setattr(module, name, fast_linear(child, machine.dtype, rows))
    for block in model.transformer.h:
        activation = FUSIBLE.get(model.config.activation)
        if activation and isinstance(block.mlp.c_fc, PackedLinear):
            block.mlp.c_fc.activation = activation
            block.mlp.activation = identity
    return model


def identity(x):
    return x


def fast_linear(linear, dtype, rows):
    """Returns the fastest layer for the weights of a linear layer on a CPU, or the layer itself."""
    is_large = linear.weight.numel() >= MIN_PACKED_WEIGHTS
    if dtype == "int8":  # with other widths, torch 2.13 reads beyond the weights
        return linear if linear.in_features % 16 else Int8Linear(linear)
    if not torch.backends.mkl.is_available():  # nor, as on Arm, packed products
        return linear
    if dtype == "float32" and rows and rows <= MAX_FEW_ROWS:
        return FewRowsLinear(linear)
    has_bfloat16 = dtype == "bfloat16" and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return PackedLinear(linear) if has_bfloat16 or (dtype == "float32" and is_large) else linear


class PackedLinear(nn.Module):
    """A linear layer and its activation, with weights in oneDNN's blocked layout.

    On two AMD cores, products with 10 rows took 1/2 of nn.Linear's time in float32 and 2/3 in
    bfloat16.
    """

    def __init__(self, linear):
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight, PACKED_BATCH_SIZE)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias, self.activation = linear.bias, ("none", "none")
        self.product = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x):
        activation, variant = self.activation
        return self.product(x, self.weight, self.bias, activation, [], variant)


class FewRowsLinear(nn.Module):
    """A linear layer in float32 that is fast for up to MAX_FEW_ROWS rows.

    MKL multiplies the halves of the weights, as a batch, by the rows as columns. On two AMD cores,
    products with one row took 2/3 of PackedLinear's time.
    """

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        N, K = linear.weight.shape
        self.halves = linear.weight.view(2 - N % 2, -1, K)

    def forward(self, x):
        rows = x.numel() // x.shape[-1]
        if rows > MAX_FEW_ROWS:
            return F.linear(x, self.weight, self.bias)
        columns = x.reshape(rows, -1).t().expand(len(self.halves), -1, -1)
        y = torch.bmm(self.halves, columns).view(-1, rows).t().reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


class Int8Linear(nn.Module):
    """A linear layer with weights in int8 and a scale for each row of them, for x in bfloat16."""

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.float()
        scales = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
        self.weight, self.scales = (weight / scales).round().to(torch.int8), scales[:, 0].bfloat16()
        self.bias = linear.bias

    def forward(self, x):
        y = torch._weight_int8pack_mm(x.flatten(0, -2), self.weight, self.scales)
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias
