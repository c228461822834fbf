"""Atomic writes, a lock for one writer per folder, and reading UTF-8 text."""

import os
import shutil
import sys
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

from folio.cli.errors import UserError, as_user_error, os_errors

LOCK_FILE = ".lock"
LFS_POINTER = b"version https://git-lfs"  # begins what Git writes for a file if it lacks Git LFS


@contextmanager
def write_atomically(*paths):
    """Yields a list of binary files that replace `paths` when the context ends.

    Each is written to PATH.tmp, synced to disk and renamed. If anything fails before the renames,
    every path keeps its old content; if the machine fails soon after them, it may have either.
    Raises UserError if the files cannot be written.
    """
    paths = tuple(Path(path) for path in paths)
    with os_errors("write", " and ".join(map(str, paths))), ExitStack() as stack:
        files = []
        for path in paths:
            temporary = Path(f"{path}.tmp")
            temporary.unlink(missing_ok=True)  # left by a process that was killed
            stack.callback(temporary.unlink, missing_ok=True)
            files.append(stack.enter_context(open(temporary, "wb")))
        yield files
        for file in files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        for file, path in zip(files, paths, strict=True):
            os.replace(file.name, path)


def replace_by_link(source, path):
    """Atomically makes `path` a hard link to `source`, or a copy. Raises UserError on failure."""
    temporary = Path(f"{path}.tmp")
    with suppress(OSError):  # the file system has no hard links
        temporary.unlink(missing_ok=True)
        os.link(source, temporary)
        os.replace(temporary, path)
        temporary.unlink(missing_ok=True)  # rename() does nothing to two links to one file
        return
    with write_atomically(path) as [target], open(source, "rb") as file:
        shutil.copyfileobj(file, target)


def make_folder_beside(folder):
    """Creates FOLDER.1, or the next free number. Returns it. Raises UserError if that fails."""
    numbered = (Path(f"{Path(folder).resolve()}.{number}") for number in count(1))
    target = next(path for path in numbered if not path.exists())
    with os_errors("create", target):
        target.mkdir()
    return target if os.path.isabs(folder) else Path(os.path.relpath(target))


@contextmanager
def lock_folder(folder, timeout_s=0):
    """Creates a folder if it does not exist, and holds its lock. Removes it if it remains empty.

    Raises UserError if another process holds the lock longer, or if the folder cannot be written.
    """
    from filelock import FileLock, Timeout  # here, because importing it would slow down --help

    folder = Path(folder)
    with os_errors("write to", folder):
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(folder / LOCK_FILE).acquire(timeout=timeout_s)
        except Timeout:
            advice = "wait for it, or choose a different folder"
            raise UserError(f"another process is writing to {folder}: {advice}") from None
    with lock:
        try:
            yield
        finally:
            if is_new and set(folder.glob("*")) <= {folder / LOCK_FILE}:
                shutil.rmtree(folder, ignore_errors=True)


def read_text(name):
    """Returns the text of a UTF-8 file, without a byte order mark. "-" is standard input."""
    if not name:
        raise UserError("the name of the file to read is empty")
    source = "standard input" if name == "-" else name
    check_lfs(name)
    with os_errors("read", source):
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    with as_user_error(f"{source} is not UTF-8 text: convert it", UnicodeDecodeError):
        return unify_line_ends(raw.decode().removeprefix("\ufeff"))


def read_prompt(start):
    """Returns the prompt that --start specifies, or None. Raises UserError if it is empty."""
    if start is None:
        return None
    if start.startswith("FILE:") or start == "-":
        start = read_text(start.removeprefix("FILE:"))
    if not start:
        raise UserError("the prompt is empty; omit --start to use the default prompt")
    return unify_line_ends(start)


def check_lfs(path):
    """Returns the first bytes of a file. Raises UserError for a Git LFS pointer."""
    if not os.path.isfile(path):  # a pipe can be read only once
        return b""
    with os_errors("read", path), open(path, "rb") as file:
        start = file.read(len(LFS_POINTER))
    if start == LFS_POINTER:
        raise UserError(f"{path} is a Git LFS pointer: install Git LFS, and run git lfs pull there")
    return start


def unify_line_ends(text):
    """Returns a text in which each CR LF and each CR is a newline, as open() reads it."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def unescape(text):
    """Returns a text in which backslash n is a newline, and backslash t a tab."""
    return text.replace("\\n", "\n").replace("\\t", "\t")  # most shells keep them as they are
