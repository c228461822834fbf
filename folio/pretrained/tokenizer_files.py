"""The files of a tokenizer in a Hugging Face folder: tokenizer.json and tokenizer_config.json.

Every tokenizer is written as a BPE of the tokenizers library. `char` has one token per character,
`byte` one per byte, both without merges. In the vocabularies of `byte`, `gpt2` and `bpe`, one
character stands for each byte of a token (folio/data/bpe.py: byte_characters).

A character that is not in the vocabulary of `char` is an error in folio. transformers reads it as
"?", or as the first character of the vocabulary if "?" is unknown, too.
"""

import hashlib
import json
import os

from folio.cli.errors import UserError, as_user_error
from folio.cli.files import read_text
from folio.data.bpe import load_encoder
from folio.data.tokenizer import (
    END_OF_TEXT,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    GPT2Tokenizer,
    Tokenizer,
)

TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
# A normalizer, or a pre-tokenizer that adds or removes characters, changes this text.
SAMPLE_TEXT = "A text: caf\u00e9 cafe\u0301, \ufb01 12 , \u6f22\u5b57\n\t end  "
UTF_8_BYTES = [*range(0xC0), *range(0xC2, 0xF5)]  # those that UTF-8 can contain
GPT2_VOCABULARY_SHA256 = "e35a33a0b2250c932ffdafc4c3a3552aef0cc7af7a11e9ebfddf1d2a6517371f"


# Writing


def make_tokenizer_files(tokenizer: Tokenizer):
    """Returns {name: text} of the files that AutoTokenizer.from_pretrained reads."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # uses tokenizer.json as it is
        "clean_up_tokenization_spaces": False,  # would remove spaces before punctuation
    }
    if tokenizer.end is not None:
        names = "bos_token", "eos_token", "unk_token"  # one for all, as GPT-2's
        config |= dict.fromkeys(names, tokenizer.end_text)
    return {TOKENIZER_FILE: tokenizer.to_definition(), CONFIG_FILE: json.dumps(config, indent=1)}


# Reading


def read_tokenizer(path) -> Tokenizer:
    """Returns the tokenizer in a tokenizer.json.

    Raises UserError if it is missing, damaged or not supported.
    """
    if not os.path.isfile(path):
        code = "AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)"
        raise UserError(f"{path.parent} has no {path.name}; write it with transformers: {code}")
    definition = read_text(path)
    try:
        return _tokenizer(load_encoder(definition), _end_text(path.parent))
    except UserError as error:
        raise UserError(f"{path}: {error}; only byte-level BPE, as of GPT-2, is read") from error


def _end_text(folder):
    """Returns the text of the end-of-text token that a folder declares, or GPT-2's."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return END_OF_TEXT
    with as_user_error(f"{path.name} cannot be read", AttributeError, RecursionError, ValueError):
        token = json.loads(read_text(path)).get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else END_OF_TEXT


def _tokenizer(built, end_text):
    """Returns the tokenizer here that is equivalent to one of the library."""
    text = built.to_str()
    fields = json.loads(text)
    model = fields["model"]
    if model["type"] != "BPE" or not model["vocab"]:
        raise UserError(f"the tokenizer is of type {model['type']} or has missing tokens")
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    for candidate in (ByteTokenizer(), CharTokenizer("".join(tokens))):
        if text == candidate.to_definition():
            return candidate
    fingerprint = hashlib.sha256("\n".join(tokens).encode()).hexdigest()
    if fingerprint == GPT2_VOCABULARY_SHA256 and len(fields["added_tokens"]) == 1:
        return GPT2Tokenizer()
    tokenizer = BPETokenizer(text, end_text)
    if tokenizer.decode(tokenizer.encode(SAMPLE_TEXT)) != SAMPLE_TEXT:
        raise UserError("the tokenizer changes the text")
    found = set(map(tokenizer.token_bytes, range(tokenizer.vocab_size)))
    if missing := [byte for byte in UTF_8_BYTES if bytes([byte]) not in found]:
        raise UserError(f"the tokenizer has no tokens for {len(missing)} bytes and drops them")
    return tokenizer
