"""The format of a dataset folder: data/NAME/{train.bin, val.bin, meta.json}.

The .bin files hold little-endian token ids: uint16, as nanoGPT's do, or uint32 for more than 65,536
ids. meta.json holds the format version, the tokenizer, the vocabulary size, the type of the ids,
token counts, byte counts and CRC-32 of each split, the source of the text, and a CRC-32 of itself.
A dataset with a test text also has test.txt. Each file is written as NAME.new. When meta.json.new
exists, all are complete and replace those of an earlier dataset.
nanoGPT's folders have a meta.pkl with the vocabulary size and usually the text of each token, or
neither file if they hold GPT-2 tokens.
"""

import dataclasses
import json
import os
import pickle
import zlib
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from folio.cli.errors import UserError, as_user_error, check_types, os_errors, suggest
from folio.cli.files import lock_folder
from folio.data.tokenizer import CharTokenizer, GPT2Tokenizer, ListTokenizer, Tokenizer, from_dict

FORMAT = 1
SPLITS = ("train", "val")
FILES = ("train.bin", "val.bin", "test.txt", "meta.json")  # in the order in which they are replaced
DATA_FOLDER = Path("data")
MAX_CHECKED_TOKENS = 2**25  # of a larger split, only these and its size are checked


@dataclass(frozen=True)
class Dataset:
    """A prepared dataset."""

    name: str
    train: Any  # (N,) uint16 or uint32, memory-mapped if they are many; after `to`, a Split
    val: Any  # the same
    tokenizer: Tokenizer
    fingerprint: dict  # {split: CRC-32 of its bytes}; see load_dataset for nanoGPT's
    train_bytes: int  # of the training text; of nanoGPT's, the number of tokens

    @property
    def summary(self):
        tokens = f"{len(self.train):,} training and {len(self.val):,} validation tokens"
        return f"{self.name}, {tokens}, vocabulary {self.tokenizer.vocab_size:,}"

    @cached_property
    def byte_lengths(self):
        """Tokenizer.byte_lengths(), or None if the tokenizer's files are missing."""
        try:
            return self.tokenizer.byte_lengths()
        except UserError:
            return None

    def to(self, device):
        """Returns a copy whose splits are Splits on a device."""
        from folio.data.batches import Split  # here, because prepare.py does not need torch

        train, val = Split(self.train, device), Split(self.val, device)
        return dataclasses.replace(self, train=train, val=val)

    def check_length(self, block_size):
        """Raises UserError if a split is too short for the context length."""
        for split in SPLITS:
            count = len(getattr(self, split))
            if count <= block_size:
                cause = f"{split}.bin of {self.name} has {count:,} tokens, fewer than the"
                advice = "use more text or a smaller --block_size"
                raise UserError(f"{cause} {block_size + 1:,} of block_size + 1; {advice}")


def dataset_folder(name):
    """Returns data/NAME. Raises UserError if `name` is not a plain folder name."""
    if not name or name in (".", "..") or set(name) & set('/\\:*?"<>|') or not name.isprintable():
        raise UserError(f"the name of a dataset must be a plain folder name, not {name!r}")
    return DATA_FOLDER / name


def meta_checksum(meta):
    """Returns the CRC-32 of everything in a meta.json except its own checksum."""
    content = {key: value for key, value in meta.items() if key != "crc32"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def load_dataset(name) -> Dataset:
    """Returns the Dataset in data/NAME, folio's or nanoGPT's.

    Raises UserError if a file is missing, damaged or does not match the others. Only the size and
    the first MAX_CHECKED_TOKENS of a split are checked. The fingerprint of a larger split of
    nanoGPT's is the CRC-32 of these and of the number of tokens as decimal digits.
    """
    folder = dataset_folder(name)
    meta, tokenizer = _read_meta(folder)
    splits = {split: _read_ids(folder / f"{split}.bin", tokenizer.dtype) for split in SPLITS}
    if meta != _read_meta(folder)[0]:  # it was replaced meanwhile
        return load_dataset(name)
    fingerprint = {}
    for split, ids in splits.items():
        path = folder / f"{split}.bin"
        checked_ids = ids[:MAX_CHECKED_TOKENS]
        largest, crc, size = checked_ids.max(), zlib.crc32(checked_ids), tokenizer.vocab_size
        if not meta:  # forks of nanoGPT write other types
            _check_type(path, checked_ids)
        if largest >= size:
            raise _unusable(path, f"it contains token {largest}, but the vocabulary has {size}")
        if len(ids) > len(checked_ids):
            crc = meta[split]["crc32"] if meta else zlib.crc32(b"%d" % len(ids), crc)
        if meta and (len(ids), crc) != (meta[split]["tokens"], meta[split]["crc32"]):
            raise _unusable(path, "it does not match meta.json")
        fingerprint[split] = crc
    if tokenizer.end not in splits["train"][:MAX_CHECKED_TOKENS]:  # models do not learn it
        tokenizer.start = tokenizer.start or "\n"
    train_bytes = meta["train"]["bytes"] if meta else len(splits["train"])
    return Dataset(name, splits["train"], splits["val"], tokenizer, fingerprint, train_bytes)


def load_tokenizer(name) -> Tokenizer:
    """Returns the tokenizer of data/NAME: from meta.json, nanoGPT's meta.pkl, or else GPT-2's."""
    return _read_meta(dataset_folder(name))[1]


def finish_replacement(folder):
    """Moves the files of a complete new dataset to their places. The caller holds the lock.

    After an interruption, the next call continues: meta.json.new is moved last.
    """
    with os_errors("replace", folder):
        old, new = (read_valid_meta(folder / name) for name in ("meta.json", "meta.json.new"))
        if not new:
            return
        if not new["test_fraction"]:  # test.txt.new is empty
            (folder / "test.txt.new").unlink(missing_ok=True)
            if old.get("test_fraction"):
                (folder / "test.txt").unlink(missing_ok=True)
        for name in FILES:
            with suppress(FileNotFoundError):  # it has been moved
                os.replace(folder / f"{name}.new", folder / name)


def read_valid_meta(path):
    """Returns the content of a meta.json, {} if it is missing or damaged."""
    meta = None
    with os_errors("read", path), suppress(FileNotFoundError, ValueError, RecursionError):
        meta = json.loads(path.read_bytes())
    is_valid = isinstance(meta, dict) and meta.get("crc32") == meta_checksum(meta)
    return meta if is_valid else {}


def _read_meta(folder):
    """Returns the content of meta.json, or {} for nanoGPT's folders, and the tokenizer."""
    if os.path.isfile(folder / "meta.json.new"):
        with lock_folder(folder, timeout_s=30):
            finish_replacement(folder)
    path = folder / "meta.json"
    if os.path.isfile(path):
        meta = read_valid_meta(path)
        if not meta:
            raise _unusable(path, "it is damaged: delete it and the token files")
        check_types(meta, {"format": int}, path)
        if meta["format"] > FORMAT:
            raise UserError(f"{path} is from a later version of folio (format {meta['format']})")
        for split in SPLITS:
            check_types(meta.get(split), {"tokens": int, "bytes": int, "crc32": int}, path)
        return meta, from_dict(meta.get("tokenizer"))
    path = folder / "meta.pkl"
    if not os.path.isfile(path):
        return {}, GPT2Tokenizer()
    with as_user_error(f"{path} cannot be used", Exception), open(path, "rb") as file:
        table = _PlainUnpickler(file).load()  # of any content
    check_types(table, {"vocab_size": int}, path)
    itos, size = table.get("itos"), table["vocab_size"]
    if size > 2**20:  # without itos, it can be any number
        raise UserError(f"{path} cannot be used: vocab_size={size:,} is too large")
    with as_user_error(f"{path} cannot be used: itos", LookupError, TypeError):
        tokens = [itos[i] if itos else "" for i in range(size)]
    if not all(isinstance(token, str) for token in tokens) or not any(tokens):
        tokens = [f"{i} " for i in range(size)]  # texts of this dataset are lists of ids
    is_list = any(len(token) != 1 for token in tokens)
    return {}, ListTokenizer(tokens) if is_list else CharTokenizer("".join(tokens))


def _read_ids(path, dtype):
    """Returns the ids in a .bin file, a large one memory-mapped. Raises UserError if it cannot."""
    if not os.path.isfile(path):
        name = path.parent.name
        known = {file.parent.name for file in DATA_FOLDER.glob("*/train.bin")} - {name}
        hint = f"; {DATA_FOLDER.resolve()} has {', '.join(sorted(known)) or 'no other dataset'}"
        raise UserError(
            f"{path} is missing; prepare it with python prepare.py --dataset={name} (and "
            f"--input=FILE_OR_FOLDER if it is your own text){suggest(name, known, hint)}"
        )
    with os_errors("read", path):
        size = path.stat().st_size
        if not size or size % dtype.itemsize:
            raise _unusable(path, f"it has {size:,} bytes, and a token has {dtype.itemsize}")
        if size <= MAX_CHECKED_TOKENS * dtype.itemsize:
            return np.fromfile(path, dtype)  # another program may write to the file
        # a plain view, because every slice of an np.memmap calls Python code
        return np.asarray(np.memmap(path, dtype, mode="r"))


def _unusable(path, cause):
    return UserError(f"{path} cannot be used ({cause}); prepare the dataset again")


def _check_type(path, ids):
    """Raises UserError if ids look like those of a wider type, with 0 in every second word."""
    if len(ids) < 4 or not ids[::2].any() or ids[1::2].any():
        return
    wide = "uint32" if ids.itemsize == 2 and ids[2::4].any() else "int64"
    code = f"np.fromfile(FILE, np.{wide}).astype(np.{ids.dtype}).tofile(FILE)"
    raise UserError(f"{path}: its type looks like {wide}, not {ids.dtype}; to convert it: {code}")


class _PlainUnpickler(pickle._Unpickler):  # in C, a large memo index would take gigabytes
    """Reads dicts, lists, strings and numbers; refuses everything that could execute code."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")
