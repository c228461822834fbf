"""Files of the safetensors library: named tensors, and no code."""

import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from folio.errors import UserError, cause_of, os_error
from folio.memory import is_out_of_memory


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    path: Path
    name: str
    shape: tuple


def entries(path):
    """Returns {name: Entry} of a file. Raises UserError if it is damaged or cannot be read."""
    path = Path(path)
    with _opened(path) as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return {name: Entry(path, name, shape) for name, shape in shapes.items()}


def mapped(entry):
    """Returns a tensor on the CPU, mapped from its file.

    Raises UserError if it does not hold floating-point numbers, or if the file cannot be read.
    """
    with _opened(entry.path) as file:  # once per tensor, so that no more than one is in memory
        tensor = file.get_tensor(entry.name)
    if not tensor.is_floating_point():
        raise UserError(f"{entry.path} has weights of type {tensor.dtype}, not floating point")
    return tensor


@contextmanager
def _opened(path):
    try:
        with _library().safe_open(path, framework="pt") as file:
            yield file
    except UserError:
        raise
    except OSError as error:
        raise os_error("read", path, error) from error
    except Exception as error:  # a damaged file can raise anything
        if is_out_of_memory(error):
            raise
        raise UserError(f"{path} is damaged or no safetensors file ({cause_of(error)})") from error


def write(path, tensors):
    """Writes {name: contiguous tensor}, and syncs the file to disk. Raises UserError."""
    _library()
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    except SafetensorError as error:
        raise UserError(f"cannot write {path}: {cause_of(error)}") from error


def _library():
    try:
        import safetensors  # imported here because it is optional
    except ImportError as error:
        raise UserError("Hugging Face folders need: pip install safetensors") from error
    return safetensors
