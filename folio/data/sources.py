"""The files of a corpus: what a user names, and how the text of each is read in constant memory.

A file of text is one document. A table (JSON lines, CSV, Parquet or Arrow) has one per row.
"""

import codecs
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
from contextlib import contextmanager, suppress
from functools import partial
from itertools import dropwhile
from pathlib import Path

from folio.cli.errors import UserError, as_user_error, import_optional, os_errors
from folio.cli.files import check_lfs, unify_line_ends
from folio.cli.process import printable
from folio.data.bpe import find_last_cut
from folio.data.encoding import explain_encoding

ROW_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".json")
TABLE_SUFFIXES = (
    ".parquet",
    ".arrow",
    *(suffix + packed for suffix in ROW_SUFFIXES for packed in ("", ".gz", ".zst")),
)
COLUMN_IN_TEMPLATE = r"\{([^{}]+)\}"
DOCUMENTATION = re.compile(  # of tables: in a clone of the hub's, and of datasets.save_to_disk
    r"(?i)readme.*|license.*|dataset_infos?\.json|state\.json|cache-.*\.arrow"
)
CHUNK_CHARACTERS = 2**19  # larger arrays are slower to write
PARQUET_ROWS_PER_BATCH = 1000
QUOTING = "put a value with double quotes in double quotes, and double its own"
MAX_DOCUMENT_BYTES = 2**27  # of a file that is parsed to see whether it is one JSON document


class Source:
    """A file of documents. `name` is what messages call it."""

    def __init__(self, path, text_key="text", name=None, encoding="utf-8"):
        """text_key: the column with the text, or a template such as "{question} {answer}"."""
        self.path, self.name = path, name or str(path)
        self.encoding = codecs.lookup(encoding).name  # of text; read() may find another
        self.suffix = table_suffix(path)
        self.template = text_key if "{" in text_key else f"{{{text_key}}}"  # a row's text
        self.columns = re.findall(COLUMN_IN_TEMPLATE, self.template)
        self.empty_rows = set()  # numbers of the rows without text that were read; not documents

    def sha256(self):
        """Returns the hash of the file's bytes."""
        with open(self.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def read(self):
        """Yields (text, whether it begins a document) for all parts of the documents.

        Raises UserError for content that is not text.
        """
        with self.errors():
            check_lfs(self.path)
            self.encoding = _find_encoding(self)
            yield from _read_table(self) if self.suffix else _read_text(self)

    @contextmanager
    def errors(self):
        """A context that turns errors of reading the file into UserErrors."""
        try:
            damage = as_user_error(f"{self.name} is damaged", EOFError, zlib.error)
            with os_errors("read", self.name), damage:
                yield
        except UnicodeError as error:
            cause = explain_encoding(self, error) if self.encoding == "utf-8" else error
            raise UserError(f"{self.name} is not {self.encoding.upper()} text: {cause}") from error

    def open(self):
        """Opens the file, which may be compressed, to read bytes."""
        suffix = self.path.suffix.lower()
        if suffix == ".zst":
            pyarrow = import_optional("pyarrow", self.name)
            return io.BufferedReader(pyarrow.CompressedInputStream(str(self.path), "zstd"))
        return gzip.open(self.path) if suffix == ".gz" else open(self.path, "rb")


def table_suffix(path):
    """Returns the suffix of a table, such as ".csv.gz", or "" for a text."""
    name = str(path).lower()
    return next((suffix for suffix in TABLE_SUFFIXES if name.endswith(suffix)), "")


# Text


def _find_encoding(source):
    """Returns the encoding of a file: of a byte order mark, UTF-8 if it fits, or the Source's."""
    with source.open() as file:
        start = file.read(4)
    if start in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE):
        return "utf-32"
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    if source.encoding != "utf-8":
        with suppress(UnicodeDecodeError), io.TextIOWrapper(source.open(), "utf-8") as file:
            parts = iter(partial(file.read, CHUNK_CHARACTERS), "")
            if False in {part.isascii() for part in parts}:  # ASCII can be UTF-7 or UTF-16, too
                return "utf-8"
    return source.encoding


def _open_text(source, newline=None):
    """Opens a file of text, which may be compressed. A byte order mark is dropped."""
    encoding = "utf-8-sig" if source.encoding == "utf-8" else source.encoding
    return io.TextIOWrapper(source.open(), encoding, newline=newline)


def _read_text(source):
    """Yields the parts of a text. If possible, they end where that does not change tokens."""
    text, is_start, is_end = "", True, False
    with _open_text(source) as file:
        while not is_end:
            new_text = file.read(CHUNK_CHARACTERS)
            if "\0" in new_text:
                raise UnicodeDecodeError(source.encoding, b"\0", 0, 1, "not in a text")
            new_text.encode()  # an error for unpaired surrogates, which UTF-7 can contain
            text += new_text
            is_end = len(new_text) < CHUNK_CHARACTERS
            cut = len(text) if is_end else find_last_cut(text)
            yield text[:cut], is_start
            text, is_start = text[cut:], False


# Tables


class RowError(Exception):
    """What is wrong with a row and what helps, in words that follow the number of the row."""


def _read_table(source):
    """Yields the text of each row of a table that has one, as Source.read does."""
    number = 1
    try:
        for row in _read_rows(source):
            text = _row_text(row, source)
            if text:
                yield unify_line_ends(text), True
            else:
                source.empty_rows.add(number)
            number += 1
    except (RowError, csv.Error, json.JSONDecodeError, RecursionError) as error:
        cause = f"row {number:,} {error}, or leave the row out"
        if number == 1 and (command := _rows_command(source)):
            cause = f"one JSON document, needs a row per line: {command}"
        elif not isinstance(error, RowError):
            rule = QUOTING if isinstance(error, csv.Error) else "each line must be a JSON object"
            message = str(error).replace("line 1 column", "column")  # a line of JSON is a row
            cause = f"row {number:,} is damaged ({message}; {rule})"
        raise UserError(f"{source.name}, {cause}") from error


def _row_text(row, source):
    """Returns the text of a row, or "" if one of its columns has no text."""
    texts = {column: _column_text(row, column) for column in source.columns}
    if not all(text.strip() for text in texts.values()):
        return ""
    text = re.sub(COLUMN_IN_TEMPLATE, lambda match: texts[match[1]], source.template)
    if "\0" in text or text.encode(errors="replace").decode() != text:
        raise RowError("has NUL or an unpaired surrogate: remove it")
    return text


def _column_text(row, column):
    """Returns the text in a column of a row; "" for a missing value."""
    if column not in row:
        known = f"{', '.join(row):.200}"
        advice = f"name one, or several in braces, with --text_key ({known})"
        raise RowError(f"has no column {column!r}: {advice}, or select other files with a pattern")
    text = row[column]
    if isinstance(text, bytes):  # as Spark and Hive write texts to Parquet
        text = text.decode("utf-8", "surrogateescape")
    if not isinstance(text, str | None):
        kind = "number" if isinstance(text, int | float) else type(text).__name__
        raise RowError(f"has a value of type {kind} in column {column!r}: convert it to text")
    return text or ""


def _read_rows(source):
    """Yields the rows of a table as dicts, {column: value}."""
    if source.suffix in (".parquet", ".arrow"):
        yield from _read_arrow(source)
        return
    with _open_text(source, newline="") as file:  # a field of CSV can contain line ends
        if source.suffix.startswith((".csv", ".tsv")):
            yield from _read_csv(source, file)
            return
        for line in filter(str.strip, file):
            row = json.loads(line, parse_int=float)  # int refuses thousands of digits
            if not isinstance(row, dict):
                raise RowError(f"is {row!r:.20}: write a JSON object per line")
            yield row


def _rows_command(source):
    """Returns the command that makes rows of a file that is one JSON document, or None."""
    quote = partial(json.dumps, ensure_ascii=False)
    rows, place = {}, ""
    with open(source.path, "rb") as file, suppress(ValueError, RecursionError):
        rows = json.loads(file.read(MAX_DOCUMENT_BYTES), parse_int=float)
    if isinstance(rows, dict) and rows:
        key = max(rows, key=lambda key: len(str(rows[key])))
        rows, place = rows[key], f"[{quote(key)}]"
    if not isinstance(rows, list) or set(map(type, rows)) != {dict}:
        return None
    row, condition = "row", ""
    for column in source.columns:
        if any(isinstance(each.get(column), list) for each in rows):  # Telegram's, of links
            parts = f"row.get({quote(column)}) or []"
            other = 'isinstance(p, dict) and p.get("text") or ""'
            text = f"p if isinstance(p, str) else {other} for p in {parts}"
            row += f' | {{{quote(column)}: "".join({text})}}'
    if any(all(map(each.get, source.columns)) for each in rows):
        condition = f" if all(map(row.get, {quote(source.columns)}))"
    rows = f'json.load(open({quote(str(source.path))}, "rb")){place}{condition}'
    program = f"import json; [print(json.dumps({row})) for row in {rows}]"
    return f"python -c {shlex.quote(program)} > {shlex.quote(source.path.stem)}-rows.jsonl"


def _read_csv(source, file):
    """Yields the rows of CSV or TSV."""
    csv.field_size_limit(2**30)  # the default is 2^17 characters
    delimiter = "," if source.suffix.startswith(".csv") else "\t"
    lines = dropwhile(str.isspace, file)  # before the header
    reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
    for row in reader:
        if None in row:
            raise RowError("has more values than columns: put text with commas in double quotes")
        if any(row.get(column, "") is None for column in source.columns):
            raise RowError("has fewer values than columns")
        texts = filter(None, row.values())
        if delimiter == "\t" and any("\t" in text and "\n" in text for text in texts):
            raise csv.Error("its double quotes enclose a tab and a line end")
        yield row


def _read_arrow(source):
    """Yields the rows of a file of Parquet, or of one of Arrow's two formats."""
    pyarrow = import_optional("pyarrow", source.name)
    from pyarrow import parquet

    types = (pyarrow.ArrowException, ValueError, OverflowError)  # of columns with dates, too
    with as_user_error(f"{source.name} cannot be read", *types), open(source.path, "rb") as file:
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
        for batch in filter(len, batches):
            arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
            if not set(source.columns) <= arrays.keys():
                yield dict.fromkeys(arrays)  # the error for this row lists them
            # A column that is not needed may have values that Python lacks.
            values = [arrays[column].to_pylist() for column in source.columns]
            for row in zip(*values, strict=True):
                yield dict(zip(source.columns, row, strict=True))


# Finding files


def find_sources(name, text_key, encoding="utf-8"):
    """Returns the Sources of a file, of a folder or of a glob pattern, sorted by path.

    In a folder, hidden files, caches of Python, links to folders and binary files are skipped, and
    in a folder of tables their documentation. Any other file that is not UTF-8 text or a table is
    an error when it is read. A .json file among texts is a text. Raises UserError if none is left.
    """
    unique: dict[str, Source] = {}  # of several links to a file, one is read
    for path in sorted(_find_files(name)):
        if not os.path.isfile(path):
            raise UserError(f"{path} is missing or not a regular file")
        unique.setdefault(os.path.realpath(path), Source(path, text_key, encoding=encoding))
    sources = list(unique.values())
    if len(sources) > 1:  # such as Spark's _SUCCESS
        sources = [source for source in sources if os.path.getsize(source.path)]
    if os.path.isfile(Path(name, "dataset_dict.json")):  # of datasets.save_to_disk
        raise UserError(f"{name} has several splits: use --input={name}/train")
    if os.path.isdir(name):
        sources = _select_sources(sources)
    if not sources:
        raise UserError(f"there are no files {name}; hidden, empty and binary files are skipped")
    json_sources = [source for source in sources if source.suffix == ".json"]
    if json_sources and not all(source.suffix for source in sources):  # such as source code
        print(f"reading {len(json_sources):,} .json files as text, because there are other texts")
        for source in json_sources:
            source.suffix = ""
    return sources


def _find_files(name):
    """Returns the paths of a file, of the files in a folder or of those of a pattern."""

    def fail(error):
        raise UserError(f"cannot read {error.filename}: {error.strerror}")

    if glob.has_magic(name) and not os.path.exists(name):
        return [Path(path) for path in glob.glob(name, recursive=True) if not os.path.isdir(path)]
    if not os.path.isdir(name):  # Path.is_dir raises for a name that is too long
        return [Path(name)] if name else []
    paths = []
    for parent, folders, names in os.walk(name, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        paths += [Path(parent, name) for name in names if not name.startswith(".")]
    return paths


def _select_sources(sources):
    """Returns the texts and tables among the Sources of a folder, and prints what is left out."""
    selected = [source for source in sources if not _is_binary(source)]
    documents = [source for source in selected if not DOCUMENTATION.fullmatch(source.path.name)]
    if documents and all(source.suffix for source in documents):
        notes = [s.path for s in selected if not (s.suffix or s in documents)]
        tables = [source.path for source in documents]
        if sum(map(os.path.getsize, notes)) > sum(map(os.path.getsize, tables)):
            files = f"{notes[0]} or in {tables[0]}"
            raise UserError(f"the text can be in {files}: name one of them, or a pattern of files")
        selected = documents
    kept = set(selected)
    names = [printable(source.path.name) for source in sources if source not in kept]
    if names:
        more = ", …" if len(names) > 3 else ""
        noun = "file" if len(names) == 1 else "files"
        kinds = "(binary, or documentation of tables)"
        print(f"left out {len(names):,} {noun} {kinds}: {', '.join(names[:3])}{more}")
    return selected


def _is_binary(source):
    if source.suffix:
        return False
    with source.errors(), source.open() as file:
        return "\0" in file.read(2**13).decode(_find_encoding(source), "replace")
