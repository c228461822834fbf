"""Tests of folio/formats.py and folio/sources.py: files of every format, and damaged ones."""

import gzip
import json
import os
import sys
import threading
from pathlib import Path

import pytest

from folio import formats
from folio.errors import UserError
from folio.sources import Source, find_sources, spooled

TEXTS = ["one", "", "two 🦶\nlines", "\0 é"]


@pytest.fixture(autouse=True)
def _folder(folder):
    pass


def lines_of(texts, key="text"):
    return "".join(json.dumps({"n": 1, key: text}) + "\n" for text in texts).encode()


def write(name, texts, key="text"):
    """Writes documents in the format of a file name. Returns the Source."""
    if name.endswith(".parquet"):
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pyarrow.table({"n": [1] * len(texts), key: texts})
        parquet.write_table(table, name, row_group_size=2)
    elif name.endswith(".zst"):
        compressor = pytest.importorskip("zstandard").ZstdCompressor()
        halves = (lines_of(half, key) for half in (texts[:1], texts[1:]))
        Path(name).write_bytes(b"".join(map(compressor.compress, halves)))  # two frames
    elif name.endswith(".gz"):
        Path(name).write_bytes(gzip.compress(lines_of(texts, key)))
    else:
        Path(name).write_bytes(lines_of(texts, key))
    return Source(Path(name), key)


def error_of(source):
    with pytest.raises(UserError) as caught:
        list(source.read())
    return str(caught.value)


FILES = ["a.jsonl", "A.JSONL", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"]


@pytest.mark.parametrize("name", FILES)
def test_documents_are_read_from_every_place(name):
    source = write(name, TEXTS, "body")
    chunks = list(source.read())
    assert [(chunk.text, chunk.ends, chunk.place) for chunk in chunks] == [
        (text, True, place) for place, text in enumerate(TEXTS, 1)
    ]
    for place in range(5):
        assert [chunk.text for chunk in source.read(place)] == TEXTS[place:]
    assert 0 < chunks[-1].num_read <= source.size


@pytest.mark.parametrize("name", FILES)
def test_missing_key_and_other_types_are_named(name):
    place = f"{name}, row 2" if name == "a.parquet" else f"{name}, line 2"
    source = write(name, ["one", None])
    assert error_of(source).startswith(f"{place}: 'text' is NoneType, not a string")
    assert "--text_key" in error_of(Source(source.path, "body"))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_damaged_file_is_named(name):
    source = write(name, ["text " * 99, "other"] * 9)
    raw = Path(name).read_bytes()
    for content in (b"no", raw[: len(raw) // 2], raw[:-9] + b"\xff" * 9):
        Path(name).write_bytes(content)
        assert error_of(source).startswith((f"{name} is damaged (", f"cannot read {name}: "))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "one"', "is not JSON in UTF-8 (Expecting ',' delimiter"),
        (b'{"text": "\xff"}', "is not JSON in UTF-8 ('utf-8' codec can't decode byte 0xff"),
        (b"[" * 100_000, "is not JSON in UTF-8 ("),
        (b"[]", "has no 'text'; name the field of the text with --text_key"),
        (b"{}", "has no 'text'"),
        (b'{"text": ["a"]}', ": 'text' is list, not a string"),
        (b'{"text": "\\ud800"}', ": 'text' contains a lone surrogate"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_invalid_line_is_named(line, message):
    Path("a.jsonl").write_bytes(b'{"text": "one"}\n\n' + line + b"\n")
    error = error_of(Source(Path("a.jsonl")))
    assert error.startswith("a.jsonl, line 3")
    assert message in error


def test_blank_lines_and_a_byte_order_mark_are_skipped():
    Path("a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\n  \n{"text": "two"}')
    assert [chunk.text for chunk in Source(Path("a.jsonl")).read()] == ["one", "two"]


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.parquet"])
def test_missing_package_is_a_user_error(name, monkeypatch):
    module = "pyarrow" if name == "a.parquet" else "zstandard"
    Path(name).write_bytes(b"")
    for each in (module, "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, each, None)
    assert error_of(Source(Path(name))) == f"{name} needs a package: pip install {module}"


@pytest.mark.parametrize("whole_words", [False, True])
def test_text_is_cut_into_chunks(whole_words, monkeypatch):
    text = "one two🦶\nthree\r\nfour  five\n"
    Path("a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    for size in (1, 4, 11, 100):
        monkeypatch.setattr(formats, "CHUNK", size)
        chunks = list(Source(Path("a.txt")).read(whole_words=whole_words))
        assert "".join(chunk.text for chunk in chunks) == text
        assert [chunk.ends for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        for number, chunk in enumerate(chunks[:-1], 1):
            after = "".join(rest.text for rest in chunks[number:])
            assert "".join(c.text for c in Source(Path("a.txt")).read(chunk.place)) == after
        assert chunks[-1].place == chunks[-1].num_read == 3 + len(text.encode())


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("raw", "byte"), [(b"ab\xff", 2), (b"abcd\xe2\x82", 4), (b"\xef\xbb\xbf\xf0\x9f\xa6a", 3)]
)
def test_place_of_invalid_utf8_is_exact(raw, byte, size, monkeypatch):
    monkeypatch.setattr(formats, "CHUNK", size)
    Path("a.txt").write_bytes(raw)
    message = f"a.txt is not UTF-8 text: byte {byte} is 0x{raw[byte]:02x}; convert"
    assert error_of(Source(Path("a.txt"))).startswith(message)


# Finding files


def names_of(pattern):
    return [source.name for source in find_sources(pattern, "text")]


def test_files_of_a_folder_or_a_pattern_are_sorted():
    for name in ("in/b.txt", "in/a.jsonl", "in/.hidden.txt", "in/c/a.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}")
    assert names_of("in") == ["in/a.jsonl", "in/b.txt", "in/c/a.txt"]
    assert names_of("in/*") == ["in/a.jsonl", "in/b.txt"]
    assert names_of("in/**/*.txt") == ["in/b.txt", "in/c/a.txt"]
    Path("in/[b].txt").write_text("")
    assert names_of("in/[b].txt") == ["in/[b].txt"]
    with pytest.raises(UserError, match=r"no file matches in/\*.md; hidden files are skipped"):
        names_of("in/*.md")


def test_stamp_changes_with_the_file():
    Path("a.txt").write_text("one")
    source = Source(Path("a.txt"))
    before = source.stamp()
    assert source.stamp() == before
    os.utime("a.txt", ns=(1, 1))
    assert source.stamp() != before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a POSIX system")
def test_a_pipe_is_read_once():
    os.mkfifo("pipe")
    thread = threading.Thread(target=lambda: Path("pipe").write_text("one two"))
    thread.start()
    [source] = find_sources("pipe", "text")
    thread.join()
    for _ in range(2):
        assert "".join(chunk.text for chunk in source.read()) == "one two"
    assert source.name == "pipe"


def test_temporary_file_is_deleted(tmp_path):
    (tmp_path / "a").write_bytes(b"one")
    with open(tmp_path / "a", "rb") as file:
        source = spooled(file, "label")
    path = source.path
    assert path.read_bytes() == b"one"
    del source
    assert not path.exists()
