"""Tests of folio/data/sources.py: how files are found and read, and damaged ones."""

import gzip
import json
import os
import sys
from pathlib import Path

import pytest

from folio.cli.errors import UserError
from folio.data import sources
from folio.data.sources import Source, find_sources

TEXTS = ["one", "", "two 🦶\nlines", 'é "quoted", with a comma']
TABLES = ["A.JSONL", "a.jsonl.gz", "a.ndjson.zst", "a.csv", "a.tsv", "a.parquet"]
pytestmark = pytest.mark.usefixtures("folder")


def write(name, texts, key="text"):
    """Writes a table in the format of a file name. Returns its Source."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import csv, parquet

    columns = {"n": [None, *range(len(texts) - 1)], key: texts}
    if name.endswith(".parquet"):
        parquet.write_table(pyarrow.table(columns), name, row_group_size=2)
        return Source(Path(name), key)
    if ".csv" in name or ".tsv" in name:
        options = csv.WriteOptions(delimiter="\t" if ".tsv" in name else ",")
        csv.write_csv(pyarrow.table(columns), name, options)
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
    assert source.name in message
    return message


@pytest.mark.parametrize("name", TABLES)
def test_rows_of_a_table_are_documents(name):
    source = write(name, TEXTS, "body")
    chunks = list(source.read())
    assert [(chunk.text, chunk.ends_document) for chunk in chunks] == [
        (text, True) for text in TEXTS
    ]
    assert "--text_key" in error_of(Source(source.path))  # there is no such column
    if "sv" not in name:  # CSV and TSV, which has no missing values
        assert "row 2 has no text" in error_of(write(name, ["one", None]))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_damaged_file_is_named(name):
    source = write(name, ["text " * 99, "other"] * 2)
    raw = Path(name).read_bytes()
    for content in (b"no", raw[: len(raw) // 2]):
        Path(name).write_bytes(content)
        error_of(source)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (b'{"text": "one"', "row 2 is damaged (Expecting ',' delimiter; each"),
        (b"[" * 10**5, "row 2 is damaged"),
        (b'{"n": ' + b"9" * 5000 + b"}", "row 2 has no text"),
        (b'{"text": "\xff"}', "byte 0xff"),
        (b"null", "row 2 is None"),
        (b"[", "row 2 is damaged (Expecting value; each line must be a JSON object)"),
        (b'{"text": 5, "a": "b"}', "row 2 has no text in column 'text': choose one with"),
        (b'{"text": "\\ud800"}', "row 2 has half of a surrogate pair"),
    ],
)
def test_invalid_json_line_is_refused(line, part):
    Path("a.jsonl").write_bytes(b'{"text": "one"}\n\n' + line + b"\n")
    assert part in error_of(Source(Path("a.jsonl")))


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (b"id;text\n1;one\n", "(id;text)"),
        (b"text,text\n1,one\n", "several columns 'text'"),
        (b"id,text\n1,one, two\n", "more values than columns"),
        (b"id,text\n1\n", "row 1 has no text"),
        (b'text\n"one', "row 1 is damaged"),
        (b'text\n"one" two\n', "row 1 is damaged"),
        (b"text\n\xe9t\xe9\n", "iconv -f WINDOWS-1252"),
    ],
)
def test_invalid_csv_is_refused(raw, part):
    Path("a.csv").write_bytes(raw)
    assert part in error_of(Source(Path("a.csv")))


def test_csv_has_long_texts_with_line_ends():
    text = "long " * 10**5
    Path("a.csv").write_bytes(f'\ufefftext,n\r\n"{text}\r\n""end""",1\r\n'.encode())
    assert [chunk.text for chunk in Source(Path("a.csv")).read()] == [text + '\n"end"']


def test_missing_package_is_a_user_error(monkeypatch):
    Path("a.parquet").write_bytes(b"{}")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in error_of(Source(Path("a.parquet")))


@pytest.mark.parametrize("longest", [2, 100])
def test_text_is_cut_into_chunks(longest, monkeypatch):
    text = "one two🦶\nthree\r\nfour  five\n"
    Path("a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    monkeypatch.setattr(sources, "MAX_UNCUT_CHARACTERS", longest)
    for size in (1, 4, 11, 100):
        monkeypatch.setattr(sources, "CHUNK_CHARACTERS", size)
        chunks = list(Source(Path("a.txt")).read())
        assert "".join(chunk.text for chunk in chunks) == text.replace("\r\n", "\n")
        assert [chunk.ends_document for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert all(len(chunk.text) <= longest + size for chunk in chunks)


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (b"a" * 20_000 + b"\x80b", "byte 0x80"),
        (b"abcd\xe2\x82", "byte 0xe2"),
        (b"ab\0", "a NUL byte; to remove it: tr -d '\\0' < 'my text'"),
        ("é".encode("latin-1"), "iconv -f WINDOWS-1252 -t UTF-8 'my text'"),
        ("é".encode("utf-16"), "it is UTF-16; to convert it: iconv -f UTF-16"),
        (b"PK\3\4\x14\0", "a ZIP archive"),
        (gzip.compress(b"tar", mtime=0), "a compressed archive"),
        (b"%PDF-1.7\n\xff", "pdftotext 'my text'"),
    ],
)
def test_a_file_that_is_not_utf8_is_refused(raw, part):
    Path("my text").write_bytes(raw)
    assert part in error_of(Source(Path("my text")))


def test_compressed_text_is_read():
    source, raw = Source(Path("a.txt.gz")), gzip.compress(b"one\r\ntwo\n")
    source.path.write_bytes(raw)
    assert "".join(chunk.text for chunk in source.read()) == "one\ntwo\n"
    for damaged in (raw[:-9], b"one", gzip.compress(b"\xff")):
        source.path.write_bytes(damaged)
        error_of(source)


# Finding files


def test_json_is_a_table_unless_it_is_among_texts(capsys):
    Path("in").mkdir()
    for name in ("in/a.json", "in/b.jsonl"):
        Path(name).write_text('{"text": "one"}\n')
    for name in ("in/a.json", "in", "in/*.json"):
        assert [next(source.read()).text for source in find_sources(name, "text")][0] == "one"
    Path("in/c.py").write_text("")
    texts = [next(source.read()).text for source in find_sources("in", "text")]
    assert texts == ['{"text": "one"}\n', "one", ""]
    assert "reading 1 .json files as text" in capsys.readouterr().out


def names_of(pattern):
    return [source.name for source in find_sources(pattern, "text")]


def test_files_of_a_folder_or_a_pattern_are_sorted(capsys):
    for name in ("in/b.txt", "in/a.jsonl", "in/.hidden.txt", "in/.git/a.txt", "in/c/a.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}")
    Path("in/loop").symlink_to("../in")
    Path("in/z.txt").symlink_to("b.txt")
    Path("in/__pycache__").mkdir()
    Path("in/__pycache__/a.txt").touch()
    Path("in/picture").write_bytes(b"\x89PNG\0")
    assert names_of("in") == ["in/a.jsonl", "in/b.txt", "in/c/a.txt"]
    assert capsys.readouterr().out == "skipped 1 binary files\n"
    assert names_of("in/*.*") == ["in/a.jsonl", "in/b.txt"]
    assert names_of("in/c/**/*.txt") == ["in/c/a.txt"]
    Path("in/[b].txt").write_text("")
    assert names_of("in/[b].txt") == ["in/[b].txt"]


@pytest.mark.parametrize("name", ["in", "in/*.md", "in/broken", "in/pipe", "x" * 300, "http://a"])
def test_a_name_without_regular_files_is_refused(name):
    Path("in").mkdir()
    Path("in/broken").symlink_to("missing")
    if hasattr(os, "mkfifo"):
        os.mkfifo("in/pipe")
    with pytest.raises(UserError, match=name.replace("*", ".").replace("//", "/+")):
        names_of(name)
