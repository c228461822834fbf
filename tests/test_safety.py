import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import safety
from config import UserError
from safety import Claim, Interrupted, Signals, move_aside, remove, replacing, run

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


@pytest.mark.skipif(os.name != "posix", reason="a POSIX shell closes them")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_do_not_matter(closed):
    script = "import sys, safety; safety.run(lambda: print('x', file=sys.stderr, flush=True))"
    done = subprocess.run(f'{sys.executable} -c "{script}" {closed}', cwd=ROOT, shell=True)
    assert done.returncode == 0


def test_run_passes_arguments_and_returns_when_all_is_well():
    seen = []
    run(seen.append, 3)
    assert seen == [3]


def test_run_collects_garbage_again_but_not_what_was_imported():
    seen = []
    gc.disable()
    run(lambda: seen.append((gc.isenabled(), gc.get_freeze_count() > 1000)))
    gc.unfreeze()
    assert seen == [(True, True)]


@pytest.mark.skipif(os.name != "posix", reason="a pipe's end is told otherwise on Windows")
def test_a_reader_that_leaves_ends_the_script_in_silence():
    script = "import safety; safety.run(lambda: print('x' * 10**6))"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 141)


@pytest.mark.skipif(os.name != "posix", reason="/dev/full is POSIX's")
@pytest.mark.parametrize(("output", "code"), [("| true", 141), ("> /dev/full", 2)])
@pytest.mark.parametrize("last", ["pass", "sys.exit(0)", "raise safety.UserError('wrong')"])
def test_an_output_that_fails_late_adds_no_words_of_pythons(output, code, last):
    script = f"import sys, safety\ndef main():\n print('x')\n {last}\nsafety.run(main)"
    command = f'"{sys.executable}" -c "$SCRIPT" {output}; exit ${{PIPESTATUS[0]}}'
    environment = os.environ | {"SCRIPT": script}
    environment.pop("PYTHONUNBUFFERED", None)  # with it the output fails early
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True)
    assert done.returncode == code
    told = done.stderr.decode().splitlines()
    assert "Exception ignored" not in done.stderr.decode()
    assert len(told) == ("wrong" in last) + (code == 2)


@pytest.mark.skipif(os.name != "posix", reason="Windows keeps a folder that is in use")
def test_a_folder_that_is_gone_is_told(folder):
    command = f'mkdir x; cd x; rmdir ../x; "{sys.executable}" {ROOT}/prepare.py --dataset=pydocs'
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True)
    assert (done.returncode, done.stderr.decode()) == (
        2, "prepare.py: the folder you are in is gone: change to another\n",
    )  # fmt: skip


# Signals


def interrupt(number=signal.SIGINT):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_a_script_with_the_status_that_shells_expect(number, status, capsys):
    assert exit_of(interrupt, number) == status
    assert capsys.readouterr().err.endswith(": interrupted\n")


def test_what_is_held_is_done_before_a_signal_counts():
    done = []

    def work():
        with signals.held():
            interrupt(signal.SIGTERM)
            done.append("all of it")
        done.append("more")

    with Signals() as signals, pytest.raises(Interrupted) as caught:
        work()
    assert (done, caught.value.number) == (["all of it"], signal.SIGTERM)


def test_a_second_ctrl_c_is_not_held_but_a_second_sigterm_is():
    def work():
        with signals.held():
            interrupt(signal.SIGTERM)
            interrupt(signal.SIGTERM)
            interrupt(signal.SIGINT)
            done.append("too much")

    done = []
    with Signals() as signals, pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert (done, type(caught.value)) == ([], KeyboardInterrupt)


def test_an_error_in_what_is_held_is_not_hidden_by_a_signal():
    def work():
        with signals.held():
            interrupt()
            raise ValueError("a bug")

    with Signals() as signals, pytest.raises(ValueError, match="a bug"):
        work()


def test_the_handlers_that_were_there_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Signals():
        pass
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_what_nohup_began_does_not_end_with_the_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals():
            interrupt(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_in_another_thread_signals_are_left_alone():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work():
        with Signals() as signals, signals.held():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


# Claim


def refused(folder):
    with pytest.raises(UserError) as caught, Claim(folder):
        pass
    return str(caught.value)


def test_a_folder_has_one_writer_at_a_time_and_no_trace_of_it_afterwards(folder):
    with Claim("new/out"):
        assert "another process is writing to new/out" in refused("new/out")
    with Claim("new/out"):
        pass
    assert list((folder / "new" / "out").iterdir()) == []


def unchecked(claim):
    with pytest.raises(UserError) as caught:
        claim.check()
    return str(caught.value)


def test_a_folder_that_is_moved_is_lost_until_it_is_back():
    with Claim("out") as claim:
        os.rename("out", "away")
        assert unchecked(claim) == "cannot write to out: No such file or directory"
        with Claim("out"):
            assert unchecked(claim) == "out is another folder than at the start"
        os.rmdir("out")
        os.rename("away", "out")
        claim.check()
        assert "another process is writing to out" in refused("out")


def test_a_folder_that_is_removed_and_made_again_is_another():
    with Claim("out") as claim:
        shutil.rmtree("out")
        os.mkdir("out")
        assert unchecked(claim) == "out is another folder than at the start"


def test_a_lock_that_someone_removed_is_taken_anew_unless_another_has_it(folder):
    with Claim("out") as claim:
        Path("out", safety.LOCK).unlink()
        with Claim("out"):
            assert "another process is writing to out" in unchecked(claim)
        claim.check()
        assert "another process is writing to out" in refused("out")
    assert os.listdir("out") == []


def test_a_place_that_cannot_be_a_folder_is_told():
    Path("file").touch()
    assert refused("file") == "cannot write to file: File exists"
    assert refused("file/out") == "cannot write to file/out: Not a directory"


# move_aside


def test_an_earlier_work_goes_to_the_first_number_that_is_free(folder):
    for name in ("out", "out.1"):
        (folder / name).mkdir()
    for name in ("work", "log", "note"):
        (folder / "out" / name).write_text(name)
    assert move_aside("out", ["work", "log", "other"]) == "out.2"
    assert (sorted(os.listdir("out.2")), os.listdir("out")) == (["log", "work"], ["note"])
    assert move_aside("out", ["work", "log", "other"]) is None


@pytest.mark.parametrize("place", [".", "here/.."])
def test_from_the_folder_one_is_in_it_goes_beside_it(folder, monkeypatch, place):
    (folder / "runs" / "here").mkdir(parents=True)
    monkeypatch.chdir(folder / "runs")
    Path("work").touch()
    assert move_aside(place, ["work"]) == os.path.join("..", "runs.1")
    assert os.listdir(folder / "runs.1") == ["work"]


@pytest.mark.parametrize("error", [OSError(errno.EXDEV, os.strerror(errno.EXDEV)), Interrupted(2)])
def test_what_cannot_be_moved_aside_stays_together(error, monkeypatch):
    Path("out").mkdir()
    for name in ("work", "log"):
        Path("out", name).touch()
    rename = Path.rename

    def refuse(path, target):
        if path.parts[-2:] == ("out", "log"):
            raise error
        rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    ways = r"moved to .*out.1 .*--out_dir.*--overwrite=True|interrupted"
    with pytest.raises((UserError, Interrupted), match=ways):
        move_aside("out", ["work", "log"])
    assert (os.listdir(), sorted(os.listdir("out"))) == (["out"], ["log", "work"])


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


def test_files_take_their_places_together_or_not_at_all():
    for name in ("a", "b"):
        Path(name).write_bytes(b"old")
    Path("c").mkdir()
    with pytest.raises(UserError, match="Is a directory"), replacing("a", "b", "c") as files:
        files[0].write(b"new")
    assert [Path(name).read_bytes() for name in ("a", "b")] == [b"old"] * 2
    with replacing("a", "b") as files:
        for file in files:
            file.write(b"new")
    assert [Path(name).read_bytes() for name in ("a", "b")] == [b"new"] * 2
    assert len(os.listdir()) == 3


def test_a_folder_that_has_vanished_is_told_and_not_made_again():
    with pytest.raises(UserError, match="cannot write gone/file: No such file or directory"):
        replacing("gone/file").__enter__()
    assert os.listdir() == []


def test_files_are_removed_where_they_are_there():
    Path("a").touch()
    Path("folder").mkdir()
    remove(["a", "b"])
    with pytest.raises(UserError, match="cannot remove folder"):
        remove(["folder"])
    assert os.listdir() == ["folder"]
