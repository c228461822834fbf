"""Reading the text of a file: UTF-8 text, JSON lines or Parquet, in constant memory."""

import codecs
import gzip
import json
from contextlib import contextmanager
from importlib import import_module
from typing import NamedTuple

from folio import bpe
from folio.errors import UserError, cause_of, os_error

CHUNK = 2**19  # bytes of a text that are read at once; larger arrays are slower to write
BYTE_ORDER_MARK = "\ufeff"
JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
FORMATS = (*JSON_LINES, ".parquet")  # by suffix; other files are text


class Chunk(NamedTuple):
    """A part of a document.

    ends: whether the document ends after it.
    place: where the next chunk begins: a byte of a text, a line of JSON lines, a row of Parquet.
    num_read: bytes of the file up to there, about.
    """

    text: str
    ends: bool
    place: int
    num_read: int


def chunks(source, start, whole_words):
    """Yields the Chunks of a Source; see Source.read."""
    with reading(source.name):
        if not source.suffix:
            yield from _text(source, start, whole_words)
        elif source.suffix in JSON_LINES:
            yield from _json_lines(source, start)
        else:
            yield from _rows(source, start)


@contextmanager
def reading(name):
    """Turns errors in a file, which may contain anything, into UserErrors."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except OSError as error:
        raise os_error("read", name, error) from error
    except Exception as error:  # each library for compressed files has its own
        raise UserError(f"{name} is damaged ({cause_of(error)})") from error


def _text(source, start, whole_words):
    """Yields the Chunks of a UTF-8 file. Line endings are kept; a byte order mark is dropped."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open(source.local_path(), "rb") as file:
        file.seek(start)
        place, rest, raw = start, "", None
        while raw != b"":
            raw = file.read(CHUNK)
            text = rest + _decoded(source, decoder, raw, file.tell() - len(raw))
            if not place and text.startswith(BYTE_ORDER_MARK):
                text, place = text[1:], 3
            cut = bpe.last_cut(text) if raw and whole_words else len(text)
            text, rest = text[:cut], text[cut:]
            place += len(text) if text.isascii() else len(text.encode())
            yield Chunk(text, not raw, place, place)


def _decoded(source, decoder, raw, offset):
    """Returns the next text of a decoder. `offset` is the place of `raw` in the file."""
    before = len(decoder.getstate()[0])  # bytes of an incomplete character
    try:
        text = decoder.decode(raw, not raw)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{source.name} is not UTF-8 text: byte {offset - before + error.start:,} is "
            f"0x{error.object[error.start]:02x}; convert the file to UTF-8, or leave it out"
        ) from error
    if "\0" in text:
        raise UserError(f"{source.name} is not UTF-8 text: it contains null bytes")
    return text


def _json_lines(source, start):
    """Yields a Chunk for each line. Blank lines are skipped."""
    with open(source.local_path(), "rb") as file:
        lines = file
        if source.suffix.endswith(".gz"):
            lines = gzip.open(file)  # noqa: SIM115, it needs no closing
        elif source.suffix.endswith(".zst"):
            lines = _zstandard_lines(file)
        for number, line in enumerate(lines, 1):
            if number > start and not line.isspace():
                text = _json_text(line, source.text_key, f"{source.name}, line {number:,}")
                yield Chunk(text, True, number, file.tell())


def _zstandard_lines(file):
    """Yields the lines of a compressed file, which may have several frames."""
    library, rest, frame = _optional("zstandard", file.name), b"", None
    while raw := file.read(CHUNK):
        while raw:
            if frame is None or frame.eof:
                frame = library.ZstdDecompressor().decompressobj()
            *lines, rest = (rest + frame.decompress(raw)).split(b"\n")
            yield from (line + b"\n" for line in lines)
            raw = frame.unused_data
    if frame and not frame.eof:  # the library's own reader would ignore it
        raise EOFError("it ends within a frame")
    if rest:
        yield rest


def _json_text(line, key, where):
    try:
        data = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise UserError(f"{where} is not JSON in UTF-8 ({cause_of(error)})") from error
    if not isinstance(data, dict) or key not in data:
        raise UserError(f"{where} has no {key!r}; name the field of the text with --text_key")
    return _checked(data[key], key, where)


def _rows(source, start):
    """Yields a Chunk for each row of a Parquet table."""
    key, size, number = source.text_key, source.size, 0
    with _optional("pyarrow.parquet", source.name).ParquetFile(source.local_path()) as file:
        if key not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise UserError(
                f"{source.name} has no column {key!r} but {names}; name that of the text with "
                "--text_key"
            )
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if number + count <= start:
                number += count
                continue
            for batch in file.iter_batches(1000, row_groups=[group], columns=[key]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    if number > start:
                        text = _checked(value, key, f"{source.name}, row {number:,}")
                        num_read = size * number // file.metadata.num_rows
                        yield Chunk(text, True, number, num_read)


def _checked(value, key, where):
    """Returns a value if it is valid text. Raises UserError for anything else."""
    if not isinstance(value, str):
        raise UserError(f"{where}: {key!r} is {type(value).__name__}, not a string")
    try:
        if not value.isascii():
            value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: {key!r} contains a lone surrogate") from error
    return value


def _optional(module, name):
    """Returns a module of an optional package that reading a file needs."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise UserError(f"{name} needs a package: pip install {package}") from error
