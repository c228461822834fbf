"""Writing a dataset folder from a stream of token ids, in constant memory."""

import json
import zlib
from contextlib import contextmanager

import numpy as np

from folio.cli.errors import UserError
from folio.cli.files import lock_folder, write_atomically
from folio.data.dataset import DTYPES, FORMAT, SPLITS, meta_checksum


@contextmanager
def open_writer(folder, tokenizer):
    """Yields a DatasetWriter while it holds the lock of the folder.

    The files are written beside those of an old dataset, which stays complete until they replace it
    when the context ends. Raises UserError if the disk is full.
    """
    # meta.json is renamed first: without it, the others would be read as nanoGPT's. If renaming is
    # interrupted, its checksums are not those of the old splits.
    meta_path, split_paths = folder / "meta.json", [folder / f"{split}.bin" for split in SPLITS]
    with lock_folder(folder), write_atomically(meta_path, *split_paths) as files:
        yield DatasetWriter(files, tokenizer)


class DatasetWriter:
    """Writes token ids to the files of a dataset: meta.json and one of each split."""

    def __init__(self, files, tokenizer):
        self.tokenizer, self.dtype = tokenizer, DTYPES[tokenizer.dtype.name]
        self.meta_file, *split_files = files
        self.files = dict(zip(SPLITS, split_files, strict=True))
        self.splits = {split: {"tokens": 0, "bytes": 0, "crc32": 0} for split in SPLITS}

    def append(self, split, ids, num_bytes):
        """Appends `ids`, (N,) of any integer type, to a split.

        They encode `num_bytes` UTF-8 bytes of text, without separators.
        """
        ids = np.ascontiguousarray(ids, self.dtype)
        entry = self.splits[split]
        self.files[split].write(ids)
        entry["tokens"] += len(ids)
        entry["bytes"] += num_bytes
        entry["crc32"] = zlib.crc32(ids, entry["crc32"])

    def finish(self, source, source_sha256, test_fraction=0.0):
        """Writes meta.json, with the description and the hash of the corpus. Returns its content.

        `test_fraction` is the part of the corpus that is in test.txt.

        Raises UserError if a split has fewer than 2 tokens.
        """
        num_bytes = sum(entry["bytes"] for entry in self.splits.values())
        for split, entry in self.splits.items():
            if entry["tokens"] < 2:
                raise UserError(
                    f"{source} is too short to split: its {num_bytes} bytes leave "
                    f"{entry['tokens']} tokens for {split}.bin, which needs at least 2"
                )
        meta = {
            "format": FORMAT,
            "tokenizer": self.tokenizer.to_dict(),
            "vocab_size": self.tokenizer.vocab_size,
            "dtype": self.tokenizer.dtype.name,
            "source": source,
            "source_sha256": source_sha256,
            "test_fraction": test_fraction,
            **self.splits,
        }
        meta["crc32"] = meta_checksum(meta)
        self.meta_file.write(json.dumps(meta, indent=1).encode())
        return meta
