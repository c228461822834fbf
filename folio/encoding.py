"""Encoding a corpus with all cores, in constant memory."""

import os
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import accumulate

import numpy as np

from folio.tokenizers import BLANK_LINE

BATCH = 2**19  # characters that a thread encodes at once, at least
COMMIT_S, COMMIT_TOKENS = 10, 250_000_000  # between two commits, at most
LARGE = 100_000_000  # bytes of a corpus that is worth commits


def encode_corpus(corpus, tokenizer, writer, start, max_tokens=None, threads=None):
    """Writes the tokens of a Corpus to a DatasetWriter. Returns the Position at the end.

    The tokens do not depend on the number of threads.

    Args:
        start: Position to continue from.
        max_tokens: stop when there are about as many; None: at the end of the corpus.
        threads: None: one per core.
    """
    threads, end = threads or num_cores(), start
    commit = Committer(writer, corpus.size >= LARGE)
    commit(start)

    def write(splits, at):
        for split, (ids, num_bytes) in splits.items():
            writer.append(split, ids, num_bytes)
        commit(at)
        return at

    with progress_bar(corpus, "encoding") as progress:
        work = batches(corpus, replace(start), progress, min(BATCH, max_tokens or BATCH))
        encoded = in_threads(lambda item: encode(tokenizer, *item), work, threads, threads + 2)
        counted = count_tokens(encoded, start.tokens, max_tokens)
        # at most one write waits: after a failed one, there must be no other
        for at in in_threads(lambda item: write(*item), counted, 1, 1):
            end = at
    return end


def count_tokens(encoded, tokens, max_tokens):
    """Yields results of `encode`, with `tokens` in the Position, until there are max_tokens."""
    for splits, at in encoded:
        tokens += sum(len(ids) for ids, _ in splits.values())
        yield splits, replace(at, tokens=tokens)
        if max_tokens and tokens >= max_tokens:
            return


class Committer:
    """Commits a position if the last commit is long ago. The first call commits."""

    def __init__(self, writer, is_active):
        self.writer, self.is_active = writer, is_active
        self.time, self.tokens = -COMMIT_S, 0

    def __call__(self, at):
        is_due = time.monotonic() >= self.time + COMMIT_S
        if self.is_active and (is_due or at.tokens >= self.tokens + COMMIT_TOKENS):
            self.writer.commit(asdict(at))
            self.time, self.tokens = time.monotonic(), at.tokens


def batches(corpus, at, progress, size):
    """Yields lists of Pieces with `size` characters or more, each with the Position after it."""
    batch, count = [], 0
    for pieces in corpus.read(at, progress):
        batch += pieces
        count += sum(len(piece.text) for piece in pieces)
        if count >= size:
            yield batch, replace(at)
            batch, count = [], 0
    yield batch, replace(at)


def encode(tokenizer, pieces, after):
    """Returns {split: (ids, UTF-8 bytes of the texts)} of Pieces, and `after`."""
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
    joined = {k: ids[0] if len(ids) == 1 else np.concatenate(ids) for k, ids in parts.items()}
    return {split: (joined[split], num_bytes[split]) for split in parts}, after


def in_threads(function, items, threads, limit):
    """Yields function(item) of each item, in order. At most `limit` calls are unfinished."""
    pending = deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            if len(pending) == limit:
                yield pending.popleft().result()
            pending.append(pool.submit(function, item))
        while pending:
            yield pending.popleft().result()


def num_cores():
    """Returns the number of cores that the process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


@contextmanager
def progress_bar(corpus, title):
    """Yields a function of a source's number and the bytes read of it that shows the time left.

    On a terminal only.
    """
    from tqdm import tqdm  # imported here because it is too slow for --help

    before = [0, *accumulate(source.size for source in corpus.sources)]
    options = {"unit": "B", "unit_scale": True, "disable": None, "leave": False}
    with tqdm(desc=title, total=before[-1], **options) as bar:

        def show(index, num_read):
            if not bar.disable:
                bar.update(before[index] + num_read - bar.n)

        yield show
