"""Writing a dataset folder from a stream of token ids, in constant memory.

Until a dataset is finished, its ids are in NAME.part files next to the old dataset, which stays
complete, and unfinished.json (the journal) describes what was committed.
"""

import json
import os
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from folio.dataset import JOURNAL, SPLITS, meta_checksum
from folio.errors import UserError, os_error
from folio.files import LOCK, is_file, locked, replacing, sync_folder
from folio.shards import DTYPES, bin_names
from folio.split_writer import SplitWriter, part_path
from folio.tokenizers import from_dict


@dataclass(frozen=True)
class Unfinished:
    """What an earlier process had committed. `position` is the argument of its last commit."""

    tokenizer: Any
    position: Any
    journal: dict


def unfinished(folder, key):
    """Returns what an earlier process with an equal key had committed, or None.

    Args:
        key: plain JSON data, as for DatasetWriter.
    """
    if not is_file(folder / JOURNAL):
        return None
    try:
        journal = json.loads((folder / JOURNAL).read_bytes())
        if journal["crc32"] != meta_checksum(journal):
            return None
        if journal["key"] != json.loads(json.dumps(key)):
            return None
        size = np.dtype(journal["dtype"]).itemsize
        for split in SPLITS:
            for number, shard in enumerate(journal["splits"][split]["shards"]):
                path = part_path(folder, split, number)
                if not path.exists():  # renamed by a killed `finish`
                    path = folder / journal["renames"][path.name]
                if path.stat().st_size < shard["tokens"] * size:
                    return None
        return Unfinished(from_dict(journal["tokenizer"]), journal["position"], journal)
    except Exception:  # it may contain anything, or a partial file was removed
        return None


class DatasetWriter:
    """Writes data/NAME from a stream of ids, in constant memory. Can continue after a kill.

    A context manager that holds the lock of the folder. What it writes does not depend on how the
    ids are grouped into calls of append. Its methods raise UserError if the disk is full; what was
    committed can be continued.
    """

    def __init__(self, folder, tokenizer, key, resumed=None):
        """The folder keeps its dataset until `finish`.

        Args:
            key: plain JSON data that identifies the settings and the sources.
            resumed: unfinished(folder, key), to continue from its position. With None, what was
                unfinished is deleted.
        """
        self.folder, self.tokenizer, self.key = folder, tokenizer, key
        self._journal = resumed.journal if resumed else None
        dtype = DTYPES[tokenizer.dtype.name]
        states = resumed.journal["splits"] if resumed else {}
        self._splits = {name: SplitWriter(folder, name, dtype, states.get(name)) for name in SPLITS}

    def __enter__(self):
        with ExitStack() as stack:
            if not os.path.exists(self.folder):  # Path.exists raises for a name that is too long
                stack.callback(self._remove_empty_folder)
            stack.enter_context(locked(self.folder))
            stack.callback(self._close)
            with self._writing():
                self._check_journal()
                self._restore() if self._journal else self._delete_unfinished()
                for split in self._splits.values():
                    split.reopen()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def _check_journal(self):
        """Raises UserError if another process has changed the journal since it was read."""
        path = self.folder / JOURNAL
        if self._journal and not (is_file(path) and json.loads(path.read_bytes()) == self._journal):
            raise UserError(f"another process has just written to {self.folder}: try again")

    def append(self, split, ids, num_bytes):
        """Appends ids to a split.

        Args:
            split: "train" or "val".
            ids: (N,) array of any integer type.
            num_bytes: UTF-8 bytes of the text that they encode, without separators.
        """
        with self._writing():
            self._splits[split].append(ids, num_bytes)

    def commit(self, position):
        """Makes everything so far durable: a kill loses nothing before this call.

        Args:
            position: plain JSON data, for Unfinished.position.
        """
        with self._writing():
            for split in self._splits.values():
                split.sync()
        self._journal = {
            "key": self.key,
            "tokenizer": self.tokenizer.to_dict(),
            "dtype": self.tokenizer.dtype.name,
            "position": position,
            "splits": {name: split.state() for name, split in self._splits.items()},
            "renames": {},
        }
        self._write_journal()

    def finish(self, source, source_sha256):
        """Puts the dataset in place of an old one. Returns the content of meta.json.

        Raises UserError if a split has fewer than 2 tokens.

        Args:
            source: description of the text.
            source_sha256: its hash.
        """
        splits = {name: split.summary() for name, split in self._splits.items()}
        num_bytes = sum(split["bytes"] for split in splits.values())
        for name, split in splits.items():
            if split["tokens"] < 2:
                self._delete_unfinished()
                raise UserError(
                    f"{source} is too short to split: its {num_bytes} bytes leave "
                    f"{split['tokens']} tokens for {name}.bin, which needs at least 2"
                )
        meta = {
            "format": 2 if any("shards" in split for split in splits.values()) else 1,
            "tokenizer": self.tokenizer.to_dict(),
            "vocab_size": self.tokenizer.vocab_size,
            "dtype": self.tokenizer.dtype.name,
            "source": source,
            "source_sha256": source_sha256,
        } | splits
        meta["crc32"] = meta_checksum(meta)
        with self._writing():
            for split in self._splits.values():
                split.sync()
                split.close()
            self._put_in_place(meta)
        return meta

    def _put_in_place(self, meta):
        """Renames the files. If it is killed, files are missing until another process continues."""
        renames = {
            part_path(self.folder, split, number).name: name
            for split in SPLITS
            for number, name in enumerate(bin_names(split, meta[split]))
        }
        if self._journal:
            self._journal["renames"] = renames
            self._write_journal()
        # meta.json is first: without it, the others would be read as nanoGPT's.
        with replacing(self.folder / "meta.json") as [file]:
            file.write(json.dumps(meta, indent=1).encode())
        for path in _bins(self.folder, ".bin"):  # a mixture with the old dataset could be valid
            path.unlink()
        for part, name in renames.items():
            os.replace(self.folder / part, self.folder / name)
        sync_folder(self.folder)
        (self.folder / JOURNAL).unlink(missing_ok=True)
        self._journal = None

    def _restore(self):
        """Undoes the renames of a killed `finish`."""
        for part, name in self._journal["renames"].items():
            if not (self.folder / part).exists():
                os.replace(self.folder / name, self.folder / part)

    def _delete_unfinished(self):
        (self.folder / JOURNAL).unlink(missing_ok=True)  # first: it describes the others
        self._journal = None
        for path in _bins(self.folder, ".bin.part"):
            path.unlink()

    def _write_journal(self):
        self._journal.pop("crc32", None)
        self._journal["crc32"] = meta_checksum(self._journal)
        with replacing(self.folder / JOURNAL) as [file]:
            file.write(json.dumps(self._journal).encode())

    def _close(self):
        for split in self._splits.values():
            split.close()
        if not self._journal:
            with suppress(OSError):  # the folder may be read-only
                self._delete_unfinished()

    def _remove_empty_folder(self):
        with suppress(OSError):
            if {path.name for path in self.folder.iterdir()} <= {LOCK}:
                (self.folder / LOCK).unlink(missing_ok=True)
                self.folder.rmdir()

    @contextmanager
    def _writing(self):
        """Turns an OSError into a UserError."""
        try:
            yield
        except OSError as error:
            raise os_error("write", error.filename or self.folder, error) from error


def _bins(folder, suffix):
    """Returns the paths of the files of any dataset in a folder with these ids."""
    numbers = ("", "_" + 5 * "[0-9]")
    patterns = (f"{split}{number}{suffix}" for split in SPLITS for number in numbers)
    return [path for pattern in patterns for path in folder.glob(pattern)]
