"""The files of a corpus: what a user names, and how the text of each is read in constant memory.

A file of text is one document. A table (JSON lines, CSV or Parquet) has one per row.
"""

import glob
import hashlib
import io
import os
import platform
import shutil
import sys
import tempfile
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from folio import bpe
from folio.errors import UserError, cause_of, os_error

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
TABLES = (
    ".parquet",
    *(kind + suffix for kind in (".jsonl", ".csv") for suffix in ("", *COMPRESSIONS)),
)
CHUNK = 2**19  # characters of a text that are read at once; larger arrays are slower to write
BLOCK = 2**25  # bytes of JSON lines or CSV that are read at once; a longer row is an error
ROWS = 1000  # of a Parquet table that are read at once


class Chunk(NamedTuple):
    """A part of a document.

    ends: whether the document ends after it.
    num_read: bytes of the file up to there, about.
    """

    text: str
    ends: bool
    num_read: int


@dataclass(frozen=True)
class Source:
    """A file of documents.

    text_key: the column of a table that contains the text.
    label: its name in messages; None: the path.
    """

    path: Path
    text_key: str = "text"
    label: str | None = None

    @property
    def name(self):
        return self.label or str(self.path)

    @property
    def suffix(self):
        """The one of TABLES, or "" for a text."""
        return next((s for s in TABLES if str(self.path).lower().endswith(s)), "")

    @property
    def size(self):
        """Bytes of the file. Raises UserError if it cannot be accessed."""
        with reading(self.name):
            return os.stat(self.path).st_size

    def local_path(self):
        """Returns the path of the file."""
        return self.path

    def sha256(self):
        """Returns the hash of the file's bytes."""
        with reading(self.name), open(self.local_path(), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def read(self, whole_words=True):
        """Yields the Chunks of the file. The last of each document ends it.

        Raises UserError for content that is not text.

        Args:
            whole_words: cut a text only where the cut does not change its tokens.
        """
        with reading(self.name):
            yield from _rows(self) if self.suffix else _text(self, whole_words)


@contextmanager
def reading(name):
    """Turns errors in a file, which may contain anything, into UserErrors."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except OSError as error:
        raise os_error("read", name, error) from error
    except Exception as error:  # the libraries have many types of errors
        raise UserError(f"{name} is damaged ({cause_of(error)})") from error


# Text


def _text(source, whole_words):
    """Yields the Chunks of a UTF-8 file. Line endings are kept; a byte order mark is dropped."""
    count, rest, new = 0, "", None
    with open(source.local_path(), encoding="utf-8-sig", newline="") as file:
        while new != "":
            try:
                new = file.read(CHUNK)
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{source.name} is not UTF-8 text: after {count:,} characters or more, it has "
                    f"byte 0x{error.object[error.start]:02x}; convert it to UTF-8, or leave it out"
                ) from error
            if "\0" in new:
                raise UserError(f"{source.name} is not UTF-8 text: it contains null bytes")
            count += len(new)
            text = rest + new
            cut = bpe.last_cut(text) if new and whole_words else len(text)
            text, rest = text[:cut], text[cut:]
            yield Chunk(text, not new, file.buffer.tell())


# Tables


def _rows(source):
    """Yields a Chunk for each row of a table."""
    try:
        import pyarrow  # imported here because it is optional
    except ImportError as error:
        raise UserError(f"{source.name} needs a package: pip install pyarrow") from error
    fix = (
        f"the text is read from column {source.text_key!r}, or that of --text_key; a row of JSON "
        f"lines or CSV has at most {BLOCK / 1e6:.0f} MB"
    )
    number = 0
    try:
        for column, num_read in _columns(source):
            for text in column.to_pylist():
                number += 1
                if not isinstance(text, str):
                    raise UserError(
                        f"{source.name}, row {number:,} has {text!r:.20} in place of a text; {fix}"
                    )
                yield Chunk(text, True, num_read)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(
            f"{source.name} cannot be read after row {number:,} ({cause_of(error)}); {fix}"
        ) from error


def _columns(source):
    """Yields parts of the column with the text, and the bytes of the file up to each, about."""
    if source.suffix == ".parquet":
        return _parquet_columns(source)
    return _streamed_columns(source)


def _parquet_columns(source):
    from pyarrow.parquet import ParquetFile

    with ParquetFile(source.local_path()) as file:
        names = file.schema_arrow.names
        if source.text_key not in names:
            raise UserError(
                f"{source.name} has no column {source.text_key!r} but {', '.join(names)}; name "
                "that of the text with --text_key"
            )
        num_rows = 0
        for batch in file.iter_batches(ROWS, columns=[source.text_key]):
            num_rows += len(batch)
            yield batch.column(0), source.size * num_rows // file.metadata.num_rows


def _streamed_columns(source):
    """For JSON lines and CSV. Values of other columns may have any type."""
    import pyarrow
    from pyarrow import csv, json

    schema = pyarrow.schema({source.text_key: pyarrow.string()})
    with pyarrow.OSFile(str(source.local_path())) as file:
        if not file.size():
            return
        compression = COMPRESSIONS.get(Path(source.suffix).suffix)
        stream = pyarrow.CompressedInputStream(file, compression) if compression else file
        if source.suffix.startswith(".csv"):
            batches = csv.open_csv(
                stream,
                csv.ReadOptions(block_size=BLOCK),
                csv.ParseOptions(newlines_in_values=True),
                csv.ConvertOptions(include_columns=schema.names, column_types=schema),
            )
        else:
            batches = json.open_json(
                stream,
                json.ReadOptions(block_size=BLOCK),
                json.ParseOptions(schema, unexpected_field_behavior="ignore"),
            )
        for batch in batches:
            yield batch.column(0), file.tell()


# Finding files


def find_sources(name, text_key):
    """Returns the Sources of a file, of a folder, of a glob pattern, or of standard input ("-").

    They are sorted by path. Hidden files are skipped. Any other file that is not UTF-8 text or a
    table is an error when it is read.
    """
    if "://" in name:
        raise UserError(f"--input takes a local file or folder: download {name} first")
    if name == "-":
        return [spooled(sys.stdin.buffer, "standard input")]
    if os.path.isdir(name):  # Path.is_dir raises for a name that is too long
        files = sorted(files_in(Path(name)))
        if not files:
            raise UserError(f"{name} contains no files; hidden files are skipped")
        if odd := [file for file in files if not os.path.isfile(file)]:
            raise UserError(f"{odd[0]} is not a regular file; remove it from {name}")
        return [Source(file, text_key) for file in files]
    if glob.has_magic(name) and not os.path.exists(name):
        files = sorted(Path(f) for f in glob.glob(name, recursive=True) if os.path.isfile(f))
        if not files:
            raise UserError(f"no file matches {name}; hidden files are skipped")
        return [Source(file, text_key) for file in files]
    if os.path.exists(name) and not os.path.isfile(name):  # such as a pipe, which is read once
        with reading(name), open(name, "rb") as file:
            return [spooled(file, name)]
    return [Source(Path(name), text_key)]


def files_in(folder):
    """Yields the paths of all files in a folder that are not hidden. Links are followed."""

    def fail(error):
        raise os_error("read", error.filename, error) from error

    seen = set()
    for at, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        real = os.path.realpath(at)
        is_loop = real in seen  # a link to a folder that was read already
        folders[:] = [] if is_loop else sorted(n for n in folders if not n.startswith("."))
        seen.add(real)
        yield from (Path(at, n) for n in names if not (is_loop or n.startswith(".")))


def spooled(file, label):
    """Returns the Source of a binary stream of text, which it copies to a temporary file."""
    handle, path = tempfile.mkstemp()
    source = Source(Path(path), label=label)
    weakref.finalize(source, Path(path).unlink, missing_ok=True)
    with reading(label), open(handle, "wb") as copy:
        shutil.copyfileobj(file, copy)
    return source


def python_docs():
    """Returns a Source of the language reference that Python includes for help()."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    label = f"pydoc_data.topics of Python {platform.python_version()}"
    return spooled(io.BytesIO(text.encode()), label)
