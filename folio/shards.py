"""The token files of a split: names, memory maps, checks, and several read like one array."""

import zlib
from contextlib import contextmanager

import numpy as np

from folio.errors import UserError, cause_of, os_error
from folio.files import is_file

DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
READ_BYTES = 64 * 2**20  # of a split at most, which is read completely when it is loaded
SAMPLES, SAMPLE_TOKENS = 32, 2**15  # blocks that are read of a larger split, and their length


def dtype_of(meta):
    """Returns the type of the ids in the .bin files."""
    return DTYPES[meta.get("dtype", "uint16")]


def bin_names(split, entry):
    """Returns the names of the files of a split; `entry` is its part of meta.json."""
    count = len(entry.get("shards", ()))
    return [f"{split}_{number:05}.bin" for number in range(count)] or [f"{split}.bin"]


@contextmanager
def reading(path):
    """Yields `path`. Turns errors in the file, which may contain anything, into UserErrors."""
    is_file(path)  # raises if it is a pipe, which would block
    try:
        yield path
    except OSError as error:
        raise os_error("read", path, error) from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except Exception as error:
        raise UserError(
            f"{path} is damaged ({cause_of(error)}); prepare the dataset again"
        ) from error


def map_split(folder, split, meta):
    """Returns a list of path, memory-mapped ids and CRC-32 (None if unknown) of a split's files."""
    entry, files = meta.get(split, {}), []
    for shard, bin_name in zip(entry.get("shards", [entry]), bin_names(split, entry), strict=True):
        with reading(folder / bin_name) as path:
            ids = np.asarray(np.memmap(path, dtype_of(meta), mode="r"))  # see Shards
            if meta and len(ids) != shard["tokens"]:
                raise ValueError("it does not match meta.json")
            files.append((path, ids, shard["crc32"] if meta else None))
    return files


def check_split(files, vocab_size):
    """Returns a fingerprint of the files that map_split returns. Raises UserError for damage."""
    size, samples = sum(ids.nbytes for _, ids, _ in files), max(2, SAMPLES // len(files))
    found = 0 if size <= READ_BYTES else zlib.crc32(b"%d" % size)
    for path, ids, crc in files:
        with reading(path):
            if size <= READ_BYTES:
                check_ids(ids, vocab_size, crc)
                found = zlib.crc32(ids, found)
                continue
            for start in np.linspace(0, max(0, len(ids) - SAMPLE_TOKENS), samples).astype(int):
                block = ids[start : start + SAMPLE_TOKENS]
                check_ids(block, vocab_size)
                found = zlib.crc32(block, found)
    return found


def check_ids(ids, vocab_size, crc=None):
    """Raises ValueError if ids have another CRC-32, or are not in the vocabulary."""
    if crc not in (None, zlib.crc32(ids)):
        raise ValueError("it does not match meta.json")
    if (largest := ids.max()) >= vocab_size:
        raise ValueError(f"it contains token {largest}, but the vocabulary has {vocab_size}")


class Shards:
    """The ids of a split: a concatenation of arrays that is not made.

    Args:
        arrays: at least one (N,) array of ids, all of one type. Plain views of memory maps are
            faster than np.memmap, whose every slice calls Python code.
    """

    def __init__(self, arrays):
        self.arrays = [np.asarray(array) for array in arrays]
        self._ends = np.cumsum([len(array) for array in self.arrays])
        self._firsts = self._ends - [len(array) for array in self.arrays]

    def __len__(self):
        return int(self._ends[-1])

    def __getitem__(self, window):
        """Returns a copy of the ids in a slice with step 1, (length,)."""
        start, stop, _ = window.indices(len(self))
        places = zip(self._firsts.tolist(), self.arrays, strict=True)
        return np.concatenate(
            [array[max(0, start - first) : max(0, stop - first)] for first, array in places]
        )

    def windows(self, starts, length):
        """Returns the ids of windows, (B, length) int64.

        Args:
            starts: (B,) int64, positions of their first ids; B is at least 1.
        """
        numbers = np.searchsorted(self._ends, starts, side="right")
        offsets = (starts - self._firsts[numbers]).tolist()
        places = zip(numbers.tolist(), offsets, strict=True)
        windows = [self.arrays[number][offset : offset + length] for number, offset in places]
        for n in np.flatnonzero(starts + length > self._ends[numbers]):  # they end in another file
            windows[n] = self[starts[n] : starts[n] + length]
        return np.concatenate(windows, dtype=np.int64).reshape(len(starts), length)
