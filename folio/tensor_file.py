"""The safetensors format: named tensors in one file, and no code.

The file starts with the length of the header in 8 bytes. The header is JSON: {name: {dtype, shape,
data_offsets}}, with offsets from its end. Then follow the tensors, row by row. All numbers are
little-endian. Each tensor is read or written on its own, so that memory holds no second copy of
the weights (https://github.com/huggingface/safetensors#format).
"""

import json
import math
from dataclasses import dataclass
from mmap import ACCESS_COPY, ALLOCATIONGRANULARITY, mmap
from pathlib import Path

import torch

from folio.errors import UserError, cause_of, os_error

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
LENGTH_BYTES = 8
LARGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library
METADATA = "__metadata__"


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    path: Path
    dtype: str  # a key of DTYPES, or another one of the format
    shape: tuple
    start: int  # offset in the file, in bytes
    stop: int


def entries(path):
    """Returns {name: Entry} of a file. Raises UserError if it is damaged or cannot be read."""
    path = Path(path)
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little")
            if start > min(size, LARGEST_HEADER):
                raise ValueError(f"a header of {start:,} bytes in a file of {size:,}")
            header = json.loads(file.read(start - LENGTH_BYTES))
        header.pop(METADATA, None)
        found = {name: _entry(path, start, **fields) for name, fields in header.items()}
        if size != max((entry.stop for entry in found.values()), default=start):
            raise ValueError(f"its tensors do not end at its {size:,} bytes")
    except OSError as error:
        raise os_error("read", path, error) from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is damaged or no safetensors file ({cause_of(error)})") from error
    return found


def _entry(path, header_end, dtype, shape, data_offsets):
    start, stop = data_offsets
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop)) or start > stop:
        raise ValueError(f"shape {shape} at {data_offsets}")
    if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != stop - start:
        raise ValueError(f"shape {shape} of {dtype} in {stop - start:,} bytes")
    return Entry(path, dtype, tuple(shape), header_end + start, header_end + stop)


def mapped(entry):
    """Returns a tensor that is mapped from its file, on the CPU; to be copied at once.

    Raises UserError if its dtype is not supported, or if the file cannot be read.
    """
    if entry.dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise UserError(f"{entry.path} has weights of type {entry.dtype}; folio reads {known}")
    dtype, page = DTYPES[entry.dtype], entry.start // ALLOCATIONGRANULARITY * ALLOCATIONGRANULARITY
    if entry.start == entry.stop:  # nothing that could be mapped
        return torch.empty(entry.shape, dtype=dtype)
    try:
        with open(entry.path, "rb") as file:
            memory = mmap(file.fileno(), entry.stop - page, access=ACCESS_COPY, offset=page)
    except ValueError as error:
        raise UserError(f"{entry.path} was changed while it was read") from error
    except OSError as error:
        raise os_error("read", entry.path, error) from error
    return torch.frombuffer(memory, dtype=dtype, offset=entry.start - page).view(entry.shape)


def write(file, dtype, shapes, tensors):
    """Writes a safetensors file.

    Args:
        file: a binary file.
        dtype: a torch.dtype in DTYPES.
        shapes: {name: shape}.
        tensors: an iterable of the tensors in the same order, any dtype.
    """
    name_of = {torch_dtype: name for name, torch_dtype in DTYPES.items()}[dtype]
    header, stop = {METADATA: {"format": "pt"}}, 0
    for name, shape in shapes.items():
        start, stop = stop, stop + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": name_of, "shape": list(shape), "data_offsets": [start, stop]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % LENGTH_BYTES)  # aligns the tensors
    file.write(len(raw).to_bytes(LENGTH_BYTES, "little") + raw)
    for tensor in tensors:
        file.write(_bytes(tensor.to(dtype).contiguous()))


def _bytes(tensor):
    """Returns the memory of a contiguous tensor, as bytes."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())
