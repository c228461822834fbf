"""Tests of folio/tokenizers.py. The first part holds for every entry of TOKENIZERS."""

import json
from unittest.mock import Mock

import numpy as np
import pytest
import requests
import tiktoken
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from folio import tokenizers
from folio.errors import UserError
from folio.tokenizers import END_OF_TEXT, TOKENIZERS, CharTokenizer, GPT2Tokenizer, from_dict

TEXT = "naïve 🦶🏽\r\n\t<end> 𝔘\ufeff\u2028 naïve"
TOO_MANY = "".join(map(chr, range(0x10000, 0x10000 + 65537)))  # characters for uint16
with_fixtures = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def for_any_text(test):
    return with_fixtures(given(text=st.text(min_size=1))(example(text=TEXT)(test)))


# Every tokenizer


@pytest.fixture(params=TOKENIZERS.values(), ids=TOKENIZERS)
def tokenizer_class(request, gpt2_of_bytes):
    """Each class in TOKENIZERS; GPT2Tokenizer has a vocabulary that needs no download."""
    return request.param


@for_any_text
def test_decode_inverts_encode(tokenizer_class, text):
    tokenizer = tokenizer_class.from_text(text)
    ids, none = tokenizer.encode(text), tokenizer.encode("")
    assert ids.dtype == none.dtype == np.uint16
    assert (ids.ndim, none.shape) == (1, (0,))
    assert ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == text
    assert tokenizer.decode(none) == tokenizer.decode([]) == ""


@for_any_text
def test_token_bytes_concatenate_to_the_bytes_of_the_text(tokenizer_class, text):
    tokenizer = tokenizer_class.from_text(text)
    pieces = [tokenizer.token_bytes(token) for token in tokenizer.encode(text).tolist()]
    assert b"".join(pieces) == text.encode()


@for_any_text
def test_from_dict_inverts_to_dict_through_json(tokenizer_class, text):
    before = tokenizer_class.from_text(text)
    after = from_dict(json.loads(json.dumps(before.to_dict())))
    assert type(after) is tokenizer_class
    assert (after.to_dict(), after.vocab_size) == (before.to_dict(), before.vocab_size)
    assert after.encode(text).tolist() == before.encode(text).tolist()


@with_fixtures
@given(text=st.text(min_size=1), data=st.data())
def test_incremental_decoder_equals_decode(tokenizer_class, text, data):
    tokenizer = tokenizer_class.from_text(text)
    ids = tokenizer.encode(text).tolist()
    for some in (ids, data.draw(st.lists(st.sampled_from(ids)))):  # the second: in any order
        decode = tokenizer.decoder()
        assert "".join(decode(token) for token in [*some, None]) == tokenizer.decode(some)


def test_attributes_are_consistent(tokenizer_class):
    tokenizer = tokenizer_class.from_text(TEXT)
    assert TOKENIZERS[tokenizer.kind] is tokenizer_class
    assert tokenizer.padded_vocab_size >= tokenizer.vocab_size
    assert tokenizers.fits(tokenizer, tokenizer.vocab_size)
    assert tokenizers.fits(tokenizer, tokenizer.padded_vocab_size)
    assert len(tokenizer.encode(tokenizer.start)) >= 1
    if tokenizer.end is not None:
        assert tokenizer.encode(tokenizer.separator).tolist() == [tokenizer.end]


# Characters


@given(st.text(min_size=1), st.text(st.characters(), min_size=1))
@example("whole 🦶", "🦶\udfff\ud83e\uddb6")
def test_first_unknown_character_is_named(vocabulary, text):
    tokenizer = CharTokenizer.from_text(vocabulary)
    unknown = [(at, c) for at, c in enumerate(text) if c not in vocabulary]
    if not unknown:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        return
    at, c = unknown[0]
    with pytest.raises(UserError) as caught:
        tokenizer.encode(text)
    assert str(caught.value) == (
        f"character {c!r} (U+{ord(c):04X}) at position {at} is not among the "
        f"{len(set(vocabulary))} characters of the vocabulary"
    )


def test_character_ids_follow_the_order_of_code_points():
    tokenizer = CharTokenizer.from_text("b🦶a\nb")
    assert (tokenizer.characters, tokenizer.vocab_size) == ("\nab🦶", 4)
    assert tokenizer.encode("ab\n🦶").tolist() == [1, 2, 0, 3]


def test_default_prompt_is_a_newline_if_the_vocabulary_has_one():
    assert (CharTokenizer("\t\na").start, CharTokenizer(" ab").start) == ("\n", " ")


def test_character_vocabulary_has_at_most_65536_entries():
    text = TOO_MANY[:-1]
    tokenizer = CharTokenizer.from_text(text)
    assert tokenizer.encode(text[0] + text[-1]).tolist() == [0, 65535]
    assert from_dict(tokenizer.to_dict()).decode([65535]) == text[-1]
    with pytest.raises(UserError, match="65,537 distinct characters, more than the 65,536"):
        CharTokenizer.from_text(TOO_MANY)


# GPT-2's byte-pair encoding; the fixture `gpt2` needs tiktoken's files, `gpt2_of_bytes` does not


def test_multi_token_character_is_decoded_with_its_last_token(gpt2_of_bytes):
    decode = gpt2_of_bytes.decoder()
    assert [decode(byte) for byte in "é🦶".encode()] == ["", "é", "", "", "", "🦶"]
    assert decode(None) == ""
    assert gpt2_of_bytes.decode([0xC3, ord("a")]) == "\ufffda"


def test_a_failed_download_of_the_vocabulary_is_a_user_error(monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", Mock(side_effect=requests.ConnectionError()))
    with pytest.raises(UserError, match="tiktoken cannot download .* TIKTOKEN_CACHE_DIR"):
        GPT2Tokenizer().encode("text")


def test_vocabulary_size_of_gpt2_needs_no_files(monkeypatch):
    monkeypatch.delattr(tiktoken, "get_encoding")
    tokenizer = from_dict(GPT2Tokenizer.from_text("any").to_dict())
    assert (tokenizer.vocab_size, tokenizer.padded_vocab_size) == (50257, 50304)


def test_gpt2_ids(gpt2):
    assert gpt2.encode(f"Hello world{END_OF_TEXT}").tolist() == [15496, 995, 50256]
    assert gpt2.end == 50256
    for text in (TEXT, f"a{END_OF_TEXT}b", " \n\n  indented\x00"):
        ids = gpt2.encode(text).tolist()
        assert gpt2.decode(ids) == b"".join(map(gpt2.token_bytes, ids)).decode() == text


# Damaged data


@pytest.mark.parametrize(
    "data", [None, "char", [], {}, {"kind": None}, {"kind": ["char"]}, {"kind": "x"},
             {"kind": "char"}, {"kind": "char", "characters": None}],
    ids=repr,
)  # fmt: skip
def test_damaged_tokenizer_is_refused(data):
    with pytest.raises(UserError, match="damaged or unknown; known kinds: char, gpt2"):
        from_dict(data)
