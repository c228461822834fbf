"""How a script starts and ends: errors, exit status, signals."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from folio import process
from folio.errors import UserError
from folio.process import Interrupted, StopSignal

ROOT = Path(__file__).parent.parent
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
posix = pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")


@pytest.fixture(autouse=True)
def restored_state(monkeypatch):
    """run() freezes the garbage collector."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py"])
    yield
    gc.unfreeze()


def raising(error):
    def main():
        raise error

    return main


def shell(command, script):
    """Runs a Bash command in which $PYTHON runs the script. Returns exit status and stderr."""
    environment = os.environ | {"SCRIPT": f"import os, signal, sys\n{script}"}
    environment.pop("PYTHONUNBUFFERED", None)  # it would make output fail earlier
    command = command.replace("$PYTHON", f'"{sys.executable}" -c "$SCRIPT"')
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True)
    return done.returncode, done.stderr.decode()


# Exit status


def test_a_user_error_is_one_line_on_stderr_and_status_2(capsys):
    with pytest.raises(SystemExit, match="^2$"):
        process.run(raising(UserError("no such\n  thing: \ud800\x1b")))
    assert capsys.readouterr() == ("", "train.py: no such thing: \\ud800\\x1b\n")


def test_a_user_error_of_another_rank_prints_nothing_if_torchrun_ends_it(monkeypatch, capsys):
    def end(seconds):
        raise Interrupted(signal.SIGTERM)

    def fail():
        raise UserError("rank 0 prints this")

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(process.time, "sleep", end)
    assert process._status_of(fail) == 2
    assert capsys.readouterr().err == ""


def test_lack_of_memory_is_one_line_on_stderr_and_status_2(capsys):
    with pytest.raises(SystemExit, match="^2$"):
        process.run(raising(MemoryError()))
    assert capsys.readouterr().err.startswith("train.py: out of memory: ")


@posix
def test_arguments_are_utf8_in_every_locale():
    command = "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 $PYTHON é"
    script = (
        "from folio import process\nprocess.run(lambda: print(ascii(sys.argv), file=sys.stderr))"
    )
    assert shell(command, script) == (0, "['-c', '\\xe9']\n")


@pytest.mark.parametrize("bug", [ZeroDivisionError(), OSError("of another kind")])
def test_a_bug_keeps_its_traceback(bug):
    with pytest.raises(type(bug)):
        process.run(raising(bug))


def test_run_enables_garbage_collection_and_freezes_what_is_imported():
    seen = []
    gc.disable()
    process.run(lambda: seen.append((gc.isenabled(), gc.get_freeze_count() > 1000)))
    assert seen == [(True, True)]


def test_a_script_whose_library_has_threads_does_not_wait_for_them():
    script = (
        "import threading\nfrom folio.errors import UserError\nfrom folio.process import run\n"
        "def main():\n threading.Timer(9, os._exit, [1]).start()\n raise UserError('wrong')\n"
        "run(main, has_threads=True)"
    )
    assert shell("$PYTHON", script) == (2, "-c: wrong\n")


# Streams


@posix
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(closed):
    script = "from folio.process import run; run(lambda: print('x', file=sys.stderr, flush=True))"
    assert shell(f"$PYTHON {closed}", script)[0] == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
@pytest.mark.parametrize(("output", "code"), [("| true", 141), ("> /dev/full", 2)])
@pytest.mark.parametrize(
    "last", ["pass", "sys.exit(0)", "raise UserError('wrong')", "print('x' * 10**6)"]
)
def test_failing_output_sets_the_exit_status_and_prints_no_traceback(output, code, last):
    script = (
        "from folio.errors import UserError\nfrom folio.process import run\n"
        f"def main():\n print('x')\n {last}\nrun(main)"
    )
    found, err = shell(f"$PYTHON {output}; exit ${{PIPESTATUS[0]}}", script)
    expected = ["-c: wrong"] if "wrong" in last else []
    expected += (
        ["-c: cannot read the input or write the output: No space left on device"]
        if code == 2
        else []
    )
    assert (found, err.splitlines()) == (code, expected)


# Signals


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_script_with_status_128_plus_its_number(number, capsys):
    with pytest.raises(SystemExit, match=f"^{128 + number}$"):
        process.run(lambda: signal.raise_signal(number))
    assert capsys.readouterr().err == "train.py: interrupted\n"


@posix
def test_a_signal_during_imports_ends_a_script_without_a_traceback():
    script = (
        "from folio import process\nfrom prepare import PrepareConfig\n"
        "process.start(PrepareConfig)\nos.kill(os.getpid(), signal.SIGTERM)"
    )
    assert shell("$PYTHON", script) == (128 + signal.SIGTERM, "")


@posix
def test_a_signal_after_the_script_ends_it_without_a_traceback():
    script = "from folio import process\nprocess.run(print)\nos.kill(os.getpid(), signal.SIGTERM)"
    assert shell("$PYTHON", script) == (128 + signal.SIGTERM, "")


@posix
def test_a_second_ctrl_c_while_the_first_is_reported_prints_no_traceback():
    script = (
        "from folio import process\ndef interrupt(*_): os.kill(os.getpid(), signal.SIGINT)\n"
        "process.print_error = interrupt\nprocess.run(interrupt)"
    )
    assert shell("$PYTHON", script) == (128 + signal.SIGINT, "")


def test_stop_signal_records_the_first_signal_and_restores_the_handlers():
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopSignal() as stop:
        assert not stop
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        stop.request(process.SIGPIPE)
    assert (bool(stop), stop.number) == (True, signal.SIGTERM)
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("first", [[], [signal.SIGTERM]])
def test_a_second_ctrl_c_interrupts_at_once(first):
    with StopSignal() as stop:
        for number in [*first, signal.SIGINT]:
            signal.raise_signal(number)  # a run of a sweep can get both, in any order
        assert stop
        with pytest.raises(Interrupted) as caught:
            signal.raise_signal(signal.SIGINT)
    assert caught.value.number == signal.SIGINT


@posix
def test_an_ignored_sighup_stays_ignored():  # as after nohup
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    process.run(lambda: signal.raise_signal(signal.SIGHUP))
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGHUP)
    assert not stop
