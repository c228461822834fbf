"""Tokenizers: characters, and GPT-2's byte-pair encoding.

A tokenizer is stored as plain data (`to_dict`, `from_dict`) in a dataset's meta.json and in each
checkpoint. Token ids are uint16, so a vocabulary has at most 65,536 entries.
"""

import codecs
from functools import cached_property

import numpy as np

from folio.errors import UserError

LARGEST_VOCABULARY = 2**16
END_OF_TEXT = "<|endoftext|>"


class Tokenizer:
    """What the tokenizers share. Each has the methods of CharTokenizer and these attributes.

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

        It returns a character of several tokens with the last of them.
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
        self._ids = {character: i for i, character in enumerate(characters)}

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
        try:
            return np.fromiter(map(self._ids.__getitem__, text), np.uint16, len(text))
        except KeyError as error:
            unknown = error.args[0]
            raise UserError(
                f"character {unknown!r} (U+{ord(unknown):04X}) at position {text.index(unknown)} "
                f"is not among the {self.vocab_size} characters of the vocabulary"
            ) from None

    def token_bytes(self, token):
        """Returns the UTF-8 bytes of a token."""
        return self.characters[token].encode()


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
        import tiktoken  # imported here because characters do not need it

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
        return self._encoding.encode_to_numpy(text, allowed_special={END_OF_TEXT}).astype(np.uint16)

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
        raise UserError(f"the tokenizer is damaged or unknown; known: {known}") from error


def fits(tokenizer, vocab_size):
    """Whether a model's vocabulary size is the tokenizer's, exact or padded."""
    return vocab_size in (tokenizer.vocab_size, tokenizer.padded_vocab_size)
