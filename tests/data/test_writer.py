"""Tests of folio/data/writer.py: tokens do not depend on threads or chunks; errors and kills."""

import errno
import json
import os
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path

import pytest
import tiny

import prepare
from folio.cli.errors import UserError
from folio.data import sources, writer
from folio.data.dataset import load_dataset
from folio.data.tokenizer import END_OF_TEXT, ByteTokenizer

pytestmark = pytest.mark.usefixtures("folder")
DOCUMENTS = [f"{n} darling buds of May,\nand 🦶 summer's lease {n}\n" for n in range(200)]
DOCUMENTS[99] += f" {END_OF_TEXT}two{END_OF_TEXT}{END_OF_TEXT} \n"


# Encoding


@pytest.fixture
def own(folder, monkeypatch, gpt2_of_bytes):
    """A text and JSON lines, which are read and encoded in small parts."""
    Path("own.txt").write_text("\ufeff" + "".join(DOCUMENTS), encoding="utf-8")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    Path("own.jsonl").write_text(lines)
    monkeypatch.setattr(sources, "CHUNK_CHARACTERS", 300)
    monkeypatch.setattr(writer, "MIN_BATCH_CHARACTERS", 200)


def prepare_files(name, source, kind, *flags):
    """Prepares data/NAME. Returns the content of its files."""
    prepare.main([f"--input={source}", f"--dataset={name}", f"--tokenizer={kind}", *flags])
    folder = Path("data", name)
    return [(folder / file).read_bytes() for file in ("meta.json", "train.bin", "val.bin")]


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("kind", ["char", "byte", "bpe", "gpt2"])
@pytest.mark.parametrize("source", ["own.txt", "own.jsonl"])
def test_tokens_do_not_depend_on_threads_or_chunks(kind, source, monkeypatch):
    flags = ["--allow_special=True"] if kind in ("bpe", "gpt2") else []
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    expected = prepare_files("one", source, kind, *flags)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    monkeypatch.setattr(sources, "CHUNK_CHARACTERS", 7)
    monkeypatch.setattr(writer, "MIN_BATCH_CHARACTERS", 2**20)
    assert prepare_files("other", source, kind, *flags) == expected


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(("kind", "tolerance"), [("char", 0), ("byte", 200), ("gpt2", 200)])
@pytest.mark.parametrize("source", ["own.txt", "own.jsonl"])
def test_max_tokens_ends_a_dataset(kind, tolerance, source):
    prepare_files("own", source, kind, "--max_tokens=3000")
    data = load_dataset("own")
    if source == "own.txt":
        assert abs(len(data.train) + len(data.val) - 3000) <= tolerance
        assert abs(len(data.val) - 300) <= tolerance
    else:
        assert 3000 <= len(data.train) + len(data.val) < 3000 + 400
    text = data.tokenizer.decode(data.train)
    assert text.startswith(DOCUMENTS[0][:20])


def test_max_tokens_counts_documents_of_special_tokens_and_ignores_later_files():
    Path("in").mkdir()
    for name in "abc":
        text = END_OF_TEXT.join(f"{name} tale\n" for _ in range(200))
        Path("in", f"{name}.txt").write_text(text)
    prepare_files("own", "in", "char", "--max_tokens=300")
    assert set(load_dataset("own").tokenizer.characters) == set("a tale\n" + END_OF_TEXT)
    flags = ["--vocab_size=260", "--allow_special=True", "--max_tokens=300"]
    prepare_files("special", "in", "bpe", *flags)
    data = load_dataset("special")
    assert 200 <= len(data.train) + len(data.val) <= 600


# What is left of a dataset after errors and kills

FOLDER = Path("data/own")
TEXTS = {"old": "abcdefghij" * 4, "new": "klmnopqrst" * 4}  # of the same size


class Killed(BaseException):
    pass


def write(text):
    tiny.write_dataset(FOLDER, tiny.corpus(text), ByteTokenizer())


def kill(*_):
    raise Killed


def state():
    """Returns "old", "new", or "refused"."""
    try:
        text = tiny.text_of("own")
    except UserError:
        return "refused"
    return {text: name for name, text in TEXTS.items()}[text]


def test_a_kill_between_renames_leaves_the_old_dataset_the_new_one_or_an_error(monkeypatch):
    states = []
    for number in range(4):
        write(TEXTS["old"])
        renames = chain([os.replace] * number, repeat(kill))
        with monkeypatch.context() as patch, suppress(Killed):
            patch.setattr(os, "replace", lambda *paths, next=renames.__next__: next()(*paths))
            write(TEXTS["new"])
        states.append(state())
    assert states == ["old", "refused", "refused", "new"]


def test_a_full_disk_or_a_split_of_one_token_leaves_the_old_dataset(monkeypatch):
    write(TEXTS["old"])
    old_contents = tiny.contents(FOLDER)
    for text in ("", "abcdefghij"):
        with pytest.raises(UserError, match=rf"own.txt .*\(bytes: {len(text)}\) leaves"):
            write(text)
    assert tiny.contents(FOLDER) == old_contents

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="data/own.*: No space left on device$"):
        write(TEXTS["new"])
    assert tiny.contents(FOLDER) == old_contents
