"""Byte-level byte-pair encodings of the tokenizers library: training, vocabulary, encoding.

A definition is the content of a tokenizer.json, which is the library's format.
"""

import re
import sys
from functools import cache

from folio.cli.errors import UserError, cause_of

PIECE = 2**16  # characters of a text that are encoded at once
# After these, a text can be cut without a change of its tokens: a line end between two characters
# that are not whitespace, and a character before a single space.
CUT = re.compile(r"(?<=\S)\n(?=\S)|(?<=\S)(?= \S)")


def train(documents, vocab_size, end):
    """Returns the definition of a BPE of texts, with GPT-2's pre-tokenization.

    It has fewer than `vocab_size` tokens if the texts are short.

    Args:
        end: the end-of-text token, which is not in the texts.
    """
    library = load_library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end],
        initial_alphabet=byte_characters(),
        show_progress=sys.stderr.isatty(),  # elsewhere, it prints empty lines
    )
    tokenizer.train_from_iterator((each for text in documents for each in pieces(text)), trainer)
    return tokenizer.to_str()


def vocabulary(encoder):
    """Returns {id: bytes} of all tokens, and {text: id} of those that are not made by merges.

    Raises KeyError or ValueError if they are not those of a byte-level encoding.
    """
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    added = {each.content: i for i, each in encoder.get_added_tokens_decoder().items()}
    tokens = {
        token: bytes(byte_of[c] for c in characters)
        for characters, token in encoder.get_vocab(with_added_tokens=False).items()
        if characters not in added
    }
    tokens |= {token: content.encode() for content, token in added.items()}
    if sorted(tokens) != list(range(len(tokens))):
        raise ValueError("the ids of the tokens are not consecutive")
    return tokens, added


def encoder(definition):
    """Returns the library's tokenizer. Raises UserError if the definition is invalid."""
    load = load_library().Tokenizer.from_str
    try:
        return load(definition)
    except Exception as error:  # the library has no type for its errors
        raise UserError(f"the BPE tokenizer is damaged ({cause_of(error)})") from error


def encode(encoder, text, allow_special):
    """Returns the ids of a text, as a list. Its pieces are encoded in parallel."""
    if encoder.encode_special_tokens == allow_special:  # setting it fails while a thread encodes
        encoder.encode_special_tokens = not allow_special  # as ordinary text
    encodings = encoder.encode_batch_fast([*pieces(text)], add_special_tokens=False)
    return [token for encoding in encodings for token in encoding.ids]


def pieces(text):
    """Yields a text in pieces of at least PIECE characters, as far as it can be cut."""
    start = 0
    while start < len(text):
        cut = CUT.search(text, start + PIECE)
        end = cut.end() if cut else len(text)
        yield text[start:end]
        start = end


def last_cut(text):
    """Returns the last place where a text can be cut, or 0 if there is none."""
    for start in (max(len(text) - 256, 0), 0):  # most texts have one near the end
        if ends := [cut.end() for cut in CUT.finditer(text, start)]:
            return ends[-1]
    return 0


@cache
def byte_characters():
    """Returns the characters that stand for the bytes 0 to 255 in vocabularies, a list.

    As in GPT-2: printable characters of Latin-1 stand for their own bytes, and U+0100, U+0101 and
    so on for the other bytes.
    """
    printable, others = {*range(33, 127), *range(161, 173), *range(174, 256)}, iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def load_library():
    """Returns the module tokenizers. Raises UserError if it is not installed."""
    try:
        import tokenizers  # imported here because it is optional
    except ImportError as error:
        raise UserError("BPE tokenizers need a package: pip install tokenizers") from error
    return tokenizers
