"""A stream of documents, divided into a training and a validation split.

In a corpus of texts, the first 90% of the characters are the training split, so a document may be
cut. In a corpus with tables (JSON lines, CSV or Parquet), the hash of a document decides: identical
documents are in the same split, and validation has about as many documents as 20 MB of the files
hold, but between 0.05% and 10% of the corpus.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tqdm import tqdm

from folio.data.tokenizer import BLANK_LINE, END_OF_TEXT, Alphabet

TRAIN_SHARE = 0.9
VAL_BYTES = 20_000_000
MIN_VAL_SHARE, MAX_VAL_SHARE = 0.0005, 0.1
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
    """The documents of Sources.

    name: of several sources, in messages and meta.json.
    allow_special: END_OF_TEXT ends a document.
    max_characters: number of characters after which reading stops; None: all are read.
    train_characters: number of characters in the training split of a text, known after scan().

    Reading shows its progress, on a terminal only.
    """

    sources: list
    name: str
    allow_special: bool = False
    max_characters: int | None = None
    train_characters: int | None = None

    @property
    def description(self):
        """The corpus as messages and meta.json name it."""
        if len(self.sources) == 1:
            return self.sources[0].name
        return f"{self.name} ({len(self.sources)} files)"

    @cached_property
    def is_text(self):
        """Whether there are no tables, so that the first characters are the training split."""
        return not any(source.suffix for source in self.sources)

    @cached_property
    def val_share(self):
        """The share of documents in the validation split of a corpus with tables."""
        num_bytes = sum(source.size for source in self.sources)
        return min(MAX_VAL_SHARE, max(MIN_VAL_SHARE, VAL_BYTES / max(num_bytes, 1)))

    def sha256(self):
        """Returns the hash of the source, or that of the hashes of several."""
        hashes = [source.sha256() for source in self.sources]
        if len(hashes) == 1:
            return hashes[0]
        return hashlib.sha256("".join(hashes).encode()).hexdigest()

    def sample(self):
        """Returns the first SAMPLE_CHARACTERS."""
        return "".join(text for _, text, _ in self._read_texts(SAMPLE_CHARACTERS))

    def scan(self):
        """Reads everything once, which finds the split boundary. Returns the Alphabet."""
        alphabet, num_characters, num_documents = Alphabet(), 0, 0
        for _, text, ends_document in self._read_texts(self.max_characters):
            alphabet.add(text)
            num_characters += len(text)
            num_documents += ends_document
        if num_documents > 1:
            alphabet.add(BLANK_LINE)
        self.train_characters = int(TRAIN_SHARE * num_characters)
        return alphabet

    def read(self):
        """Yields the Pieces of both splits, in the order of the sources."""
        started_splits, is_inside = set(), False
        for split, text, ends_document in self._read_splits():
            if text or (ends_document and not is_inside):  # or an empty document
                yield Piece(split, not is_inside and split in started_splits, text)
                started_splits.add(split)
                is_inside = True
            is_inside = is_inside and not ends_document

    def _read_splits(self):
        """Yields (split, text, whether its document ends) of all texts."""
        texts = self._read_texts(self.max_characters)
        if not self.is_text:
            yield from texts
            return
        num_left = self.train_characters
        for _, text, ends_document in texts:
            if 0 < num_left < len(text):  # the boundary is inside the text
                yield "train", text[:num_left], False
                yield "val", text[num_left:], ends_document
            else:
                yield "train" if num_left else "val", text, ends_document
            num_left = max(num_left - len(text), 0)

    def _read_texts(self, max_characters):
        """Yields (split by hash, text, whether its document ends); the split of a text is None."""
        num_left = max_characters
        with tqdm(unit=" characters", unit_scale=True, disable=None, leave=False) as progress:
            for split, text, ends_document in self._read_documents():
                text = text[:num_left]
                yield split, text, ends_document
                progress.update(len(text))
                if num_left is not None:
                    num_left -= len(text)
                    if num_left == 0:
                        return

    def _read_documents(self):
        """Yields the same as _read_texts, of all characters."""
        for source in self.sources:
            split = None
            for chunk in source.read():
                if split is None and not self.is_text:
                    split = self._hash_split(source, chunk)
                texts = chunk.text.split(END_OF_TEXT) if self.allow_special else [chunk.text]
                for text in texts[:-1]:
                    yield split, text, True
                yield split, texts[-1], chunk.ends_document
                if chunk.ends_document:
                    split = None

    def _hash_split(self, source, chunk):
        """Returns the split of a document, of which `chunk` is the first.

        A document of several Chunks is the whole source, which is read again.
        """
        digest = hashlib.blake2b(digest_size=8)
        for part in [chunk] if chunk.ends_document else source.read():
            digest.update(part.text.encode())
        return "val" if int.from_bytes(digest.digest()) < self.val_share * 2**64 else "train"
