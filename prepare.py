"""Turn text into token files: data/<dataset>/{train.bin, val.bin, meta.json}.

    python prepare.py                                        tiny Shakespeare, by characters
    python prepare.py --dataset=shakespeare                  the same in GPT-2's byte pairs
    python prepare.py --dataset=pydocs                       Python's own reference, no network
    python prepare.py --input=FILE_OR_FOLDER --dataset=NAME  your own text

The bins hold little-endian uint16 token ids and nothing else; the first 90 % of the characters
are for training and the rest for validation. This file alone reads and writes that folder.
"""

import hashlib
import json
import os
import platform
import sys
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from config import UserError, load, nearest, setting
from safety import Claim, cause_of, refusal, replacing, run
from tokenizer import KINDS, CharTokenizer, GPT2Tokenizer, from_dict
from untrusted import PlainUnpickler

FORMAT = 1
TOKEN = np.dtype("<u2")
LARGEST_META = 2**22  # bytes; that of 65,536 characters has less than two million
DATA = Path("data")
KNOWN = {"shakespeare_char": "char", "shakespeare": "gpt2", "pydocs": "char"}  # name: tokenizer

SHAKESPEARE_URLS = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "https://storage.googleapis.com/download.tensorflow.org/data/shakespeare.txt",
)
SHAKESPEARE_BYTES = 1_115_394
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


@dataclass(frozen=True)
class PrepareConfig:
    """Turn text into token files for train.py: data/<dataset>/{train.bin, val.bin, meta.json}."""

    dataset: str | None = setting(
        None,
        "shakespeare_char (if not set), shakespeare, pydocs, or a name for your own text",
        group="Corpus",
    )
    input: str | None = setting(None, "your own UTF-8 text: a file, or a folder of files")
    tokenizer: Literal["char", "gpt2"] | None = setting(
        None, "a token per character, or GPT-2's byte pairs, as for shakespeare; char if not set"
    )
    url: str | None = setting(None, "another address to download tiny Shakespeare from")

    def __post_init__(self):
        if self.input == "":
            raise UserError("--input is empty: it names a file or a folder")
        if self.url == "":
            raise UserError("--url is empty: it names an address")
        if self.input and self.dataset is None:
            name = Path(self.input).resolve().stem or "mine"
            raise UserError(f"name the dataset that --input becomes, as in --dataset={name}")
        if self.url and (self.input or self.dataset == "pydocs"):
            raise UserError("--url is for tiny Shakespeare alone")


@dataclass(frozen=True)
class Text:
    """A corpus, where it came from, and the sha256 of its bytes."""

    text: str
    source: str
    sha256: str


def main(argv=None):
    config = load(PrepareConfig, sys.argv[1:] if argv is None else argv)
    name = "shakespeare_char" if config.dataset is None else config.dataset
    folder = dataset_folder(name)
    kind = config.tokenizer or ("char" if config.input else KNOWN.get(name, "char"))
    if config.input:
        text = read_input(Path(config.input), KINDS[kind].separator)
    else:
        text = corpus(name, folder, config.url)
    if not text.text:
        raise UserError(f"{text.source} is empty")
    meta = write_dataset(folder, text, KINDS[kind].from_text(text.text))
    print(
        f"{folder}: {len(text.text):,} characters of {text.source}, "
        f"vocabulary {meta['vocab_size']:,} ({kind}), "
        f"{meta['train']['tokens']:,} train and {meta['val']['tokens']:,} validation tokens"
    )


# Reading and writing a dataset's folder


@dataclass(frozen=True)
class Dataset:
    """A prepared dataset: memory-mapped uint16 ids, and what they stand for."""

    train: np.ndarray
    val: np.ndarray
    tokenizer: CharTokenizer | GPT2Tokenizer
    val_bytes_per_token: float | None  # None for nanoGPT's folders, which do not tell bytes
    fingerprint: dict  # CRC-32 of each split's bytes


def dataset_folder(name):
    """data/<name>. Raises UserError for a name that leads elsewhere."""
    if not name or name in (".", "..") or set(name) & set('/\\:*?"<>|\0'):
        raise UserError(f"a dataset's name is a plain folder name, not {name!r}")
    return DATA / name


def write_dataset(folder, text, tokenizer):
    """Write both splits and meta.json; return the meta.

    Where the disk refuses, what was there stays. A process killed between the three renames leaves
    files that do not fit each other, which their checksums tell.
    """
    cut = int(0.9 * len(text.text))
    meta = {
        "format": FORMAT,
        "tokenizer": tokenizer.to_dict(),
        "vocab_size": tokenizer.vocab_size,
        "source": text.source,
        "source_sha256": text.sha256,
    }
    bins = []
    for split, part in {"train": text.text[:cut], "val": text.text[cut:]}.items():
        ids = tokenizer.encode(part).astype(TOKEN).tobytes()
        tokens = len(ids) // TOKEN.itemsize
        if tokens < 2:
            raise UserError(
                f"{text.source} is too short to split: its {len(text.text)} characters leave "
                f"{tokens} of the 2 tokens that {split} needs at least"
            )
        meta[split] = {"tokens": tokens, "bytes": len(part.encode()), "crc32": zlib.crc32(ids)}
        bins.append(ids)
    meta["crc32"] = _checksum(meta)
    names = ("meta.json", "train.bin", "val.bin")  # without the first it would be nanoGPT's
    with Claim(folder), replacing(*(folder / name for name in names)) as files:
        for file, content in zip(files, [json.dumps(meta, indent=1).encode(), *bins], strict=True):
            file.write(content)
    return meta


def _checksum(meta):
    """CRC-32 of what a meta.json says, but for its own checksum."""
    rest = {key: value for key, value in meta.items() if key != "crc32"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def load_dataset(name):
    """The prepared dataset data/<name>, folio's or nanoGPT's.

    Raises UserError where a file is missing, damaged or does not fit the others.
    """
    folder = dataset_folder(name)
    if not os.path.isfile(folder / "train.bin"):
        raise UserError(f"{folder}/train.bin is missing; {_how_to_make(name)}")
    meta = _read_meta_json(folder)
    tokenizer = _tokenizer(folder, meta)
    splits, fingerprint = {}, {}
    for split in ("train", "val"):
        path = folder / f"{split}.bin"
        splits[split] = _read_bin(path)
        fingerprint[split] = _check_bin(path, splits[split], tokenizer.vocab_size, meta.get(split))
    counts = meta.get("val")
    per_token = counts["bytes"] / counts["tokens"] if counts else None
    return Dataset(splits["train"], splits["val"], tokenizer, per_token, fingerprint)


def load_tokenizer(name):
    """The tokenizer of data/<name>: from meta.json, nanoGPT's meta.pkl, else GPT-2's.

    That nanoGPT's folders without a meta.pkl hold GPT-2 tokens is nanoGPT's own rule.
    """
    folder = dataset_folder(name)
    return _tokenizer(folder, _read_meta_json(folder))


def _tokenizer(folder, meta):
    try:
        if meta:
            return from_dict(meta["tokenizer"])
        if (folder / "meta.pkl").exists():
            return _tokenizer_from_pickle(folder / "meta.pkl")
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
    return GPT2Tokenizer()


def _how_to_make(name):
    """The command that prepares the dataset, and what is prepared already."""
    text = "" if name in KNOWN else " --input=FILE_OR_FOLDER"
    command = f"python prepare.py --dataset={name}{text}"
    ready = []
    with suppress(OSError):
        ready = sorted(path.parent.name for path in DATA.glob("*/train.bin"))
    return f"make it by {command}" + (f", or choose from {', '.join(ready)}" if ready else "")


def _read_small(path):
    """The bytes of a file that describes a dataset. Raises ValueError for one that cannot be it."""
    if path.stat().st_size > LARGEST_META or not path.is_file():
        raise ValueError("it is too large, or no regular file")
    return path.read_bytes()


def _read_meta_json(folder):
    """meta.json as a dict, {} where there is none; UserError where it is not as folio wrote it."""
    path = folder / "meta.json"
    try:
        meta = json.loads(_read_small(path))
        if type(meta["format"]) is not int or meta["format"] >= 2**31:
            raise ValueError("its format is no number of a format")
        if meta["format"] > FORMAT:
            raise UserError(f"{path} was written by a later folio (format {meta['format']})")
        if meta.get("crc32") != _checksum(meta):
            raise ValueError("its checksum is wrong")
        sizes = [meta[split][unit] for split in ("train", "val") for unit in ("tokens", "bytes")]
        if (
            not all(type(size) is int and 0 < size < 2**63 for size in sizes)
            or "tokenizer" not in meta
        ):
            raise ValueError("token counts or tokenizer missing")
        return meta
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise refusal("read", path, error) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged ({cause_of(error)}); prepare the dataset again"
        ) from error


def _read_bin(path):
    """A split's ids, memory-mapped."""
    try:
        size = path.stat().st_size
        if size == 0 or size % TOKEN.itemsize:
            raise UserError(f"{path} is damaged: its {size:,} bytes are no uint16 tokens")
        return np.memmap(path, dtype=TOKEN, mode="r")
    except OSError as error:
        raise refusal("read", path, error) from error


def _check_bin(path, ids, vocab_size, described, piece=2**24):
    """CRC-32 of a split. Raises UserError where ids are beyond the vocabulary, or the split is not
    the one that meta.json describes, if there is one.
    """
    checksum = 0
    for start in range(0, len(ids), piece):
        part = np.asarray(ids[start : start + piece])
        if (largest := part.max()) >= vocab_size:
            raise UserError(
                f"{path} holds token {largest}, beyond its vocabulary of {vocab_size}; "
                "prepare the dataset again"
            )
        checksum = zlib.crc32(part, checksum)
    if described and (described["tokens"], described.get("crc32")) != (len(ids), checksum):
        raise UserError(
            f"{path} is damaged: it holds other tokens than meta.json says; "
            "prepare the dataset again"
        )
    return checksum


def _tokenizer_from_pickle(path):
    """The character tokenizer of nanoGPT's meta.pkl: {vocab_size, itos, stoi}."""
    try:
        meta = PlainUnpickler(_read_small(path)).load()
        characters = [meta["itos"][i] for i in range(meta["vocab_size"])]
    except Exception as error:  # a damaged or hostile pickle fails in any way at all
        raise UserError(f"meta.pkl is not nanoGPT's character table ({cause_of(error)})") from error
    if not all(isinstance(c, str) and len(c) == 1 for c in characters):
        raise UserError("meta.pkl has tokens that are not single characters")
    return from_dict({"kind": "char", "characters": "".join(characters)})


# Where text comes from


def corpus(name, folder, url=None):
    """The text of a dataset that folio knows by name."""
    if name not in KNOWN:
        hint = nearest(name, KNOWN, f"; without it folio makes {', '.join(KNOWN)}")
        raise UserError(f"dataset {name} needs its text, --input=FILE_OR_FOLDER{hint}")
    if name == "pydocs":
        return pydocs()
    folders = (folder, DATA / "shakespeare_char", DATA / "shakespeare")  # one text serves both
    path = next(
        (f / "input.txt" for f in folders if (f / "input.txt").exists()), folder / "input.txt"
    )
    return shakespeare(path, (url,) if url else SHAKESPEARE_URLS)


def pydocs():
    """The language reference that Python carries for its help(): a corpus without a network."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    source = f"pydoc_data.topics of Python {platform.python_version()}"
    return Text(text, source, hashlib.sha256(text.encode()).hexdigest())


def shakespeare(path, urls):
    """Tiny Shakespeare from `path`, downloaded to there where it is missing."""
    if not path.exists():
        raw = download(urls, SHAKESPEARE_BYTES, SHAKESPEARE_SHA256, path)
        with Claim(path.parent), replacing(path) as [file]:
            file.write(raw)
    text = read_text(path)
    if text.sha256 != SHAKESPEARE_SHA256:
        raise UserError(
            f"{path} is not tiny Shakespeare (its sha256 is {text.sha256[:8]}…, not "
            f"{SHAKESPEARE_SHA256[:8]}…): move it away, or use it by --input={path} --dataset=NAME"
        )
    return text


def read_input(path, separator):
    """The text of a UTF-8 file, or of all files in a folder, sorted by path, `separator` between.

    Hidden files do not count, nor do folders behind links; any other file that cannot be read as
    text is an error, not skipped.
    """
    if not os.path.isdir(path):  # Path.is_dir would raise where a name is too long
        return read_text(path)
    try:
        tree = list(os.walk(path, onerror=_raise))
    except OSError as error:
        raise refusal("read", error.filename, error) from error
    found = sorted(Path(folder, name) for folder, _, names in tree for name in names)
    files = [f for f in found if not any(p.startswith(".") for p in f.relative_to(path).parts)]
    if odd := [f for f in files if not os.path.isfile(f)]:  # a pipe would be waited for
        raise UserError(f"{odd[0]} is no regular file; leave it out of {path}")
    text = separator.join(read_text(file).text for file in files)
    return Text(text, f"{path} ({len(files)} files)", hashlib.sha256(text.encode()).hexdigest())


def _raise(error):
    raise error


def read_text(path):
    """The text of a UTF-8 file."""
    try:
        return decode_text(path.read_bytes(), str(path))
    except OSError as error:
        raise refusal("read", path, error) from error


def decode_text(raw, source):
    """UTF-8 bytes as Text, line ends and all, but without a byte order mark."""
    if b"\0" in raw:
        raise UserError(f"{source} is not UTF-8 text: byte {raw.index(0):,} is NUL, as in UTF-16")
    try:
        return Text(raw.decode("utf-8-sig"), source, hashlib.sha256(raw).hexdigest())
    except UnicodeDecodeError as error:
        offset = len(raw) - len(error.object) + error.start  # the codec drops the mark first
        raise UserError(
            f"{source} is not UTF-8 text: byte {offset:,} is 0x{raw[offset]:02x}; "
            "convert it, or leave it out"
        ) from error


# Downloading


class _RefusedError(Exception):
    """One attempt failed; `lasting` where another would fail alike."""

    def __init__(self, reason, lasting):
        super().__init__(reason)
        self.lasting = lasting


def download(urls, size, sha256, path, attempts=3, timeout_s=(10, 30), pause_s=1.0):
    """The bytes of that size and sha256 from the first of `urls` that delivers them.

    Each is tried up to `attempts` times, with growing pauses; `timeout_s` is for connecting and for
    each read. Raises UserError, with the ways on, where all fail; `path` is where the file may be
    put by hand.
    """
    reasons = {}
    for attempt in range(attempts):
        for url in urls:
            if url in reasons and reasons[url].lasting:
                continue
            try:
                return _fetch(url, size, sha256, timeout_s)
            except _RefusedError as error:
                reasons[url] = error
        if all(why.lasting for why in reasons.values()):
            break
        if attempt + 1 < attempts:
            time.sleep(pause_s * 2**attempt)
    tried = "; ".join(f"{_host(url)}: {why}" for url, why in reasons.items())
    raise UserError(
        f"tiny Shakespeare could not be downloaded ({tried}). Three ways on: put the file at "
        f"{path}; use your own text by --input=FILE --dataset=NAME; or use Python's docs by "
        "--dataset=pydocs"
    )


def _host(url):
    """The host of an address, even of one that is none."""
    return url.partition("://")[2].partition("/")[0] or url


def _fetch(url, size, sha256, timeout_s):
    """The bytes at `url`, in memory, so that a cut download leaves nothing behind."""
    import requests  # here, so that train.py and --help do without it
    from tqdm import tqdm

    received = bytearray()
    try:
        with (
            requests.get(url, stream=True, timeout=timeout_s) as response,
            tqdm(total=size, unit="B", unit_scale=True, desc="download", disable=None) as bar,
        ):
            response.raise_for_status()
            for chunk in response.iter_content(2**16):
                received += chunk
                bar.update(len(chunk))
                if len(received) > size:
                    break
    except requests.HTTPError as error:
        status = error.response.status_code
        raise _RefusedError(f"HTTP {status}", lasting=status < 500 and status != 429) from error
    except (requests.Timeout, requests.ConnectionError) as error:
        stalled = "timed out" in str(error)  # in the midst of a body that is a ConnectionError, too
        reason = "timed out" if stalled else "no connection, or it broke off"
        raise _RefusedError(reason, lasting=False) from error
    except requests.exceptions.ChunkedEncodingError as error:
        raise _RefusedError("the connection broke off", lasting=False) from error
    except (requests.RequestException, ValueError) as error:  # no address at all is a ValueError
        raise _RefusedError(str(error), lasting=True) from error
    if hashlib.sha256(received).hexdigest() != sha256:
        lasting = len(received) >= size
        raise _RefusedError("it sent other bytes than tiny Shakespeare's", lasting)
    return bytes(received)


if __name__ == "__main__":
    run(main)
