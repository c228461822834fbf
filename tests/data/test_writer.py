"""Tests of folio/data/writer.py: tokens do not depend on threads or chunks; errors and kills."""

import errno
import json
import os
from contextlib import suppress
from functools import partial
from itertools import chain, count, repeat
from pathlib import Path

import pytest
import tiny

import prepare
from folio.cli.errors import UserError
from folio.cli.files import lock_folder
from folio.data import dataset, sources, writer
from folio.data.dataset import load_dataset
from folio.data.tokenizer import END_OF_TEXT

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
    monkeypatch.setattr(sources, "CHUNK_CHARACTERS", 100)
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
        assert abs(len(data.train) + len(data.val) - 3000) <= 150
    text = data.tokenizer.decode(data.train)
    assert text.startswith(DOCUMENTS[0][:20])


@pytest.mark.parametrize("kind", ["char", "byte"])
@pytest.mark.parametrize("source", ["names.txt", "names.jsonl"])
def test_max_tokens_counts_the_separators_of_short_documents(folder, kind, source):
    names = [f"{a}{b}" for a in "abcdefghij" for b in "klmnopqrst"] * 20
    Path("names.txt").write_text("\n".join(names))
    Path("names.jsonl").write_text("\n".join(f'{{"text": "{name}"}}' for name in names))
    flags = ["--lines=True"] if source == "names.txt" else []
    prepare_files("own", source, kind, "--max_tokens=1000", *flags)
    data = load_dataset("own")
    assert 995 <= len(data.train) + len(data.val) <= 1000


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
CHANGES = ("mkdir", "open", "fsync", "replace", "unlink")  # functions of os


class Killed(BaseException):
    pass


def write(text, *flags):
    Path("text.txt").write_text(text)
    prepare.main(["--input=text.txt", "--dataset=own", "--tokenizer=byte", *flags])


def state():
    """Returns the text of the dataset, and its test text or None."""
    data, test = load_dataset("own"), FOLDER / "test.txt"
    text = data.tokenizer.decode([*data.train, *data.val])
    return text, test.read_text() if test.exists() else None


def fail_at(number, is_kill, patch):
    """Lets a change of the file system fail: on a full disk once, after a kill always."""
    counter = count()

    def change(function, *args, **options):
        calls = next(counter)
        if is_kill and calls >= number:
            raise Killed
        if calls == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return function(*args, **options)

    for name in CHANGES:
        patch.setattr(os, name, partial(change, getattr(os, name)))
    return counter


@pytest.mark.parametrize("is_kill", [True, False])
@pytest.mark.parametrize(("old_test", "new_test"), [(0, 0.2), (0.2, 0), (0.2, 0.2)])
def test_a_fault_leaves_the_old_dataset_or_the_new_one(is_kill, old_test, new_test, monkeypatch):
    old = TEXTS["old"], f"--test_fraction={old_test}"
    new = TEXTS["new"], f"--test_fraction={new_test}"
    expected, states = [], []
    for arguments in (new, old):
        write(*arguments)
        expected.append(state())
    cut = 32 if new_test else 40
    assert expected[0] == (TEXTS["new"][:cut], TEXTS["new"][cut:] or None)
    for number in count():
        with monkeypatch.context() as patch, suppress(Killed, UserError):
            counter = fail_at(number, is_kill, patch)
            write(*new)
        assert is_kill or not [*FOLDER.glob("*.tmp")]
        states.append(state())
        if next(counter) <= number:  # no change has failed
            break
        if states[-1] == expected[0]:
            write(*old)
    assert states[-1] == expected[0]
    assert set(states) == set(expected)


def test_a_dataset_that_is_replaced_while_it_is_read_is_read_again(monkeypatch):
    write(TEXTS["old"])
    reads = chain([lambda: write(TEXTS["new"])], repeat(lambda: None))
    read = dataset._read_ids
    monkeypatch.setattr(dataset, "_read_ids", lambda *args: (next(reads)(), read(*args))[1])
    assert state() == (TEXTS["new"], None)


def test_a_second_process_is_refused_before_it_reads_the_text():
    write(TEXTS["old"])
    with lock_folder(FOLDER), pytest.raises(UserError, match="another process .* data/own"):
        write(TEXTS["new"])
    assert state() == (TEXTS["old"], None)


def test_an_error_leaves_the_old_dataset_or_no_folder():
    for text in ("", "abcdefghij"):
        with pytest.raises(UserError, match="text.txt is too short to split: .* and has [01]; use"):
            write(text)
        assert not FOLDER.exists()
    write(TEXTS["old"])
    old_contents = tiny.contents(FOLDER)
    with pytest.raises(UserError, match="too short"):
        write("abcdefghij")
    assert tiny.contents(FOLDER) == old_contents
