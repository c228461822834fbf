"""Tokenizers: characters, and GPT-2's byte-pair encoding.

A tokenizer is stored as plain data (`to_dict`, `from_dict`) in a dataset's meta.json and in each
checkpoint. Token ids are uint16, so a vocabulary has at most 65,536 entries.
"""

import codecs
from functools import cached_property

import numpy as np

from folio.errors import UserError

LARGEST_VOCABULARY = 2**16
CODE_POINTS = 0x110000  # in Unicode
CHUNK = 2**20  # characters that are encoded at once, to limit memory
END_OF_TEXT = "<|endoftext|>"


class Tokenizer:
    """Base class of the tokenizers. Each has the methods of CharTokenizer and these attributes.

    kind: its name in TOKENIZERS.
    vocab_size: number of token ids.
    padded_vocab_size: rows of a new model's embedding.
    end: id of the end-of-text token, or None.
    start: default prompt.
    separator: text between the documents of a folder.
    """

    def decode(self, ids):
        """Returns the text of a sequence of ids; invalid UTF-8 becomes U+FFFD."""
        return b"".join(self.token_bytes(int(i)) for i in ids).decode("utf-8", errors="replace")

    def decoder(self):
        """Returns an incremental decoder: called with each id, then None, it returns new text.

        A character that spans several tokens is returned with the last of them.
        """
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        return lambda token: decode(b"", True) if token is None else decode(self.token_bytes(token))


class CharTokenizer(Tokenizer):
    """One token per character (Unicode code point)."""

    kind = "char"
    end = None
    separator = "\n\n"

    def __init__(self, characters):
        """`characters` is a string, indexed by id. Raises UserError if there are too many."""
        if len(characters) > LARGEST_VOCABULARY:
            raise UserError(
                f"the text has {len(characters):,} distinct characters, more than the "
                f"{LARGEST_VOCABULARY:,} that uint16 ids allow; use --tokenizer=gpt2"
            )
        self.characters = characters
        self.vocab_size = self.padded_vocab_size = len(characters)
        self._ids = np.full(CODE_POINTS, -1, np.int32)
        self._ids[_code_points(characters)] = np.arange(self.vocab_size)

    @classmethod
    def from_text(cls, text):
        """Returns the tokenizer of the characters in `text`, ordered by code point."""
        return cls("".join(sorted(set(text))))

    def to_dict(self):
        return {"kind": self.kind, "characters": self.characters}

    @property
    def start(self):
        return "\n" if "\n" in self.characters else self.characters[0]

    def encode(self, text):
        """Returns the ids of `text`, (length,) uint16. Raises UserError for unknown characters."""
        ids = np.empty(len(text), np.uint16)
        for start in range(0, len(text), CHUNK):
            chunk = self._ids[_code_points(text[start : start + CHUNK])]
            if chunk.min() < 0:
                at = start + int(np.argmax(chunk < 0))
                raise UserError(
                    f"character {text[at]!r} (U+{ord(text[at]):04X}) at position {at} is not among "
                    f"the {self.vocab_size} characters of the vocabulary"
                )
            ids[start : start + len(chunk)] = chunk
        return ids

    def token_bytes(self, token):
        """Returns the UTF-8 bytes of a token."""
        return self.characters[token].encode(errors="surrogatepass")  # nanoGPT's may have some


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-pair encoding, from tiktoken, which downloads its two files on first use."""

    kind = "gpt2"
    separator = END_OF_TEXT
    start = "\n"
    vocab_size = 50257
    padded_vocab_size = 50304  # as in nanoGPT; multiples of 64 are faster on GPUs

    @classmethod
    def from_text(cls, text):
        return cls()

    def to_dict(self):
        return {"kind": self.kind}

    @cached_property
    def _encoding(self):
        import tiktoken  # imported here because CharTokenizer does not need it

        try:
            return tiktoken.get_encoding("gpt2")
        except (OSError, ValueError) as error:  # no network, or a file with other content
            raise UserError(
                f"tiktoken cannot download GPT-2's vocabulary ({type(error).__name__}); connect to "
                "the network once, or set TIKTOKEN_CACHE_DIR to a folder that contains its files"
            ) from error

    @property
    def end(self):
        return self._encoding.eot_token

    def encode(self, text):
        """Returns the ids of `text`, uint16; END_OF_TEXT in it becomes the end-of-text token."""
        try:
            ids = self._encoding.encode_to_numpy(text, allowed_special={END_OF_TEXT})
        except ValueError as error:  # tiktoken fails on a million equal characters in a row
            raise UserError(f"tiktoken cannot encode the text ({error})") from error
        return ids.astype(np.uint16)

    def token_bytes(self, token):
        """Returns the bytes of a token, possibly an incomplete UTF-8 character."""
        return self._encoding.decode_single_token_bytes(token)


TOKENIZERS = {each.kind: each for each in (CharTokenizer, GPT2Tokenizer)}


def from_dict(data):
    """Returns the tokenizer that `to_dict` described. Raises UserError for invalid data."""
    try:
        parameters = dict(data)
        return TOKENIZERS[parameters.pop("kind")](**parameters)
    except (KeyError, TypeError, ValueError) as error:
        known = ", ".join(TOKENIZERS)
        raise UserError(f"the tokenizer is damaged or unknown; known kinds: {known}") from error


def _code_points(text):
    """Returns the code points of `text`, uint32; lone surrogates are allowed."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def fits(tokenizer, vocab_size):
    """Whether a model's vocabulary size is the tokenizer's, exact or padded."""
    return vocab_size in (tokenizer.vocab_size, tokenizer.padded_vocab_size)
