"""The files of a corpus: what a user names, and how the text of each is read in constant memory.

A file of text is one document. A table (JSON lines, CSV or Parquet) has one per row.
"""

import csv
import glob
import gzip
import hashlib
import io
import json
import os
import re
import shlex
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from folio.cli.errors import UserError, cause_of, import_optional, os_errors
from folio.cli.files import unify_line_ends
from folio.data.bpe import find_last_cut

JSON_SUFFIXES = (".json", ".json.gz", ".json.zst")
TABLE_SUFFIXES = (
    ".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".ndjson.gz", ".ndjson.zst",
    ".csv", ".csv.gz", ".csv.zst", ".tsv", ".tsv.gz", ".tsv.zst",
    *JSON_SUFFIXES,  # last, because repositories of datasets have other ones
)  # fmt: skip
UTF_16 = "it is UTF-16; to convert it: iconv -f UTF-16 -t UTF-8 {path} > NEW_FILE"
FOREIGN_FORMATS = {  # {first bytes: what a file is}
    b"\xff\xfe": UTF_16,
    b"\xfe\xff": UTF_16,
    b"PK\3\4": "it is a ZIP archive or a document such as .docx; extract or save its text",
    b"\x1f\x8b": "it is a compressed archive; extract its files",
    b"BZh": "it is compressed; to decompress it: bunzip2 {path}",
    b"\xfd7zXZ": "it is compressed; to decompress it: unxz {path}",
    b"%PDF": "it is a PDF; to extract its text: pdftotext {path}",
}
CHUNK_CHARACTERS = 2**19  # larger arrays are slower to write
MAX_UNCUT_CHARACTERS = 2**18  # after which a text is cut even if that changes its tokens
PARQUET_ROWS_PER_BATCH = 1000
MAX_FIELD_CHARACTERS = 2**30  # of CSV; Python's default is 2^17


class Chunk(NamedTuple):
    """A part of a document, or all of it."""

    text: str
    ends_document: bool


@dataclass(frozen=True)
class Source:
    """A file of documents.

    text_key: the column of a table that contains the text.
    label: its name in messages; None: the path.
    is_text: it is a text, whatever its name.
    line_ends: those in the part that has been read; each becomes a newline.
    """

    path: Path
    text_key: str = "text"
    label: str | None = None
    is_text: bool = field(default=False, kw_only=True)
    line_ends: set = field(default_factory=set, compare=False, kw_only=True)

    @property
    def name(self):
        return self.label or str(self.path)

    @property
    def suffix(self):
        """The one of TABLE_SUFFIXES, or "" for a text."""
        name = "" if self.is_text else str(self.path).lower()
        return next((suffix for suffix in TABLE_SUFFIXES if name.endswith(suffix)), "")

    @property
    def size(self):
        """Bytes of the file."""
        return os.stat(self.path).st_size

    def local_path(self):
        """Returns the path of the file on this machine."""
        return self.path

    def sha256(self):
        """Returns the hash of the file's bytes."""
        with open(self.local_path(), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def read(self):
        """Yields the Chunks of the file. Raises UserError for content that is not text."""
        try:
            with os_errors("read", self.name):
                yield from _read_table(self) if self.suffix else _read_text(self)
        except (EOFError, zlib.error) as error:
            raise UserError(f"{self.name} is damaged ({cause_of(error)})") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{self.name} is not UTF-8 text: {_explain(self, error)}") from error


def _explain(source, error):
    """Returns what a file is that is not UTF-8 text, and what helps."""
    path = shlex.quote(str(source.path))
    with open(source.local_path(), "rb") as file:
        start = file.read(8)
    for signature, explanation in FOREIGN_FORMATS.items():
        if start.startswith(signature):
            return explanation.format(path=path)
    byte = error.object[error.start]
    if not byte:
        return f"it contains a NUL byte; to remove it: tr -d '\\0' < {path} > NEW_FILE"
    return (
        f"it contains byte 0x{byte:02x}; its encoding can be WINDOWS-1252: "
        f"iconv -f WINDOWS-1252 -t UTF-8 {path} > NEW_FILE"
    )


# Text


def _open_text(source, newline=None):
    """Opens a UTF-8 file, which may be compressed. A byte order mark is dropped."""
    path, name = source.local_path(), str(source.path).lower()
    if name.endswith(".zst"):
        file = import_optional("pyarrow", source.name).CompressedInputStream(str(path), "zstd")
        return io.TextIOWrapper(file, "utf-8-sig", newline=newline)
    open_file = gzip.open if name.endswith(".gz") else open
    return open_file(path, "rt", encoding="utf-8-sig", newline=newline)


def _read_text(source):
    """Yields the Chunks of a UTF-8 file, without a byte order mark.

    Chunks end where that does not change the tokens of any tokenizer. If there is no such position
    in more than MAX_UNCUT_CHARACTERS, they end anywhere.
    """
    text, is_end = "", False
    with _open_text(source) as file:
        while not is_end:
            new_text = file.read(CHUNK_CHARACTERS)
            if "\0" in new_text:
                raise UnicodeDecodeError("utf-8", b"\0", 0, 1, "not in a text")
            text += new_text
            is_end = len(new_text) < CHUNK_CHARACTERS
            cut = len(text) if is_end else find_last_cut(text)
            if len(text) - cut > MAX_UNCUT_CHARACTERS:
                cut = len(text)
            if cut or is_end:
                yield Chunk(text[:cut], is_end)
            text = text[cut:]
        ends = file.newlines
        source.line_ends.update(ends if isinstance(ends, tuple) else [ends])


# Tables


def _read_table(source):
    """Yields a Chunk for each row of a table."""
    number = 0
    try:
        for number, row in enumerate(_read_rows(source), start=1):
            if problem := _find_problem(row, source.text_key):
                raise UserError(f"{source.name}, row {number:,} {problem}, or leave the row out")
            text = row[source.text_key]
            source.line_ends.update(re.findall("\r\n|\r", text))
            yield Chunk(unify_line_ends(text), True)
    except (csv.Error, json.JSONDecodeError, RecursionError) as error:
        cause = cause_of(error)
        if isinstance(error, json.JSONDecodeError):
            cause = f"{error.msg}; each line must be a JSON object"  # its line number is always 1
        raise UserError(f"{source.name}, row {number + 1:,} is damaged ({cause})") from error


def _find_problem(row, text_key):
    """Returns what is wrong with a row of a table and what helps, or None."""
    if not isinstance(row, dict):
        return f"is {row!r:.20}: write a JSON object per line"
    if None in row:  # csv.DictReader's key
        return "has more values than columns: put text with commas in double quotes"
    text = row.get(text_key)
    if not isinstance(text, str):
        columns = f"{', '.join(row):.200}"
        return f"has no text in column {text_key!r}: choose one with --text_key ({columns})"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "has half of a surrogate pair, which is no character: replace it"
    return None


def _read_rows(source):
    """Yields the rows of a table as dicts, {column: value}; lines of JSON may have other types."""
    if source.suffix == ".parquet":
        yield from _read_parquet(source)
        return
    with _open_text(source, newline="") as file:  # a field of CSV can contain line ends
        if not source.suffix.startswith((".csv", ".tsv")):
            # parse_int: int() refuses numbers of thousands of digits
            yield from (json.loads(line, parse_int=float) for line in file if line.strip())
            return
        csv.field_size_limit(MAX_FIELD_CHARACTERS)
        delimiter = "," if source.suffix.startswith(".csv") else "\t"
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
        if (reader.fieldnames or []).count(source.text_key) > 1:
            raise csv.Error(f"there are several columns {source.text_key!r}")
        yield from reader


def _read_parquet(source):
    pyarrow = import_optional("pyarrow", source.name)
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(source.local_path()) as file:
            columns = file.schema_arrow.names
            if columns.count(source.text_key) != 1:
                yield dict.fromkeys(columns)  # a row without the text
                return
            for batch in file.iter_batches(PARQUET_ROWS_PER_BATCH, columns=[source.text_key]):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"{source.name} cannot be read ({cause_of(error)})") from error


# Finding files


def find_sources(name, text_key):
    """Returns the Sources of a file, of a folder or of a glob pattern, sorted by path.

    In a folder, hidden files, caches of Python, links to folders and binary files are skipped, and
    of several links to a file all but one. Any other file that is not UTF-8 text or a table is an
    error when it is read. A .json file among texts is a text. Raises UserError if there are no
    files.
    """
    paths = [Path(name)]
    if os.path.isdir(name):  # Path.is_dir raises for a name that is too long
        paths = _skip_binary(_list_files(name))
    elif glob.has_magic(name) and not os.path.exists(name):
        paths = [Path(path) for path in glob.glob(name, recursive=True)]
    files = sorted(path for path in paths if not os.path.isdir(path))
    if not files:
        raise UserError(f"--input={name} finds no files; hidden files are skipped")
    for file in files:
        if not os.path.isfile(file):
            raise UserError(f"{file} is missing or no regular file")
    unique = {}
    for file in files:
        unique.setdefault(os.path.realpath(file), file)
    found = [Source(file, text_key) for file in unique.values()]
    if all(source.suffix for source in found):
        return found
    # A .json file among source code is not a table.
    found = [replace(source, is_text=source.suffix == ".json") for source in found]
    if count := sum(source.is_text for source in found):
        print(f"reading {count:,} .json files as text, because there are other texts")
    return found


def _list_files(folder):
    """Yields the paths of all files in a folder and its subfolders that are not hidden."""

    def fail(error):
        with os_errors("read", error.filename):
            raise error

    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def _skip_binary(paths):
    """Returns the paths of files that are not binary, and prints the number of the others."""
    texts, count = [], 0
    for path in paths:
        start = b""
        if os.path.isfile(path) and not Source(path).suffix:
            with os_errors("read", path), open(path, "rb") as file:
                start = file.read(2**13)
        if b"\0" in start and not start.startswith((b"\xff\xfe", b"\xfe\xff")):  # UTF-16
            count += 1
        else:
            texts.append(path)
    if count:
        print(f"skipped {count:,} binary files")
    return texts
