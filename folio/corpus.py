"""A stream of documents, divided into training and validation split.

The first 90% of the characters of texts are the training split, so a document may be cut. In a
corpus with JSON lines or Parquet, the hash of a document decides: identical documents are in the
same split, and validation has about as many documents as 20 MB of the files hold, but between 0.05%
and 10% of the corpus.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from folio.tokenizers import BLANK_LINE, END_OF_TEXT, CharTokenizer

TRAIN_SHARE = 0.9
VAL_BYTES = 20_000_000
VAL_SHARES = (0.0005, 0.1)  # least and largest
SAMPLE = 2**20  # characters from which the length of tokens is estimated


@dataclass
class Position:
    """Where reading a Corpus continues.

    place: `start` of Source.read, in sources[source].
    inside: whether the document has begun.
    split: of the document.
    begun: splits that contain documents.
    characters: number that were read.
    left: number that belong to training from here on; None: hashes decide.
    limit: number of characters to read in total; None: all.
    tokens: number that were written.
    sha256s: of the sources that are known.
    """

    source: int = 0
    place: int = 0
    inside: bool = False
    split: str = "train"
    begun: tuple = ()
    characters: int = 0
    left: int | None = None
    limit: int | None = None
    tokens: int = 0
    sha256s: list = field(default_factory=list)

    @property
    def rest(self):
        """Number of characters that may still be read; None: all."""
        return None if self.limit is None else self.limit - self.characters


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
    whole_words: cut texts only where the cut does not change their tokens.
    """

    sources: list
    description: str
    allow_special: bool = False
    whole_words: bool = True

    @property
    def in_order(self):
        """Whether the first part is the training split, rather than a choice by hashes."""
        return not any(source.suffix for source in self.sources)

    @cached_property
    def size(self):
        """Bytes of all sources."""
        return sum(source.size for source in self.sources)

    def survey(self, kind, limit, progress):
        """Reads everything once. Returns a Position at the start, and a CharTokenizer or None.

        Args:
            kind: "char" for a CharTokenizer.
            limit: number of characters to read in total, or None.
            progress: a function that is called with the source's number and the bytes read of it.
        """
        at, documents = Position(limit=limit), 0

        def texts():
            nonlocal documents
            for index, source in enumerate(self.sources):
                with ThreadPoolExecutor(1) as thread:
                    sha256 = thread.submit(source.sha256)
                    for chunk in source.read(whole_words=self.whole_words):
                        for text in self._parts(chunk.text):
                            text = text[: at.rest]
                            at.characters += len(text)
                            yield text
                            documents += 1
                        documents -= not chunk.ends
                        progress(index, chunk.num_read)
                        if at.rest == 0:
                            break
                    at.sha256s.append(sha256.result())
                if at.rest == 0:
                    break
            if documents > 1:
                yield BLANK_LINE

        if kind == "char":
            tokenizer = CharTokenizer.from_text(texts())
        else:
            tokenizer = None
            for _ in texts():
                pass
        if self.in_order:
            at.left = int(TRAIN_SHARE * at.characters)
        return replace(at, characters=0), tokenizer

    def sample(self):
        """Returns the first SAMPLE characters."""
        text = ""
        for source in self.sources:
            for chunk in source.read(whole_words=self.whole_words):
                text += chunk.text
                if len(text) >= SAMPLE:
                    return text[:SAMPLE]
        return text

    def read(self, at, progress=lambda index, num_read: None):
        """Yields a list of Pieces for each chunk of the sources, and moves a Position behind it."""
        for index in range(at.source, len(self.sources)):
            source = self.sources[index]
            if index == len(at.sha256s):
                at.sha256s.append(source.sha256())
            for chunk in source.read(at.place, self.whole_words):
                if at.left is None and (source.suffix or not at.place):
                    at.split = self._split_by_hash(source, chunk)
                is_last = chunk.ends and not source.suffix
                at.source, at.place = (index + 1, 0) if is_last else (index, chunk.place)
                parts, pieces = self._parts(chunk.text), []
                for number, text in enumerate(parts, start=1):
                    if at.rest != 0:
                        pieces += self._pieces(at, text, number < len(parts) or chunk.ends)
                progress(index, chunk.num_read)
                yield pieces
                if at.rest == 0:
                    return
            at.source, at.place = index + 1, 0

    def training_texts(self, start):
        """Yields the texts of the training split from a Position on."""
        at = replace(start)
        for pieces in self.read(at):
            yield from (piece.text for piece in pieces if piece.split == "train")
            if at.left == 0:
                return

    def sha256(self, at):
        """Returns the hash of the file, or that of the hashes of several, up to a Position."""
        known = at.sha256s[: at.source + (at.place > 0)]  # reading may have been ahead
        if len(self.sources) == 1:
            return known[0]
        return hashlib.sha256("".join(known).encode()).hexdigest()

    def _parts(self, text):
        return text.split(END_OF_TEXT) if self.allow_special else [text]

    def _pieces(self, at, text, ends):
        """Returns the Pieces of the next text of a document."""
        text = text[: at.rest]
        at.characters += len(text)
        if at.left is None:
            parts = [(at.split, text)]
        else:
            parts = [("train", text[: at.left]), ("val", text[at.left :])]
            at.left -= len(parts[0][1])
        pieces = [self._piece(at, split, part) for split, part in parts if part]
        if ends and not at.inside:  # an empty document
            pieces.append(self._piece(at, at.split, ""))
        at.inside = at.inside and not ends
        return pieces

    @staticmethod
    def _piece(at, split, text):
        begins = not at.inside or split != at.split
        separated = begins and split in at.begun
        at.inside, at.split = True, split
        if split not in at.begun:
            at.begun = (*at.begun, split)  # a new one: copies of the Position keep theirs
        return Piece(split, separated, text)

    def _split_by_hash(self, source, chunk):
        least, largest = VAL_SHARES
        share = min(largest, max(least, VAL_BYTES / max(self.size, 1)))
        digest = hashlib.blake2b(digest_size=8)
        for part in [chunk] if chunk.ends else source.read():
            digest.update(part.text.encode())
        return "val" if int.from_bytes(digest.digest()) < share * 2**64 else "train"
