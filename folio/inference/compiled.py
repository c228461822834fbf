"""One step of generation, compiled ahead of time for a CPU (AOTInductor), in the user's cache.

A compiled file contains the weights and code. So it is not stored next to a checkpoint, which can
come from someone else. It continues batches of one size.
"""

import hashlib
import io
import os
import sys
import time
from contextlib import contextmanager, redirect_stderr
from copy import copy
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from folio.checkpoint.format import build_model
from folio.cli.errors import UserError, os_errors
from folio.cli.settings import ROOT
from folio.hardware.compile import continue_on_failure
from folio.hardware.device import DTYPES, device_type, limit_threads
from folio.inference.generate import KVCache, decode_one
from folio.pretrained.load import load_initial

INDUCTOR_OPTIONS = {
    "freezing": True,
    "max_autotune": True,  # measures which matrix product is faster, oneDNN's or a generated one
    "max_autotune_gemm_backends": "ATEN,CPP",
    "aot_inductor.precompile_headers": False,  # would take 6 s, for headers that are used once
}
MIN_ATTENDED_LENGTH = 2  # torch.export takes a size of 1 for a constant
MAX_CACHED_FILES = 4  # each is as large as the model
COMPILING_HINT = "compiling the model for later runs with --compile; Ctrl-C stops this"


@contextmanager
def use_compiled_step(trained, enabled, batch_size):
    """A context in which a TrainedModel on a CPU continues batches of a size with a compiled step.

    If there is none yet, it is compiled when the context ends, for later runs. The context has no
    effect on another device, or if it is not enabled. Raises UserError if the model is not from a
    file.
    """
    if not enabled or device_type(trained.machine.device) != "cpu":
        yield
        return
    path = compiled_path(trained, batch_size)
    if path.exists():
        with continue_on_failure("loading the compiled step"):
            trained.decode = CompiledStep(path, trained.model.config, batch_size)
    if trained.decode is not decode_one:
        print("using the step that an earlier run compiled", file=sys.stderr)
    yield
    if trained.decode is decode_one:
        compile_for_later(trained, path, batch_size)


def compiled_path(trained, batch_size):
    """Returns the path of the compiled step of a TrainedModel, which may not exist yet.

    It depends on everything that the compiled file does.
    """
    source, files = Path(trained.checkpoint.path), []
    if not source.exists():
        raise UserError(f"on a CPU, --compile needs a checkpoint file, not {source}")
    for file in sorted(source.iterdir()) if source.is_dir() else [source]:
        stat = file.stat()
        files.append((str(file.resolve()), stat.st_size, stat.st_mtime_ns))
    code = [ROOT / "model.py", *sorted((ROOT / "folio").rglob("*.py"))]
    machine = [trained.machine.dtype, torch.get_num_threads(), torch.__version__]
    machine += sorted(torch.cpu.get_capabilities().items())
    key = repr([files, machine, batch_size, [file.read_bytes() for file in code]])
    return cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()}.pt2"


def cache_folder():
    """Returns the folder of compiled files, which is created if it does not exist.

    Raises UserError if another user could have written a file, which would be executed.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = (folder if folder.is_absolute() else Path.home() / ".cache") / "folio"
    with os_errors("write to", folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    stat = folder.stat()
    if hasattr(os, "getuid") and (stat.st_uid != os.getuid() or stat.st_mode & 0o022):
        raise UserError(f"other users own or can write to {folder}: change its owner and mode")
    return folder


@torch.no_grad()
def compile_for_later(trained, path, batch_size):
    """Compiles the step of a TrainedModel to a file, if possible."""
    print(COMPILING_HINT, file=sys.stderr, flush=True)
    start = time.monotonic()
    checkpoint = load_initial(trained.checkpoint.path)  # the loaded model has packed layers
    model = build_model(checkpoint).to(DTYPES[trained.machine.dtype]).eval()
    with (
        continue_on_failure("compilation"),
        TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as folder,
    ):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        output = Path(folder, path.name)
        products = batch_size * model.flops_per_token() / 6
        with limit_threads(products), redirect_stderr(io.StringIO()):
            program = DecodeStep(model.requires_grad_(False), batch_size).export()
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(output), inductor_configs=INDUCTOR_OPTIONS
            )
        output.replace(path)
        print(f"compiled in {time.monotonic() - start:.0f} s", file=sys.stderr)
    newest_last = sorted(path.parent.glob("*.pt2"), key=os.path.getmtime)
    for old_path in newest_last[:-MAX_CACHED_FILES]:
        old_path.unlink(missing_ok=True)


class CompiledStep:
    """A compiled decode_one, for a cache of block_size + 1 positions.

    A batch of another size, such as the last one of a run, is decoded without it.
    torch._inductor.aoti_load_package would do the same, but it imports the compiler first, which
    takes a second.
    """

    def __init__(self, path, config, batch_size):
        self.batch_size = batch_size
        self.runner = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
        self.positions = torch.arange(config.block_size)

    def __call__(self, model, cache, tail, position, length):
        """See decode_one. `tail` must be contiguous."""
        if len(tail) != self.batch_size:
            return decode_one(model, cache, tail, position, length)
        visible = self.positions[: max(length, MIN_ATTENDED_LENGTH)]
        return self.runner.boxed_run([tail, position, visible, *cache.keys, *cache.values])[0]


class DecodeStep(nn.Module):
    """decode_one as a function of tensors only; the length of `visible` stands for `length`.

    The last position of the cache is unused. A slice of all positions would be contiguous, and
    torch.export does not make one program for contiguous and other slices.
    """

    def __init__(self, model, batch_size):
        super().__init__()
        self.model = model
        self.cache = KVCache(model, batch_size, length=model.config.block_size + 1)

    def forward(self, tail, position, visible, keys, values):
        cache, length = copy(self.cache), visible.shape[0]
        cache.keys, cache.values = keys, values
        return decode_one(self.model, cache, tail, position, length, elementwise_attention).float()

    def export(self):
        """Returns the exported program, for any length of `visible`."""
        config, batch_size = self.model.config, len(self.cache.keys[0])
        fixed = [None] * config.n_layer  # the shapes of the cache
        tail = torch.zeros(batch_size, 1 + config.preceding_tokens, dtype=torch.int64)
        position, visible = tail[:, 0].clone(), torch.arange(config.block_size)
        example = (tail, position, visible, self.cache.keys, self.cache.values)
        length = torch.export.Dim("length", min=MIN_ATTENDED_LENGTH, max=config.block_size)
        shapes = (None, None, {0: length}, fixed, fixed)
        return torch.export.export(self, example, dynamic_shapes=shapes)


def elementwise_attention(q, k, v, attn_mask):
    """Attention of one query as elementwise operations, which the compiler fuses.

    q: (B, H, 1, D); k, v: (B, H, length, D); attn_mask: (B, 1, 1, length), added to the scores.
    """
    scores = (q * k).sum(dim=-1) * q.shape[-1] ** -0.5
    weights = (scores + attn_mask[:, :, 0]).softmax(dim=-1)
    return (weights.unsqueeze(-1) * v).sum(dim=2, keepdim=True)
