"""The format of a dataset folder: data/NAME/{train.bin, val.bin, meta.json}.

The .bin files hold little-endian token ids: uint16, as nanoGPT's do, or uint32 for more than 65,536
ids. A split of more than split_writer.SHARD_TOKENS is in several files (shards): train_00000.bin,
train_00001.bin, and so on. meta.json holds the format version, the tokenizer, the vocabulary size,
the type of the ids (default: uint16), token counts, byte counts and CRC-32 of each split (and token
counts and CRC-32 of its shards), the source of the text, and a CRC-32 of itself. nanoGPT's folders
have a meta.pkl with the character table, or neither file if they hold GPT-2 tokens.
"""

import io
import json
import pickle
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from folio.errors import UserError
from folio.files import is_file
from folio.shards import Shards, bin_names, check_ids, check_split, dtype_of, map_split, reading
from folio.tokenizers import CharTokenizer, GPT2Tokenizer, from_dict

FORMAT = 2  # the newest; it is 1 if no split has shards
SPLITS = ("train", "val")
DATA = Path("data")
JOURNAL = "unfinished.json"  # of a preparation; see dataset_writer
VERIFY_TOKENS = 2**22  # that are read at once


@dataclass(frozen=True)
class Dataset:
    """A prepared dataset.

    train, val: (N,) uint16 or uint32 ids, memory-mapped, in an array or Shards; after
        batches.to_device, a Split each.
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


def load_dataset(name):
    """Returns the Dataset in data/NAME, folio's or nanoGPT's.

    Small splits are read completely. Of larger ones, the sizes of the files and a sample of the ids
    are checked. Raises UserError if a file is missing, damaged or does not match the others.
    """
    folder = dataset_folder(name)
    _check_prepared(folder)
    meta, tokenizer = _read_meta(folder)
    splits, fingerprint = {}, {}
    for split in SPLITS:
        files = map_split(folder, split, meta)
        found = check_split(files, tokenizer.vocab_size)
        fingerprint[split] = meta[split]["crc32"] if meta else found
        arrays = [ids for _, ids, _ in files]
        splits[split] = arrays[0] if len(arrays) == 1 else Shards(arrays)
    return Dataset(name, **splits, tokenizer=tokenizer, fingerprint=fingerprint)


def verify_dataset(name):
    """Reads all of data/NAME in constant memory. Returns a line that says what was checked.

    Raises UserError if a file is missing or damaged.
    """
    from tqdm import tqdm

    folder = dataset_folder(name)
    _check_prepared(folder)
    meta, tokenizer = _read_meta(folder)
    splits = [map_split(folder, split, meta) for split in SPLITS]
    counts = [sum(len(ids) for _, ids, _ in files) for files in splits]
    size = sum(counts) * dtype_of(meta).itemsize
    with tqdm(total=size, unit="B", unit_scale=True, leave=False, disable=None) as bar:
        for path, ids, crc in sum(splits, []):
            with reading(path), open(path, "rb") as file:
                found = 0
                while len(block := np.fromfile(file, ids.dtype, VERIFY_TOKENS)):
                    found = zlib.crc32(block, found)
                    check_ids(block, tokenizer.vocab_size)
                    bar.update(block.nbytes)
                if crc not in (None, found):
                    raise ValueError("it does not match meta.json")
    checked = "checksums and ids are correct" if meta else "ids are correct; it has no checksums"
    return f"{folder}: {counts[0]:,} training and {counts[1]:,} validation tokens, {checked}"


def dataset_size(name):
    """Returns the DatasetSize of data/NAME without reading its tokens. Raises UserError."""
    folder = dataset_folder(name)
    _check_prepared(folder)
    meta, tokenizer = _read_meta(folder)
    counts = dict.fromkeys(SPLITS, 0)
    for split in SPLITS:
        for bin_name in bin_names(split, meta.get(split, {})):
            with reading(folder / bin_name) as path:
                count = path.stat().st_size // dtype_of(meta).itemsize
                if not count:
                    raise ValueError("it is empty")
                counts[split] += count
    return DatasetSize(*counts.values(), tokenizer.vocab_size)


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
    if not (is_file(folder / "train.bin") or is_file(folder / "train_00000.bin")):
        if is_file(folder / JOURNAL):
            raise UserError(f"{folder} is unfinished: run the same prepare.py command to continue")
        raise UserError(
            f"{folder}/train.bin is missing; prepare it with python prepare.py "
            f"--dataset={folder.name} (and --input=FILE_OR_FOLDER for your own text), or start "
            "with a preset: python prepare.py && python train.py config/shakespeare_char_fast.py"
        )


def _read_meta(folder):
    """Returns the content of meta.json, or {} for nanoGPT's folders, and the tokenizer."""
    if is_file(folder / "meta.json"):
        with reading(folder / "meta.json") as path:
            meta = json.loads(path.read_bytes())
            if meta["format"] > FORMAT:
                raise UserError(f"it is from a later version of folio (format {meta['format']})")
            if meta["crc32"] != meta_checksum(meta):
                raise ValueError("its checksum is wrong")
            return meta, from_dict(meta["tokenizer"])
    if is_file(folder / "meta.pkl"):
        with reading(folder / "meta.pkl") as path:
            table = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
            characters = [table["itos"][i] for i in range(table["vocab_size"])]
            if any(len(character) != 1 for character in characters):
                raise ValueError("it has tokens that are not single characters")
            return {}, CharTokenizer("".join(characters))
    return {}, GPT2Tokenizer()


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, strings and numbers; refuses everything that could execute code."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")
