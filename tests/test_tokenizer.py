import json

import numpy as np
import pytest
import requests
import tiktoken
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from config import UserError
from tokenizer import END_OF_TEXT, KINDS, CharTokenizer, GPT2Tokenizer, from_dict

any_text = st.text(st.characters(), min_size=1)


def code_points(start, count):
    return "".join(map(chr, range(start, start + count)))


# Characters


@given(any_text)
@example("lone \udfff, halves \ud83e\uddb6, whole 🦶")
def test_any_text_survives_encoding_and_decoding(text):
    tokenizer = CharTokenizer.from_text(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(any_text)
def test_characters_decode_one_by_one_as_all_at_once(text):
    tokenizer = CharTokenizer.from_text(text)
    decode = tokenizer.decoder()
    assert [decode(token) for token in tokenizer.encode(text).tolist()] == list(text)
    assert (decode(None), tokenizer.end) == ("", None)


@given(any_text)
def test_any_tokenizer_survives_the_journey_as_json(text):
    there = CharTokenizer.from_text(text)
    back = from_dict(json.loads(json.dumps(there.to_dict())))
    assert (back.kind, back.characters) == (there.kind, there.characters)
    assert back.encode(text).tolist() == there.encode(text).tolist()


@given(any_text, any_text)
def test_text_is_encoded_or_its_first_foreign_character_is_named(vocabulary, text):
    tokenizer = CharTokenizer.from_text(vocabulary)
    foreign = [at for at, character in enumerate(text) if character not in vocabulary]
    if not foreign:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        return
    with pytest.raises(UserError) as caught:
        tokenizer.encode(text)
    assert f"{text[foreign[0]]!r} (U+" in str(caught.value)
    assert f" at position {foreign[0]} " in str(caught.value)


def test_ids_are_places_in_the_order_of_code_points():
    tokenizer = CharTokenizer.from_text("b🦶a\nb")
    assert (tokenizer.characters, tokenizer.vocab_size) == ("\nab🦶", 4)
    assert tokenizer.encode("ab\n🦶").tolist() == [1, 2, 0, 3]


@pytest.mark.parametrize("text", ["", "ab"])
def test_ids_are_uint16_one_per_character(text):
    ids = CharTokenizer("ab").encode(text)
    assert (ids.dtype, ids.shape) == (np.uint16, (len(text),))


@pytest.mark.parametrize("ids", [[], [1, 0], (1, 0), np.array([1, 0], dtype=np.uint16)])
def test_decode_takes_any_sequence_of_ids(ids):
    assert CharTokenizer("ab").decode(ids) == "ba"[: len(ids)]


@pytest.mark.parametrize(
    ("foreign", "name"),
    [("d", "'d' (U+0064)"), ("\t", "'\\t' (U+0009)"), ("🦶", "'🦶' (U+1F9B6)")],
)
def test_a_foreign_character_is_named_with_its_place_and_the_vocabularys_size(foreign, name):
    with pytest.raises(UserError) as caught:
        CharTokenizer("abc").encode(f"ab{foreign}")
    assert str(caught.value) == (
        f"character {name} at position 2 is not among the 3 characters of the vocabulary"
    )


def test_a_foreign_character_between_known_ones_is_found():
    with pytest.raises(UserError, match=r"'b' \(U\+0062\) at position 1 "):
        CharTokenizer("ac").encode("abc")


def test_uint16_tells_65536_characters_apart():
    text = code_points(0x10000, 65536)
    tokenizer = CharTokenizer.from_text(text)
    assert tokenizer.encode(text[0] + text[-1]).tolist() == [0, 65535]
    assert from_dict(tokenizer.to_dict()).decode([65535]) == text[-1]


def test_more_than_65536_distinct_characters_are_refused():
    with pytest.raises(UserError, match="65,537 distinct characters, more than the 65,536"):
        CharTokenizer.from_text(code_points(0x10000, 65537))


@pytest.mark.parametrize(("characters", "start"), [("\t\na", "\n"), (" ab", " ")])
def test_a_sample_starts_with_a_new_line_where_the_vocabulary_has_one(characters, start):
    assert CharTokenizer(characters).start == start


def test_a_text_of_millions_is_encoded_whole_and_its_foreign_character_found():
    tokenizer = CharTokenizer("ab")
    text = "a" * 1_500_000 + "b" * 1_500_000
    assert tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(UserError, match="'c' .* at position 3000000 "):
        tokenizer.encode(text + "c")


# GPT-2's byte pairs; `gpt2_of_bytes` needs no files from tiktoken, `gpt2` does


def test_gpt2_tokens_are_uint16_and_come_back(gpt2_of_bytes):
    ids = gpt2_of_bytes.encode("é!")
    assert (ids.dtype, ids.tolist()) == (np.uint16, [0xC3, 0xA9, ord("!")])
    assert gpt2_of_bytes.decode(ids) == "é!"


def test_the_end_of_a_text_is_one_token(gpt2_of_bytes):
    assert gpt2_of_bytes.end == 256
    ids = gpt2_of_bytes.encode(f"a{END_OF_TEXT}b")
    assert ids.tolist() == [ord("a"), 256, ord("b")]
    assert gpt2_of_bytes.decode(ids) == f"a{END_OF_TEXT}b"


def test_a_character_of_several_tokens_comes_whole_with_the_last(gpt2_of_bytes):
    decode = gpt2_of_bytes.decoder()
    assert [decode(byte) for byte in "é🦶".encode()] == ["", "é", "", "", "", "🦶"]
    assert decode(None) == ""


@given(st.lists(st.integers(0, 255)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_decode_one_by_one_as_all_at_once(gpt2_of_bytes, ids):
    decode = gpt2_of_bytes.decoder()
    assert "".join(map(decode, [*ids, None])) == gpt2_of_bytes.decode(ids)


def test_bytes_that_are_not_utf8_decode_to_a_replacement(gpt2_of_bytes):
    assert gpt2_of_bytes.decode([0xC3, ord("a")]) == "\ufffda"


@pytest.mark.parametrize(
    "error", [requests.ConnectionError("no route"), requests.Timeout(), OSError("read-only")]
)
def test_gpt2_files_out_of_reach_are_told_with_the_ways_on(error, monkeypatch):
    def fail(name):
        raise error

    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    with pytest.raises(UserError) as caught:
        GPT2Tokenizer().encode("text")
    message = str(caught.value)
    assert message.startswith(f"tiktoken cannot fetch GPT-2's vocabulary ({type(error).__name__})")
    assert "TIKTOKEN_CACHE_DIR" in message


def test_a_text_that_tiktoken_gives_up_on_is_told(monkeypatch):
    class Weary:
        def encode_to_numpy(self, text, allowed_special):
            raise ValueError("max stack size exceeded")

    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: Weary())
    with pytest.raises(UserError, match="cannot encode the text .max stack size exceeded"):
        GPT2Tokenizer().encode("a" * 9)


def test_gpt2_as_data_needs_no_files(monkeypatch):
    monkeypatch.delattr(tiktoken, "get_encoding")
    data = GPT2Tokenizer.from_text("any").to_dict()
    assert data == {"kind": "gpt2"}
    assert from_dict(data).vocab_size == 50257


def test_the_real_gpt2_ids(gpt2):
    assert gpt2.encode(f"Hello world{END_OF_TEXT}").tolist() == [15496, 995, 50256]
    assert gpt2.decode([15496, 995]) == "Hello world"


def test_any_text_survives_the_real_gpt2(gpt2):
    @given(st.text())
    def check(text):
        assert gpt2.decode(gpt2.encode(text)) == text

    check()


# As plain data


def test_each_kind_is_known_by_its_name():
    assert {name: from_dict({"kind": name, "characters": "ab"}).kind for name in KINDS} == {
        "char": "char",
        "gpt2": "gpt2",
    }


@pytest.mark.parametrize(
    "data",
    [
        None,
        "char",
        [],
        {},
        {"kind": None},
        {"kind": ["char"]},
        {"kind": "words", "characters": "ab"},
        {"kind": "char"},
        {"kind": "char", "characters": ""},
        {"kind": "char", "characters": ["a", "b"]},
        {"kind": "char", "characters": code_points(0x10000, 65537)},
    ],
    ids=lambda data: repr(data)[:40],
)
def test_data_of_no_tokenizer_is_refused(data):
    with pytest.raises(
        UserError, match="its tokenizer is damaged or unknown: folio knows char, gpt2"
    ):
        from_dict(data)


def test_characters_that_repeat_are_refused():
    with pytest.raises(UserError, match="do not differ"):
        from_dict({"kind": "char", "characters": "aba"})
