"""A stream of documents, divided into training and validation split.

The first 90% of the characters of texts are the training split, so a document may be cut. In a
corpus with tables (JSON lines, CSV or Parquet), the hash of a document decides: identical documents
are in the same split, and validation has about as many documents as 20 MB of the files hold, but
between 0.05% and 10% of the corpus.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tqdm import tqdm

from folio.data.tokenizer import BLANK_LINE, END_OF_TEXT, CharTokenizer

TRAIN_SHARE = 0.9
VAL_BYTES = 20_000_000
VAL_SHARES = (0.0005, 0.1)  # least and largest
SAMPLE = 2**20  # characters from which the length of tokens is estimated


class Extent(NamedTuple):
    """How much of a Corpus is read, and where it is divided.

    characters: number to read in total; None: all.
    train: number of characters that come first and are the training split; None: hashes decide.
    """

    characters: int | None = None
    train: int | None = None


class Piece(NamedTuple):
    """A text for a split.

    separated: whether a separator precedes it, because it begins a document, not the split's first.
    """

    split: str
    separated: bool
    text: str


@dataclass(frozen=True)
class Corpus:
    """The documents of Sources.

    description: what messages and meta.json call it.
    allow_special: END_OF_TEXT ends a document.

    Reading shows its progress, on a terminal only.
    """

    sources: list
    description: str
    allow_special: bool = False

    @cached_property
    def in_order(self):
        """Whether the first part is the training split, rather than a choice by hashes."""
        return not any(source.suffix for source in self.sources)

    @cached_property
    def size(self):
        """Bytes of all sources."""
        return sum(source.size for source in self.sources)

    def sha256(self):
        """Returns the hash of the source, or that of the hashes of several."""
        hashes = [source.sha256() for source in self.sources]
        if len(hashes) == 1:
            return hashes[0]
        return hashlib.sha256("".join(hashes).encode()).hexdigest()

    def sample(self):
        """Returns the first SAMPLE characters."""
        return "".join(text for _, text, _ in self._texts(SAMPLE))

    def survey(self, kind, limit):
        """Reads everything once. Returns an Extent, and a CharTokenizer or None.

        Args:
            kind: "char" for a CharTokenizer.
            limit: number of characters to read in total, or None.
        """
        characters = documents = 0

        def texts():
            nonlocal characters, documents
            for _, text, ends in self._texts(limit):
                characters += len(text)
                documents += ends
                yield text
            if documents > 1:
                yield BLANK_LINE

        if kind == "char":
            tokenizer = CharTokenizer.from_text(texts())
        else:
            tokenizer = None
            for _ in texts():
                pass
        return Extent(limit, int(TRAIN_SHARE * characters) if self.in_order else None), tokenizer

    def read(self, extent):
        """Yields the Pieces of both splits, in the order of the sources."""
        left, begun, is_inside = extent.train, set(), False
        for split, text, ends in self._texts(extent.characters):
            parts = [(split, text)]
            if self.in_order:
                parts = [("train", text[:left]), ("val", text[left:])] if left else [("val", text)]
                left = max(left - len(text), 0)
            for name, part in parts:
                is_empty_document = ends and not is_inside and not part
                if part or is_empty_document:
                    yield Piece(name, not is_inside and name in begun, part)
                    begun.add(name)
                    is_inside = True
            is_inside = is_inside and not ends

    def training_texts(self, extent):
        """Yields the texts of the training split."""
        for piece in self.read(extent):
            if piece.split == "train":
                yield piece.text
            elif self.in_order:
                return

    def _texts(self, limit):
        """Yields split of the document (None if it is in order), text, and whether a document ends.

        Args:
            limit: number of characters after which it stops, or None.
        """
        rest = limit
        with tqdm(unit=" characters", unit_scale=True, disable=None, leave=False) as progress:
            for source in self.sources:
                split = None
                for chunk in source.read():
                    split = split or self._split_of(source, chunk)
                    parts = chunk.text.split(END_OF_TEXT) if self.allow_special else [chunk.text]
                    for place, text in enumerate(parts, 1):
                        text = text[:rest]
                        yield split, text, place < len(parts) or chunk.ends
                        if rest is not None:
                            rest -= len(text)
                        if rest == 0:
                            return
                    progress.update(len(chunk.text))
                    if chunk.ends:
                        split = None

    def _split_of(self, source, chunk):
        """Returns the split of a document from its first Chunk; None if the corpus is in order."""
        if self.in_order:
            return None
        least, largest = VAL_SHARES
        share = min(largest, max(least, VAL_BYTES / max(self.size, 1)))
        digest = hashlib.blake2b(digest_size=8)
        for part in [chunk] if chunk.ends else source.read():
            digest.update(part.text.encode())
        return "val" if int.from_bytes(digest.digest()) < share * 2**64 else "train"
