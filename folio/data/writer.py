"""Encoding a corpus with all cores, and writing a dataset folder, in constant memory."""

import json
import os
import zlib
from collections import Counter, defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from folio.cli.errors import UserError
from folio.cli.files import write_atomically
from folio.data.corpus import Corpus
from folio.data.dataset import FILES, FORMAT, SPLITS, finish_replacement, meta_checksum
from folio.data.tokenizer import Tokenizer

MIN_BATCH_CHARACTERS = 2**19
MAX_THREADS = 32  # a machine with more cores may lend only some of them


def write_dataset(folder, corpus: Corpus, tokenizer: Tokenizer, allow_special=False):
    """Writes the tokens of a Corpus that has been scanned, in their order, and its test text.

    They do not depend on the number of cores. An old dataset stays complete until the new one is.
    The caller holds the lock of the folder. Returns the content of meta.json. Raises UserError if
    the disk is full, or if a split has fewer than 2 tokens.
    """
    splits = {split: {"tokens": 0, "bytes": 0, "crc32": 0} for split in SPLITS}
    encode = partial(encode_pieces, tokenizer, allow_special)
    batches = batch_pieces(piece for piece in corpus.read() if piece.split in SPLITS)
    paths = [folder / f"{name}.new" for name in FILES]
    with write_atomically(*paths) as [train_file, val_file, test_file, meta_file]:
        files = {"train": train_file, "val": val_file}
        for encoded_splits in map_in_threads(encode, batches):
            for split, (ids, num_bytes) in encoded_splits.items():
                files[split].write(ids)
                entry = splits[split]
                entry["tokens"] += len(ids)
                entry["bytes"] += num_bytes  # of the text, without separators
                entry["crc32"] = zlib.crc32(ids, entry["crc32"])
        for split, entry in splits.items():
            if entry["tokens"] < 2:
                cause = f"{corpus.description} is too short to split: {split}.bin needs at least 2"
                advice = "use more text, or change --max_tokens, --val_fraction or --test_fraction"
                raise UserError(f"{cause} tokens and has {entry['tokens']}; {advice}")
        meta = {
            "format": FORMAT,
            "tokenizer": tokenizer.to_dict(),
            "vocab_size": tokenizer.vocab_size,
            "dtype": tokenizer.dtype.name,
            "source": corpus.description,
            "source_sha256": corpus.sha256(),
            "test_fraction": corpus.test_fraction,
            **splits,
        }
        meta["crc32"] = meta_checksum(meta)
        meta_file.write(json.dumps(meta, indent=1).encode())
        has_end = tokenizer.end is not None and not corpus.lines  # sample.py --by_line reads lines
        for split, separator, text in corpus.read() if corpus.test_fraction else []:
            if split == "test":
                separator = tokenizer.end_text if has_end and separator else separator
                test_file.write((separator + text).encode())
    finish_replacement(folder)
    return meta


def batch_pieces(pieces):
    """Yields lists of Pieces that have at least MIN_BATCH_CHARACTERS together."""
    batch, num_characters = [], 0
    for piece in pieces:
        batch.append(piece)
        num_characters += len(piece.text)
        if num_characters >= MIN_BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def encode_pieces(tokenizer: Tokenizer, allow_special, pieces):
    """Returns {split: (ids, number of UTF-8 bytes of the texts)} of Pieces."""
    arrays: dict[str, list[np.ndarray]] = defaultdict(list)
    num_bytes: Counter[str] = Counter()
    for split, separator, text in pieces:
        num_bytes[split] += len(text.encode())
        if separator and tokenizer.end is not None:
            arrays[split].append(np.array([tokenizer.end], tokenizer.dtype))
        else:
            text = separator + text
        arrays[split].append(tokenizer.encode(text, allow_special))
    return {split: (np.concatenate(arrays[split]), num_bytes[split]) for split in arrays}


def map_in_threads(function, items):
    """Yields function(item) in the order of the items, with a thread per core."""
    pending: deque[Future] = deque()
    num_threads = min(os.cpu_count() or 1, MAX_THREADS)
    with ThreadPoolExecutor(num_threads) as pool:
        for item in items:
            if len(pending) == num_threads + 2:  # so that memory does not grow
                yield pending.popleft().result()
            pending.append(pool.submit(function, item))
        for future in pending:
            yield future.result()
