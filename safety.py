"""What keeps people's work: one-line errors, signals that wait, whole files, one writer a folder.

Standard library and filelock only, so that `--help` need not wait for torch.
"""

import errno
import os
import signal
import sys
import threading
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from config import UserError

LOCK = ".lock"  # in a folder that is being written


# Scripts


def run(main, *args):
    """Call `main(*args)` as a script does: a UserError becomes one line on stderr and status 2.

    An interrupt exits with the status that shells expect of it, 130 or 143; any other exception is
    a bug of ours and keeps its traceback.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who called; no other file may take its place
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115, it lasts as the process
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    sys.excepthook = _quiet_if_interrupted
    try:
        with Signals():
            main(*args)
            sys.stdout.flush()
    except UserError as error:
        _say(error)
        sys.exit(2)
    except Interrupted as interrupt:
        _say(interrupt)
        sys.exit(interrupt.status)
    except KeyboardInterrupt:
        _say("interrupted at once")
        sys.exit(130)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again
        if error.errno == errno.EPIPE:  # the reader left, as `| head` does
            sys.exit(141)
        _say("no space is left where the output goes")
        sys.exit(2)


def _say(message):
    """One line on stderr, in which nothing draws on the terminal."""
    line = f"{Path(sys.argv[0]).name}: {' '.join(str(message).split())}"
    spelt = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    with suppress(OSError):  # there may be no terminal left, or no room
        print("".join(spelt), file=sys.stderr, flush=True)


def _quiet_if_interrupted(kind, error, trace):
    """For Ctrl-C where `run` does not catch it: while a script imports what is slow."""
    if issubclass(kind, KeyboardInterrupt):
        _say("interrupted")
    else:
        sys.__excepthook__(kind, error, trace)


# Signals


class Interrupted(KeyboardInterrupt):
    """A signal asked the script to stop; `status` is what it then exits with."""

    def __init__(self, number, message="interrupted"):
        super().__init__(message)
        self.number, self.status = number, 128 + number


class Signals:
    """While it lasts, SIGINT, SIGTERM and SIGHUP raise Interrupted, though not inside `held()`.

    A second SIGINT raises KeyboardInterrupt at once, wherever it comes.
    """

    def __init__(self):
        self.received, self.holding, self.before = None, False, {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            for name in ("SIGINT", "SIGTERM", "SIGHUP"):
                number = getattr(signal, name, None)  # Windows has no SIGHUP
                # What nohup began is not to end with the terminal. That scripts have what they
                # begin by & ignore SIGINT is overruled: kill -INT is to save, too.
                if number and not (name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN):
                    self.before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _receive(self, number, _):
        if self.received is None:
            self.received = number
            if not self.holding:
                raise Interrupted(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    @contextmanager
    def held(self):
        """A context that a first signal lets finish; Interrupted is raised at its end."""
        self.holding = True
        try:
            yield
        finally:
            self.holding = False
        if self.received is not None:
            raise Interrupted(self.received)


# Files


@contextmanager
def replacing(*paths):
    """Yield binary files that take the places of `paths` once all are whole and on disk.

    Until then, and after any failure to write them, a reader sees what was there before. Raises
    UserError where the disk, its permissions or a missing folder refuse.
    """
    paths = [Path(path) for path in paths]
    parts = [path.with_name(path.name + ".tmp") for path in paths]
    try:
        try:
            if any(path.is_dir() for path in paths):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            with ExitStack() as opened:
                files = [opened.enter_context(open(part, "wb")) for part in parts]
                yield files
                for file in files:
                    file.flush()
                    os.fsync(file.fileno())
            for part, path in zip(parts, paths, strict=True):
                os.replace(part, path)
            for folder in {path.parent for path in paths}:
                sync_folder(folder)
        finally:
            for part in parts:
                with suppress(OSError):
                    part.unlink()
    except OSError as error:
        raise refusal("write", " and ".join(map(str, paths)), error) from error


def remove(paths):
    """Remove those of the files that are there. Raises UserError where the disk refuses."""
    for path in paths:
        try:
            Path(path).unlink(missing_ok=True)
        except OSError as error:
            raise refusal("remove", path, error) from error


def sync_folder(folder):
    """Make renames in a folder durable, where the system lets one open and sync it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def cause_of(error):
    """An exception in a line of 200 characters at most."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def refusal(verb, path, error):
    """The UserError for an OSError: 'cannot write out/last.pt: No space left on device'."""
    return UserError(f"cannot {verb} {path}: {error.strerror or error}")


# Folders


@contextmanager
def writing_to(folder, earlier=()):
    """Be the only process that writes to `folder`, which is made where it is missing.

    Where it holds a file of the names `earlier`, the whole folder first becomes folder.1 (or .2,
    and so on) beside it. Yields where that is, or None. Raises UserError where another process
    writes to it, or the disk refuses.
    """
    folder = Path(folder)
    aside = None
    place = Path(os.path.realpath(folder))  # of a link, what it leads to
    _make(place, folder)
    with ExitStack() as locks:
        if any(os.path.lexists(folder / name) for name in earlier):
            # Windows does not rename a folder with an open file, its lock, nor one in use.
            locks.enter_context(nullcontext() if os.name == "nt" else _lock(folder))
            aside = _move_aside(place, folder)
            _make(place, folder)
        locks.enter_context(_lock(folder))
        yield aside


def _make(place, folder):
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refusal("write to", folder, error) from error


@contextmanager
def _lock(folder):
    from filelock import FileLock, Timeout  # here, as it takes longer than --help may

    path = folder / LOCK
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(
            f"another process is writing to {folder}: wait for it, choose another folder, or, if "
            f"there is none, remove {path}"
        ) from None
    except OSError as error:
        raise refusal("write to", folder, error) from error
    mine = path.stat()
    try:
        yield
    finally:
        with suppress(OSError):  # whoever opened it before finds it without a name, and lets go
            if os.path.samestat(mine, path.stat()):
                path.unlink()
        lock.release()


def _move_aside(place, folder):
    """Rename `place`, told as `folder`, to the first of place.1, place.2, … that is free."""
    if Path.cwd().is_relative_to(place):
        raise UserError(
            f"{folder} holds an earlier run and the folder you are in, so it is not moved aside; "
            "choose another --out_dir, or use --init_from=resume or --overwrite=True"
        )
    number = 1
    while os.path.lexists(f"{place}.{number}"):
        number += 1
    aside = Path(f"{place}.{number}")
    try:
        place.rename(aside)
    except OSError as error:
        raise refusal("move aside", folder, error) from error
    sync_folder(place.parent)
    with suppress(OSError):  # still locked: who opened it before finds it held, or without a name
        (aside / LOCK).unlink()
    return aside if folder.is_symlink() else folder.with_name(aside.name)
