"""How a script starts and ends: one-line errors, exit status, signals.

Exit status: 0 success, 2 an error of the user or the system, 128 + n after signal n. Any other
exception is a bug in folio and keeps its traceback.
"""

import errno
import gc
import os
import signal
import sys
import time
from contextlib import suppress
from importlib.util import find_spec

from folio.cli.errors import RankError, UserError, is_out_of_memory, script_name
from folio.cli.settings import handle_help, parse_arguments

SIGPIPE = 13  # Windows lacks signal.SIGPIPE
REQUIRED_PACKAGES = ("filelock", "numpy", "torch", "tqdm")
MEMORY_ADVICE = "use less data, or a machine with more memory"
OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
EXIT_DELAY_S = 2  # rank 0 prints the error before torchrun ends all processes
STARTED = time.monotonic()  # about when the process started: scripts import this module first


class Interrupted(KeyboardInterrupt):
    """A signal ended the script. `number` is the signal number."""

    def __init__(self, number, message="interrupted"):
        super().__init__(message)
        self.number = number


def start(module_name, settings_class, only_help=False, **environment):
    """Handles `--help` and `--version` and reports wrong flags before a script imports torch.

    A script passes its `__name__`. If it is imported by another module, nothing happens.

    Args:
        only_help: flags are not checked, because `settings_class` lacks some settings.
        environment: defaults of variables that torch reads when it is imported.
    """
    if module_name != "__main__":
        return
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    check = handle_help if only_help else parse_arguments
    if (status := _run(check, settings_class, sys.argv[1:])) is not None:
        sys.exit(status)
    if missing := [name for name in REQUIRED_PACKAGES if not find_spec(name)]:
        names = ", ".join(missing)
        print_error(f"{names} not installed: activate the virtual environment, as in README.md")
        sys.exit(2)
    gc.disable()  # until run(), because collecting garbage makes imports slower


def run(main, memory_advice=MEMORY_ADVICE):
    """Calls `main()` and ends the process. If memory is exhausted, prints `memory_advice`."""
    gc.freeze()  # modules live until exit; scanning them again at exit takes 0.4 s
    gc.enable()
    status = _run(main, memory_advice=memory_advice)
    if is_launched():
        os._exit(status or 0)  # threads of gloo can abort the process while Python cleans up
    if status is not None:
        sys.exit(status)


def _run(function, *args, memory_advice=MEMORY_ADVICE):
    """Returns the exit status, or None if `function` returns."""
    _set_up_streams()
    _set_handlers(signal.SIG_DFL if is_launched() else _interrupt)  # torch may wait in C++
    try:
        try:
            function(*args)
        finally:
            print(end="", flush=True)
    except SystemExit as exit:
        return exit.code or 0
    except Interrupted as interrupt:
        return _report(interrupt, 128 + interrupt.number)
    except UserError as error:
        return _report(error)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return _report(RankError(f"out of memory: {memory_advice}"))
    except OSError as error:
        if error.errno not in OUTPUT_ERRORS or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would report it again at exit
        if isinstance(error, BrokenPipeError):  # the reader of the output has exited
            return 128 + SIGPIPE
        return _report(UserError(f"cannot write standard output: {error.strerror}"))
    finally:
        _set_handlers(signal.SIG_DFL)  # nothing would catch an exception


def _set_up_streams():
    """Makes standard streams UTF-8. Only the process that prints has a standard output."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's streams lack it
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    if not is_main() or sys.stdout is None:  # >&- closes it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, open until exit


def _report(error, status=2):
    """Prints an error, unless rank 0 does. Returns the exit status."""
    if type(error) in (UserError, Interrupted) and not is_main():
        time.sleep(EXIT_DELAY_S)  # torchrun ends all processes as soon as one has ended
    else:
        print_error(error)
    return status


def print_error(message):
    """Prints one line on stderr, without control characters."""
    line = f"{script_name()}: {' '.join(str(message).split())}"
    with suppress(OSError):  # the terminal may be gone, or the disk full
        print(printable(line), file=sys.stderr, flush=True)


def printable(text):
    """Returns text with escaped control characters, which could change a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def is_launched():
    """Whether torchrun has started this process. Kubernetes, for example, sets RANK alone."""
    return os.environ.keys() >= {"RANK", "WORLD_SIZE", "LOCAL_RANK"}


def is_main():
    """Whether this is the process that prints: the only one, or rank 0."""
    return not is_launched() or os.environ["RANK"] == "0"


def _set_handlers(handler):
    """Sets the handler of the signals that ask a script to stop. Returns {number: previous one}."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    if hangup and signal.getsignal(hangup) != signal.SIG_IGN:  # nohup ignores it
        numbers.append(hangup)
    return {number: signal.signal(number, handler) for number in numbers}


def _interrupt(number, _):
    raise Interrupted(number)


class StopSignal:
    """Context manager that, at the first stop signal, records it and prints a message.

    A program checks it between two pieces of its work. A second SIGINT raises Interrupted
    immediately. The processes of torchrun ignore it: they stop together, and torchrun kills them
    30 s after the first signal. Signals are recorded inside the context only.
    """

    def __init__(self, message):
        self.message = message
        self.number = None  # of the first signal
        self._interrupts = 0

    def __enter__(self):
        self._previous_handlers = _set_handlers(self._receive)
        return self

    def __exit__(self, *_):
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def __bool__(self):
        return self.number is not None

    def request(self, number):
        """Acts as if this signal had arrived, such as SIGPIPE when the reader has exited."""
        self.number = self.number or number

    def _receive(self, number, _):
        if not self and is_main():
            with suppress(OSError):  # print() fails if the signal interrupts another one
                os.write(2, f"\n{script_name()}: {self.message}\n".encode())
        self.request(number)
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1 and not is_launched():
            raise Interrupted(number, "interrupted again; steps since the last save may be lost")
