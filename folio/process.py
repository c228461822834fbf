"""How a script starts and ends: one-line errors, exit status, signals.

Standard library only, so that `--help` does not wait for torch.

Exit status: 0 success, 2 UserError, 128 + n after signal n. Any other exception is a bug in folio
and keeps its traceback.
"""

import errno
import gc
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from folio.errors import RankError, UserError

SIGPIPE = 13  # which Windows lacks
SECONDS_TO_PRINT = 2  # for rank 0
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
    gc.disable()  # until run(): collecting garbage takes a third of the time to import torch


def run(main, has_threads=False):
    """Calls `main()` and ends the process with its exit status.

    `has_threads`: whether threads of a library may still run, such as those of a server. Then the
    process ends immediately, because such threads can abort it while Python cleans up.
    """
    gc.freeze()  # modules live until exit; scanning them again at exit takes 0.4 s
    gc.enable()
    status = _run(main)
    if has_threads or "RANK" in os.environ:  # gloo has threads
        os._exit(status or 0)
    if status is not None:
        sys.exit(status)


def _run(function, *args):
    """Returns the exit status, or None if `function` returns."""
    if sys.getfilesystemencoding() != "utf-8":  # start again: arguments and paths are decoded by it
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent; keep its descriptor in use
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115, open until exit
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        errors = "surrogateescape" if stream is sys.stdin else "backslashreplace"
        with suppress(AttributeError):  # a notebook's streams cannot be reconfigured
            stream.reconfigure(encoding="utf-8", errors=errors)
    if not is_main():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, open until exit
    _set_handlers(_interrupt)
    try:
        status = _status_of(function, *args)
        sys.stdout.flush()
    except OSError as error:
        is_error = error.errno in (errno.ENOSPC, errno.EBADF)
        if is_error:
            print_error(f"cannot read the input or write the output: {error.strerror}")
        elif error.errno not in (errno.EPIPE, errno.EIO):  # the reader or the terminal is gone
            raise
        for handle in (1, 2):  # otherwise Python reports the same error again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), handle)
        status = 2 if is_error else 128 + SIGPIPE
    return status


def _status_of(function, *args):
    """Returns the exit status, or None if `function` returns."""
    try:
        function(*args)
    except SystemExit as error:
        return error.code or 0
    except UserError as error:
        if is_main() or isinstance(error, RankError):
            print_error(error)
        else:  # rank 0 raises it, too; torchrun ends all processes as soon as one has ended
            with suppress(KeyboardInterrupt):
                time.sleep(SECONDS_TO_PRINT)
        return 2
    except MemoryError:
        print_error("out of memory: use less data, or a machine with more memory")
        return 2
    except KeyboardInterrupt as error:
        _set_handlers(_exit)
        if is_main():
            print_error(str(error) or "interrupted")
        return 128 + getattr(error, "number", signal.SIGINT)
    finally:
        _set_handlers(_exit)
    return None


def is_main():
    """Whether this is the process of a run that prints: the only one, or rank 0 of torchrun's."""
    return os.environ.get("RANK", "0") == "0"


def print_error(message):
    """Prints one line on stderr, without control characters."""
    line = f"{Path(sys.argv[0]).name}: {' '.join(str(message).split())}"
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    with suppress(OSError):  # the terminal may be gone, or the disk full
        print(line, file=sys.stderr, flush=True)


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
