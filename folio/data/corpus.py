"""A stream of documents, divided into splits: training, validation and, if asked for, test.

By default, validation has a tenth of the characters, or 20 million if that is less, but at least
0.05%. A hash puts each document into one of BUCKETS. The splits divide the characters in the order
of the buckets. So the last 10% of a single text are validation, only one of several documents is
cut at each boundary, and equal documents are in the same split, except for those in a bucket that
is cut. Empty texts are not documents.
"""

import hashlib
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from folio.cli.errors import UserError
from folio.data.tokenizer import BLANK_LINE, UNICODE_CODE_POINTS, code_points

VAL_CHARACTERS = 20_000_000
MIN_VAL_SHARE, MAX_VAL_SHARE = 0.0005, 0.1
BUCKETS = 2**16
VAL_BUCKET = BUCKETS  # a last one, of the validation text if it is given
SAMPLE_CHARACTERS = 2**20  # enough to estimate the length of tokens


class Piece(NamedTuple):
    """A text for a split."""

    split: str
    separator: str  # before it, if it begins a document, but not the split's first; otherwise ""
    text: str


@dataclass
class Corpus:
    """The documents of Sources. scan() must precede read(). Both show progress on a terminal.

    If there are `val_sources`, they are the validation split, and `sources` the training split.
    """

    sources: list
    name: str  # of the sources together, such as a folder
    val_sources: list = field(default_factory=list)
    val_name: str | None = None
    end_text: str | None = None  # of a special token that ends a document; None: there is none
    lines: bool = False  # whether each line of a text is a document
    val_fraction: float | None = None  # of the characters; None: the default
    test_fraction: float = 0.0  # of the characters, which follow those of the validation split
    max_characters: int = sys.maxsize  # with separators, after which reading stops
    split_ends: dict = field(default_factory=dict)  # {split: characters to its end}, from scan()
    num_documents: int = 0  # from scan()
    _bucket_starts: np.ndarray = field(init=False, repr=False)  # characters before each bucket

    @property
    def separator(self):
        """The text between two documents, unless an end-of-text token is there."""
        return "\n" if self.lines else BLANK_LINE

    @property
    def description(self):
        """The corpus as messages and meta.json name it."""
        name = _describe(self.name, self.sources)
        if self.val_sources:
            name += f", validation text {_describe(self.val_name, self.val_sources)}"
        return name

    @property
    def all_sources(self):
        return [*self.val_sources, *self.sources]

    def sha256(self):
        """Returns the hash of the source, or that of the hashes of several."""
        hashes = [source.sha256() for source in self.all_sources]
        if len(hashes) == 1:
            return hashes[0]
        return hashlib.sha256("".join(hashes).encode()).hexdigest()

    def sample(self):
        """Returns the first SAMPLE_CHARACTERS, or a separator less, of the sources."""
        pieces = self._read_sources(SAMPLE_CHARACTERS)
        text = "".join(self.separator * is_new + text for _, text, is_new in pieces)
        return text.removeprefix(self.separator)

    def scan(self):
        """Finds the ends of the splits. Returns the characters of texts and separators, sorted."""
        is_used, sizes = np.zeros(UNICODE_CODE_POINTS, bool), np.zeros(BUCKETS + 1, np.int64)
        self.num_documents = 0
        for source in self.all_sources:
            source.empty_rows.clear()  # those of a sample
        for bucket, text, begins_document in self._read_texts():
            is_used[code_points(text)] = True
            sizes[bucket] += len(text)
            self.num_documents += begins_document
        if self.num_documents > 1:
            is_used[ord("\n")] = True
        total = int(sizes.sum())
        val_share = self.val_fraction
        if val_share is None:
            val_share = min(MAX_VAL_SHARE, max(MIN_VAL_SHARE, VAL_CHARACTERS / max(total, 1)))
        train_end = int((1 - val_share - self.test_fraction) * total)
        if self.val_sources:
            train_end = total - int(sizes[VAL_BUCKET])
        val_end = int((1 - self.test_fraction) * total)
        self.split_ends = {"train": train_end, "val": val_end, "test": total}
        self._bucket_starts = sizes.cumsum() - sizes
        return "".join(map(chr, np.flatnonzero(is_used)))

    def read(self):
        """Yields the Pieces of all splits, in the order of the sources.

        Raises UserError if the text differs from that of the scan.
        """
        positions, started_splits, last_split = self._bucket_starts.tolist(), set(), None
        for bucket, text, begins_document in self._read_texts():
            for split, end in self.split_ends.items():
                part = text[: max(0, end - positions[bucket])]
                if part:
                    is_new = begins_document or split != last_split
                    is_separated = is_new and split in started_splits
                    yield Piece(split, self.separator if is_separated else "", part)
                    positions[bucket] += len(part)
                    text = text[len(part) :]
                    started_splits.add(split)
                    last_split = split
        if positions != [*self._bucket_starts[1:].tolist(), self.split_ends["test"]]:
            raise UserError(f"{self.description} changed while it was read: run prepare.py again")

    def _read_texts(self):
        """Yields (bucket, text, whether it begins a document)."""
        for _, text, begins_document in self._read_documents(self.val_sources):
            yield VAL_BUCKET, text, begins_document
        yield from self._read_sources(self.max_characters)

    def _read_sources(self, num_left):
        """Yields the same of the sources, up to `num_left` characters with separators."""
        num_left += len(self.separator)  # which the first document lacks
        with tqdm(unit=" characters", unit_scale=True, disable=None, leave=False) as progress:
            for bucket, text, begins_document in self._read_documents(self.sources):
                num_left -= len(self.separator) * begins_document
                yield bucket, text[:num_left], begins_document
                progress.update(len(text))
                num_left -= len(text)
                if num_left <= len(self.separator):  # no other document fits
                    return

    def _read_documents(self, sources):
        """Yields the same of all of these sources. The hash of a document decides its bucket."""
        end_text = "\n" if self.lines else self.end_text
        for source in sources:
            for text, begins_document in source.read():
                if begins_document:  # one of several parts is hashed by the first
                    bucket, is_new = zlib.crc32(text.encode()) % BUCKETS, True
                parts = text.split(end_text) if end_text else [text]
                for number, part in enumerate(parts):
                    is_new = is_new or number > 0  # this part or, if it is empty, the next one
                    if part:
                        if is_new and self.lines:
                            bucket = zlib.crc32(part.encode()) % BUCKETS
                        yield bucket, part, is_new
                        is_new = False


def _describe(name, sources):
    """Returns how messages and meta.json name Sources: as a file, or as IN (3 files)."""
    name, count = str(Path(name)), len(sources)
    if count == 1 and name == sources[0].name:
        return name
    return f"{name} ({count} file{'s' * (count > 1)})"
