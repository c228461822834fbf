"""Tests of folio/data/encoding.py: tokens do not depend on threads or chunks; max_tokens."""

import json
import os
from pathlib import Path

import pytest

import prepare
from folio.data import encoding, sources
from folio.data.dataset import load_dataset
from folio.data.tokenizer import END_OF_TEXT

DOCUMENTS = [f"{n} darling buds of May,\nand 🦶 summer's lease {n}\n" for n in range(200)]


@pytest.fixture(autouse=True)
def _sources(folder, monkeypatch, gpt2_of_bytes):
    """A text and JSON lines, which are read and encoded in small parts."""
    pytest.importorskip("pyarrow")
    Path("own.txt").write_text("\ufeff" + "".join(DOCUMENTS), encoding="utf-8")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    Path("own.jsonl").write_text(lines)
    monkeypatch.setattr(sources, "CHUNK_CHARACTERS", 300)
    monkeypatch.setattr(encoding, "MIN_BATCH_CHARACTERS", 200)


def prepare_files(name, source, kind, *flags):
    """Prepares data/NAME. Returns the content of its files."""
    prepare.main([f"--input={source}", f"--dataset={name}", f"--tokenizer={kind}", *flags])
    folder = Path("data", name)
    return [(folder / file).read_bytes() for file in ("meta.json", "train.bin", "val.bin")]


@pytest.mark.parametrize("kind", ["char", "byte", "bpe", "gpt2"])
@pytest.mark.parametrize("source", ["own.txt", "own.jsonl"])
def test_tokens_do_not_depend_on_threads_or_chunks(kind, source, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    expected = prepare_files("one", source, kind)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    monkeypatch.setattr(sources, "CHUNK_CHARACTERS", 100)
    monkeypatch.setattr(encoding, "MIN_BATCH_CHARACTERS", 2**20)
    assert prepare_files("other", source, kind) == expected


def test_max_tokens_counts_documents_of_special_tokens_and_ignores_later_files():
    Path("in").mkdir()
    for name in "abc":
        text = END_OF_TEXT.join(f"{name} tale\n" for _ in range(200))
        Path("in", f"{name}.txt").write_text(text)
    prepare.main(["--input=in", "--dataset=own", "--max_tokens=300"])
    assert set(load_dataset("own").tokenizer.characters) == set("a tale\n" + END_OF_TEXT)
    flags = ["--tokenizer=bpe", "--vocab_size=270", "--allow_special=True", "--max_tokens=300"]
    prepare.main(["--input=in", "--dataset=special", *flags])
    data = load_dataset("special")
    assert 200 <= len(data.train) + len(data.val) <= 600


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
