"""Tests of folio/data/tokenizer.py. The first part holds for every entry of TOKENIZERS."""

import json
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import requests
import tiktoken
import tiny
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import prepare
from folio.cli.files import unify_line_ends
from folio.data import bpe
from folio.data.dataset import load_dataset
from folio.data.tokenizer import (
    END_OF_TEXT,
    TOKENIZERS,
    BPETokenizer,
    CharTokenizer,
    GPT2Tokenizer,
    Tokenizer,
    from_dict,
)
from tools.page.__main__ import describe_tokenizer

TEXT = "naïve 🦶🏽\r\n\t<end> 𝔘\ufeff\u2028 naïve"
with_fixtures = settings(
    max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


# Every tokenizer


@pytest.fixture(params=TOKENIZERS)
def kind(request, gpt2_of_bytes):
    """Each kind in TOKENIZERS; GPT2Tokenizer has a vocabulary that needs no download."""
    return request.param


@with_fixtures
@given(text=st.text(min_size=1))
@example(text=TEXT)
def test_tokens_are_the_text(kind, text):
    tokenizer = tiny.new_tokenizer(kind, text)
    ids, none = tokenizer.encode(text), tokenizer.encode("")
    assert ids.dtype == none.dtype == np.uint16
    assert (ids.ndim, none.shape) == (1, (0,))
    assert ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(none) == ""
    lengths = tokenizer.byte_lengths()
    assert lengths.shape == (tokenizer.padded_vocab_size,)
    assert lengths[ids].sum() == len(text.encode())
    assert not lengths[tokenizer.vocab_size :].any()
    assert tokenizer.end is None or lengths[tokenizer.end] == 0
    restored = from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert restored.to_dict() == tokenizer.to_dict()
    assert restored.encode(text).tolist() == ids.tolist()


@with_fixtures
@given(text=st.text(min_size=1), data=st.data())
def test_incremental_decoder_equals_decode(kind, text, data):
    tokenizer = tiny.new_tokenizer(kind, text)
    ids = tokenizer.encode(text).tolist()
    for sequence in (ids, data.draw(st.lists(st.sampled_from(ids)))):  # the second: any order
        decode = tokenizer.decoder()
        assert "".join(decode(token) for token in [*sequence, None]) == tokenizer.decode(sequence)


def test_attributes_are_consistent(kind):
    tokenizer = tiny.new_tokenizer(kind, TEXT)
    assert tokenizer.name == f"{kind} with {tokenizer.vocab_size} tokens"
    assert tokenizer.fits(tokenizer.vocab_size)
    assert tokenizer.fits(tokenizer.padded_vocab_size)
    assert None not in tokenizer.encode_prompt(tokenizer.start)
    if tokenizer.end is not None:
        assert tokenizer.encode(END_OF_TEXT, allow_special=True).tolist() == [tokenizer.end]
        assert tokenizer.end not in tokenizer.encode(f"a{END_OF_TEXT}b")
        assert tokenizer.decode(tokenizer.encode(END_OF_TEXT)) == END_OF_TEXT


def test_a_new_kind_needs_one_class(folder, monkeypatch):
    monkeypatch.setitem(TOKENIZERS, "mirror", None)  # which is undone after the test

    class MirrorTokenizer(Tokenizer):
        kind = "mirror"
        vocab_size = 256

        def encode(self, text, allow_special=False):
            return np.array([255 - byte for byte in text.encode()], self.dtype)

        def token_bytes(self, token):
            return bytes([255 - token])

    Path("own.txt").write_bytes(TEXT.encode() * 9)
    prepare.main(["--input=own.txt", "--dataset=own", "--tokenizer=mirror"])
    tokenizer = load_dataset("own").tokenizer
    assert isinstance(tokenizer, MirrorTokenizer)
    assert tiny.text_of("own") == unify_line_ends(TEXT * 9)
    for describe in (Tokenizer.to_definition, describe_tokenizer):
        assert "mirror" in tiny.error_of(describe, tokenizer)


# Characters


def test_unknown_characters_are_counted_and_the_most_frequent_are_named():
    unknown = "".join(map(chr, range(0x410, 0x42A)))
    message = tiny.error_of(CharTokenizer("ab").encode, f"a{unknown}b🦶🦶")
    assert "lacks 27 that the text has (occurrences: 28): 2 × '🦶' (U+1F9B6), 1 × 'А'" in message
    assert message.count(" × ") == 10


def test_ids_of_characters_are_their_positions_in_the_vocabulary():
    tokenizer = CharTokenizer("\nab🦶")
    assert tokenizer.encode("ab\n🦶").tolist() == [1, 2, 0, 3]
    assert (tokenizer.start, CharTokenizer(" ab").start) == ("\n", " ")
    assert "(U+DFFF);" in tiny.error_of(tokenizer.encode, "ab\udfff")


# Bytes and trained byte-pair encodings


def test_bpe_merges_frequent_pairs_and_has_every_byte():
    tokenizer = BPETokenizer.from_texts(["ab ab ab ab cd"] * 3, 260)
    assert [tokenizer.token_bytes(token) for token in (0, 257, 258)] == [
        END_OF_TEXT.encode(), b"ab", b" ab"
    ]  # fmt: skip
    assert sorted(tokenizer.token_bytes(token) for token in range(1, 257)) == [
        bytes([byte]) for byte in range(256)
    ]
    assert tokenizer.end == 0
    assert BPETokenizer.from_texts(["ab"], 1000).vocab_size == 258
    assert BPETokenizer.from_texts([], 1000).vocab_size == 257


@pytest.mark.parametrize("kind", ["bpe", "gpt2"])
def test_text_without_a_place_to_cut_is_cut_after_the_maximum(kind, gpt2_of_bytes, monkeypatch):
    """Otherwise, time would be quadratic, and tiktoken fails on a million equal characters."""
    monkeypatch.setattr(bpe, "MIN_PIECE_CHARACTERS", 10)
    monkeypatch.setattr(bpe, "MAX_PIECE_CHARACTERS", 20)
    text = "漢" * 30 + "字、字" * 10 + "a" * 99
    pieces = [*bpe.cut_text(text)]
    assert "".join(pieces) == text
    assert [len(piece) for piece in pieces] == [20, 11, 12, 12, 20, 20, 20, 20, 20, 4]
    tokenizer = gpt2_of_bytes if kind == "gpt2" else BPETokenizer.from_texts([text], 270)
    expected = [token for piece in pieces for token in tokenizer.encode(piece)]
    assert tokenizer.encode(text).tolist() == expected


def test_bpe_is_trained_on_parts_of_long_words():
    """Otherwise, training would take quadratic time."""
    tokenizer = BPETokenizer.from_texts(["ab" * 1000], 1000)
    assert max(map(len, map(tokenizer.token_bytes, range(tokenizer.vocab_size)))) == 256
    assert json.loads(tokenizer.definition)["pre_tokenizer"]["type"] == "ByteLevel"


@pytest.mark.parametrize("kind", ["bpe", "gpt2"])
@with_fixtures
@given(text=st.text("ab1.' \n\r\té\x1c\x85\xa0\u2028漢、。_", max_size=20))
@example(text="it's  so.\r\nI'm 's a\n\nb 1\n")
@example(text="line 1's end.  \nline 2's end.\r\n\r\nline 3 \n end.")
def test_every_cut_keeps_the_tokens(kind, text, request):
    trained = BPETokenizer.from_texts(["it's a b. a\n\nb \r\n a  a' 's 1 a.\n"] * 9, 290)
    tokenizer = trained if kind == "bpe" else request.getfixturevalue("gpt2")
    whole = tokenizer.encode(text).tolist()
    cuts = [cut.end() for cut in bpe.CUT_PATTERN.finditer(text)]
    for cut in cuts:
        first, second = text[:cut], text[cut:]
        assert [*tokenizer.encode(first), *tokenizer.encode(second)] == whole
    assert bpe.find_last_cut(text) == max(cuts, default=len(text))


# GPT-2's byte-pair encoding; the fixture `gpt2` needs tiktoken's files, `gpt2_of_bytes` does not


def test_multi_token_character_is_decoded_with_its_last_token(gpt2_of_bytes):
    decode = gpt2_of_bytes.decoder()
    assert [decode(byte) for byte in "é🦶".encode()] == ["", "é", "", "", "", "🦶"]
    assert decode(None) == ""
    assert gpt2_of_bytes.decode([0xC3, ord("a")]) == "\ufffda"


def test_a_failed_download_of_the_vocabulary_is_a_user_error(monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", Mock(side_effect=requests.ConnectionError()))
    assert "TIKTOKEN_CACHE_DIR" in tiny.error_of(GPT2Tokenizer().encode, "text")


def test_gpt2_ids(gpt2):
    text = f"Hello world{END_OF_TEXT}"
    assert gpt2.encode(text, allow_special=True).tolist() == [15496, 995, gpt2.end]
    assert gpt2.decode([15496, 995, gpt2.end]) == text


# Damaged data


@pytest.mark.parametrize(
    "data",
    [None, [], {}, {"kind": ["char"]}, {"kind": "x"}, {"kind": "char", "characters": None},
     {"kind": "byte", "definition": ""}, {"kind": "bpe", "definition": None},
     {"kind": "bpe", "definition": "{}"}],
    ids=repr,
)  # fmt: skip
def test_damaged_tokenizer_is_refused(data):
    assert "tokenizer" in tiny.error_of(from_dict, data)


SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"vocab": {"a": 1}}}, "cannot be used"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": [["nothing", "known"]]}}, "cannot be"),
        # matching a pattern could take exponential time
        ({"normalizer": SPLIT}, "normalizer Split is not supported"),
        ({"pre_tokenizer": SPLIT}, "pre_tokenizer Split is not supported"),
        ({"decoder": SPLIT}, "decoder Split is not supported"),
    ],
)
def test_a_damaged_or_unsupported_bpe_is_refused(changes, message):
    plain = json.loads(BPETokenizer.from_texts(["ab" * 9], 260).definition)
    assert message in tiny.error_of(BPETokenizer, json.dumps(plain | changes))


def test_settings_of_the_library_that_crash_or_change_tokens_have_no_effect():
    plain = BPETokenizer.from_texts(["ab" * 9], 260)
    changed = json.loads(plain.definition)
    changed["model"] |= {"dropout": 1.0, "continuing_subword_prefix": "##"}
    changed["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 9}
    restored = BPETokenizer(json.dumps(changed))
    assert restored.encode("abab").tolist() == plain.encode("abab").tolist()
