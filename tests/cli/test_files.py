"""Atomic writes, the lock of a folder, and reading text."""

import errno
import os
from pathlib import Path

import pytest
import tiny

from folio.cli.errors import UserError
from folio.cli.files import (
    LOCK_FILE,
    lock_folder,
    make_folder_beside,
    read_text,
    replace_by_link,
    write_atomically,
)

pytestmark = pytest.mark.usefixtures("folder")


def write(content, *paths):
    with write_atomically(*paths) as files:
        for file in files:
            file.write(content)


def test_several_files_are_replaced_together_or_not_at_all():
    Path("a.tmp").write_bytes(b"of a process that was killed")
    write(b"old", "a", "b")
    with pytest.raises(UserError, match="gone/c"):
        write(b"new", "a", "b", "gone/c")
    with pytest.raises(TypeError):
        write("a text, not bytes", "a", "b")
    assert tiny.contents() == {"a": b"old", "b": b"old"}
    write(b"new", "a", "b")
    assert tiny.contents() == {"a": b"new", "b": b"new"}


@pytest.mark.parametrize("links", [True, False])
def test_a_file_is_replaced_by_a_link_or_a_copy(links, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "the file system has no hard links")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    write(b"new", "source")
    write(b"old", "file")
    for _ in range(2):  # the second time, both are already the same file
        replace_by_link(Path("source"), Path("file"))
        assert tiny.contents() == {"source": b"new", "file": b"new"}
    assert os.path.samefile("source", "file") == links
    write(b"newer", "source")
    assert tiny.contents() == {"source": b"newer", "file": b"new"}


def test_a_folder_has_one_writer_at_a_time():
    for _ in range(2):  # the second time, after a release
        with lock_folder("new/out"), pytest.raises(UserError, match="another process .* new/out"):
            lock_folder("new/out").__enter__()
        assert not Path("new/out").exists()  # because it has remained empty
    with lock_folder("new/out"):
        Path("new/out/work").touch()
    assert set(os.listdir("new/out")) <= {LOCK_FILE, "work"}
    Path("file").touch()
    with pytest.raises(UserError, match="file/out"):
        lock_folder("file/out").__enter__()
    with pytest.raises(UserError, match="cannot write to aaa.*: File name too long"):
        lock_folder(300 * "a").__enter__()


def test_a_folder_beside_has_the_first_free_number(monkeypatch):
    for folder in ("out", "out.1", "out.3"):
        Path(folder).mkdir()
    assert make_folder_beside("out") == Path("out.2")
    monkeypatch.chdir("out")
    assert make_folder_beside(".") == Path("..", "out.4")
    assert Path("../out.4").is_dir()


def test_text_keeps_its_line_endings_and_must_be_utf8():
    Path("text").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\r\n")
    assert read_text("text") == "café\n"
    Path("text").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(UserError, match="text is not UTF-8 text: convert it .* byte 0xe9"):
        read_text("text")
    with pytest.raises(UserError, match="none"):
        read_text("none")
    Path("text").write_bytes(tiny.LFS_POINTER)
    with pytest.raises(UserError, match="text is a Git LFS pointer: .* git lfs pull"):
        read_text("text")
    Path("text").write_bytes(b"version https://git")
    assert read_text("text") == "version https://git"
