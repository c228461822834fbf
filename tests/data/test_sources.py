"""Tests of folio/data/sources.py: how files are found and read, and damaged ones."""

import bz2
import gzip
import io
import json
import lzma
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from folio.cli.errors import UserError
from folio.cli.files import unify_line_ends
from folio.data import sources
from folio.data.sources import Source, find_sources
from folio.data.tokenizer import BPETokenizer

TABLES = [
    "A.JSONL", "a.jsonl.gz", "a.ndjson.zst", "a.csv", "a.tsv", "a.parquet", "a.arrow", "file.arrow"
]  # fmt: skip
pytestmark = pytest.mark.usefixtures("folder")


def write(name, texts, key="text"):
    """Writes a table in the format of a file name. Returns its Source."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import csv, ipc, parquet

    path, numbers = Path(name), [None, *range(len(texts) - 1)]
    table, content = pyarrow.table({"n": numbers, key: texts}), io.BytesIO()
    if name.endswith(".parquet"):
        parquet.write_table(table, content, row_group_size=2)
    elif name.endswith(".arrow"):
        new_writer = ipc.new_file if "file" in name else ipc.new_stream
        with new_writer(content, table.schema) as writer:
            writer.write_table(table)
    elif "sv" in name:
        options = csv.WriteOptions(delimiter="\t" if ".tsv" in name else ",")
        csv.write_csv(table, content, options)
    else:
        rows = zip([None, "x", [1, {"a": 2}], {"b": 3}, 4], texts, strict=False)
        lines = (json.dumps({"n": n, key: text}) + "\n" for n, text in rows)
        content.write("".join(lines).encode())
    packed = {".gz": gzip.compress, ".zst": lambda raw: pyarrow.compress(raw, "zstd", asbytes=True)}
    path.write_bytes(packed.get(path.suffix, bytes)(content.getvalue()))
    return Source(path, key)


def error_of(source):
    message = tiny.error_of(lambda: list(source.read()))
    assert source.name in message
    return message


CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")


@pytest.mark.parametrize("name", TABLES)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.none() | st.text(CHARACTERS), min_size=1, max_size=5))
@example(texts=["one", "", None, "two 🦶\nlines", 'é "quoted", with a comma'])
def test_rows_of_a_table_are_documents(name, texts):
    source = write(name, texts, "body")
    documents = [unify_line_ends(text) for text in texts if text and text.strip()]
    assert list(source.read()) == [(text, True) for text in documents]
    assert len(source.empty_rows) == len(texts) - len(documents)
    message = error_of(Source(source.path))
    assert "no column 'text'" in message
    assert "(n, body)" in message


def test_a_template_reads_questions_and_answers():
    rows = [{"q": "1 plus 1?", "a": "2 {q}", "n": 1}, {"q": None, "a": "3"}, {"q": "", "a": "4"}]
    Path("qa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = Source(Path("qa.jsonl"), "Q: {q}\nA: {a}")
    assert list(source.read()) == [("Q: 1 plus 1?\nA: 2 {q}", True)]
    assert source.empty_rows == {2, 3}
    assert "no column 'answer'" in error_of(Source(Path("qa.jsonl"), "{q} {answer}"))


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ([b"one", b"\xff"], "row 2 has NUL or an unpaired surrogate"),
        ([["one"], []], "row 1 has a value of type list"),
        ([1.5], "row 1 has a value of type number"),
    ],
)
def test_a_column_of_bytes_is_text_and_other_types_are_refused(values, part):
    assert list(write("a.parquet", ["zwölf".encode()]).read()) == [("zwölf", True)]
    assert part in error_of(write("a.parquet", values))


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_damaged_file_is_named(name):
    source = write(name, ["text " * 99, "other"] * 2)
    raw = Path(name).read_bytes()
    for content in (b"no", raw[: len(raw) // 2]):
        Path(name).write_bytes(content)
        error_of(source)
    Path(name).write_bytes(tiny.LFS_POINTER)
    assert "Git LFS" in error_of(source)


@pytest.mark.parametrize(
    ("suffix", "raw", "part"),
    [
        ("jsonl", b'{"text": "one"', "row 2 is damaged (Expecting ',' delimiter: column 15"),
        ("jsonl", b'{"text": "\xff"}', "line 2 has the byte 0xff"),
        ("jsonl", b'{"text": "a\\u0000"}', "row 2 has NUL or an unpaired surrogate"),
        ("jsonl", b'{"text": "\\ud800"}', "row 2 has NUL or an unpaired surrogate"),
        ("jsonl", b"null", "row 2 is None"),
        ("jsonl", b"[" * 10**5, "row 2 is damaged (maximum recursion depth exceeded"),
        ("csv", b"id;text\n1;one\n", "(id;text)"),
        ("csv", b"id,text\n1,one, two\n", "row 1 has more values than columns"),
        ("csv", b"id,text\n1\n", "row 1 has fewer values than columns"),
        ("csv", b'text\n"one', "row 1 is damaged (unexpected end of data; put a value with double"),
        ("tsv", b'id\ttext\n1\t"one\n2\ttwo"\n', "row 1 is damaged (its double quotes enclose"),
        ("tsv", b'text\tid\n"one\t1\n\t2\ntwo"\t3\n', "its double quotes enclose a tab"),
        ("csv", b"text\n\xe9t\xe9\n", "cp1252 (été)"),
    ],
)
def test_an_invalid_row_is_refused(suffix, raw, part):
    source = Source(Path(f"a.{suffix}"))
    source.path.write_bytes((b'{"text": "one"}\n' if suffix == "jsonl" else b"\n") + raw)
    assert part in error_of(source)


@pytest.mark.parametrize(
    ("document", "text_key", "texts"),
    [
        ([{"text": "one"}, {"text": "two"}], "text", ["one", "two"]),
        ({"messages": [{"text": "one"}] * 9, "name": "a 'chat'"}, "text", ["one"] * 9),
        (
            {"é": [{"text": ["see ", {"text": "two"}, {}]}, {"text": ""}]},
            "text",
            ["see two"],
        ),
        (
            [{"id": 1}, {"who": "I", "content": [{"type": "t", "text": "one"}]}],
            "{who}: {content}",
            ["I: one"],
        ),
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_the_command_for_a_json_document_makes_rows(document, text_key, texts, indent):
    Path("it's.json").write_text(json.dumps(document, indent=indent))
    message = error_of(Source(Path("it's.json"), text_key))
    command = re.search("one JSON document, needs a row per line: python(.+)", message)[1]
    subprocess.run(sys.executable + command, shell=True, check=True)
    assert [text for text, _ in Source(Path("it's-rows.jsonl"), text_key).read()] == texts


def test_json_integers_can_have_any_length():
    Path("a.jsonl").write_text('{"text": "one", "n": ' + "1" * 5000 + "}")
    assert list(Source(Path("a.jsonl")).read()) == [("one", True)]


def test_csv_has_long_texts_with_line_ends():
    text = "long " * 10**5
    Path("a.csv").write_bytes(f'\ufefftext,n\r\n"{text}\r\n""end""",1\r\n'.encode())
    assert list(Source(Path("a.csv")).read()) == [(text + '\n"end"', True)]


def test_a_missing_package_is_a_user_error(monkeypatch):
    Path("a.parquet").write_bytes(b"{}")
    for package in ("pyarrow", "tokenizers"):
        monkeypatch.setitem(sys.modules, package, None)
    assert "pip install pyarrow" in error_of(Source(Path("a.parquet")))
    with pytest.raises(UserError, match="pip install tokenizers"):
        BPETokenizer.from_texts(["ab"])


def test_text_is_cut_into_chunks(monkeypatch):
    text = "one two🦶\nthree\r\nfour  five\n"
    Path("a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    for size in (1, 4, 11, 100):
        monkeypatch.setattr(sources, "CHUNK_CHARACTERS", size)
        texts, begin = zip(*Source(Path("a.txt")).read(), strict=True)
        assert "".join(texts) == text.replace("\r\n", "\n")
        assert begin == (True,) + (False,) * (len(texts) - 1)
        assert max(map(len, texts)) <= 8 + size  # the longest part that is not cut has 8


GERMAN = "Der Fluß trägt kühle Wörter\nüber die Brücke. " * 400
RAW = GERMAN.encode()


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (b"PK\3\4\x14\0", "a ZIP archive"),
        (lzma.compress(RAW), "it is compressed; to decompress it: cat 'my text' | unxz"),
        (b"a\0" * 200, "a file of numbers or a program"),
        (b"%PDF-1.7\n\xff", "pdftotext 'my text'"),
    ],
)
def test_a_file_of_a_different_format_is_refused(raw, part):
    Path("my text").write_bytes(raw)
    assert part in error_of(Source(Path("my text")))


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (gzip.compress(RAW, mtime=0), "it is compressed; to decompress it"),
        (bz2.compress(RAW), "it is compressed; to decompress it"),
        (RAW[:36] + b"\0" + RAW[36:], "it contains a NUL byte; to remove it"),
        (RAW + "ß".encode()[:1], "line 401 has the byte 0xc3; to leave out such bytes"),
        (RAW[:36] + b"\xe9" + RAW[36:], "line 2 has the byte 0xe9; to leave out such bytes"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_command_for_a_damaged_text_restores_it(raw, part, suffix):
    path = Path(f"a text.txt{suffix}")
    path.write_bytes(gzip.compress(raw) if suffix else raw)
    command = re.search(f"{part}: (.+)", error_of(Source(path)))[1]
    subprocess.run(command, shell=True, stderr=subprocess.DEVNULL)  # iconv -c reports an error
    assert Path("NEW_FILE").read_text() == GERMAN


RUSSIAN = "В тихом саду у реки стоял старый дом.\n" * 9
FRENCH = "Le garçon lisait près de la rivière\xa0; l’été était doux.\n" * 9
SPANISH = (
    "En un lugar de la Mancha vivía un hidalgo de rocín flaco. Una olla de algo más vaca, salpicón "
    "las más noches, lantejas los sábados y algún palomino de añadidura los domingos, consumían su "
    "hacienda. ¿Qué dices, Sancho? ¡Válame Dios!, respondió él; ¿no le dije yo que lo mirase bien?"
)
CHINESE = "清晨的河邊有一座老房子，男孩在窗前讀書。\n" * 4000


@pytest.mark.parametrize(
    ("text", "encoding", "part"),
    [
        (RUSSIAN, "cp1251", "--encoding=NAME: cp1251 (В тихом саду у реки"),
        (FRENCH, "cp1252", "cp1252 (près rivière garçon"),
        (CHINESE, "big5", "--encoding=NAME: big5 (清晨的河邊有一座"),
        (
            "同学们清晨在河边读书，风吹过花园" * 60,
            "gb18030",
            "--encoding=NAME: ",
        ),  # its first bytes are UTF-8, too
        ("caf\xe9", "cp1252", "cp1252 (café)"),
        ("Träumen im Rücken der Straße\n" * 300, "cp1252", "cp1252 (Träumen Rücken"),
        (SPANISH, "cp1252", "--encoding=NAME: cp1252 (¿Qué ¡Válame ¿no"),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz"])
def test_other_encodings_are_named_and_read(text, encoding, part, name):
    source, content = Source(Path(name)), text
    if "json" in name:
        content = json.dumps({"text": text}, ensure_ascii=False) + "\n"
    raw = content.encode(encoding)
    source.path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    assert part in error_of(source) or "json" in name
    source.encoding = encoding
    assert "".join(part for part, _ in source.read()) == text
    source.encoding = "ascii"
    assert "is not ASCII text: " in error_of(source)


@pytest.mark.parametrize(
    ("raw", "encoding"),
    [
        (RUSSIAN.encode(), "cp1251"),
        (RUSSIAN.encode("utf-16"), "utf-8"),
        (RUSSIAN.encode("utf-16"), "utf-16-le"),
        (RUSSIAN.encode("utf-16-be"), "utf-16-be"),
        (RUSSIAN.encode("utf-32"), "utf-8"),
    ],
)
def test_a_byte_order_mark_or_valid_utf_8_is_more_certain_than_the_encoding(raw, encoding):
    Path("in").mkdir()
    Path("in/a.txt").write_bytes(raw)
    [source] = find_sources("in", "text", encoding)
    for _ in range(2):
        assert "".join(part for part, _ in source.read()) == RUSSIAN


def test_unpaired_surrogates_of_utf_7_are_refused():
    Path("a").write_bytes(b"+2AA-")
    assert "a is not UTF-7 text: " in error_of(Source(Path("a"), encoding="utf-7"))


def test_random_bytes_do_not_look_like_text():
    for seed in range(20):
        Path("a").write_bytes(random.Random(seed).randbytes(3000))
        assert "does not look like text" in error_of(Source(Path("a")))


# Finding files


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_values_that_python_lacks_are_a_problem_of_their_column_only(name):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    dates = pyarrow.array([10**18 + 1], pyarrow.timestamp("ns"))
    table = pyarrow.table({"body": ["a text"], "date": dates})
    if name == "a.parquet":
        parquet.write_table(table, name)
    else:
        with ipc.new_stream(name, table.schema) as writer:
            writer.write_table(table)
    assert list(Source(Path(name), "body").read()) == [("a text", True)]
    none = table.select([]).slice(0, 0)
    with ipc.new_stream("none.arrow", none.schema) as writer:
        writer.write_table(none)
    assert list(Source(Path("none.arrow"), "body").read()) == []
    for column, message in (
        ("text", r"'text': name one.*\(body, date\)"),
        ("date", "cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            list(Source(Path(name), column).read())


def test_json_is_a_table_unless_it_is_among_texts(capsys):
    Path("in").mkdir()
    for name in ("in/a.json", "in/b.jsonl"):
        Path(name).write_text('{"text": "one"}\n')
    for name in ("in/a.json", "in", "in/*.json"):
        assert [next(source.read())[0] for source in find_sources(name, "text")][0] == "one"
    Path("in/c.py").write_text("pass")
    texts = [next(source.read())[0] for source in find_sources("in", "text")]
    assert texts == ['{"text": "one"}\n', "one", "pass"]
    assert "reading 1 .json files as text" in capsys.readouterr().out


def names_of(pattern):
    return [source.name for source in find_sources(pattern, "text")]


def test_files_of_a_folder_or_a_pattern_are_sorted(capsys):
    binary = ["0.png", "1.png", "2.tar.gz", "3.png"]
    texts = ["b.txt", "a.jsonl", "z.gz", ".hidden.txt", ".git/a.txt", "c/a.txt", "__pycache__/a"]
    for name in texts + binary:
        path, raw = Path("in", name), b"a\0" if name in binary else b"{}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    Path("in/loop").symlink_to("../in")
    Path("in/link.txt").symlink_to("b.txt")
    assert names_of("in") == ["in/a.jsonl", "in/b.txt", "in/c/a.txt", "in/z.gz"]
    assert "left out 4 files" in capsys.readouterr().out
    assert names_of("in/*.*[lt]") == ["in/a.jsonl", "in/b.txt"]
    assert names_of("in/c/**/*.txt") == ["in/c/a.txt"]
    Path("in/[b].txt").write_text("")
    assert names_of("in/[b].txt") == ["in/[b].txt"]


def test_documentation_and_metadata_of_tables_are_left_out(capsys):
    Path("in/data").mkdir(parents=True)
    write("in/data/train.parquet", ["one", "two"])
    documentation = "README.md", "LICENSE", "data/state.json"
    for name in (*documentation, "dataset_info.json", "dataset_infos.json"):
        Path("in", name).write_text("{}")
    assert names_of("in") == ["in/data/train.parquet"]
    assert ": LICENSE, README.md, state.json, …\n" in capsys.readouterr().out
    Path("in/a.txt").write_text("a text")
    assert len(names_of("in")) == 7
    Path("in/dataset_dict.json").write_text("{}")
    with pytest.raises(UserError, match="several splits: use --input=in/train"):
        find_sources("in", "text")


def test_notes_beside_a_table_are_texts(capsys):
    Path("in/a").mkdir(parents=True)
    Path("in/a.csv").write_text("Name,Date\nTask,2024\n")
    Path("in/a/note.md").write_text("a note " * 9)
    assert names_of("in") == ["in/a/note.md", "in/a.csv"]
    assert "--text_key (Name, Date), or select other files" in error_of(Source(Path("in/a.csv")))
    Path("in/a/note.md").rename("in/a/README.md")  # a package, or a folder of such texts
    with pytest.raises(UserError, match="can be in in/a/README.md or in in/a.csv: name one"):
        names_of("in")


@pytest.mark.parametrize("name", ["in", "in/*.md", "in/broken", "png", "x" * 300, "http://a"])
def test_a_name_without_regular_files_is_refused(name):
    Path("in").mkdir()
    Path("png").mkdir()
    Path("png/a.png").write_bytes(b"\0")
    Path("in/broken").symlink_to("missing")
    with pytest.raises(UserError, match=name.replace("*", ".").replace("//", "/+")):
        names_of(name)
