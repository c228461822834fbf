import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from config import UserError
from safety import replacing, run

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# run


def exit_of(main, *args):
    with pytest.raises(SystemExit) as caught:
        run(main, *args)
    return caught.value.code


def raising(error):
    def main():
        raise error

    return main


def test_a_user_error_becomes_one_line_on_stderr_and_status_2(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py"])
    assert exit_of(raising(UserError("no such\n  thing: \ud800"))) == 2
    assert capsys.readouterr() == ("", "train.py: no such thing: \\ud800\n")


def test_ctrl_c_exits_with_130(capsys):
    assert exit_of(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err.endswith(": interrupted at once\n")


@pytest.mark.parametrize("bug", [ZeroDivisionError(), OSError("no traceback would hide this")])
def test_a_bug_keeps_its_traceback(bug):
    with pytest.raises(type(bug)):
        run(raising(bug))


def test_a_full_disk_behind_stdout_is_told_in_one_line():
    script = "from safety import run; run(lambda: print('x' * 10**6))"
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 2
    assert done.stderr.decode() == "-c: no space is left where the output goes\n"


def test_run_passes_arguments_and_returns_when_all_is_well():
    seen = []
    run(seen.append, 3)
    assert seen == [3]


@pytest.mark.skipif(os.name != "posix", reason="a pipe's end is told otherwise on Windows")
def test_a_reader_that_leaves_ends_the_script_in_silence():
    script = "import safety; safety.run(lambda: print('x' * 10**6))"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 141)


# replacing


def test_new_content_appears_whole_at_the_end():
    path = Path("folder/file")
    path.parent.mkdir()
    with replacing(path) as [file]:
        file.write(b"old")
    with replacing(path) as [file]:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_the_content_is_on_disk_before_it_takes_its_place(monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *a: (calls.append("replace"), replace(*a)))
    with replacing("file") as [file]:
        file.write(b"new")
    assert calls[:2] == ["fsync", "replace"]


def fail_while_writing(path, error):
    with replacing(path) as [file]:
        file.write(b"half")
        raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, UserError])
def test_an_exception_leaves_the_old_file_and_no_temporary(error):
    Path("file").write_bytes(b"old")
    with pytest.raises(error):
        fail_while_writing("file", error)
    assert [(p.name, p.read_bytes()) for p in Path().iterdir()] == [("file", b"old")]


def test_a_full_disk_is_told_and_leaves_the_old_file():
    Path("file").write_bytes(b"old")
    with pytest.raises(UserError, match="cannot write file: No space left on device"):
        fail_while_writing("file", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert [(p.name, p.read_bytes()) for p in Path().iterdir()] == [("file", b"old")]


def test_a_folder_that_cannot_be_made_is_told():
    Path("file").write_bytes(b"old")
    with pytest.raises(UserError, match="cannot write file/sub/x: Not a directory"):
        replacing("file/sub/x").__enter__()


def test_a_folder_in_the_files_place_is_told_and_no_temporary_stays():
    Path("taken").mkdir()
    with pytest.raises(UserError, match="cannot write taken"), replacing("taken") as [file]:
        file.write(b"new")
    assert list(Path().iterdir()) == [Path("taken")]
