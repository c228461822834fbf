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
from folio.files import is_file
from folio.tokenizers import CharTokenizer, GPT2Tokenizer, from_dict

FORMAT = 1
SPLITS = ("train", "val")
DATA = Path("data")
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
READ_BYTES = 64 * 2**20  # of a split at most, which is read completely when it is loaded
SAMPLES, SAMPLE_TOKENS = 32, 2**15  # blocks that are read of a larger split, and their length
READ_TOKENS = 2**22  # that are read at once


@dataclass(frozen=True)
class Dataset:
    """A prepared dataset.

    train, val: (N,) uint16 or uint32 ids, memory-mapped; after batches.to_device, a Split each.
    fingerprint: CRC-32 of each split's bytes. For nanoGPT's splits of more than READ_BYTES, it is
        that of the size as decimal digits and of SAMPLES evenly spaced blocks of SAMPLE_TOKENS.
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
    """The size of a prepared dataset."""

    train_tokens: int
    val_tokens: int
    vocab_size: int


def dataset_folder(name):
    """Returns data/NAME. Raises UserError if `name` is not a plain folder name."""
    if not name or name in (".", "..") or set(name) & set('/\\:*?"<>|\0'):
        raise UserError(f"the name of a dataset must be a plain folder name, not {name!r}")
    return DATA / name


def meta_checksum(meta):
    """Returns the CRC-32 of everything in a meta.json except its own checksum."""
    rest = {key: value for key, value in meta.items() if key != "crc32"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def load_dataset(name, verify=False):
    """Returns the Dataset in data/NAME, folio's or nanoGPT's.

    Small splits are read completely. Of larger ones, the size of the file and a sample of the ids
    are checked. Raises UserError if a file is missing, damaged or does not match the others.

    Args:
        verify: read large splits completely, too.
    """
    folder = dataset_folder(name)
    meta, tokenizer = _read_meta(folder)
    splits, fingerprint = {}, {}
    for split in SPLITS:
        with _reading(folder / f"{split}.bin") as path:
            ids = splits[split] = _map_ids(path, meta, split)
            is_sampled = ids.nbytes > READ_BYTES and not verify
            found = _check_ids(ids, tokenizer.vocab_size, is_sampled)
            if meta and not is_sampled and found != meta[split]["crc32"]:
                raise ValueError("it does not match meta.json")
        fingerprint[split] = meta[split]["crc32"] if meta else found
    return Dataset(name, **splits, tokenizer=tokenizer, fingerprint=fingerprint)


def verify_dataset(name):
    """Reads all of data/NAME in constant memory. Returns a line that says what was checked.

    Raises UserError if a file is missing or damaged.
    """
    data = load_dataset(name, verify=True)
    has_checksums = is_file(dataset_folder(name) / "meta.json")
    return (
        f"{DATA / name}: {len(data.train):,} training and {len(data.val):,} validation tokens, "
        + ("checksums and ids are correct" if has_checksums else "ids are correct; no checksums")
    )


def dataset_size(name):
    """Returns the DatasetSize of data/NAME without reading its tokens. Raises UserError."""
    folder = dataset_folder(name)
    meta, tokenizer = _read_meta(folder)
    counts = []
    for split in SPLITS:
        with _reading(folder / f"{split}.bin") as path:
            counts.append(len(_map_ids(path, meta, split)))
    return DatasetSize(*counts, tokenizer.vocab_size)


def fingerprint(name):
    """Returns Dataset.fingerprint of data/NAME, without reading the tokens if meta.json has it."""
    meta, _ = _read_meta(dataset_folder(name))
    if not meta:
        return load_dataset(name).fingerprint
    return {split: meta[split]["crc32"] for split in SPLITS}


def load_tokenizer(name):
    """Returns the tokenizer of data/NAME: from meta.json, nanoGPT's meta.pkl, or else GPT-2's."""
    return _read_meta(dataset_folder(name))[1]


def _read_meta(folder):
    """Returns the content of meta.json, or {} for nanoGPT's folders, and the tokenizer."""
    if is_file(folder / "meta.json"):
        with _reading(folder / "meta.json") as path:
            meta = json.loads(path.read_bytes())
            if meta["format"] > FORMAT:
                raise UserError(f"it is from a later version of folio (format {meta['format']})")
            if meta["crc32"] != meta_checksum(meta):
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


@contextmanager
def _reading(path):
    """Yields `path`. Turns errors in the file, which may contain anything, into UserErrors."""
    if not is_file(path):  # a pipe is an error, too, because reading it would block
        name = path.parent.name
        raise UserError(
            f"{path} is missing; prepare it with python prepare.py --dataset={name} (and "
            "--input=FILE_OR_FOLDER for your own text), or start with a preset: python prepare.py "
            "&& python train.py config/shakespeare_char_fast.py"
        )
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


def _map_ids(path, meta, split):
    """Returns the memory-mapped ids of a split. Raises ValueError if their number is wrong."""
    # a plain view, because every slice of an np.memmap calls Python code
    ids = np.asarray(np.memmap(path, DTYPES[meta.get("dtype", "uint16")], mode="r"))
    if meta and len(ids) != meta[split]["tokens"]:
        raise ValueError("it does not match meta.json")
    return ids


def _check_ids(ids, vocab_size, is_sampled):
    """Returns the CRC-32 of all ids, or of their size and a sample of blocks.

    Raises ValueError for ids that are not in the vocabulary.
    """
    if is_sampled:
        crc, length = zlib.crc32(b"%d" % ids.nbytes), SAMPLE_TOKENS
        starts = np.linspace(0, max(0, len(ids) - SAMPLE_TOKENS), SAMPLES).astype(int)
    else:
        crc, length, starts = 0, READ_TOKENS, range(0, len(ids), READ_TOKENS)
    for start in starts:
        block = ids[start : start + length]
        crc = zlib.crc32(block, crc)
        if (largest := block.max()) >= vocab_size:
            raise ValueError(f"it contains token {largest}, but the vocabulary has {vocab_size}")
    return crc


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, strings and numbers; refuses everything that could execute code."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")
