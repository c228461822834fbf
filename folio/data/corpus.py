"""A stream of documents, divided into splits: training, validation and, if asked for, test.

By default, validation has a tenth of the characters, or as many as 20 MB of the files hold if that
is less, but at least 0.05%. A hash puts each document into one of BUCKETS. The splits divide the
characters in the order of the buckets. So the last 10% of a single text are validation, only one of
several documents is cut at each boundary, and equal documents are in the same split, except for
those in a bucket that is cut.
"""

import hashlib
import zlib
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from folio.data.tokenizer import BLANK_LINE, Alphabet

VAL_BYTES = 20_000_000
MIN_VAL_SHARE, MAX_VAL_SHARE = 0.0005, 0.1
BUCKETS = 2**16
VAL_BUCKET = BUCKETS  # a last one, of the validation text if it is given
SAMPLE_CHARACTERS = 2**20  # enough to estimate the length of tokens


class Piece(NamedTuple):
    """A text for a split.

    separated: whether a separator precedes it, because it begins a document, not the split's first.
    """

    split: str
    separated: bool
    text: str


@dataclass
class Corpus:
    """The documents of Sources. scan() must precede read().

    name: of several sources, in messages and meta.json.
    val_sources: those of the validation split; the others are then the training split.
    end_text: the text of a special token that ends a document; None: there is none.
    val_fraction: of the characters; None: the default.
    test_fraction: of the characters; they follow those of the validation split.
    max_characters: number of characters after which reading stops; None: all are read.
    train_characters: number of characters in the training split, known after scan().

    Reading shows its progress, on a terminal only.
    """

    sources: list
    name: str
    val_sources: list = field(default_factory=list)
    end_text: str | None = None
    val_fraction: float | None = None
    test_fraction: float = 0.0
    max_characters: int | None = None
    train_characters: int | None = None
    _bucket_starts: np.ndarray | None = None  # characters in the buckets before each one
    _split_ends: dict | None = None  # {split: number of characters up to its end}

    @property
    def description(self):
        """The corpus as messages and meta.json name it."""
        name = self.sources[0].name
        if len(self.sources) > 1:
            name = f"{self.name} ({len(self.sources)} files)"
        if self.val_sources:
            more = ", …" * (len(self.val_sources) > 1)
            name += f", validation text {self.val_sources[0].name}{more}"
        return name

    @property
    def all_sources(self):
        return [*self.val_sources, *self.sources]

    @property
    def empty_rows(self):
        """The number of rows of tables without text, which reading has left out."""
        return sum(len(source.empty_rows) for source in self.all_sources)

    def sha256(self):
        """Returns the hash of the source, or that of the hashes of several."""
        hashes = [source.sha256() for source in self.all_sources]
        if len(hashes) == 1:
            return hashes[0]
        return hashlib.sha256("".join(hashes).encode()).hexdigest()

    def sample(self):
        """Returns the first SAMPLE_CHARACTERS."""
        return "".join(text for _, text, _ in self._read_texts(SAMPLE_CHARACTERS))

    def scan(self):
        """Reads everything once, which finds the boundaries of the splits. Returns the Alphabet."""
        alphabet, sizes, num_documents = Alphabet(), np.zeros(BUCKETS + 1, np.int64), 0
        for bucket, text, ends_document in self._read_texts(self.max_characters):
            alphabet.add(text)
            sizes[bucket] += len(text)
            num_documents += ends_document
        if num_documents > 1:
            alphabet.add(BLANK_LINE)
        total = int(sizes.sum())
        self.train_characters = int((1 - self._val_share() - self.test_fraction) * total)
        if self.val_sources:
            self.train_characters = total - int(sizes[VAL_BUCKET])
        self._split_ends = {"train": self.train_characters, "val": total + 1}
        if self.test_fraction:
            self._split_ends |= {"val": int((1 - self.test_fraction) * total), "test": total + 1}
        self._bucket_starts = sizes.cumsum() - sizes
        return alphabet

    def _val_share(self):
        """Returns the part of the characters that is the validation split."""
        if self.val_fraction is not None:
            return self.val_fraction
        num_bytes = sum(source.size for source in self.sources)
        return min(MAX_VAL_SHARE, max(MIN_VAL_SHARE, VAL_BYTES / max(num_bytes, 1)))

    def read(self):
        """Yields the Pieces of all splits, in the order of the sources."""
        started_splits, unfinished = set(), None  # the split of a document whose end is not read
        for split, text, ends_document in self._read_splits():
            if text or (ends_document and not unfinished):  # or an empty document
                yield Piece(split, split != unfinished and split in started_splits, text)
                started_splits.add(split)
                unfinished = split
            unfinished = None if ends_document else unfinished

    def _read_splits(self):
        """Yields (split, text, whether its document ends) of all texts, cut at the boundaries."""
        positions = self._bucket_starts.tolist()
        for bucket, text, ends_document in self._read_texts(self.max_characters):
            position = positions[bucket]
            positions[bucket] += len(text)
            for split, end in self._split_ends.items():
                if position < end:
                    part, text = text[: end - position], text[end - position :]
                    position += len(part)
                    yield split, part, ends_document and not text
                    if not text:
                        break

    def _read_texts(self, max_characters):
        """Yields (bucket, text, whether its document ends). The validation text has no limit."""
        for _, text, ends_document in self._read_documents(self.val_sources):
            yield VAL_BUCKET, text, ends_document
        num_left = max_characters
        with tqdm(unit=" characters", unit_scale=True, disable=None, leave=False) as progress:
            for bucket, text, ends_document in self._read_documents(self.sources):
                text = text[:num_left]
                yield bucket, text, ends_document
                progress.update(len(text))
                if num_left is not None:
                    num_left -= len(text)
                    if num_left == 0:
                        return

    def _read_documents(self, sources):
        """Yields the same of all characters of these sources, with the bucket of each hash."""
        for source in sources:
            bucket = None
            for chunk in source.read():
                if bucket is None:  # a document of several Chunks is hashed by the first
                    bucket = zlib.crc32(chunk.text.encode()) % BUCKETS
                *texts, last = chunk.text.split(self.end_text) if self.end_text else [chunk.text]
                yield from ((bucket, text, True) for text in texts)
                if last or not texts or not chunk.ends_document:  # else, the last document ended
                    yield bucket, last, chunk.ends_document
                if chunk.ends_document:
                    bucket = None
