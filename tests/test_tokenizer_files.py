"""Tests of folio/tokenizer_files.py, against the tokenizers library and transformers."""

import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library

from folio import tokenizer_files
from folio.bpe import byte_characters
from folio.errors import UserError
from folio.tokenizers import END_OF_TEXT, BPETokenizer, ByteTokenizer, CharTokenizer, GPT2Tokenizer

DIFFICULT = (
    " \n\n\t leading and trailing  \r\n"
    "isn't it ? yes , it 's !  I 'm  we 've\n"  # transformers' clean-up would remove the spaces
    "naïve nai\u0308ve \u212b \u00c5 A\u030a ﬁ ½ \u1100\u1161\u11a8 각 \u0344\n"  # normal forms
    "🦶🏽 👩\u200d🔬 🇩🇪 𝔘 \U0010fffd \ue000 \ufffd \ufffe\n"
    "\x00\x01\x1b\x7f\x85\xa0\xad\u2028\u2029\u3000\ufeff\u202eabc\u202c\n"
    "नमस्ते שלום مرحبا ไทย 漢字 １２３ ٣٤ Ǆ ẞ İ ı ſ\n"
    "<|endof text|> <s> [UNK] ▁ Ġ Ċ ## \\u0041 &amp; '  "
)
BOOK = DIFFICULT + "the cat sat on the mat and the dog sat on the log; " * 20
GAP = json.dumps(  # an id is missing
    {"model": {"type": "BPE", "vocab": {"a": 0, "b": 2}}, "added_tokens": []}
    | dict.fromkeys(("pre_tokenizer", "decoder"), {"type": "ByteLevel"})
)


def bpe():
    """A BPETokenizer that was trained on BOOK."""
    return BPETokenizer.train([BOOK], vocab_size=400)


MAKE = {
    "char": lambda: CharTokenizer.from_text(BOOK),
    "byte": ByteTokenizer,
    "bpe": bpe,
}
every_kind = pytest.mark.parametrize("kind", [*MAKE, "gpt2"])


def write(folder, tokenizer):
    for name, text in tokenizer_files.contents(tokenizer).items():
        (folder / name).write_bytes(text.encode())


@pytest.fixture
def tokenizer(kind, request):
    return MAKE[kind]() if kind in MAKE else request.getfixturevalue(kind)


@pytest.fixture
def auto_tokenizer(tmp_path):
    """A function that writes a tokenizer, and loads it with transformers."""
    transformers = pytest.importorskip("transformers")

    def load(tokenizer, model_type="gpt2"):
        write(tmp_path, tokenizer)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        return transformers.AutoTokenizer.from_pretrained(tmp_path)

    return load


def library(tokenizer):
    return Library.from_str(tokenizer_files.definition(tokenizer))


def written(folder, **changes):
    """Writes a tokenizer.json of bytes with changes."""
    plain = json.loads(tokenizer_files.definition(ByteTokenizer())) | changes
    Path(folder, "tokenizer.json").write_text(json.dumps(plain), encoding="utf-8")


# Writing


@every_kind
def test_transformers_reads_the_same_tokens(tokenizer, auto_tokenizer):
    theirs = auto_tokenizer(tokenizer)
    assert len(theirs) == tokenizer.vocab_size
    assert theirs.eos_token_id == theirs.bos_token_id == tokenizer.end
    for text in (DIFFICULT, "", " ", "\n", "a"):
        ids = tokenizer.encode(text).tolist()
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("model_type", ["starcoder2", "arcee"])
@pytest.mark.parametrize("kind", MAKE)
def test_the_tokenizer_does_not_depend_on_the_architecture(tokenizer, auto_tokenizer, model_type):
    theirs = auto_tokenizer(tokenizer, model_type)
    ids = tokenizer.encode(DIFFICULT).tolist()
    assert theirs(DIFFICULT)["input_ids"] == ids
    assert theirs.decode(ids) == DIFFICULT


@pytest.mark.slow
@every_kind
def test_transformers_tokenizes_shakespeare_alike(kind, request, auto_tokenizer):
    if not (path := os.environ.get("FOLIO_SHAKESPEARE")):
        pytest.skip("FOLIO_SHAKESPEARE names no copy of tiny Shakespeare")
    text = Path(path).read_text(encoding="utf-8")
    makers = MAKE | {
        "char": lambda: CharTokenizer.from_text(text),
        "gpt2": lambda: request.getfixturevalue("gpt2"),
    }
    tokenizer = makers[kind]()
    theirs, ids = auto_tokenizer(tokenizer), tokenizer.encode(text).tolist()
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", ["bpe", "gpt2"])
def test_transformers_reads_the_end_token_in_a_text(tokenizer, auto_tokenizer):
    theirs, text = auto_tokenizer(tokenizer), f"a{END_OF_TEXT}b"
    ids = tokenizer.encode(text, allow_special=True).tolist()
    assert theirs(text)["input_ids"] == ids
    assert theirs(text, split_special_tokens=True)["input_ids"] == tokenizer.encode(text).tolist()
    assert theirs.decode(ids, skip_special_tokens=True) == "ab"


@pytest.mark.parametrize(("vocabulary", "read"), [("ab?", "a?b?"), ("ba", "abbb")])
def test_unknown_characters_become_question_marks(vocabulary, read):
    theirs = library(CharTokenizer(vocabulary))
    assert theirs.decode(theirs.encode("aéb🦶").ids) == read


def test_gpt2_has_its_50000_merges(gpt2):
    model = json.loads(tokenizer_files.definition(gpt2))["model"]
    assert len(model["merges"]) == 50_000
    assert len(model["vocab"]) == 50_257
    assert model["merges"][0] == "Ġ t"


def test_half_a_character_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"U\+D83E, half of a character"):
        write(tmp_path, CharTokenizer("a\ud83e"))
    assert not any(tmp_path.iterdir())


# Reading


@every_kind
def test_read_inverts_write(tokenizer, tmp_path):
    write(tmp_path, tokenizer)
    assert tokenizer_files.read(tmp_path).to_dict() == tokenizer.to_dict()


@every_kind
def test_files_that_transformers_has_saved_are_read(tokenizer, auto_tokenizer, tmp_path):
    auto_tokenizer(tokenizer).save_pretrained(tmp_path / "saved")
    again = tokenizer_files.read(tmp_path / "saved")
    assert again.to_dict() == tokenizer.to_dict()
    assert again.encode(DIFFICULT).tolist() == tokenizer.encode(DIFFICULT).tolist()


def test_gpt2_is_recognized_by_vocab_and_merges(gpt2, tmp_path):
    model = json.loads(tokenizer_files.definition(gpt2))["model"]
    merges = "\n".join(["#version: 0.2", *model["merges"], ""])
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text(merges, encoding="utf-8")
    assert isinstance(tokenizer_files.read(tmp_path), GPT2Tokenizer)


def test_vocab_and_merges_of_another_bpe_are_read(tmp_path):
    tokens = [*byte_characters(), "th", "the", END_OF_TEXT]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("t h\nth e\n", encoding="utf-8")
    tokenizer = tokenizer_files.read(tmp_path)
    assert (tokenizer.kind, tokenizer.end) == ("bpe", 258)
    assert tokenizer.encode("the #1").tolist() == [257, 32, 35, 49]


def test_texts_are_not_truncated(tmp_path):
    tokenizer = bpe()
    limit = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    plain = json.loads(tokenizer.definition) | {"truncation": limit}
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
    assert tokenizer_files.read(tmp_path).encode(BOOK).tolist() == tokenizer.encode(BOOK).tolist()


def test_gpt2_with_another_token_is_another_vocabulary(gpt2, tmp_path):
    plain = json.loads(tokenizer_files.definition(gpt2))
    plain["added_tokens"].append(plain["added_tokens"][0] | {"id": 50257, "content": "[PAD]"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
    tokenizer = tokenizer_files.read(tmp_path)
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.end) == ("bpe", 50258, 50256)
    assert tokenizer.encode(DIFFICULT).tolist() == gpt2.encode(DIFFICULT).tolist()


def test_a_folder_without_tokenizer_files_has_no_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert tokenizer_files.read(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", GAP, "tokenizer.json: the BPE tokenizer is damaged"),
        ("tokenizer.json", "{", "tokenizer.json is damaged or not a tokenizer"),
        ("tokenizer.json", "[]", "tokenizer.json is damaged or not a tokenizer"),
        ("tokenizer.json", '{"model": {"type": "BPE"}}', "damaged|type BPE"),
        ("tokenizer.json", '{"model": {"type": "Unigram"}}', "type Unigram; only byte-level BPE"),
        ("tokenizer.model", "", "tokenizer.model is a tokenizer of type SentencePiece"),
        ("vocab.txt", "", "type WordPiece"),
    ],
)
def test_other_tokenizers_are_refused(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        tokenizer_files.read(tmp_path)


def test_a_normalizer_is_refused(tmp_path):
    written(tmp_path, normalizer={"type": "NFC"})
    with pytest.raises(UserError, match="only byte-level BPE without a normalizer"):
        tokenizer_files.read(tmp_path)


@pytest.mark.parametrize("changes", [{"model": []}, {"model": {"type": "BPE", "vocab": 1}}])
def test_damaged_definitions_are_refused(changes, tmp_path):
    written(tmp_path, **changes)
    with pytest.raises(UserError, match="damaged"):
        tokenizer_files.read(tmp_path)


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        None,
        {"type": "Whitespace"},
        {"type": "ByteLevel", "add_prefix_space": True},
        {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, {"type": "ByteLevel"}]},
        {
            "type": "Sequence",
            "pretokenizers": [{"type": "Split", "behavior": "Removed"}, {"type": "ByteLevel"}],
        },
    ],
    ids=str,
)
def test_pre_tokenizers_that_change_a_text_are_refused(pre_tokenizer, tmp_path):
    plain = json.loads(bpe().definition) | {"pre_tokenizer": pre_tokenizer}
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
    with pytest.raises(UserError, match="json has a pre_tokenizer that changes the text"):
        tokenizer_files.read(tmp_path)


def test_pre_tokenizers_that_cut_a_text_are_read(tmp_path):
    plain = json.loads(bpe().definition)
    digits = {"type": "Digits", "individual_digits": True}
    steps = {"type": "Sequence", "pretokenizers": [digits, plain["pre_tokenizer"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain | {"pre_tokenizer": steps}))
    tokenizer = tokenizer_files.read(tmp_path)
    assert tokenizer.decode(tokenizer.encode(BOOK)) == BOOK
