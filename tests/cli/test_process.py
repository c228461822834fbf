"""How a script starts and ends: errors, exit status, signals."""

import gc
import os
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest

from folio.cli import process
from folio.cli.errors import UserError
from folio.cli.process import Interrupted, StopSignal
from folio.cli.settings import ROOT

pytest.importorskip("fcntl")  # POSIX
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
START = "import dataclasses as d\nprocess.start('__main__', d.make_dataclass('Settings', []))"
LAUNCHED = {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}


@pytest.fixture(autouse=True)
def restored_state(monkeypatch):
    """run() freezes the garbage collector."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # it is pytest's
    yield
    gc.unfreeze()


def shell(command, *lines, **variables):
    """Runs a Bash command in which $PYTHON runs a script. Returns exit status and stderr."""
    code = "\n".join(["import os, signal, sys", "from folio.cli import process", *lines])
    environment = os.environ | {"SCRIPT": code} | variables
    environment.pop("PYTHONUNBUFFERED", None)  # it would make output fail earlier
    command = command.replace("$PYTHON", f'"{sys.executable}" -c "$SCRIPT"')
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True)
    return done.returncode, done.stderr.decode()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("no such\n  thing: \ud800\x1b"), "no such thing: \\ud800\\x1b"),
        (MemoryError(), "out of memory: ADVICE"),
        (RuntimeError("CUDA out of memory."), "out of memory: ADVICE"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you"), "out of memory: ADVICE"),
    ],
    ids=str,
)
def test_an_error_is_one_line_on_stderr_and_status_2(capfd, error, line):
    with pytest.raises(SystemExit, match="^2$"):
        process.run(Mock(side_effect=error), "ADVICE")
    assert capfd.readouterr() == ("", f"train.py: {line}\n")


@pytest.mark.parametrize("error", [FileNotFoundError("of no user"), RuntimeError("a bug")])
def test_another_error_is_a_bug_and_keeps_its_traceback(error):
    with pytest.raises(type(error), match=str(error)):
        process.run(Mock(side_effect=error))


@pytest.mark.parametrize(
    ("variables", "error", "output"),
    [
        ({"RANK": "1"}, "process.UserError('wrong')", "-c: wrong\n"),  # as on Kubernetes
        (LAUNCHED | {"RANK": "0"}, "process.UserError('wrong')", "-c: wrong\n"),
        (LAUNCHED | {"RANK": "1"}, "process.UserError('wrong')", ""),
        (LAUNCHED | {"RANK": "1"}, "MemoryError", "-c: out of memory: ADVICE\n"),
    ],
)
def test_processes_of_torchrun_leave_common_errors_to_rank_0(variables, error, output):
    lines = [START, "process.EXIT_DELAY_S = 0", "def main():", f" raise {error}"]
    assert shell("$PYTHON", *lines, "process.run(main, 'ADVICE')", **variables) == (2, output)


def test_a_reader_that_exits_sets_the_exit_status_and_causes_no_traceback():
    lines = ["def main():", " print('x')", " sys.exit(0)", "process.run(main)"]
    assert shell("$PYTHON | true; exit ${PIPESTATUS[0]}", *lines) == (128 + process.SIGPIPE, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has this file")
def test_output_to_a_full_disk_is_an_error_in_one_line():
    result = shell("$PYTHON > /dev/full", "process.run(lambda: print('x'))")
    assert result == (2, "-c: cannot write standard output: No space left on device\n")


def test_a_closed_output_is_no_error():
    assert shell("$PYTHON >&-", "process.run(lambda: sys.stdout.flush())") == (0, "")


def test_a_missing_package_causes_no_traceback():
    lines = ["process.REQUIRED_PACKAGES = ('sys', 'no_such_package')", START]
    status, err = shell("$PYTHON", *lines)
    assert (status, err.partition(" not")[0]) == (2, "-c: no_such_package")


# Signals


def test_a_signal_ends_a_process_of_torchrun_while_it_waits_in_c():
    lines = ["import ctypes, threading", "def main():", " libc = ctypes.CDLL(None)"]
    lines += [" threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()"]
    lines += [" libc.sleep(20) or libc.sleep(20)", "process.run(main)"]
    assert shell("exec $PYTHON", *lines, RANK="0", **LAUNCHED)[0] == -signal.SIGTERM


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_script_with_status_128_plus_its_number(number, capsys):
    with pytest.raises(SystemExit, match=f"^{128 + number}$"):
        process.run(lambda: signal.raise_signal(number))
    assert capsys.readouterr().err == "train.py: interrupted\n"


def test_the_first_signal_is_recorded_and_a_second_ctrl_c_interrupts_at_once(capfd):
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopSignal("stopping") as stop:
        assert not stop
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        stop.request(process.SIGPIPE)
        assert (bool(stop), stop.number) == (True, signal.SIGTERM)
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert capfd.readouterr().err.count(": stopping\n") == 1


def test_an_ignored_sighup_stays_ignored():  # as after nohup
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    process.run(lambda: signal.raise_signal(signal.SIGHUP))
    with StopSignal("stopping") as stop:
        signal.raise_signal(signal.SIGHUP)
    assert not stop
