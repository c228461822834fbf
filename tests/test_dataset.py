"""Tests of folio/dataset.py: the files of a dataset folder, damaged ones, and nanoGPT's."""

import json
import os
import pickle
import zlib
from pathlib import Path

import numpy as np
import pytest
import tiny
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from folio import dataset
from folio.dataset import (
    DATA,
    DatasetSize,
    dataset_size,
    fingerprint,
    load_dataset,
    load_tokenizer,
    verify_dataset,
)
from folio.errors import UserError
from folio.files import LOCK
from folio.tokenizers import TOKENIZERS, ByteTokenizer, CharTokenizer

pytestmark = pytest.mark.usefixtures("folder")


def write(path, content):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def write_text(text, tokenizer=None):
    """Writes data/own, by characters unless a tokenizer is given."""
    tokenizer = tokenizer or CharTokenizer.from_text(text)
    return tiny.write_dataset(DATA / "own", tiny.corpus(text), tokenizer)


def texts_of(name):
    """Returns the text of both splits."""
    data = load_dataset(name)
    return data.tokenizer.decode(data.train), data.tokenizer.decode(data.val)


def error_of(name):
    with pytest.raises(UserError) as caught:
        load_dataset(name)
    return str(caught.value)


# Writing


def test_format_of_the_files():
    write_text("abcabcabcabcaē", CharTokenizer("abcē"))
    assert Path("data/own/train.bin").read_bytes() == b"\0\0\1\0\2\0" * 4
    assert Path("data/own/val.bin").read_bytes() == b"\0\0\3\0"
    meta = json.loads(Path("data/own/meta.json").read_bytes())
    checksum = meta.pop("crc32")
    assert checksum == zlib.crc32(json.dumps(meta, sort_keys=True).encode())
    assert meta == {
        "format": 1,
        "tokenizer": {"kind": "char", "characters": "abcē"},
        "vocab_size": 4,
        "dtype": "uint16",
        "source": "own.txt",
        "source_sha256": "5a",
        "train": {"tokens": 12, "bytes": 12, "crc32": zlib.crc32(b"\0\0\1\0\2\0" * 4)},
        "val": {"tokens": 2, "bytes": 3, "crc32": zlib.crc32(b"\0\0\3\0")},
    }
    names = {path.name for path in Path("data/own").iterdir()}
    assert names - {LOCK} == {"meta.json", "train.bin", "val.bin"}


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=5)
@given(text=st.text(min_size=20))
@example(text="\r\n\0 é🦶\ufeff\u2028\U0010ffff----------")
def test_dataset_decodes_to_its_text(gpt2_of_bytes, kind, text):
    write_text(text, tiny.new_tokenizer(kind, text, 257))  # bpe: no merges, for two tokens
    data, cut = load_dataset("own"), int(0.9 * len(text))
    assert data.train.dtype == np.uint16
    assert texts_of("own") == (text[:cut], text[cut:])
    meta = json.loads(Path("data/own/meta.json").read_bytes())
    assert [meta[split]["bytes"] for split in ("train", "val")] == [
        len(text[:cut].encode()), len(text[cut:].encode())
    ]  # fmt: skip
    assert data.tokenizer.to_dict() == load_tokenizer("own").to_dict()


@pytest.mark.parametrize(("text", "tokens", "split"), [("a", 0, "train"), ("abcdefghij", 1, "val")])
def test_text_that_is_too_short_is_refused(text, tokens, split):
    with pytest.raises(UserError) as caught:
        write_text(text)
    assert str(caught.value) == (
        f"own.txt is too short to split: its {len(text)} bytes leave {tokens} tokens for "
        f"{split}.bin, which needs at least 2"
    )


def test_documents_are_separated_and_the_one_at_the_boundary_is_cut(gpt2_of_bytes):
    documents = ["ab", "cdefgh", "", "ij", "k<|endoftext|>l"]
    for tokenizer, between in ((ByteTokenizer(), [10, 10]), (gpt2_of_bytes, [256])):
        tiny.write_dataset(DATA / "own", tiny.corpus(*documents), tokenizer)
        data = load_dataset("own")
        train = [*b"ab", *between, *b"cdefgh", *between, *between, *b"ij", *between]
        assert (data.train.tolist(), data.val.tolist()) == (
            [*train, *b"k<|endoftext"], [*b"|>l"],
        )  # fmt: skip
        meta = json.loads(Path("data/own/meta.json").read_bytes())
        assert meta["train"]["bytes"] == 22


@pytest.mark.parametrize(("count", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_bins_of_more_than_65536_ids_are_uint32(count, dtype):
    characters = "".join(map(chr, range(0x10000, 0x10000 + count)))
    write_text(characters[::-1])
    data = load_dataset("own")
    assert (data.train.dtype, data.val.dtype) == (dtype, dtype)
    assert int(data.train[0]) == count - 1
    assert "".join(texts_of("own")) == characters[::-1]
    assert dataset_size("own").train_tokens == len(data.train)
    assert Path("data/own/train.bin").stat().st_size == len(data.train) * dtype().itemsize


def test_dataset_without_a_recorded_type_has_uint16_ids():
    write_text("abcdefghij" * 2)
    path = Path("data/own/meta.json")
    meta = json.loads(path.read_bytes())
    del meta["dtype"], meta["crc32"]
    meta["crc32"] = zlib.crc32(json.dumps(meta, sort_keys=True).encode())
    write(path, json.dumps(meta).encode())
    assert texts_of("own") == ("abcdefghij" + "abcdefgh", "ij")
    assert dataset_size("own").train_tokens == 18


# Missing and damaged files


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/tmp/x", "a\\b", "c:x", "a\0b"])
def test_name_must_be_a_plain_folder_name(name):
    assert error_of(name) == f"the name of a dataset must be a plain folder name, not {name!r}"


def test_error_for_a_missing_dataset_says_how_to_prepare_it():
    assert error_of("own") == (
        "data/own/train.bin is missing; prepare it with python prepare.py --dataset=own (and "
        "--input=FILE_OR_FOLDER for your own text), or start with a preset: python prepare.py && "
        "python train.py config/shakespeare_char_fast.py"
    )


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train.bin", b"\0\0\1", r"train.bin is damaged \(Size of .*available data is not a mult"),
        ("val.bin", b"", r"val.bin is damaged \(cannot mmap an empty file\)"),
        ("val.bin", None, "cannot read data/own/val.bin: No such file or directory"),
        ("val.bin", b"\0\0", r"val.bin is damaged \(it does not match meta.json\)"),
        *(
            ("meta.json", content, "data/own/meta.json is damaged ")
            for content in (b"", b'{"format": 1', b'{"format": "1"}', b"\xff", b"[]", b"{}", b'"x"')
        ),
        ("meta.json", b"[" * 100_000, "data/own/meta.json is damaged "),
        ("meta.json", b'{"format": 2}', r"from a later version of folio \(format 2\)"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_damaged_file_is_named(file, content, message):
    write_text("abcdefghij" * 2)
    if content is None:
        Path("data/own", file).unlink()
    else:
        write(f"data/own/{file}", content)
    with pytest.raises(UserError, match=message):
        load_dataset("own")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a POSIX system")
@pytest.mark.parametrize("make", ["mkfifo", "mkdir"])
@pytest.mark.parametrize("file", ["val.bin", "meta.json", "meta.pkl"])
def test_a_pipe_or_a_folder_in_place_of_a_file_is_refused(file, make):
    write_text("abcdefghij" * 2)
    for name in (file, "meta.json"):
        Path("data/own", name).unlink(missing_ok=True)
    getattr(os, make)(f"data/own/{file}")
    assert error_of("own") == (f"data/own/{file} is not a regular file")


def test_split_must_be_longer_than_the_context():
    write_text("abcdefghij" * 2)
    data = load_dataset("own")
    data.check_length(1)
    with pytest.raises(UserError, match="val.bin of own has 2 tokens.* smaller --block_size"):
        data.check_length(2)


# Verification


def test_verification_says_what_was_checked(monkeypatch, capsys):
    write_text("abcdefghij" * 2)
    monkeypatch.setattr(dataset, "VERIFY_TOKENS", 3)
    assert verify_dataset("own") == (
        "data/own: 18 training and 2 validation tokens, checksums and ids are correct"
    )
    assert capsys.readouterr().err == ""  # no progress bar


def test_verification_of_nanogpts_dataset():
    tiny.write_nanogpt_dataset("nano", "b\na" * 10)
    assert verify_dataset("nano") == (
        "data/nano: 27 training and 3 validation tokens, ids are correct; it has no checksums"
    )
    write("data/nano/val.bin", b"\0\0\3\0")
    message = r"data/nano/val.bin is damaged \(it contains token 3, but the vocabulary has 3\)"
    with pytest.raises(UserError, match=message):
        verify_dataset("nano")


def test_verification_of_a_missing_dataset_is_an_error():
    with pytest.raises(UserError, match="data/nope/train.bin is missing"):
        verify_dataset("nope")


# nanoGPT's folders


TABLE = {"vocab_size": 2, "itos": {0: "a", 1: "b"}, "stoi": {"a": 0, "b": 1}}


def test_nanogpts_character_dataset_is_loaded():
    tiny.write_nanogpt_dataset("nano", "b\na" * 10)
    assert texts_of("nano") == ("b\na" * 9, "b\na")


def test_nanogpts_dataset_without_meta_has_gpt2_tokens():
    tiny.write_nanogpt_dataset("nano", "b\na" * 10)
    Path("data/nano/meta.pkl").unlink()
    data = load_dataset("nano")
    assert data.tokenizer.kind == "gpt2"
    assert (data.train.tolist(), data.val.tolist()) == ([2, 0, 1] * 9, [2, 0, 1])


@pytest.mark.parametrize(
    "changes",
    [{"vocab_size": 3}, {"itos": {0: "ab", 1: "c"}}, {"itos": None}],
)
def test_meta_pkl_that_is_not_nanogpts_is_refused(changes):
    tiny.write_nanogpt_dataset("nano")
    write("data/nano/meta.pkl", pickle.dumps(TABLE | changes))
    assert error_of("nano").startswith("data/nano/meta.pkl")


def test_size_and_fingerprint_are_known_without_reading_the_tokens(verse):
    size = dataset_size("verse")
    assert (size.train_tokens, size.val_tokens) == (len(verse.train), len(verse.val))
    assert size.vocab_size == verse.tokenizer.vocab_size
    assert fingerprint("verse") == verse.fingerprint


def test_size_and_fingerprint_of_nanogpts_dataset(folder):
    vocab_size = tiny.write_nanogpt_dataset()
    loaded = load_dataset("verse")
    expected = DatasetSize(len(loaded.train), len(loaded.val), vocab_size)
    assert dataset_size("verse") == expected
    assert fingerprint("verse") == loaded.fingerprint


def test_size_of_a_missing_dataset_is_an_error(folder):
    with pytest.raises(UserError, match="data/nope/train.bin is missing"):
        dataset_size("nope")


# Large splits, of which a sample is checked


@pytest.fixture
def large(monkeypatch):
    """Makes splits of more than 100 bytes large; each has two samples of four ids."""
    monkeypatch.setattr(dataset, "READ_BYTES", 100)
    monkeypatch.setattr(dataset, "SAMPLES", 2)
    monkeypatch.setattr(dataset, "SAMPLE_TOKENS", 4)


def set_id(place, token):
    path = Path("data/verse/train.bin")
    ids = np.fromfile(path, "<u2")
    ids[place] = token
    ids.tofile(path)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("nanogpt", [False, True])
@pytest.mark.parametrize("place", [0, 3, -4, -1])
def test_a_sample_of_a_large_split_is_checked(nanogpt, place):
    (tiny.write_nanogpt_dataset if nanogpt else tiny.prepare_verse)("verse")
    set_id(place, 999)
    assert "token 999" in error_of("verse")


@pytest.mark.usefixtures("large")
def test_the_rest_of_a_large_split_is_checked_by_verify_only():
    tiny.prepare_verse()
    before = load_dataset("verse").fingerprint
    set_id(4, 1)
    assert load_dataset("verse").fingerprint == before
    with pytest.raises(UserError, match="data/verse/train.bin is damaged"):
        verify_dataset("verse")
    path = Path("data/verse/train.bin")
    path.write_bytes(path.read_bytes()[:-2])
    assert "data/verse/train.bin" in error_of("verse")


@pytest.mark.usefixtures("large")
def test_fingerprint_of_a_large_split_of_nanogpt():
    tiny.write_nanogpt_dataset()
    raw = Path("data/verse/train.bin").read_bytes()
    expected = zlib.crc32(b"%d" % len(raw) + raw[:8] + raw[-8:])
    assert load_dataset("verse").fingerprint["train"] == expected
