"""Tokenizers: characters, UTF-8 bytes, GPT-2's byte-pair encoding, one trained on a text, a list.

Each is stored as plain data (`to_dict`, `from_dict`) in a dataset's meta.json and in checkpoints.
"""

import codecs
from abc import ABC, abstractmethod
from collections import Counter
from functools import cached_property

import numpy as np

from folio.cli.errors import UserError, as_user_error
from folio.data import bpe

UNICODE_CODE_POINTS = 0x110000
END_OF_TEXT = "<|endoftext|>"
BLANK_LINE = "\n\n"
GPT2_MERGES_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
GPT2_REFUSAL = (
    "tiktoken cannot download GPT-2's vocabulary: connect to the network once, or set "
    "TIKTOKEN_CACHE_DIR to a folder that contains its files"
)
TOKENIZERS: dict[str, type["Tokenizer"]] = {}  # by kind


class Tokenizer(ABC):
    """Base class of the tokenizers. Each subclass is a kind, and is registered in TOKENIZERS.

    A subclass defines `kind`, `vocab_size`, `encode` and `token_bytes`. If its constructor has
    parameters, it also defines `from_texts` and `to_dict`. The other members have defaults.
    """

    kind: str  # its name in settings and files
    vocab_size: int  # number of token ids
    # The id of the end-of-text token, or None. The class has that of the tokenizers of from_texts.
    end: int | None = None
    end_text = END_OF_TEXT  # the text of that token
    start = "\n"  # default prompt; an empty one is the end-of-text token

    def __init_subclass__(cls):
        TOKENIZERS[cls.kind] = cls

    @classmethod
    def from_texts(cls, texts, vocab_size=None) -> "Tokenizer":
        """Returns the tokenizer for an iterable of texts. A trained kind needs `vocab_size`."""
        return cls()

    def to_dict(self):
        """Returns `kind` and the arguments of the constructor, as plain data."""
        return {"kind": self.kind}

    def to_definition(self):
        """Returns the content of a tokenizer.json. Raises UserError if none has the same tokens."""
        raise UserError(f"a tokenizer of kind {self.kind} cannot be written as tokenizer.json")

    @abstractmethod
    def encode(self, text, allow_special=False):
        """Returns the ids of `text`, (N,) of type `dtype`.

        The text of a special token is ordinary text, or that token if `allow_special`. Raises
        UserError if the vocabulary lacks a part of the text.
        """

    def encode_prompt(self, prompt, allow_special=False):
        """Returns the ids of a prompt, a nonempty list. An empty prompt begins a document."""
        return self.encode(prompt, allow_special).tolist() if prompt else [self.end]

    @abstractmethod
    def token_bytes(self, token):
        """Returns the bytes of a token, which can be an incomplete character."""

    @property
    def padded_vocab_size(self):
        """Rows of a new model's embedding."""
        return self.vocab_size

    def fits(self, vocab_size):
        """Whether a model's vocabulary size is the tokenizer's, exact or padded."""
        return vocab_size in (self.vocab_size, self.padded_vocab_size)

    @property
    def name(self):
        """The tokenizer as messages name it, such as "char with 65 tokens"."""
        return f"{self.kind} with {self.vocab_size:,} tokens"  # in logs of 0.2.0, too

    @property
    def dtype(self):
        """The type of ids: uint16 up to 65,536 ids, else uint32."""
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")

    def decode(self, ids):
        """Returns the text of a sequence of ids; invalid UTF-8 becomes U+FFFD."""
        return b"".join(self.token_bytes(int(i)) for i in ids).decode("utf-8", errors="replace")

    def decoder(self):
        """Returns an incremental decoder: called with each id, then None, it returns new text.

        A character that spans several tokens is returned with the last of them.
        """
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        return lambda token: decode(b"", True) if token is None else decode(self.token_bytes(token))

    def byte_lengths(self):
        """Returns the bytes of each token, (padded_vocab_size,) int64; 0 for end and padding."""
        lengths = np.zeros(self.padded_vocab_size, np.int64)
        lengths[: self.vocab_size] = [len(self.token_bytes(i)) for i in range(self.vocab_size)]
        if self.end is not None:
            lengths[self.end] = 0
        return lengths


class CharTokenizer(Tokenizer):
    """One token per character (Unicode code point)."""

    kind = "char"

    def __init__(self, characters):
        """`characters` is a string, indexed by id."""
        self.characters = characters
        self.vocab_size = len(characters)
        self.start = "\n" if "\n" in characters else characters[:1]
        self._ids = np.full(UNICODE_CODE_POINTS, -1, np.int32)
        self._ids[code_points(characters)] = np.arange(self.vocab_size)

    @classmethod
    def from_texts(cls, texts, vocab_size=None):
        return cls("".join(sorted(set("".join(texts)))))

    def to_dict(self):
        return {"kind": self.kind, "characters": self.characters}

    def to_definition(self):
        return bpe.define_characters(self.characters)

    def encode(self, text, allow_special=False):
        points = code_points(text)
        ids = self._ids[points]
        if len(ids) and ids.min() < 0:
            counts = Counter(map(chr, points[ids < 0].tolist()))
            frequent = [f"{n:,} × {c!r} (U+{ord(c):04X})" for c, n in counts.most_common(10)]
            raise UserError(
                f"the vocabulary of {self.vocab_size:,} characters lacks {len(counts):,} that the "
                f"text has (occurrences: {counts.total():,}): {', '.join(frequent)}; replace or "
                "remove them, or train a new model, with --tokenizer=byte or bpe for any text"
            )
        return ids.astype(self.dtype)

    def token_bytes(self, token):
        return self.characters[token].encode(errors="surrogatepass")  # nanoGPT's may have some


class ListTokenizer(Tokenizer):
    """Tokens of any length, from nanoGPT's meta.pkl; the longest one that fits is used."""

    kind = "list"

    def __init__(self, tokens):
        """`tokens` is a list of strings, indexed by id. Raises ValueError if it has no token."""
        self.tokens, self.vocab_size = tokens, len(tokens)
        self.start = next(filter(None, tokens))
        self._ids = {token: i for i, token in enumerate(tokens)}
        self._lengths = sorted(set(map(len, tokens)) - {0}, reverse=True)

    def to_dict(self):
        return {"kind": self.kind, "tokens": self.tokens}

    def encode(self, text, allow_special=False):
        ids, position = [], 0
        while position < len(text):
            pieces = (text[position : position + length] for length in self._lengths)
            piece = next((piece for piece in pieces if piece in self._ids), None)
            if piece is None:
                rest, examples = text[position : position + 20], ", ".join(map(repr, self.tokens))
                raise UserError(f"no token fits {rest!r}; the tokens are {examples:.100}")
            ids.append(self._ids[piece])
            position += len(piece)
        return np.array(ids, self.dtype)

    def token_bytes(self, token):
        return self.tokens[token].encode(errors="surrogatepass")


class ByteTokenizer(Tokenizer):
    """One token per byte of UTF-8."""

    kind = "byte"
    vocab_size = 256

    def to_definition(self):
        return bpe.define_merges(list(map(self.token_bytes, range(256))))

    def encode(self, text, allow_special=False):
        return np.frombuffer(text.encode(), np.uint8).astype(self.dtype)

    def token_bytes(self, token):
        return bytes([token])


class BPETokenizer(Tokenizer):
    """A byte-level byte-pair encoding, such as one trained on a corpus; see folio/data/bpe.py."""

    kind = "bpe"
    end = 0

    def __init__(self, definition, end_text=END_OF_TEXT):
        """`definition` is the content of a tokenizer.json. Raises UserError if it is invalid."""
        self.definition, self.end_text = definition, end_text
        self._encoder = bpe.load_encoder(definition)
        with as_user_error("the BPE tokenizer is damaged", KeyError, ValueError):
            self._token_bytes, added_ids = bpe.read_vocabulary(self._encoder)
        self.vocab_size, self.end = len(self._token_bytes), added_ids.get(end_text)
        self.start = "\n" if self.end is None else ""

    @classmethod
    def from_texts(cls, texts, vocab_size=None):
        """Returns a tokenizer trained on texts. Its size includes the end-of-text token."""
        return cls(bpe.train_bpe(texts, vocab_size, END_OF_TEXT))

    def to_dict(self):
        data = {"kind": self.kind, "definition": self.definition}
        if self.end_text != END_OF_TEXT:  # which older files do not have
            data["end_text"] = self.end_text
        return data

    def to_definition(self):
        return self.definition

    def encode(self, text, allow_special=False):
        return np.array(bpe.encode_text(self._encoder, text, allow_special), self.dtype)

    def token_bytes(self, token):
        return self._token_bytes[token]


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-pair encoding, from tiktoken, which downloads its two files on first use."""

    kind = "gpt2"
    vocab_size = 50257
    padded_vocab_size = 50304  # as in nanoGPT; multiples of 64 are faster on GPUs
    end = 50256
    start = ""

    @cached_property
    def _encoding(self):
        import tiktoken  # imported here because the other tokenizers do not need it

        with as_user_error(GPT2_REFUSAL, OSError, ValueError):  # a ValueError: other content
            return tiktoken.get_encoding("gpt2")

    def to_definition(self):
        from tiktoken.load import read_file_cached  # imported here because it is slow

        with as_user_error(GPT2_REFUSAL, OSError, ValueError):
            lines = read_file_cached(GPT2_MERGES_URL).decode().splitlines()[1:]  # 0: the version
        merges = [tuple(line.split(" ")) for line in lines]
        tokens = list(map(self.token_bytes, range(self.vocab_size)))
        return bpe.define_merges(tokens, merges, END_OF_TEXT)

    def encode(self, text, allow_special=False):
        special = {END_OF_TEXT} if allow_special else set()
        options = {"allowed_special": special, "disallowed_special": ()}
        # tiktoken fails on a million equal characters in a row
        arrays = [self._encoding.encode_to_numpy(piece, **options) for piece in bpe.cut_text(text)]
        return np.concatenate(arrays, dtype=self.dtype, casting="unsafe")

    def token_bytes(self, token):
        return self._encoding.decode_single_token_bytes(token)


def from_dict(data) -> Tokenizer:
    """Returns the tokenizer that `to_dict` described. Raises UserError for invalid data."""
    refusal = f"the tokenizer is damaged or unknown; known kinds: {', '.join(TOKENIZERS)}"
    with as_user_error(refusal, AttributeError, KeyError, TypeError, ValueError):
        parameters = dict(data)
        return TOKENIZERS[parameters.pop("kind")](**parameters)


def code_points(text):
    """Returns the code points of `text`, uint32; lone surrogates are allowed."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
