"""Tests of folio/encoding.py: tokens do not depend on threads, chunks, or interruptions."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny

import prepare
from folio import dataset_writer, encoding, formats
from folio.dataset import load_dataset
from folio.dataset_writer import DatasetWriter
from folio.encoding import encode_corpus, in_threads
from folio.errors import UserError
from folio.tokenizers import END_OF_TEXT

DOCUMENTS = [f"{n} darling buds of May,\nand 🦶 summer's lease {n}\n" for n in range(200)]
KINDS = ("char", "byte", "bpe", "gpt2")


@pytest.fixture(autouse=True)
def sources(folder, monkeypatch, gpt2_of_bytes):
    """A text and JSON lines, which are read and encoded in small parts, with many commits."""
    Path("own.txt").write_text("\ufeff" + "".join(DOCUMENTS), encoding="utf-8")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    Path("own.jsonl").write_text(lines)
    monkeypatch.setattr(formats, "CHUNK", 300)
    monkeypatch.setattr(encoding, "BATCH", 200)
    monkeypatch.setattr(encoding, "LARGE", 0)
    monkeypatch.setattr(encoding, "COMMIT_TOKENS", 1)


def prepared(name, source, kind, *flags):
    """Prepares data/NAME. Returns the content of its files."""
    prepare.main([f"--input={source}", f"--dataset={name}", f"--tokenizer={kind}", *flags])
    folder = Path("data", name)
    return [(folder / file).read_bytes() for file in ("meta.json", "train.bin", "val.bin")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", ["own.txt", "own.jsonl"])
def test_tokens_do_not_depend_on_threads_or_chunks(kind, source, monkeypatch):
    monkeypatch.setattr(encoding, "num_cores", lambda: 1)
    expected = prepared("one", source, kind)
    monkeypatch.setattr(encoding, "num_cores", lambda: 5)
    for size in (100, 2**20):
        monkeypatch.setattr(formats, "CHUNK", size)
        monkeypatch.setattr(encoding, "BATCH", size)
        assert prepared("other", source, kind) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", ["own.txt", "own.jsonl"])
def test_killed_preparation_continues(kind, source, monkeypatch, capsys):
    expected = prepared("whole", source, kind)
    append, appends = DatasetWriter.append, []
    for count in (0, 3, 17):
        appends.clear()

        def failing(self, *args, count=count):
            appends.append(args)
            if len(appends) > count:
                raise KeyboardInterrupt
            append(self, *args)

        monkeypatch.setattr(DatasetWriter, "append", failing)
        with pytest.raises(KeyboardInterrupt):
            prepared("killed", source, kind)
    monkeypatch.setattr(DatasetWriter, "append", append)
    monkeypatch.setattr(prepare, "tokenizer_and_start", None)  # was done by the first process
    capsys.readouterr()
    assert prepared("killed", source, kind) == expected
    assert capsys.readouterr().out.startswith("continuing data/killed after ")


def test_changed_source_is_prepared_from_the_start(monkeypatch, capsys):
    append = DatasetWriter.append
    calls = iter([append] * 5)
    monkeypatch.setattr(DatasetWriter, "append", lambda *args: next(calls)(*args))
    with pytest.raises(RuntimeError):  # from StopIteration
        prepared("own", "own.txt", "byte")
    monkeypatch.setattr(DatasetWriter, "append", append)
    Path("own.txt").write_text("rose " * 100)
    prepared("own", "own.txt", "byte")
    assert "continuing" not in capsys.readouterr().out
    data = load_dataset("own")
    assert data.tokenizer.decode([*data.train, *data.val]) == "rose " * 100


def test_max_tokens_counts_documents_of_special_tokens_and_ignores_later_files(folder):
    Path("in").mkdir()
    for name in "abc":
        text = END_OF_TEXT.join(f"{name} tale" for _ in range(200))
        Path("in", f"{name}.txt").write_text(text)
    prepare.main(["--input=in", "--dataset=own", "--max_tokens=300"])
    assert load_dataset("own").tokenizer.characters == "".join(sorted(set("a tale" + END_OF_TEXT)))
    flags = ["--tokenizer=bpe", "--vocab_size=270", "--allow_special=True", "--max_tokens=300"]
    prepare.main(["--input=in", "--dataset=special", *flags])
    found = load_dataset("special")
    assert 200 <= len(found.train) + len(found.val) <= 600


@pytest.mark.parametrize(("kind", "tolerance"), [("char", 0), ("byte", 200), ("gpt2", 200)])
@pytest.mark.parametrize("source", ["own.txt", "own.jsonl"])
def test_max_tokens_ends_a_dataset(kind, tolerance, source):
    prepared("own", source, kind, "--max_tokens=3000")
    data = load_dataset("own")
    if source == "own.txt":
        assert abs(len(data.train) + len(data.val) - 3000) <= tolerance
        assert abs(len(data.val) - 300) <= tolerance
    else:
        assert 3000 <= len(data.train) + len(data.val) < 3000 + 400
    text = data.tokenizer.decode(data.train)
    assert text.startswith(DOCUMENTS[0][:20])


def test_progress_and_byte_counts():
    meta = json.loads(prepared("own", "own.jsonl", "byte")[0])
    total = sum(len(text.encode()) for text in DOCUMENTS)
    assert meta["train"]["bytes"] + meta["val"]["bytes"] == total
    tokens = meta["train"]["tokens"] + meta["val"]["tokens"]
    assert tokens == total + 2 * (len(DOCUMENTS) - 2)


class Recorder:
    """A DatasetWriter that fails at one append."""

    def __init__(self, fails_at):
        self.fails_at, self.calls = fails_at, []

    def append(self, *args):
        self.calls.append(args)
        if len(self.calls) == self.fails_at:
            raise UserError("the disk is full")

    def commit(self, position):
        self.calls.append(position)


def test_nothing_is_written_after_a_failed_write():
    documents = tiny.corpus(*DOCUMENTS)
    start, _ = documents.survey("byte", None, lambda *_: None)
    writer = Recorder(6)
    with pytest.raises(UserError, match="disk is full"):
        encode_corpus(documents, tiny.new_tokenizer("byte", ""), writer, start)
    assert len(writer.calls) == 6


def test_in_threads_keeps_the_order_and_the_limit():
    started = []

    def items():
        for number in range(50):
            started.append(number)
            yield number

    results = in_threads(lambda number: number * 2, items(), 3, 4)
    for expected in range(50):
        assert next(results) == 2 * expected
        assert len(started) <= expected + 6
    assert list(results) == []


def test_ids_are_unsigned():
    prepared("own", "own.txt", "char")
    assert load_dataset("own").train.dtype == np.uint16
    assert dataset_writer.JOURNAL not in {path.name for path in Path("data/own").iterdir()}
