"""The tokenizer files of a Hugging Face folder: tokenizer.json and tokenizer_config.json.

Every tokenizer is written as a BPE. `char` has one token per character, `byte` one per byte, both
without merges. In the vocabularies of `byte`, `gpt2` and `bpe`, one character stands for each byte
of a token (folio.bpe.byte_characters).

A character that is not in the vocabulary of `char` is an error in folio. transformers reads it as
"?", or as the first character of the vocabulary if "?" is unknown, too.
"""

import hashlib
import json
from pathlib import Path

from folio.bpe import byte_characters
from folio.errors import UserError, cause_of
from folio.files import is_file, read_text
from folio.tokenizers import (
    END_OF_TEXT,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    GPT2Tokenizer,
)

FILES = ("tokenizer.json", "tokenizer_config.json")
UNSUPPORTED = {"tokenizer.model": "SentencePiece", "vocab.txt": "WordPiece"}  # file: its format
CUTS = ("Digits", "Split")  # pre-tokenizers
GPT2_MERGES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
GPT2_VOCABULARY = (
    "e35a33a0b2250c932ffdafc4c3a3552aef0cc7af7a11e9ebfddf1d2a6517371f"  # see _fingerprint
)


# Writing


def contents(tokenizer):
    """Returns {name: text} of the files that AutoTokenizer.from_pretrained reads.

    Raises UserError if the tokenizer cannot be represented.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # uses tokenizer.json as it is
        "clean_up_tokenization_spaces": False,  # would remove spaces before punctuation
    }
    if tokenizer.end is not None:
        config["bos_token"] = config["eos_token"] = END_OF_TEXT
    return dict(zip(FILES, (definition(tokenizer), json.dumps(config, indent=1)), strict=True))


def definition(tokenizer):
    """Returns a tokenizer as the text of a tokenizer.json, the format of the tokenizers library."""
    if tokenizer.kind == "bpe":
        return tokenizer.definition
    plain = {"char": _char, "byte": _byte, "gpt2": _gpt2}[tokenizer.kind](tokenizer)
    return json.dumps(plain, ensure_ascii=False)


def _char(tokenizer):
    characters = tokenizer.characters
    if surrogates := [c for c in characters if "\ud800" <= c <= "\udfff"]:
        raise UserError(
            f"the vocabulary contains U+{ord(surrogates[0]):04X}, half of a character, which "
            "transformers cannot read: prepare the text as valid UTF-8, and train again"
        )
    plain = _bpe(_char_vocabulary(tokenizer), [])
    plain["model"]["unk_token"] = "?" if "?" in characters else characters[0]
    return plain | {"decoder": {"type": "Fuse"}}


def _char_vocabulary(tokenizer):
    return {character: i for i, character in enumerate(tokenizer.characters)}


def _byte(tokenizer):
    return _byte_level(_byte_vocabulary(), [], split_words=False)


def _gpt2(tokenizer):
    from tiktoken.load import read_file_cached  # imported here because it is slow

    tokens = map(tokenizer.token_bytes, range(tokenizer.end))  # raises if tiktoken has no files
    vocabulary = {_characters(token): i for i, token in enumerate(tokens)}
    merges = read_file_cached(GPT2_MERGES).decode().splitlines()[1:]  # the first is the version
    return _gpt2_layout(vocabulary | {END_OF_TEXT: tokenizer.end}, merges)


def _gpt2_layout(vocabulary, merges):
    end = {"id": vocabulary[END_OF_TEXT], "content": END_OF_TEXT, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return _byte_level(vocabulary, merges) | {"added_tokens": [end | flags]}


def _byte_level(vocabulary, merges, split_words=True):
    layer = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    layer["use_regex"] = split_words
    return _bpe(vocabulary, merges) | {"pre_tokenizer": layer, "decoder": layer}


def _bpe(vocabulary, merges):
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    model = {"type": "BPE", "unk_token": None, "vocab": vocabulary, "merges": merges}
    return {"version": "1.0", "added_tokens": []} | dict.fromkeys(names) | {"model": model}


def _byte_vocabulary():
    return {character: byte for byte, character in enumerate(byte_characters())}


def _characters(token):
    """Returns the characters that stand for the bytes of a token."""
    return "".join(byte_characters()[byte] for byte in token)


# Reading


def read(folder):
    """Returns the tokenizer of a Hugging Face folder, or None if it has no tokenizer files.

    Raises UserError if the files are damaged, or are not a byte-level BPE or written by folio.
    """
    path, vocabulary, merges = (Path(folder, n) for n in (FILES[0], "vocab.json", "merges.txt"))
    try:
        if is_file(path):
            return _tokenizer(read_text(path), path)
        if is_file(path := vocabulary) and is_file(merges):
            lines = read_text(merges).splitlines()
            lines = [line for line in lines if line and not line.startswith("#version")]
            plain = _gpt2_layout(json.loads(read_text(vocabulary)), lines)
            return _tokenizer(json.dumps(plain), path)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged or not a tokenizer ({cause_of(error)})") from error
    for name, kind in UNSUPPORTED.items():
        if is_file(Path(folder, name)):
            raise _unsupported(Path(folder, name), kind)
    return None


def _tokenizer(text, path):
    """Returns the tokenizer that the text of a tokenizer.json defines."""
    plain = json.loads(text)
    model, decoder = plain["model"], (plain.get("decoder") or {}).get("type")
    if model["type"] != "BPE" or plain.get("normalizer") or decoder not in ("ByteLevel", "Fuse"):
        raise _unsupported(path, model["type"])
    vocabulary, added = model["vocab"], plain["added_tokens"]
    tokens = sorted(vocabulary, key=vocabulary.get)
    if decoder == "Fuse":
        tokenizer = CharTokenizer("".join(tokens))
        if added or model["merges"] or vocabulary != _char_vocabulary(tokenizer):
            raise _unsupported(path, "BPE")
        return tokenizer
    if vocabulary == _byte_vocabulary() and not added:
        return ByteTokenizer()
    if _fingerprint(tokens) == GPT2_VOCABULARY and len(added) == 1:
        return GPT2Tokenizer()
    if not _keeps_text(plain.get("pre_tokenizer") or {}):
        raise UserError(f"{path} has a pre_tokenizer that changes the text, or is not byte-level")
    plain |= dict.fromkeys(("truncation", "padding", "post_processor"))  # not used here
    try:  # in the library's layout, so that a tokenizer that other programs saved remains equal
        return BPETokenizer(json.dumps(plain, ensure_ascii=False, separators=(",", ":")))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _keeps_text(pre_tokenizer):
    """Whether a pre-tokenizer only cuts a text before it maps its bytes to characters."""
    *cuts, last = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    is_removed = [cut["type"] not in CUTS or cut.get("behavior") == "Removed" for cut in cuts]
    return last.get("type") == "ByteLevel" and not (last.get("add_prefix_space") or any(is_removed))


def _unsupported(path, kind):
    return UserError(
        f"{path} is a tokenizer of type {kind}; only byte-level BPE without a normalizer, as of "
        "GPT-2, is supported"
    )


def _fingerprint(tokens):
    """Returns the sha256 of a vocabulary in order, which identifies it."""
    return hashlib.sha256("\n".join(tokens).encode()).hexdigest()
