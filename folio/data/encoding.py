"""Encoding a corpus with all cores, in constant memory."""

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from folio.data.tokenizer import BLANK_LINE

BATCH = 2**19  # characters that a thread encodes at once, at least


def encode_corpus(corpus, tokenizer, writer, extent, max_tokens=None):
    """Writes the tokens of a Corpus to a DatasetWriter. They do not depend on the number of cores.

    Returns the number of characters.

    Args:
        extent: the Extent that is read.
        max_tokens: stop when there are about as many; None: at the end of the extent.
    """
    characters = tokens = 0
    work = batches(corpus.read(extent), min(BATCH, max_tokens or BATCH))
    for batch, encoded in in_threads(lambda pieces: encode(tokenizer, pieces), work):
        for split, (ids, num_bytes) in encoded.items():
            writer.append(split, ids, num_bytes)
            tokens += len(ids)
        characters += sum(len(piece.text) for piece in batch)
        if max_tokens and tokens >= max_tokens:
            break
    return characters


def batches(pieces, size):
    """Yields lists of Pieces with `size` characters or more."""
    batch, count = [], 0
    for piece in pieces:
        batch.append(piece)
        count += len(piece.text)
        if count >= size:
            yield batch
            batch, count = [], 0
    if batch:
        yield batch


def encode(tokenizer, pieces):
    """Returns {split: (ids, UTF-8 bytes of the texts)} of Pieces."""
    parts, num_bytes = {}, {}
    for split, separated, text in pieces:
        ids = parts.setdefault(split, [])
        if separated and tokenizer.end is None:
            ids.append(tokenizer.encode(BLANK_LINE))
        elif separated:
            ids.append(np.array([tokenizer.end], tokenizer.dtype))
        ids.append(tokenizer.encode(text))
        size = len(text) if text.isascii() else len(text.encode())
        num_bytes[split] = num_bytes.get(split, 0) + size
    return {split: (np.concatenate(ids), num_bytes[split]) for split, ids in parts.items()}


def in_threads(function, items):
    """Yields each item and function(item), in order, with a thread per core.

    At most two more calls than cores are unfinished, so that memory does not grow.
    """
    pending, threads = deque(), num_cores()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            if len(pending) == threads + 2:
                item_before, future = pending.popleft()
                yield item_before, future.result()
            pending.append((item, pool.submit(function, item)))
        for item, future in pending:
            yield item, future.result()


def num_cores():
    """Returns the number of cores that the process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1
