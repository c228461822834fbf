"""Writing the ids of one split to partial files of limited length, and their CRC-32."""

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

SHARD_TOKENS = 200_000_000  # of every file of a split except the last, which may have fewer
BUFFER_BYTES = 2**17  # with more, Linux may take longer to allocate memory for the page cache
CRC_POLYNOMIAL = 0xEDB88320  # of CRC-32; its highest bit is the coefficient of x^0


def part_path(folder, split, number):
    """Returns the path of a partial file."""
    return folder / f"{split}_{number:05}.bin.part"


class SplitWriter:
    """The partial files of a split, each with its token count and CRC-32."""

    def __init__(self, folder, name, dtype, state):
        """state: that of an earlier process, or None."""
        self.folder, self.name, self.dtype, self.file = folder, name, dtype, None
        self.thread, self.synced = ThreadPoolExecutor(1), None
        self.bytes = state["bytes"] if state else 0
        self.shards = [dict(shard) for shard in state["shards"]] if state else []

    def reopen(self):
        """Opens the last file at the end of what was committed."""
        if self.shards:
            self.file = open(self._path(), "r+b")  # noqa: SIM115, open until close
            self.file.truncate(self.shards[-1]["tokens"] * self.dtype.itemsize)
            self.file.seek(0, os.SEEK_END)

    def append(self, ids, num_bytes):
        ids, self.bytes = np.ascontiguousarray(ids, self.dtype), self.bytes + num_bytes
        while len(ids):
            if not self.shards or self.shards[-1]["tokens"] == SHARD_TOKENS:
                self._start_shard()
            shard = self.shards[-1]
            taken = ids[: SHARD_TOKENS - shard["tokens"]]
            self.file.write(taken)
            shard["crc32"] = zlib.crc32(taken, shard["crc32"])
            shard["tokens"] += len(taken)
            ids = ids[len(taken) :]

    def _start_shard(self):
        self._wait()
        if self.file:  # another thread syncs it, because this takes long
            self.file.flush()
            self.synced = self.thread.submit(_sync_and_close, self.file)
        self.shards.append({"tokens": 0, "crc32": 0})
        self.file = open(self._path(), "wb", BUFFER_BYTES)  # noqa: SIM115, open until close

    def _path(self):
        return part_path(self.folder, self.name, len(self.shards) - 1)

    def _wait(self):
        """Waits until every shard before the last is on the disk."""
        if self.synced:
            self.synced.result()

    def sync(self):
        self._wait()
        if self.file:
            self.file.flush()
            os.fsync(self.file.fileno())

    def close(self):
        """Closes the file. A full disk is reported by append and sync."""
        self.thread.shutdown()
        if self.file:
            with suppress(OSError):
                self.file.close()

    def state(self):
        """Returns plain data, the argument of a later process."""
        return {"bytes": self.bytes, "shards": [dict(shard) for shard in self.shards]}

    def summary(self):
        """Returns the split's part of meta.json."""
        tokens, crc = 0, 0
        for shard in self.shards:
            tokens += shard["tokens"]
            crc = joined_crc(crc, shard["crc32"], shard["tokens"] * self.dtype.itemsize)
        shards = {"shards": self.shards} if len(self.shards) > 1 else {}
        return {"tokens": tokens, "bytes": self.bytes, "crc32": crc} | shards


def joined_crc(first, second, num_bytes):
    """Returns the CRC-32 of a concatenation from those of its two parts.

    A CRC-32 is a polynomial over GF(2), modulo CRC_POLYNOMIAL: that of the first part is multiplied
    by x^(8 num_bytes), and that of the second is added.

    Args:
        num_bytes: length of the second part.
    """
    power, exponent = 1 << 30, 8 * num_bytes  # x^1
    while exponent:
        if exponent & 1:
            first = _product(first, power)
        power, exponent = _product(power, power), exponent >> 1
    return first ^ second


def _product(a, b):
    """Returns the product of two polynomials over GF(2), modulo CRC_POLYNOMIAL."""
    product = 0
    for place in range(31, -1, -1):
        if a >> place & 1:
            product ^= b
        b = b >> 1 ^ (CRC_POLYNOMIAL if b & 1 else 0)  # b times x
    return product


def _sync_and_close(file):
    with file:
        os.fsync(file.fileno())
