"""The files of a dataset folder, folio's and nanoGPT's; see also test_damage.py."""

import json
import pickle
import tracemalloc
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tiny
from tiny import error_of

import train
from folio.cli.files import LOCK_FILE
from folio.cli.settings import load_settings
from folio.data import dataset
from folio.data.dataset import DATA_FOLDER, load_dataset
from folio.data.tokenizer import ByteTokenizer, CharTokenizer, from_dict

pytestmark = pytest.mark.usefixtures("folder")
TEXT = "abcdefghij" * 2


def write_text(text=TEXT, tokenizer=None):
    """Writes data/own, by characters unless a tokenizer is given."""
    tokenizer = tokenizer or tiny.new_tokenizer("char", text)
    return tiny.write_dataset(DATA_FOLDER / "own", tiny.corpus(text), tokenizer)


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
        "test_fraction": 0.0,
        "train": {"tokens": 12, "bytes": 12, "crc32": zlib.crc32(b"\0\0\1\0\2\0" * 4)},
        "val": {"tokens": 2, "bytes": 3, "crc32": zlib.crc32(b"\0\0\3\0")},
    }
    names = {path.name for path in Path("data/own").iterdir()}
    assert names - {LOCK_FILE} == {"meta.json", "train.bin", "val.bin"}


def test_documents_are_separated_and_the_one_at_the_boundary_is_cut(gpt2_of_bytes):
    documents = ["ab", "cdefgh", "", "ij", "k<|endoftext|>l"]
    for tokenizer, separator in ((ByteTokenizer(), [10, 10]), (gpt2_of_bytes, [256])):
        meta = tiny.write_dataset(DATA_FOLDER / "own", tiny.corpus(*documents), tokenizer)
        data = load_dataset("own")
        train = [*b"ab", *separator, *b"cde", *separator, *b"ij", *separator]
        assert data.train.tolist() == [*train, *b"k<|endoftext|>l"]
        assert data.val.tolist() == [*b"fgh"]
        assert meta["train"]["bytes"] == 22  # without separators


@pytest.mark.parametrize(("count", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_bins_of_more_than_65536_ids_are_uint32(count, dtype):
    characters = "".join(map(chr, range(0x10000, 0x10000 + count)))
    write_text(characters[::-1])
    data = load_dataset("own")
    assert (data.train.dtype, data.val.dtype) == (dtype, dtype)
    assert int(data.train[0]) == count - 1
    assert tiny.text_of("own") == characters[::-1]
    assert data.train_bytes == 4 * len(data.train)  # in UTF-8


# Reading


@pytest.mark.parametrize("name", ["", "..", "a/b", "a\\b", "c:x", "a\0b", "\x1b[31m"])
def test_name_must_be_a_plain_folder_name(name):
    assert repr(name) in error_of(load_dataset, name)


def test_error_for_a_missing_dataset_says_how_to_prepare_it_and_names_others():
    message = error_of(load_dataset, "own")
    assert message.startswith("data/own/train.bin is missing")
    assert message.endswith(f"own text); {Path('data').resolve()} has no other dataset")
    assert "--dataset=own" in message
    write_text()
    assert error_of(load_dataset, "ovn").endswith("; did you mean own?")
    assert error_of(load_dataset, "other").endswith("data has own")
    load_preset = partial(load_settings, train.TrainConfig)  # of a preset that reads its size
    assert "data/ovn/train.bin" in error_of(load_preset, ["--dataset=ovn", "config/own_text.py"])
    Path("data/own/val.bin").unlink()
    assert "data/own/val.bin" in error_of(load_dataset, "own")


def test_split_must_be_longer_than_the_context():
    write_text()
    data = load_dataset("own")
    data.check_length(1)
    assert "val.bin of own has 2 tokens" in error_of(data.check_length, 2)


# nanoGPT's folders


def test_nanogpts_datasets_are_loaded():
    vocab_size = tiny.write_nanogpt_dataset("nano", "b\na" * 10)
    assert tiny.text_of("nano") == "b\na" * 10
    data = load_dataset("nano")
    assert (data.train_bytes, data.tokenizer.vocab_size) == (27, vocab_size)
    Path("data/nano/meta.pkl").unlink()  # then it has GPT-2's tokens
    data = load_dataset("nano")
    assert data.tokenizer.kind == "gpt2"
    assert (data.train.tolist(), data.val.tolist()) == ([2, 0, 1] * 9, [2, 0, 1])


@pytest.mark.parametrize(
    ("itos", "text"),
    [
        ({0: "a", 1: "ab", 2: "c"}, "aba"),
        (["a", "ab", "c"], "aba"),
        ({0: 60, 1: 62, 2: 64}, "1 0 "),
        (None, "1 0 "),
    ],
)
def test_nanogpts_tokens_can_have_any_length(itos, text):
    tiny.write_nanogpt_dataset("nano", "abc" * 10)
    meta = {"vocab_size": 3, "itos": itos}
    Path("data/nano/meta.pkl").write_bytes(pickle.dumps(meta))
    tokenizer = load_dataset("nano").tokenizer
    assert tokenizer.decode([1, 0]) == text
    assert from_dict(tokenizer.to_dict()).encode(text).tolist() == [1, 0]
    assert "no token fits 'x'" in error_of(tokenizer.encode, text + "x")
    Path("data/nano/meta.pkl").write_bytes(pickle.dumps({"vocab_size": 9, "itos": ["a"]}))
    assert "meta.pkl cannot be used" in error_of(load_dataset, "nano")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            pickle.dumps({"vocab_size": 10**9}),
            "cannot be used: vocab_size=1,000,000,000 is too large",
        ),
        (b"}r\xff\xff\xff\x7f.", "vocab_size is missing"),  # stores {} at 2**31 - 1 in the memo
    ],
)
def test_a_table_that_would_take_gigabytes_takes_no_memory(table, words):
    tiny.write_nanogpt_dataset("nano")
    Path("data/nano/meta.pkl").write_bytes(table)
    tracemalloc.start()
    assert words in error_of(load_dataset, "nano")
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer": None}, "the tokenizer is damaged or unknown"),
        ({"tokenizer": {"kind": "x"}}, "the tokenizer is damaged or unknown; known kinds: char"),
        ({"val": None}, "data/own/meta.json: tokens is missing"),
        ({"train": {"tokens": 18, "bytes": "18", "crc32": 5}}, "data/own/meta.json: bytes is"),
        ({"train": {"tokens": 18, "bytes": 18}}, "data/own/meta.json: crc32 is missing"),
    ],
)
def test_wrong_values_in_meta_json_are_refused(changes, words):
    meta = write_text() | changes
    meta["crc32"] = dataset.meta_checksum(meta)
    Path("data/own/meta.json").write_text(json.dumps(meta))
    assert words in error_of(load_dataset, "own")


@pytest.mark.parametrize("content", [100_000 * "[", 100_000 * "9", '{"vocab_size": 65}'])
def test_a_meta_json_that_is_damaged_or_not_folios_is_refused_and_not_replaced(content):
    tiny.prepare_verse("own")
    Path("data/own/meta.json").write_text(content)
    expected = tiny.contents("data/own")
    assert "data/own/meta.json cannot be used" in error_of(load_dataset, "own")
    words = "data/own has token files or a meta.json of a different program, or damaged ones"
    assert words in error_of(tiny.prepare_verse, "own")
    assert tiny.contents("data/own") == expected


@pytest.mark.parametrize("vocab_size", [100, 70_000])
def test_nanogpts_bins_have_the_type_of_their_vocabulary_size(vocab_size):
    tiny.write_nanogpt_dataset("nano")
    Path("data/nano/meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))
    right, wrong = ("uint16", "uint32") if vocab_size == 100 else ("uint32", "int64")
    ids = np.arange(vocab_size - 50, vocab_size)
    for dtype in (right, wrong, "int64"):
        for split in ("train", "val"):
            ids.astype(dtype).tofile(f"data/nano/{split}.bin")
        if dtype == right:
            data = load_dataset("nano")
        else:
            expected = f"looks like {dtype}, not {right}; to convert it: "
            assert expected in error_of(load_dataset, "nano")
    assert data.train.tolist() == ids.tolist()  # which do not change with the file


# Large splits, of which the first part is checked


@pytest.mark.parametrize("write", [tiny.prepare_verse, tiny.write_nanogpt_dataset])
def test_the_rest_of_a_large_split_is_not_checked(write, monkeypatch):
    monkeypatch.setattr(dataset, "MAX_CHECKED_TOKENS", 10)
    write("verse")
    path = Path("data/verse/train.bin")
    raw, original = path.read_bytes(), load_dataset("verse")
    for position in (11, -1):
        ids = np.frombuffer(raw, "<u2").copy()
        ids[position] = 999
        ids.tofile(path)
        assert load_dataset("verse").train.tolist() == ids.tolist()
    ids[9] = 999
    ids.tofile(path)
    assert "token 999" in error_of(load_dataset, "verse")
    path.write_bytes(raw + raw[:2])
    if write is tiny.prepare_verse:
        assert str(path) in error_of(load_dataset, "verse")
    else:
        assert load_dataset("verse").fingerprint != original.fingerprint
