"""Encoding a corpus with all cores, in constant memory."""

import os
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from folio.data.dataset import SPLITS
from folio.data.tokenizer import BLANK_LINE

MIN_BATCH_CHARACTERS = 2**19
MAX_THREADS = 32  # a machine with more cores may lend only some of them


def encode_corpus(corpus, tokenizer, writer, allow_special=False):
    """Writes the tokens of a Corpus, without its test text, to a DatasetWriter, in their order.

    They do not depend on the number of cores. Returns the number of characters.
    """
    num_characters = 0
    encode = partial(encode_pieces, tokenizer, allow_special)
    batches = batch_pieces(piece for piece in corpus.read() if piece.split in SPLITS)
    for batch, encoded_splits in map_in_threads(encode, batches):
        for split, (ids, num_bytes) in encoded_splits.items():
            writer.append(split, ids, num_bytes)
        num_characters += sum(len(piece.text) for piece in batch)
    return num_characters


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


def encode_pieces(tokenizer, allow_special, pieces):
    """Returns {split: (ids, number of UTF-8 bytes of the texts)} of Pieces."""
    arrays, num_bytes = defaultdict(list), Counter()
    for split, separated, text in pieces:
        if separated and tokenizer.end is None:
            arrays[split].append(tokenizer.encode(BLANK_LINE))
        elif separated:
            arrays[split].append(np.array([tokenizer.end], tokenizer.dtype))
        arrays[split].append(tokenizer.encode(text, allow_special))
        num_bytes[split] += len(text.encode())
    return {split: (np.concatenate(arrays[split]), num_bytes[split]) for split in arrays}


def map_in_threads(function, items):
    """Yields (item, function(item)) in the order of the items, with a thread per core.

    At most two more calls than threads are unfinished, so that memory does not grow.
    """
    pending, num_threads = deque(), min(os.cpu_count() or 1, MAX_THREADS)
    with ThreadPoolExecutor(num_threads) as pool:
        for item in items:
            if len(pending) == num_threads + 2:
                first_item, future = pending.popleft()
                yield first_item, future.result()
            pending.append((item, pool.submit(function, item)))
        for pending_item, future in pending:
            yield pending_item, future.result()
