"""Compilation of one step of generation ahead of time, for a CPU (AOTInductor).

The compiled code contains the weights. It continues one text; for more texts, steps with packed
linear layers (folio/compile.py) are as fast. folio/step_cache.py keeps compiled files.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from copy import copy
from pathlib import Path

import torch
from torch import nn

from folio import checkpoint as checkpoints
from folio.device import DTYPES
from folio.errors import UserError, cause_of
from folio.generate import KVCache, decode_one
from folio.initial import load_initial
from folio.settings import ROOT

OPTIONS = {
    "freezing": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP",
    "aot_inductor.precompile_headers": False,  # would take 6 s, for headers that are used once
}
LEAST = 2  # positions that attention covers; torch.export takes a size of 1 for a constant


class CompiledStep:
    """A compiled decode_one, for one text and a cache of block_size + 1 positions."""

    def __init__(self, path, config):
        self.runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1)
        self.columns = torch.arange(max(config.block_size, LEAST))

    def __call__(self, model, cache, tail, position, length):
        """See decode_one; `model` is ignored."""
        visible = self.columns[: max(length, LEAST)]
        return self.runner.run([tail, position, visible, *cache.keys, *cache.values])[0]


class Step(nn.Module):
    """decode_one as a function of tensors. `visible` is as long as the attended part of the cache.

    The last position of the cache is unused. A slice of all positions would be contiguous, and
    torch.export does not make one program for contiguous and other slices.
    """

    def __init__(self, model):
        super().__init__()
        self.model, size = model, model.config.block_size
        self.cache = KVCache(model.config, 1, "cpu", length=size + 1)

    def forward(self, tail, position, visible, keys, values):
        cache, length = copy(self.cache), visible.shape[0]
        cache.keys, cache.values = keys, values
        return decode_one(self.model, cache, tail, position, length, elementwise_attention).float()

    def export(self):
        """Returns the exported program and the arguments of an example."""
        size, layers = self.model.config.block_size, self.model.config.n_layer
        tail = torch.zeros(1, 1 + self.model.config.receptive_field, dtype=torch.int64)
        position, visible = torch.zeros(1, dtype=torch.int64), torch.arange(max(size, LEAST))
        example = (tail, position, visible, self.cache.keys, self.cache.values)
        changing = {0: torch.export.Dim("length", min=LEAST, max=size)} if size > LEAST else None
        shapes = (None, None, changing, [None] * layers, [None] * layers)
        return torch.export.export(self, example, dynamic_shapes=shapes), example


def elementwise_attention(q, k, v, attn_mask):
    """Attention of one query as elementwise operations, which the compiler fuses.

    q: (B, H, 1, D); k, v: (B, H, length, D); attn_mask: (B, 1, 1, length).
    """
    scores = (q * k).sum(dim=-1) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~attn_mask[:, :, 0], -torch.inf).softmax(dim=-1)
    return (weights.unsqueeze(-1) * v).sum(dim=2, keepdim=True)


@torch.no_grad()
def compile_checkpoint(source, dtype, threads, output):
    """Compiles the step of a checkpoint's model to the file `output`."""
    torch.set_num_threads(int(threads))
    model = checkpoints.build_model(load_initial(source)).to(DTYPES[dtype]).eval()
    program, example = Step(model.requires_grad_(False)).export()
    options = OPTIONS | {"aot_inductor.output_path": output}
    torch._inductor.aot_compile(program.module(), example, options=options)
    CompiledStep(output, model.config)  # raises if it cannot be loaded


def compile_in_process(source, dtype, threads, folder):
    """Compiles in another process, for the compiler's memory and messages.

    Returns the path of the result, in `folder`. Raises UserError if the compiler fails.
    """
    output = Path(folder, "step.so")
    child = subprocess.Popen(
        [sys.executable, "-m", "folio.aot", *map(str, (source, dtype, threads, output))],
        cwd=ROOT,
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,  # to end it with the compiler's processes
    )
    try:
        messages = child.communicate()[1].decode(errors="replace").strip()
    except BaseException:
        with suppress(ProcessLookupError):  # it has just ended
            if hasattr(os, "killpg"):
                os.killpg(child.pid, signal.SIGKILL)
            else:
                child.kill()
        child.wait()
        raise
    if child.returncode:
        raise UserError(messages.splitlines()[-1] if messages else "the compiler crashed")
    return output


if __name__ == "__main__":
    try:
        compile_checkpoint(*sys.argv[1:])
    except Exception as error:  # a missing or broken toolchain can raise anything
        sys.exit(cause_of(error))
