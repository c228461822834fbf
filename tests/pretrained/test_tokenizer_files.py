"""Tests of folio/pretrained/tokenizer_files.py, against the tokenizers library and transformers."""

import json
from pathlib import Path

import pytest
import tiny
from tokenizers import Tokenizer

import prepare
from folio.cli.errors import UserError
from folio.data.bpe import byte_characters
from folio.data.dataset import load_dataset
from folio.data.tokenizer import END_OF_TEXT, ByteTokenizer, CharTokenizer
from folio.pretrained.tokenizer_files import (
    TOKENIZER_FILE,
    make_tokenizer_files,
    read_tokenizer,
)

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


KINDS = ["char", "byte", "bpe"]
GPT2 = pytest.param("gpt2", marks=pytest.mark.slow)


def write_changed(folder, tokenizer, **changes):
    """Writes a tokenizer.json with changes."""
    fields = json.loads(tokenizer.to_definition()) | changes
    Path(folder, "tokenizer.json").write_text(json.dumps(fields), encoding="utf-8")


@pytest.fixture
def tokenizer(kind, request):
    return request.getfixturevalue(kind) if kind == "gpt2" else tiny.new_tokenizer(kind, BOOK)


@pytest.fixture
def auto_tokenizer(tmp_path):
    """A function that writes a tokenizer, and loads it with transformers."""
    import transformers  # here because it is slow

    def load(tokenizer):
        files = make_tokenizer_files(tokenizer) | {"config.json": '{"model_type": "gpt2"}'}
        for name, text in files.items():
            (tmp_path / name).write_bytes(text.encode())
        return transformers.AutoTokenizer.from_pretrained(tmp_path)

    return load


# Writing


@pytest.mark.parametrize("kind", [*KINDS, GPT2])
def test_transformers_reads_the_same_tokens(tokenizer, auto_tokenizer, tmp_path):
    theirs = auto_tokenizer(tokenizer)
    assert len(theirs) == tokenizer.vocab_size
    assert theirs.eos_token_id == theirs.bos_token_id == theirs.unk_token_id == tokenizer.end
    for text in (DIFFICULT, "", " ", "\n", "a"):
        ids = tokenizer.encode(text).tolist()
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == text
    theirs.save_pretrained(tmp_path / "saved")
    for folder in (tmp_path, tmp_path / "saved"):  # both are read again
        assert read_tokenizer(Path(folder, TOKENIZER_FILE)).to_dict() == tokenizer.to_dict()


@pytest.mark.parametrize("kind", ["bpe", GPT2])
def test_transformers_reads_the_end_token_in_a_text(tokenizer, auto_tokenizer):
    theirs, text = auto_tokenizer(tokenizer), f"a{END_OF_TEXT}b"
    ids = tokenizer.encode(text, allow_special=True).tolist()
    assert theirs(text)["input_ids"] == ids
    assert theirs(text, split_special_tokens=True)["input_ids"] == tokenizer.encode(text).tolist()
    assert theirs.decode(ids, skip_special_tokens=True) == "ab"


@pytest.mark.parametrize(("vocabulary", "read"), [("ab?", "a?b?"), ("ba", "abbb")])
def test_unknown_characters_become_question_marks(vocabulary, read, auto_tokenizer):
    theirs = auto_tokenizer(CharTokenizer(vocabulary))
    assert theirs.decode(theirs("aéb🦶")["input_ids"]) == read


@pytest.mark.parametrize("eos_token", ["</s>", {"content": "</s>"}])
def test_special_tokens_in_a_corpus_are_those_of_transformers(eos_token, folder):
    from transformers import PreTrainedTokenizerFast  # here because it is slow

    built = Tokenizer.from_str(tiny.new_tokenizer("bpe", BOOK).to_definition())
    built.add_special_tokens(["<s>", "</s>"])
    Path("hf").mkdir()
    built.save("hf/tokenizer.json")
    Path("hf/tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    text = "<s>the cat</s><s>the dog</s>" * 30
    Path("own.txt").write_text(text)
    flags = ["--input=own.txt", "--dataset=own", "--tokenizer=hf", "--val_fraction=0.5"]
    prepare.main([*flags, "--allow_special=True"])
    data, size = load_dataset("own"), len(load_dataset("own").train)
    theirs = PreTrainedTokenizerFast(tokenizer_object=built)
    expected = theirs(text.removesuffix("</s>"))["input_ids"]  # separators are between documents
    assert data.train.tolist() == expected[:size]
    assert data.val.tolist() == expected[size + 1 :]  # without the separator between the splits
    assert data.tokenizer.end == theirs.convert_tokens_to_ids("</s>") in expected
    assert data.tokenizer.encode(text, allow_special=True).tolist()[:-1] == expected


# Reading


def test_a_tokenizer_keeps_the_spaces_beside_its_tokens(tmp_path):
    bpe = tiny.new_tokenizer("bpe", BOOK)
    [token] = json.loads(bpe.to_definition())["added_tokens"]
    write_changed(tmp_path, bpe, added_tokens=[token | {"lstrip": True, "rstrip": True}])
    text, tokenizer = f"a {END_OF_TEXT} b", read_tokenizer(tmp_path / TOKENIZER_FILE)
    assert tokenizer.decode(tokenizer.encode(text, allow_special=True)) == text


@pytest.mark.parametrize(("missing", "count"), [([0xC0, 0xFF], 0), ([0xC0, 0x80, 0xC5], 2)])
def test_a_tokenizer_without_all_bytes_is_refused(missing, count, tmp_path):
    characters = [c for byte, c in enumerate(byte_characters()) if byte not in missing]
    vocabulary = {character: i for i, character in enumerate(characters)}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    write_changed(tmp_path, ByteTokenizer(), model=model)
    if not count:
        assert read_tokenizer(tmp_path / TOKENIZER_FILE).vocab_size == 254
        return
    with pytest.raises(UserError, match=f"no tokens for {count} bytes"):
        read_tokenizer(tmp_path / TOKENIZER_FILE)


@pytest.mark.slow
def test_gpt2_with_an_added_token_is_a_bpe(gpt2, tmp_path):
    [end] = json.loads(gpt2.to_definition())["added_tokens"]
    padding = end | {"id": 50257, "content": "[PAD]"}
    write_changed(tmp_path, gpt2, added_tokens=[end, padding])
    tokenizer = read_tokenizer(tmp_path / TOKENIZER_FILE)
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.end) == ("bpe", 50258, 50256)
    assert tokenizer.encode(DIFFICULT).tolist() == gpt2.encode(DIFFICULT).tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {"model": []},
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 2}, "merges": []}},  # an id is missing
        {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []},
        {"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0}},
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}},
    ],
    ids=str,
)
def test_damaged_and_other_tokenizers_are_refused(changes, tmp_path):
    write_changed(tmp_path, tiny.new_tokenizer("bpe", BOOK), **changes)
    with pytest.raises(UserError, match=r"^[^\n]*tokenizer\.json: [^\n]*$"):
        read_tokenizer(tmp_path / TOKENIZER_FILE)
