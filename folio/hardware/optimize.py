"""Makes a GPT faster or smaller, in place: for training, and for inference.

Results do not change, except by rounding. Parameters keep their names and values.
"""

import sys
import time
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

from folio.cli.errors import cause_of, is_out_of_memory
from folio.hardware import kernels
from folio.hardware.device import Machine
from model import GPT, CausalSelfAttention

# Training


def optimize_for_training(loss_fn, batch, machine: Machine, world, activation_checkpointing=False):
    """Makes a loss function faster in training: a GPT, or a module whose attribute `model` is one.

    With activation checkpointing (Chen et al. 2016, "Training Deep Nets with Sublinear Memory
    Cost"), each block keeps only its input for the backward pass, which runs the block again, with
    the same dropout. batch: the arguments of loss_fn in training.
    """
    model = getattr(loss_fn, "model", loss_fn)
    use_fast_kernels(model)
    is_compiled = machine.compile and compile_methods(loss_fn, machine)
    if activation_checkpointing:
        for block in model.transformer.h:  # a wrapper would change the names of the parameters
            block.forward = partial(recompute, block.forward, use_reentrant=False)
    if machine.compile:
        is_compiled = is_compiled and run_compiler(loss_fn, batch)
        if not all(world.all_gather_object(is_compiled)):  # it can fail on one machine only
            torch.compiler.set_stance("force_eager")


def use_fast_kernels(model: GPT):
    """Makes a GPT use the attention and dropout of folio/hardware/kernels.py, in place."""
    for module in model.modules():
        if isinstance(module, CausalSelfAttention):
            module.kernel = kernels.fast_attention
        elif type(module) is nn.Dropout:
            module.__class__ = kernels.Dropout  # with the same rate and mode


def compile_methods(model, machine: Machine):
    """Compiles the `compiled_methods` of a model's modules, in place. Returns whether it succeeds.

    Modules of a class share the code, so that a GPT compiles one block instead of all. The first
    calls run the compiler; see run_compiler. torch.compiler.set_stance("force_eager") disables it.
    """
    mode = "max-autotune-no-cudagraphs" if machine.compile == "max-autotune" else None
    # On a CPU, C++ calls the kernels, which takes less time than calling them from Python.
    options: dict | None = {"cpp_wrapper": True} if machine.kind == "cpu" and not mode else None

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


def run_compiler(loss_fn, batch):
    """Makes the first calls of a compiled loss function. Returns whether they succeed.

    `batch` has its arguments in a training step; an evaluation passes inputs and targets only.
    """
    start, has_compiled = time.monotonic(), False
    with continue_on_failure("compilation"):
        # Training is last because an evaluation with FSDP leaves some parameters gathered, and then
        # zero_grad() misses their gradients.
        for training in (False, True):
            loss_fn.train(training)
            with torch.set_grad_enabled(training):
                loss = loss_fn(*batch) if training else loss_fn(*batch[:2])
        loss.backward()
        has_compiled = True
        print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    loss_fn.train()
    loss_fn.zero_grad()
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


# Inference


@torch.no_grad()
def optimize_for_inference(model: GPT, machine: Machine, rows=None) -> GPT:
    """Makes a GPT faster for inference, in place, and unfit for training. Returns the model.

    Removes dropout and, on a CPU, replaces linear layers by others for the dtype of the machine,
    which cannot be compiled. `rows` is the number of texts at a time; None: many.
    """
    model.eval()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Dropout):
                delattr(module, name)  # a function is called in less time than a module
                setattr(module, name, lambda x: x)
            elif isinstance(child, nn.Linear) and child.weight.is_cpu and not machine.compile:
                setattr(module, name, kernels.fast_linear(child, machine.dtype, rows))
    return model


def accelerate(machine: Machine, step, *arguments):
    """Returns a faster version of a function for tensors with the shapes of these arguments."""
    fast = step
    if machine.compile:
        with continue_on_failure("compilation"):
            compiled = torch.compile(step)
            compiled(*arguments)  # runs the compiler
            fast = compiled
    return CudaGraph(fast) if machine.kind == "cuda" else fast


class CudaGraph:
    """A function of tensors whose kernels, from the fourth call on, are launched together.

    Each call must run the same operations with the same Python numbers; values that change must be
    in tensors. If capture fails, calls continue to launch each kernel.
    """

    def __init__(self, function):
        self.function, self.graph = function, None
        self.warmup_calls = 3  # one-time initialization must not be captured
        self.stream = torch.cuda.Stream()  # a different stream from the default

    def __call__(self, *arguments):
        if self.warmup_calls:
            self.warmup_calls -= 1
            return self._call_on_stream(arguments)
        if self.graph is None:
            self.graph = False  # unless it is captured
            with continue_on_failure("CUDA graph capture"):
                self.inputs = [argument.clone() for argument in arguments]  # at fixed addresses
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=self.stream):  # runs no kernel
                    self.outputs = self.function(*self.inputs)
                self.graph = graph
        if not self.graph:
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
