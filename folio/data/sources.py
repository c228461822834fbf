"""The files of a corpus: what a user names, and how the text of each is read in constant memory.

A file of text is one document. A table (JSON lines, CSV or Parquet) has one per row.
"""

import glob
import gzip
import hashlib
import os
import shlex
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from folio.cli.errors import UserError, cause_of, import_optional, os_errors
from folio.cli.files import unify_line_ends
from folio.data.bpe import find_last_cut

TABLE_SUFFIXES = (
    ".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".ndjson.gz", ".ndjson.zst",
    ".csv", ".csv.gz", ".csv.zst", ".tsv", ".tsv.gz", ".tsv.zst",
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
TABLE_BLOCK_BYTES = 2**25  # a longer row of JSON lines or CSV is an error
PARQUET_ROWS_PER_BATCH = 1000


class Chunk(NamedTuple):
    """A part of a document, or all of it."""

    text: str
    ends_document: bool


@dataclass(frozen=True)
class Source:
    """A file of documents.

    text_key: the column of a table that contains the text.
    label: its name in messages; None: the path.
    line_ends: those in the part that has been read; each becomes a newline.
    """

    path: Path
    text_key: str = "text"
    label: str | None = None
    line_ends: set = field(default_factory=set, compare=False, kw_only=True)

    @property
    def name(self):
        return self.label or str(self.path)

    @property
    def suffix(self):
        """The one of TABLE_SUFFIXES, or "" for a text."""
        name = str(self.path).lower()
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
            raise _unreadable(self, cause_of(error)) from error
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


def _unreadable(source, cause):
    """Returns the UserError for a damaged file."""
    return UserError(
        f"{source.name} cannot be read ({cause}); in a table, --text_key names the column with the "
        f"text, and a row of JSON lines or CSV has at most {TABLE_BLOCK_BYTES / 1e6:.0f} MB"
    )


# Text


def _read_text(source):
    """Yields the Chunks of a UTF-8 file, without a byte order mark.

    Chunks end where that does not change the tokens of any tokenizer. If there is no such position
    in more than MAX_UNCUT_CHARACTERS, they end anywhere.
    """
    text, is_end = "", False
    open_file = gzip.open if source.path.suffix == ".gz" else open
    with open_file(source.local_path(), "rt", encoding="utf-8-sig") as file:
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
    row = 0
    if not source.size:  # an error in pyarrow
        return
    for batch in _read_row_batches(source):
        if batch.schema.names.count(source.text_key) != 1:
            raise _unreadable(source, f"it has not one column {source.text_key!r}")
        for text in batch.column(source.text_key).to_pylist():
            row += 1
            if not isinstance(text, str):
                raise UserError(
                    f"{source.name}, row {row:,} has {text!r:.20} in place of a text in column "
                    f"{source.text_key!r}; choose another with --text_key, or leave the row out"
                )
            source.line_ends.update(end for end in ("\r\n", "\r") if end in text)
            yield Chunk(unify_line_ends(text), True)


def _read_row_batches(source):
    """Yields pyarrow's record batches of a table. Columns other than the text may have any type."""
    pyarrow = import_optional("pyarrow", source.name)
    from pyarrow import csv, json, parquet

    path, schema = str(source.local_path()), pyarrow.schema({source.text_key: pyarrow.string()})
    try:
        if source.suffix == ".parquet":
            with parquet.ParquetFile(path) as file:
                yield from file.iter_batches(PARQUET_ROWS_PER_BATCH, columns=schema.names)
            return
        with pyarrow.input_stream(path) as stream:  # decompresses it
            if source.suffix.startswith((".csv", ".tsv")):
                delimiter = "," if source.suffix.startswith(".csv") else "\t"
                yield from csv.open_csv(
                    stream,
                    csv.ReadOptions(block_size=TABLE_BLOCK_BYTES),
                    csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
                    csv.ConvertOptions(include_columns=schema.names, column_types=schema),
                )
            else:
                yield from json.open_json(
                    stream,
                    json.ReadOptions(block_size=TABLE_BLOCK_BYTES),
                    json.ParseOptions(schema, unexpected_field_behavior="ignore"),
                )
    except pyarrow.ArrowException as error:
        raise _unreadable(source, cause_of(error)) from error


# Finding files


def find_sources(name, text_key):
    """Returns the Sources of a file, of a folder or of a glob pattern, sorted by path.

    In a folder, hidden files, caches of Python, links to folders and binary files are skipped, and
    of several links to a file all but one. Any other file that is not UTF-8 text or a table is an
    error when it is read. Raises UserError if there are no files.
    """
    paths = [Path(name)]
    if os.path.isdir(name):  # Path.is_dir raises for a name that is too long
        paths = _skip_binary(_list_files(name))
    elif glob.has_magic(name) and not os.path.exists(name):
        paths = [Path(path) for path in glob.glob(name, recursive=True)]
    files = sorted(path for path in paths if not os.path.isdir(path))
    if not files:
        raise UserError(f"--input={name} finds no files; hidden files are skipped")
    if name.endswith(".json") and os.path.isfile(name):
        _check_json(name)
    for file in files:
        if not os.path.isfile(file):
            raise UserError(f"{file} is missing or no regular file")
    unique = {}
    for file in files:
        unique.setdefault(os.path.realpath(file), file)
    return [Source(file, text_key) for file in unique.values()]


def _check_json(name):
    """Raises UserError if a file is a JSON array. Its punctuation would be part of the text."""
    with os_errors("read", name), open(name, "rb") as file:
        if file.read(100).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            code = f"import json; [print(json.dumps(row)) for row in json.load(open({name!r}))]"
            raise UserError(
                f"{name} is a JSON array, but a table has one object per line; to convert it: "
                f'python -c "{code}" > {Path(name).stem}.jsonl'
            )


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
