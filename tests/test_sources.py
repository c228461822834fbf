"""Tests of folio/sources.py: how files are found and read, and damaged ones."""

import gzip
import json
import os
import sys
import threading
from pathlib import Path

import pytest

from folio import sources
from folio.errors import UserError
from folio.sources import Source, find_sources

TEXTS = ["one", "", "two 🦶\nlines", 'é "quoted", with a comma']
TABLES = ["a.jsonl", "A.JSONL", "a.jsonl.gz", "a.jsonl.zst", "a.csv", "a.csv.gz", "a.parquet"]
pytestmark = pytest.mark.usefixtures("folder")


def write(name, texts, key="text"):
    """Writes a table in the format of a file name. Returns its Source."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import csv, parquet

    columns = {"n": [None, *range(len(texts) - 1)], key: texts}
    if name.endswith(".parquet"):
        parquet.write_table(pyarrow.table(columns), name, row_group_size=2)
        return Source(Path(name), key)
    if ".csv" in name:
        csv.write_csv(pyarrow.table(columns), name)
        raw = Path(name).read_bytes()
    else:
        rows = zip([None, "x", [1, {"a": 2}], {"b": 3}], texts, strict=False)
        raw = "".join(json.dumps({"n": n, key: text}) + "\n" for n, text in rows).encode()
    packed = {".gz": gzip.compress, ".zst": lambda raw: pyarrow.compress(raw, "zstd", asbytes=True)}
    Path(name).write_bytes(packed.get(Path(name).suffix, bytes)(raw))
    return Source(Path(name), key)


def error_of(source):
    with pytest.raises(UserError) as caught:
        list(source.read())
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith((source.name, f"cannot read {source.name}"))
    return message


@pytest.mark.parametrize("name", TABLES)
def test_rows_of_a_table_are_documents(name):
    source = write(name, TEXTS, "body")
    chunks = list(source.read())
    assert [(chunk.text, chunk.ends) for chunk in chunks] == [(text, True) for text in TEXTS]
    assert 0 < chunks[-1].num_read <= source.size
    assert "text" in error_of(Source(source.path))  # there is no such column


@pytest.mark.parametrize("name", [name for name in TABLES if "csv" not in name])
def test_a_row_without_a_text_is_named(name):
    message = error_of(write(name, ["one", None]))
    assert "row 2 has None" in message
    assert "--text_key" in message


def test_a_column_of_another_type_is_refused():
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": [b"a", b"\xff"]}), "a.parquet")
    assert "b'a'" in error_of(Source(Path("a.parquet")))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.csv.gz", "a.parquet"])
def test_damaged_file_is_named(name):
    source = write(name, ["text " * 99, "other"] * 2)
    raw = Path(name).read_bytes()
    for content in (b"no", raw[: len(raw) // 2], raw[:-9] + b"\xff" * 9):
        Path(name).write_bytes(content)
        error_of(source)


@pytest.mark.parametrize(
    "line",
    [b'{"text": "one"', b'{"text": "\xff"}', b"[" * 10**5, b"[]", b"{}", b'{"text": ["a"]}',
     b'{"text": 5}', b'{"text": "\\ud800"}'],
    ids=lambda line: repr(line)[:20],
)  # fmt: skip
def test_invalid_json_line_is_refused(line):
    Path("a.jsonl").write_bytes(b'{"text": "one"}\n\n' + line + b"\n")
    assert "--text_key" in error_of(Source(Path("a.jsonl")))


def test_blank_lines_a_byte_order_mark_and_an_empty_file_are_skipped():
    Path("a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\n  \n{"text": "two"}')
    Path("b.jsonl").write_bytes(b"")
    chunks = [chunk for source in find_sources("*.jsonl", "text") for chunk in source.read()]
    assert [chunk.text for chunk in chunks] == ["one", "two"]


def test_a_row_longer_than_a_block_is_an_error(monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 100)
    assert "a.jsonl" in error_of(write("a.jsonl", ["short", "long " * 99, "short"]))


def test_missing_package_is_a_user_error(monkeypatch):
    Path("a.jsonl").write_bytes(b"{}")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in error_of(Source(Path("a.jsonl")))


@pytest.mark.parametrize("whole_words", [False, True])
def test_text_is_cut_into_chunks(whole_words, monkeypatch):
    text = "one two🦶\nthree\r\nfour  five\n"
    Path("a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    for size in (1, 4, 11, 100):
        monkeypatch.setattr(sources, "CHUNK", size)
        chunks = list(Source(Path("a.txt")).read(whole_words))
        assert "".join(chunk.text for chunk in chunks) == text
        assert [chunk.ends for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].num_read == 3 + len(text.encode())
        assert len(chunks) > 1 or size == 100


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (b"ab\xff", "byte 0xff"),
        (b"abcd\xe2\x82", "byte 0xe2"),
        (b"a" * 20_000 + b"\x80b", "000 characters or more, it has byte 0x80"),
        ("hello".encode("utf-16"), "byte 0xff"),
        (b"ab\0", "null bytes"),
    ],
)
def test_a_file_that_is_not_utf8_is_refused(raw, part, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 1000)
    Path("a.txt").write_bytes(raw)
    assert part in error_of(Source(Path("a.txt")))


# Finding files


def names_of(pattern):
    return [source.name for source in find_sources(pattern, "text")]


def test_files_of_a_folder_or_a_pattern_are_sorted():
    for name in ("in/b.txt", "in/a.jsonl", "in/.hidden.txt", "in/.git/a.txt", "in/c/a.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}")
    assert names_of("in") == ["in/a.jsonl", "in/b.txt", "in/c/a.txt"]
    assert names_of("in/*") == ["in/a.jsonl", "in/b.txt"]
    assert names_of("in/**/*.txt") == ["in/b.txt", "in/c/a.txt"]
    Path("in/[b].txt").write_text("")
    assert names_of("in/[b].txt") == ["in/[b].txt"]
    Path("in/link").symlink_to("missing")
    for wrong, named in (("in/*.md", "in/*.md"), ("in", "in/link"), ("http://a", "http://a")):
        with pytest.raises(UserError) as caught:
            names_of(wrong)
        assert named in str(caught.value)


def test_links_to_folders_are_followed_once():
    for name in ("in/a.txt", "elsewhere/b.txt"):
        Path(name).parent.mkdir()
        Path(name).write_text("text")
    os.symlink("../elsewhere", "in/linked")
    os.symlink("../in", "in/loop")
    assert names_of("in") == ["in/a.txt", "in/linked/b.txt"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a POSIX system")
def test_a_pipe_is_copied_to_a_temporary_file():
    os.mkfifo("pipe")
    thread = threading.Thread(target=lambda: Path("pipe").write_text("one two"))
    thread.start()
    [source] = find_sources("pipe", "text")
    thread.join()
    for _ in range(2):
        assert "".join(chunk.text for chunk in source.read()) == "one two"
    path, name = source.path, source.name
    assert name == "pipe"
    del source
    assert not path.exists()
