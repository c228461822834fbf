"""The format of a dataset folder: data/NAME/{train.bin, val.bin, meta.json}.

The .bin files hold little-endian token ids: uint16, as nanoGPT's do, or uint32 for more than 65,536
ids. meta.json holds the format version, the tokenizer, the vocabulary size, the type of the ids
(default: uint16), token counts, byte counts and CRC-32 of each split, the source of the text, and a
CRC-32 of itself. nanoGPT's folders have a meta.pkl with the character table, or neither file if
they hold GPT-2 tokens.
"""

import io
import json
import pickle
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from folio.errors import UserError, cause_of, os_error
from folio.files import is_file, locked, replacing
from folio.tokenizers import CharTokenizer, GPT2Tokenizer, from_dict

FORMAT = 1
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SPLITS = ("train", "val")
FILES = ("meta.json", "train.bin", "val.bin")
DATA = Path("data")


@dataclass(frozen=True)
class Dataset:
    """A prepared dataset.

    train, val: (N,) uint16 or uint32 ids, memory-mapped; after batches.to_device, a Split each.
    fingerprint: CRC-32 of each split's bytes.
    """

    name: str
    train: Any
    val: Any
    tokenizer: Any
    fingerprint: dict

    @cached_property
    def byte_lengths(self):
        """Tokenizer.byte_lengths(); None if the tokenizer's files are missing."""
        try:
            return self.tokenizer.byte_lengths()
        except UserError:
            return None

    def check_length(self, block_size):
        """Raises UserError if a split is too short for the context length."""
        for split in SPLITS:
            count = len(getattr(self, split))
            if count <= block_size:
                raise UserError(
                    f"{split}.bin of {self.name} has {count:,} tokens, fewer than the "
                    f"{block_size + 1:,} of block_size + 1; use more text or a smaller --block_size"
                )


@dataclass(frozen=True)
class DatasetSize:
    """The size of a prepared dataset. `train_bytes` is None for nanoGPT's folders."""

    train_tokens: int
    val_tokens: int
    train_bytes: int | None
    vocab_size: int


def dataset_folder(name):
    """Returns data/NAME. Raises UserError if `name` is not a plain folder name."""
    if not name or name in (".", "..") or set(name) & set('/\\:*?"<>|\0'):
        raise UserError(f"the name of a dataset must be a plain folder name, not {name!r}")
    return DATA / name


# Writing


def write_dataset(folder, corpus, tokenizer):
    """Splits a Corpus, encodes it and writes the folder. Returns the content of meta.json.

    Byte counts are those of the documents. If writing fails, the old files remain.
    """
    dtype = tokenizer.dtype.name
    meta = {
        "format": FORMAT,
        "tokenizer": tokenizer.to_dict(),
        "vocab_size": tokenizer.vocab_size,
        "dtype": dtype,
        "source": corpus.source,
        "source_sha256": corpus.sha256,
    }
    bins = {}
    for split, documents in zip(SPLITS, corpus.split(), strict=True):
        ids = tokenizer.encode_documents(documents).astype(DTYPES[dtype], copy=False)
        if len(ids) < 2:
            raise UserError(
                f"{corpus.source} is too short to split: its {corpus.characters} characters leave "
                f"{len(ids)} tokens for {split}.bin, which needs at least 2"
            )
        size = sum(len(text.encode()) for text in documents)
        bins[f"{split}.bin"] = ids
        meta[split] = {"tokens": len(ids), "bytes": size, "crc32": zlib.crc32(ids)}
    meta["crc32"] = _meta_checksum(meta)
    # meta.json is renamed first: without it, the others would be read as nanoGPT's.
    contents = {"meta.json": json.dumps(meta, indent=1).encode()} | bins
    with locked(folder), replacing(*(folder / name for name in contents)) as files:
        for file, content in zip(files, contents.values(), strict=True):
            file.write(content)
    return meta


def _meta_checksum(meta):
    """Returns the CRC-32 of everything in a meta.json except its own checksum."""
    rest = {key: value for key, value in meta.items() if key != "crc32"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


# Reading


def load_dataset(name):
    """Returns the Dataset in data/NAME, folio's or nanoGPT's.

    Raises UserError if a file is missing, damaged or does not match the others.
    """
    folder = dataset_folder(name)
    _check_prepared(folder)
    meta, tokenizer = _read_meta(folder)
    splits, fingerprint = {}, {}
    for split in SPLITS:
        with _reading(folder / f"{split}.bin") as path:
            ids = np.memmap(path, _dtype(meta), mode="r")
            splits[split], fingerprint[split] = ids, zlib.crc32(ids)
            if meta and meta[split]["crc32"] != fingerprint[split]:
                raise ValueError("it does not match meta.json")
            if not meta and (largest := ids.max()) >= tokenizer.vocab_size:
                raise ValueError(
                    f"it contains token {largest}, but the vocabulary has {tokenizer.vocab_size}"
                )
    return Dataset(name, **splits, tokenizer=tokenizer, fingerprint=fingerprint)


def dataset_size(name):
    """Returns the DatasetSize of data/NAME without reading its tokens. Raises UserError."""
    folder = dataset_folder(name)
    _check_prepared(folder)
    meta, tokenizer = _read_meta(folder)
    counts = []
    for split in SPLITS:
        with _reading(folder / f"{split}.bin") as path:
            counts.append(path.stat().st_size // _dtype(meta).itemsize)
            if not counts[-1]:
                raise ValueError("it is empty")
    return DatasetSize(*counts, meta["train"]["bytes"] if meta else None, tokenizer.vocab_size)


def fingerprint(name):
    """Returns Dataset.fingerprint of data/NAME, without reading the tokens if meta.json has it."""
    meta, _ = _read_meta(dataset_folder(name))
    if not meta:
        return load_dataset(name).fingerprint
    return {split: meta[split]["crc32"] for split in SPLITS}


def load_tokenizer(name):
    """Returns the tokenizer of data/NAME: from meta.json, nanoGPT's meta.pkl, or else GPT-2's."""
    return _read_meta(dataset_folder(name))[1]


def _check_prepared(folder):
    if not is_file(folder / "train.bin"):
        raise UserError(
            f"{folder}/train.bin is missing; prepare it with python prepare.py "
            f"--dataset={folder.name} (and --input=FILE_OR_FOLDER for your own text), or start "
            "with a preset: python prepare.py && python train.py config/shakespeare_char_fast.py"
        )


def _read_meta(folder):
    """Returns the content of meta.json, or {} for nanoGPT's folders, and the tokenizer."""
    if is_file(folder / "meta.json"):
        with _reading(folder / "meta.json") as path:
            meta = json.loads(path.read_bytes())
            if meta["format"] > FORMAT:
                raise UserError(f"it is from a later version of folio (format {meta['format']})")
            if meta["crc32"] != _meta_checksum(meta):
                raise ValueError("its checksum is wrong")
            return meta, from_dict(meta["tokenizer"])
    if is_file(folder / "meta.pkl"):
        with _reading(folder / "meta.pkl") as path:
            table = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
            characters = [table["itos"][i] for i in range(table["vocab_size"])]
            if any(len(character) != 1 for character in characters):
                raise ValueError("it has tokens that are not single characters")
            return {}, CharTokenizer("".join(characters))
    return {}, GPT2Tokenizer()


def _dtype(meta):
    """Returns the type of the ids in the .bin files."""
    return DTYPES[meta.get("dtype", "uint16")]


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, strings and numbers; refuses everything that could execute code."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


@contextmanager
def _reading(path):
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
