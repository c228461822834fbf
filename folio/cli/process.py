"""How a script starts and ends: one-line errors, exit status, signals.

Standard library only, so that `--help` does not wait for torch.

Exit status: 0 success, 2 an error of the user or the system, 128 + n after signal n. Any other
exception is a bug in folio and keeps its traceback.
"""

import gc
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from folio.cli.errors import UserError

SIGPIPE = 13  # which Windows lacks
SECONDS_TO_PRINT = 2  # for rank 0, which raises the same errors
STARTED = time.monotonic()  # about when the process started: scripts import this module first


class Interrupted(KeyboardInterrupt):
    """A signal ended the script. `number` is the signal number."""

    def __init__(self, number, message="interrupted"):
        super().__init__(message)
        self.number = number


def start(function, *args):
    """Calls a function that handles `--help` or invalid flags before a script imports torch."""
    if (status := _run(function, *args)) is not None:
        sys.exit(status)
    gc.disable()  # until run(), because collecting garbage makes imports slower


def run(main, has_threads=False):
    """Calls `main()` and ends the process with its exit status.

    `has_threads`: whether threads of a library may still run, such as those of a server. Then the
    process ends immediately, because such threads can abort it while Python cleans up.
    """
    gc.freeze()  # modules live until exit; scanning them again at exit takes 0.4 s
    gc.enable()
    status = _run(main)
    if has_threads or is_launched():  # gloo has threads
        os._exit(status or 0)
    if status is not None:
        sys.exit(status)


def _run(function, *args):
    """Returns the exit status, or None if `function` returns."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        with suppress(AttributeError):  # a notebook's streams cannot be reconfigured
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    if not is_main():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, open until exit
    error = status = None
    _set_handlers(_interrupt)
    try:
        try:
            function(*args)
        finally:
            print(end="", flush=True)
    except SystemExit as found:
        status = found.code or 0
    except KeyboardInterrupt as found:
        error, status = found, 128 + getattr(found, "number", signal.SIGINT)
    except (UserError, MemoryError) as found:
        error, status = found, 2
    except OSError as found:
        is_broken = isinstance(found, BrokenPipeError)  # the reader of the output has exited
        error, status = (None, 128 + SIGPIPE) if is_broken else (found, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would report it again at exit
    finally:
        _set_handlers(_exit)
    if error and not is_main() and type(error) in (UserError, Interrupted):
        time.sleep(SECONDS_TO_PRINT)  # torchrun ends all processes as soon as one has ended
    elif error:
        print_error(str(error) or "out of memory: use less data, or a machine with more memory")
    return status


def script_name():
    """Returns the name of the running script, such as train.py or tools.plot."""
    path = Path(sys.argv[0])
    return f"tools.{path.parent.name}" if path.name == "__main__.py" else path.name


def print_error(message):
    """Prints one line on stderr, without control characters."""
    line = f"{script_name()}: {' '.join(str(message).split())}"
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    with suppress(OSError):  # the terminal may be gone, or the disk full
        print(line, file=sys.stderr, flush=True)


# Processes of a run


def is_launched():
    """Whether torchrun has started this process. Others may set RANK alone, such as Kubernetes."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys()


def is_main():
    """Whether this is the process that prints: the only one, or rank 0."""
    return not is_launched() or os.environ["RANK"] == "0"


# Signals


def _set_handlers(handler):
    """Sets the handler of the signals that ask a script to stop. Returns {number: previous one}."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    if hangup and signal.getsignal(hangup) != signal.SIG_IGN:  # nohup ignores it
        numbers.append(hangup)
    return {number: signal.signal(number, handler) for number in numbers}


def _interrupt(number, _):
    raise Interrupted(number)


def _exit(number, _):
    os._exit(128 + number)  # an exception would print a traceback, as nothing catches it


class StopSignal:
    """Context manager that records the first stop signal instead of raising an exception.

    The training loop checks it (`if stop:`) when its state is complete. A second SIGINT raises
    Interrupted immediately. The processes of a distributed run must stop at the same step, so there
    a signal only counts once `agree` is called; torchrun passes on every signal and kills the
    processes 30 s later.
    """

    def __init__(self, is_shared=False):
        """`is_shared`: whether the processes of a run stop together."""
        self.is_shared, self.received, self.number = is_shared, None, None
        self._read, self._interrupts = None, 0

    def __enter__(self):
        self._before = _set_handlers(self._receive)
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __bool__(self):
        return self.number is not None

    @property
    def was_received(self):
        """Whether this process has received a signal, which the others may not know yet."""
        return self.received is not None

    def request(self, number):
        """Stops as if this signal had arrived, such as SIGPIPE when the reader has exited."""
        self.received = self.received or number
        if not self.is_shared:
            self.number = self.received

    def agree(self, total):
        """Stops if `total`, the number of processes that have received a signal, is not 0."""
        if self.is_shared and total:
            self.number = self.received or signal.SIGTERM

    def agree_later(self, read):
        """Calls agree(read()) at the next call: until then, a GPU can compute the total."""
        if self._read:
            self.agree(self._read())
        self._read = read

    def _receive(self, number, _):
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1 and not self.is_shared:
            raise Interrupted(number, "interrupted immediately")
        self.request(number)


NEVER = StopSignal()  # no stop is requested
