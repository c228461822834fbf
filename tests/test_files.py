"""Atomic writes and the lock of a folder."""

import errno
import os
from pathlib import Path

import pytest

from folio.errors import UserError
from folio.files import LOCK, InUseError, locked, move_aside, replace_by_link, replacing


@pytest.fixture(autouse=True)
def in_folder(folder):
    """Every test runs in an empty folder."""


def contents():
    return {path.name: path.read_bytes() for path in Path().iterdir()}


def write(content, *paths):
    with replacing(*paths) as files:
        for file in files:
            file.write(content)


# replacing


def test_new_content_replaces_the_old_at_the_end():
    Path("file.tmp").write_bytes(b"of a process that was killed")
    write(b"old", "file")
    with replacing("file") as [file]:
        file.write(b"new")
        file.flush()
        assert Path("file").read_bytes() == b"old"
    assert contents() == {"file": b"new"}


def test_content_is_synced_before_the_rename(monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *a: (calls.append("replace"), replace(*a)))
    write(b"new", "file")
    assert calls[:2] == ["fsync", "replace"]


def fail_while_writing(path, error):
    with replacing(path) as [file]:
        file.write(b"half")
        raise error


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (ValueError("a bug"), ValueError, "a bug"),
        (KeyboardInterrupt("stop"), KeyboardInterrupt, "stop"),
        (FULL, UserError, "^cannot write file: No space left on device$"),
    ],
)
def test_an_error_while_writing_leaves_the_old_file(error, raised, message):
    write(b"old", "file")
    with pytest.raises(raised, match=message):
        fail_while_writing("file", error)
    assert contents() == {"file": b"old"}


def test_several_files_are_replaced_together_or_not_at_all():
    write(b"old", "a", "b")
    with pytest.raises(UserError, match="cannot write a and b and gone/c: No such file"):
        write(b"new", "a", "b", "gone/c")
    assert contents() == {"a": b"old", "b": b"old"}
    write(b"new", "a", "b")
    assert contents() == {"a": b"new", "b": b"new"}


def test_a_missing_folder_is_an_error_and_is_not_created():
    with pytest.raises(UserError, match="^cannot write gone/file: No such file or directory$"):
        write(b"new", "gone/file")
    assert contents() == {}


# replace_by_link


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
        assert contents() == {"source": b"new", "file": b"new"}
    assert os.path.samefile("source", "file") == links
    write(b"newer", "source")
    assert contents() == {"source": b"newer", "file": b"new"}


def test_a_link_in_place_of_a_folder_is_an_error():
    write(b"new", "source")
    Path("file").mkdir()
    with pytest.raises(UserError, match="^cannot write file: Is a directory$"):
        replace_by_link(Path("source"), Path("file"))
    Path("file").rmdir()
    assert contents() == {"source": b"new"}


# locked


def test_a_folder_has_one_writer_at_a_time():
    for _ in range(2):  # the second time, after a release
        with locked("out"), pytest.raises(InUseError, match="another process is writing to out"):
            locked("out").__enter__()
    assert set(os.listdir("out")) <= {LOCK}


def test_a_missing_folder_is_created():
    Path("file").touch()
    with locked("new/out"):
        assert os.path.isdir("new/out")
    for folder, reason in (("file", "File exists"), ("file/out", "Not a directory")):
        with pytest.raises(UserError, match=f"^cannot write to {folder}: {reason}$"):
            locked(folder).__enter__()


# Moving aside


def test_earlier_files_are_moved_to_the_first_free_number():
    for folder in ("out", "out.1", "out.3"):
        Path(folder).mkdir()
    for name in ("work", "log", "note"):
        Path("out", name).touch()
    assert move_aside("out", ["work", "log", "other"]) == Path("out.2")
    assert (sorted(os.listdir("out.2")), os.listdir("out")) == (["log", "work"], ["note"])
    assert move_aside("out", ["work", "log", "other"]) is None


@pytest.mark.parametrize("place", [".", "here/.."])
def test_current_folder_is_moved_aside_beside_itself(folder, monkeypatch, place):
    (folder / "runs" / "here").mkdir(parents=True)
    monkeypatch.chdir(folder / "runs")
    Path("work").touch()
    assert move_aside(place, ["work"]) == Path("..", "runs.1")
    assert os.listdir(folder / "runs.1") == ["work"]
