"""The files of a corpus: what a user names, and how each is read."""

import glob
import hashlib
import os
import shutil
import sys
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path

from folio.errors import UserError, os_error
from folio.formats import FORMATS, chunks, reading

HASHED = 2**23  # bytes that are hashed at once; a thread waits for the GIL after each


@dataclass(frozen=True)
class Source:
    """A file of documents: a text, which is one document, JSON lines, or a Parquet table.

    text_key: the field or column with the text.
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
        """The one of FORMATS, or "" for a text."""
        return next((s for s in FORMATS if str(self.path).lower().endswith(s)), "")

    @property
    def size(self):
        """Bytes of the file. Raises UserError if it cannot be accessed."""
        return self._stat().st_size

    def stamp(self):
        """Returns plain data that changes if the file does."""
        return [self.name, self.size, self._stat().st_mtime_ns]

    def local_path(self):
        """Returns the path of the file."""
        return self.path

    def sha256(self):
        """Returns the hash of the file's bytes."""
        digest = hashlib.sha256()
        with reading(self.name), open(self.local_path(), "rb", buffering=0) as file:
            while raw := file.read(HASHED):
                digest.update(raw)
        return digest.hexdigest()

    def read(self, start=0, whole_words=True):
        """Returns an iterator of the Chunks from a place on. The last of each document ends it.

        Raises UserError for content that is not text, with the byte, line or row.

        Args:
            start: `place` of the last chunk that was used.
            whole_words: cut a text only where the cut does not change its tokens.
        """
        return chunks(self, start, whole_words)

    def _stat(self):
        with reading(self.name):
            return os.stat(self.path)


# Finding files


def find_sources(name, text_key):
    """Returns the Sources of a file, of a folder, of a glob pattern, or of standard input ("-").

    They are sorted by path. Hidden files are skipped. Any other file that is not UTF-8 text or of
    a known format is an error when it is read.
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
