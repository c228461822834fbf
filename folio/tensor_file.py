"""Files of the safetensors library: named tensors, and no code."""

import json
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from folio.errors import UserError, cause_of, os_error
from folio.memory import is_out_of_memory

DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}  # that are written


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
        from safetensors import safe_open  # imported here because it is optional

        with safe_open(path, framework="pt") as file:
            yield file
    except ImportError as error:
        raise UserError("reading Hugging Face folders needs: pip install safetensors") from error
    except OSError as error:
        raise os_error("read", path, error) from error
    except Exception as error:  # a damaged file can raise anything
        if is_out_of_memory(error):
            raise
        raise UserError(f"{path} is damaged or no safetensors file ({cause_of(error)})") from error


def write(file, tensors):
    """Writes {name: tensor} to a binary file, one tensor at a time.

    The library would need another file or a copy of all tensors. The format is the length of a JSON
    header, the header and the data (https://github.com/huggingface/safetensors#format).
    """
    header, stop = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        start, stop = stop, stop + tensor.nbytes
        shape, offsets = list(tensor.shape), [start, stop]
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": offsets}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)  # aligns the data
    file.write(len(raw).to_bytes(8, "little") + raw)
    for tensor in tensors.values():
        file.write(tensor.reshape(-1).view(torch.uint8).numpy())
