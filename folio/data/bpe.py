"""Byte-level BPEs of the tokenizers library. A definition is the content of a tokenizer.json."""

import json
import re
import sys
from functools import cache

from folio.cli.errors import as_user_error, check_types, import_optional

MIN_PIECE_CHARACTERS, MAX_PIECE_CHARACTERS = 2**16, 2**17
# After a match, a text can be cut without a change of its tokens: a line end between two characters
# that are not whitespace, a character before a single space, a letter before a comma or full stop.
CUT_PATTERN = re.compile(r"(?<=\S)\n(?=\S)|(?<=\S)(?= \S)|(?<=[^\W_])(?=[,.\u3001\u3002\uff0c])")


def train_bpe(texts, vocab_size, end_of_text):
    """Returns the definition of a BPE that is trained on texts, with GPT-2's pre-tokenization.

    It has fewer than `vocab_size` tokens if the texts are short. They do not contain `end_of_text`.
    """
    library = import_optional("tokenizers", "a BPE tokenizer")
    tokenizer = library.Tokenizer(library.models.BPE())
    byte_level = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    limit = library.pre_tokenizers.FixedLength(256)  # longer words would take quadratic time
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence([byte_level, limit])
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end_of_text],
        initial_alphabet=byte_characters(),
        show_progress=sys.stderr.isatty(),  # elsewhere, it prints empty lines
    )
    pieces = (piece for text in texts for piece in cut_text(text))
    tokenizer.train_from_iterator(pieces, trainer)
    tokenizer.pre_tokenizer = byte_level
    return tokenizer.to_str()


def read_vocabulary(encoder):
    """Returns {id: bytes} of all tokens, and {text: id} of those that are not made by merges.

    Raises KeyError or ValueError if they are not those of a byte-level encoding.
    """
    added_tokens = encoder.get_added_tokens_decoder()
    added_ids = {token.content: token_id for token_id, token in added_tokens.items()}
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    token_bytes = {
        token_id: bytes(byte_of[character] for character in characters)
        for characters, token_id in encoder.get_vocab(with_added_tokens=False).items()
        if characters not in added_ids
    }
    token_bytes |= {token_id: text.encode() for text, token_id in added_ids.items()}
    if sorted(token_bytes) != list(range(len(token_bytes))):
        raise ValueError("the ids of the tokens are not consecutive")
    return token_bytes, added_ids


def define_merges(tokens, merges=(), end_of_text=None):
    """Returns the definition of a byte-level encoding.

    Args:
        tokens: bytes of each token, indexed by id.
        merges: pairs of tokens, in the alphabet of byte_characters(). Without any, each byte is a
            token, and the text is not split into words.
        end_of_text: text of a special token among them, or None.
    """
    library = import_optional("tokenizers", "a tokenizer.json")
    characters = byte_characters()
    names = ("".join(characters[byte] for byte in token) for token in tokens)
    vocabulary = {name: token_id for token_id, name in enumerate(names)}
    encoder = library.Tokenizer(library.models.BPE(vocabulary, list(merges)))
    encoder.pre_tokenizer = library.pre_tokenizers.ByteLevel(False, True, use_regex=bool(merges))
    encoder.decoder = library.decoders.ByteLevel()
    if end_of_text:
        token = library.AddedToken(end_of_text, special=True, normalized=False)
        encoder.add_special_tokens([token])
    return encoder.to_str()


def define_characters(characters):
    """Returns the definition of an encoding with these characters as tokens, without merges."""
    library = import_optional("tokenizers", "a tokenizer.json")
    unknown = "?" if "?" in characters else characters[0]  # what other characters are read as
    vocabulary = {character: i for i, character in enumerate(characters)}
    encoder = library.Tokenizer(library.models.BPE(vocabulary, [], unk_token=unknown))
    encoder.decoder = library.decoders.Fuse()
    return encoder.to_str()


def load_encoder(definition):
    """Returns the library's tokenizer. Raises UserError if the definition is invalid."""
    library = import_optional("tokenizers", "a BPE tokenizer")
    with as_user_error("the BPE tokenizer cannot be used", Exception):  # JSON may hold anything
        fields, parts = json.loads(definition), ("normalizer", "pre_tokenizer", "decoder")
        check_types(fields, {"model": dict, **dict.fromkeys(parts, dict | None)}, "its content")
        for name in parts:
            kind = (fields.get(name) or {}).get("type")
            if kind not in (None, "ByteLevel", "Fuse"):  # can crash or take exponential time
                raise ValueError(f"{name} {kind} is not supported")
        fields |= dict.fromkeys(("truncation", "padding", "post_processor"))
        fields["model"] |= dict.fromkeys(("dropout", "continuing_subword_prefix"))
        for token in fields.get("added_tokens") or ():
            token |= {"lstrip": False, "rstrip": False}  # they would drop the spaces beside it
        return library.Tokenizer.from_str(json.dumps(fields))


def encode_text(encoder, text, allow_special):
    """Returns the ids of a text, as a list. Its pieces are encoded in parallel."""
    if encoder.encode_special_tokens == allow_special:  # setting it fails while a thread encodes
        encoder.encode_special_tokens = not allow_special  # as ordinary text
    encodings = encoder.encode_batch_fast(list(cut_text(text)), add_special_tokens=False)
    return [token for encoding in encodings for token in encoding.ids]


def cut_text(text):
    """Yields pieces of a text, whose tokens are those of the text.

    Each has MIN_PIECE_CHARACTERS to MAX_PIECE_CHARACTERS, except the last. If CUT_PATTERN has no
    match in between, a piece ends after the maximum, which can change the tokens at this position.
    """
    start = 0
    while start < len(text) or start == 0:
        limit = start + MAX_PIECE_CHARACTERS
        cut = CUT_PATTERN.search(text, start + MIN_PIECE_CHARACTERS, limit)
        end = cut.end() if cut else limit
        yield text[start:end]
        start = end


def find_last_cut(text):
    """Returns the last position near the end at which a text can be cut, or else its end."""
    cuts = CUT_PATTERN.finditer(text, max(len(text) - MIN_PIECE_CHARACTERS, 0))
    return max((cut.end() for cut in cuts), default=len(text))


@cache
def byte_characters():
    """Returns the characters that stand for the bytes 0 to 255 in vocabularies, a list.

    As in GPT-2, printable characters of Latin-1 stand for their own bytes, U+0100 on for others.
    """
    printable, others = {*range(33, 127), *range(161, 173), *range(174, 256)}, iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
