"""Compiled steps of models on a CPU, in the user's cache folder: which one to load or to make.

The folder is not next to a checkpoint, because a checkpoint can come from someone else, and a
compiled file contains code.
"""

import hashlib
import os
import shutil
import signal
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from folio.aot import CompiledStep, compile_in_process
from folio.compile import continue_on_failure
from folio.device import kind_of, useful_threads
from folio.errors import UserError
from folio.files import replacing
from folio.settings import ROOT

KEPT = 4  # compiled files; each is as large as the model
MODULES = ("generate", "aot", "kernels", "checkpoint")
CODE = ("model.py", *(f"folio/{name}.py" for name in MODULES))
HINT = "compiling the model for later runs with --compile; Ctrl-C skips this"
BATCH_HINT = (
    "on a CPU, --compile applies to one text at a time: use --stream, or one prompt with "
    "--num_samples=1"
)


@contextmanager
def compiled_step(trained, one_text):
    """A context in which texts of a TrainedModel on a CPU are continued by a compiled step.

    If there is none yet, it is compiled when the context ends, for later runs.

    Args:
        one_text: whether each batch has only one text.
    """
    path = None
    if kind_of(trained.machine.device) == "cpu":
        if one_text:
            with continue_on_failure("compilation"):
                path = path_of(trained)
                trained.decode = load(path, trained.model.config) or trained.decode
        else:
            print(BATCH_HINT, file=sys.stderr)
    yield
    if path and not isinstance(trained.decode, CompiledStep):
        make(trained, path)


def path_of(trained):
    """Returns where the compiled step of a TrainedModel is stored, if it is."""
    source, threads = source_of(trained)
    parts = [trained.machine.dtype, threads, torch.__version__]
    parts += [torch.backends.cpu.get_cpu_capability(), sorted(torch.cpu.get_capabilities().items())]
    for file in sorted(source.iterdir()) if source.is_dir() else [source]:
        stat = file.stat()
        parts.append((str(file), stat.st_size, stat.st_mtime_ns))
    parts += [(ROOT / file).read_bytes() for file in CODE]
    return cache_folder() / f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.so"


def source_of(trained):
    """Returns the path of a TrainedModel's checkpoint and its number of threads."""
    path = Path(trained.checkpoint.path).resolve()
    if not path.exists():
        raise UserError(f"on a CPU, --compile needs a checkpoint file, not {path.name}")
    with useful_threads(trained.model.num_params()):
        return path, torch.get_num_threads()


def cache_folder():
    """Returns the folder of compiled files, which is created if it does not exist."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = (folder if folder.is_absolute() else Path.home() / ".cache") / "folio"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(folder)
    return folder


def check_owner(path):
    """Raises UserError if another user could have written a file or folder."""
    stat = path.stat()
    if hasattr(os, "getuid") and (stat.st_uid != os.getuid() or stat.st_mode & 0o022):
        raise UserError(f"other users own or can write to {path}")


def load(path, config):
    """Returns the CompiledStep in a file; None if there is none, or if it cannot be loaded."""
    with continue_on_failure("loading the compiled step"):
        if path.exists():
            check_owner(path)
            step = CompiledStep(path, config)
            print("using the step that an earlier run compiled", file=sys.stderr)
            return step
    return None


def make(trained, path):
    """Compiles the step of a TrainedModel to a file. Ctrl-C ends this without an error."""
    start = time.monotonic()
    try:
        with (
            continue_on_failure("compilation"),
            TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        ):
            source, threads = source_of(trained)
            print(HINT, file=sys.stderr, flush=True)
            compiled = compile_in_process(source, trained.machine.dtype, threads, folder)
            if path_of(trained) != path:
                raise UserError(f"{source} has changed")
            with replacing(path) as [file], compiled.open("rb") as code:
                Path(file.name).chmod(0o700)  # see check_owner
                shutil.copyfileobj(code, file)
            prune(path.parent)
            print(f"compiled in {time.monotonic() - start:.0f} s", file=sys.stderr)
    except KeyboardInterrupt as interrupt:
        if getattr(interrupt, "number", signal.SIGINT) != signal.SIGINT:
            raise


def prune(folder):
    """Removes all but the newest compiled files."""
    with suppress(OSError):  # another run may remove the same files
        for file in sorted(folder.glob("*.so"), key=os.path.getmtime)[:-KEPT]:
            file.unlink()
