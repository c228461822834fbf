"""The files of a corpus: what a user names, and how the text of each is read in constant memory.

A file of text is one document. A table (JSON lines, CSV, Parquet or Arrow) has one per row.
"""

import csv
import glob
import gzip
import hashlib
import io
import json
import os
import re
import zlib
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from itertools import dropwhile
from pathlib import Path
from typing import NamedTuple

from folio.cli.errors import UserError, cause_of, import_optional, os_errors
from folio.cli.files import check_lfs, unify_line_ends
from folio.data.bpe import find_last_cut
from folio.data.problems import explain_bytes

JSON_SUFFIXES = (".json", ".json.gz", ".json.zst")
TABLE_SUFFIXES = (
    ".parquet", ".arrow", ".jsonl", ".jsonl.gz", ".jsonl.zst",
    ".ndjson", ".ndjson.gz", ".ndjson.zst",
    ".csv", ".csv.gz", ".csv.zst", ".tsv", ".tsv.gz", ".tsv.zst",
    *JSON_SUFFIXES,  # last, because repositories of datasets have other ones
)  # fmt: skip
COLUMN_IN_TEMPLATE = r"\{([^{}]+)\}"
DOCUMENTATION = ("README*", "LICENSE*", "*.md")
ARROW_METADATA = ("dataset_info.json", "state.json", "cache-*.arrow")  # of datasets.save_to_disk
SPLIT_NAMES = ("train", "val", "valid", "validation", "dev", "test")
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

    text_key: the column of a table that contains the text, or a template of columns in braces, such
        as "{question} {answer}".
    label: its name in messages; None: the path.
    is_text: it is a text, whatever its name.
    line_ends: those in the part that has been read; each becomes a newline.
    empty_rows: numbers of the rows without text in that part; they are no documents.
    """

    path: Path
    text_key: str = "text"
    label: str | None = None
    is_text: bool = field(default=False, kw_only=True)
    line_ends: set = field(default_factory=set, compare=False, kw_only=True)
    empty_rows: set = field(default_factory=set, compare=False, kw_only=True)

    @property
    def name(self):
        return self.label or str(self.path)

    @property
    def suffix(self):
        """The one of TABLE_SUFFIXES, or "" for a text."""
        name = "" if self.is_text else str(self.path).lower()
        return next((suffix for suffix in TABLE_SUFFIXES if name.endswith(suffix)), "")

    @property
    def columns(self):
        """The columns of a table that text_key names."""
        return re.findall(COLUMN_IN_TEMPLATE, self.text_key) or [self.text_key]

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
                check_lfs(self.local_path())
                yield from _read_table(self) if self.suffix else _read_text(self)
        except (EOFError, zlib.error) as error:
            raise UserError(f"{self.name} is damaged ({cause_of(error)})") from error
        except UnicodeDecodeError as error:
            cause = explain_bytes(self.path, self.open, error)
            raise UserError(f"{self.name} is not UTF-8 text: {cause}") from error

    def open(self):
        """Opens the file, which may be compressed, to read bytes."""
        path, suffix = self.local_path(), self.path.suffix.lower()
        if suffix == ".zst":
            pyarrow = import_optional("pyarrow", self.name)
            return io.BufferedReader(pyarrow.CompressedInputStream(str(path), "zstd"))
        return gzip.open(path) if suffix == ".gz" else open(path, "rb")


# Text


def _open_text(source, newline=None):
    """Opens a UTF-8 file, which may be compressed. A byte order mark is dropped."""
    return io.TextIOWrapper(source.open(), "utf-8-sig", newline=newline)


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
            text, problem = _row_text(row, source)
            if problem:
                raise UserError(f"{source.name}, row {number:,} {problem}, or leave the row out")
            if not text:
                source.empty_rows.add(number)
                continue
            source.line_ends.update(re.findall("\r\n|\r", text))
            yield Chunk(unify_line_ends(text), True)
    except (csv.Error, json.JSONDecodeError, RecursionError) as error:
        cause = cause_of(error)
        if isinstance(error, json.JSONDecodeError):
            cause = f"{error.msg}; each line must be a JSON object"  # its line number is always 1
        raise UserError(f"{source.name}, row {number + 1:,} is damaged ({cause})") from error


def _row_text(row, source):
    """Returns the text of a row of a table, and what is wrong with it and what helps, or None."""
    if not isinstance(row, dict):
        return "", f"is {row!r:.20}: write a JSON object per line"
    if None in row:  # csv.DictReader's key
        return "", "has more values than columns: put text with commas in double quotes"
    texts = {}
    for column in source.columns:
        if column not in row:
            known = f"{', '.join(row):.200}"
            advice = f"name one, or several in braces, with --text_key ({known})"
            return "", f"has no column {column!r}: {advice}"
        value = row[column]
        if value is None and source.suffix.startswith((".csv", ".tsv")):
            return "", "has fewer values than columns"
        if isinstance(value, bytes):  # as Spark and Hive write texts to Parquet
            value = value.decode("utf-8", "surrogateescape")
        if not isinstance(value, str | None):
            kind = "number" if isinstance(value, int | float) else type(value).__name__
            return "", f"has no text in column {column!r}, but a value of type {kind}"
        texts[column] = value or ""
    if not all(text.strip() for text in texts.values()):
        return "", None
    text = texts.get(source.text_key)
    if text is None:  # a template
        text = re.sub(COLUMN_IN_TEMPLATE, lambda match: texts[match[1]], source.text_key)
    if "\0" in text:
        return "", "has a NUL character: remove it"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "", "has what is no character, such as half of a surrogate pair: replace it"
    return text, None


def _read_rows(source):
    """Yields the rows of a table as dicts, {column: value}; lines of JSON may have other types."""
    if source.suffix in (".parquet", ".arrow"):
        yield from _read_arrow(source)
        return
    with _open_text(source, newline="") as file:  # a field of CSV can contain line ends
        if not source.suffix.startswith((".csv", ".tsv")):
            # parse_int: int() refuses numbers of thousands of digits
            yield from (json.loads(line, parse_int=float) for line in file if line.strip())
            return
        csv.field_size_limit(MAX_FIELD_CHARACTERS)
        delimiter = "," if source.suffix.startswith(".csv") else "\t"
        lines = dropwhile(str.isspace, file)  # before the header
        reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
        for column in source.columns:
            if (reader.fieldnames or []).count(column) > 1:
                raise csv.Error(f"there are several columns {column!r}")
        yield from reader


def _read_arrow(source):
    """Yields the rows of a file of Parquet, or of one of Arrow's two formats."""
    pyarrow = import_optional("pyarrow", source.name)
    from pyarrow import parquet

    try:
        with open(source.local_path(), "rb") as file:
            if source.suffix == ".parquet":
                table = parquet.ParquetFile(file)
                has_columns = set(source.columns) <= set(table.schema_arrow.names)
                columns = source.columns if has_columns else None  # all, for the message
                batches = table.iter_batches(PARQUET_ROWS_PER_BATCH, columns=columns)
            elif file.read(6) == b"ARROW1":
                reader = pyarrow.ipc.open_file(file)
                batches = map(reader.get_batch, range(reader.num_record_batches))
            else:
                file.seek(0)
                batches = pyarrow.ipc.open_stream(file)
            for batch in batches:
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{source.name} cannot be read ({cause_of(error)})") from error


# Finding files


def find_sources(name, text_key):
    """Returns the Sources of a file, of a folder or of a glob pattern, sorted by path.

    In a folder, hidden files, caches of Python, links to folders, binary files and the
    documentation of tables are skipped, and of several links to a file all but one. Any other file
    that is not UTF-8 text or a table is an error when it is read. A .json file among texts is a
    text. Raises UserError if there are no files.
    """
    paths = [Path(name)]
    if os.path.isdir(name):  # Path.is_dir raises for a name that is too long
        paths = _select_files(name, list(_list_files(name)))
    elif glob.has_magic(name) and not os.path.exists(name):
        paths = [Path(path) for path in glob.glob(name, recursive=True)]
    files = sorted(path for path in paths if not os.path.isdir(path))
    if not files:
        raise UserError(f"there are no files {name}; hidden files are skipped")
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


def _select_files(folder, paths):
    """Returns the paths of texts and tables in a folder, and prints what is left out.

    Prints a note, too, if names of files are those of splits. Raises UserError if
    datasets.save_to_disk wrote several splits.
    """
    if os.path.isfile(Path(folder, "dataset_dict.json")):
        splits = {path.parent.name for path in paths if path.suffix == ".arrow"}
        splits = sorted(splits, key=lambda split: (split != "train", split))
        raise UserError(
            f"{folder} has the splits {', '.join(splits)}: use --input={folder}/{splits[0]}, and "
            "--val_input=FOLDER for a validation split"
        )
    splits = [path for path in sorted(paths) if path.name.split(".")[0] in SPLIT_NAMES]
    if len(splits) > 1:
        names = ", ".join(path.name for path in splits)
        print(f"{names} become one text; --input and --val_input keep two apart")
    documentation = [path for path in paths if _is_documentation(folder, path)]
    suffixes = {Source(path).suffix for path in paths if path not in documentation}
    if not suffixes - {"", ".json"} and suffixes != {".json"}:  # there are no tables
        documentation = []
    binary = [path for path in paths if path not in documentation and _is_binary(path)]
    for kind, left_out in (("documentation", documentation), ("binary", binary)):
        if left_out:
            names = ", ".join(path.name for path in left_out[:3])
            print(f"left out {len(left_out):,} files, {kind}: {names}{', …' * (len(left_out) > 3)}")
    return [path for path in paths if path not in {*documentation, *binary}]


def _is_documentation(folder, path):
    """Whether a file describes the tables in a folder, such as a clone of a hub's dataset."""
    is_text = path.parent == Path(folder) and not Source(path).suffix
    names = DOCUMENTATION if is_text else ARROW_METADATA
    return any(fnmatch(path.name.lower(), name.lower()) for name in names)


def _is_binary(path):
    """Whether a file is neither a table nor a text, judged by its beginning."""
    source, start = Source(path), b""
    if os.path.isfile(path) and not source.suffix:
        damaged = EOFError, zlib.error, gzip.BadGzipFile  # an error when it is read
        with os_errors("read", path), suppress(*damaged), source.open() as file:
            start = file.read(2**13)
    return b"\0" in start and not start.startswith((b"\xff\xfe", b"\xfe\xff"))  # UTF-16
