"""Text to token ids and back, for characters and for GPT-2's byte pairs.

A tokenizer travels as plain data (`to_dict`, `from_dict`) in a dataset's meta.json and inside each
checkpoint. Ids are uint16: no vocabulary here is larger than 65,536.
"""

import codecs
from functools import cached_property

import numpy as np

from config import UserError

LARGEST_VOCABULARY = 2**16
CODE_POINTS = 0x110000  # of Unicode
END_OF_TEXT = "<|endoftext|>"


class CharTokenizer:
    """One id per character, that is, per Unicode code point."""

    kind = "char"
    end = None  # no id says that a text ends
    separator = "\n\n"  # between documents of a folder

    def __init__(self, characters):
        """`characters`: the vocabulary as a string; a character's id is its place in it."""
        self.characters = characters
        self.vocab_size = len(characters)
        self._points = _code_points(characters)
        self._ids = np.full(CODE_POINTS, -1, dtype=np.int32)
        self._ids[self._points] = np.arange(self.vocab_size)

    @classmethod
    def from_text(cls, text):
        """The tokenizer of the characters that occur in `text`, in the order of code points."""
        occurs = np.zeros(CODE_POINTS, dtype=bool)
        for _, points in _pieces(text):
            occurs[points] = True
        points = np.flatnonzero(occurs)
        if len(points) > LARGEST_VOCABULARY:
            raise UserError(
                f"the text has {len(points):,} distinct characters, more than the "
                f"{LARGEST_VOCABULARY:,} that uint16 ids can tell apart; use --tokenizer=gpt2"
            )
        return cls(_text(points))

    @property
    def start(self):
        """What a sample continues when nothing else is asked for."""
        return "\n" if "\n" in self.characters else self.characters[0]

    def encode(self, text):
        """Ids of `text`, uint16 of shape (len(text),); UserError names a foreign character."""
        ids = np.empty(len(text), dtype=np.uint16)
        for start, points in _pieces(text):
            piece = self._ids[points]
            if piece.min() < 0:
                at = start + int(np.argmax(piece < 0))
                raise UserError(
                    f"character {text[at]!r} (U+{ord(text[at]):04X}) at position {at} is not among "
                    f"the {self.vocab_size} characters of the vocabulary"
                )
            ids[start : start + len(piece)] = piece
        return ids

    def decode(self, ids):
        """The text of a sequence of ids."""
        return _text(self._points[np.asarray(ids, dtype=np.int64)])

    def decoder(self):
        """A function of the ids of a text, one by one and None at last, to the text they add."""
        return lambda token: "" if token is None else self.characters[token]

    def bytes_of(self, token):
        """What a token adds to the UTF-8 text."""
        return self.characters[token].encode("utf-8", "surrogatepass")

    def to_dict(self):
        return {"kind": self.kind, "characters": self.characters}


class GPT2Tokenizer:
    """GPT-2's byte pair encoding, by tiktoken, which fetches its two files on first use."""

    kind = "gpt2"
    separator = END_OF_TEXT
    start = "\n"
    vocab_size = 50257

    @classmethod
    def from_text(cls, text):
        """The same for every text."""
        return cls()

    @cached_property
    def _encoding(self):
        import tiktoken  # here, so that work on characters does without it

        try:
            return tiktoken.get_encoding("gpt2")
        except (OSError, ValueError) as error:  # no network, or a file that is not the right one
            raise UserError(
                f"tiktoken cannot fetch GPT-2's vocabulary ({type(error).__name__}); connect once, "
                "or set TIKTOKEN_CACHE_DIR to a folder that holds its files"
            ) from error

    @property
    def end(self):
        """The id of END_OF_TEXT."""
        return self._encoding.eot_token

    def encode(self, text):
        """Ids of `text`, uint16; <|endoftext|> in it becomes the one token of that name."""
        encoding = self._encoding
        try:
            ids = encoding.encode_to_numpy(text, allowed_special={END_OF_TEXT})
        except ValueError as error:  # it gives up on a million equal characters in a row
            raise UserError(f"tiktoken cannot encode the text ({error})") from error
        return ids.astype(np.uint16)

    def decode(self, ids):
        """The text of a sequence of ids; bytes that are not UTF-8 become U+FFFD."""
        return self._encoding.decode([int(i) for i in ids])

    def decoder(self):
        """As above; a character whose bytes come with several ids comes whole, with the last."""
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        return lambda token: decode(b"", True) if token is None else decode(self.bytes_of(token))

    def bytes_of(self, token):
        """As above; a part of a character, it may be."""
        return self._encoding.decode_single_token_bytes(token)

    def to_dict(self):
        return {"kind": self.kind}


KINDS = {kind.kind: kind for kind in (CharTokenizer, GPT2Tokenizer)}


def from_dict(data):
    """The tokenizer that `to_dict` described. Raises UserError for anything else."""
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind == GPT2Tokenizer.kind:
        return GPT2Tokenizer()
    characters = data.get("characters") if kind == CharTokenizer.kind else None
    if not isinstance(characters, str) or not 1 <= len(characters) <= LARGEST_VOCABULARY:
        raise UserError(f"its tokenizer is damaged or unknown: folio knows {', '.join(KINDS)}")
    if len(set(characters)) < len(characters):
        raise UserError("the tokenizer's characters do not differ from each other")
    return CharTokenizer(characters)


def _pieces(text, size=2**20):
    """(where it starts, its code points) of each piece: a long text is not held as uint32 whole."""
    for start in range(0, len(text), size):
        yield start, _code_points(text[start : start + size])


def _code_points(text):
    """Code points of `text` as uint32, without a Python loop; lone surrogates pass."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def _text(points):
    return points.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")
