"""What keeps people's work: one-line errors, signals that wait, whole files, one writer a folder.

Standard library and filelock only, so that `--help` need not wait for torch.
"""

import errno
import gc
import os
import signal
import sys
import threading
from contextlib import ExitStack, contextmanager, suppress
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
    gc.freeze()  # what was imported stays; to look through it all again at the end takes 0.4 s
    gc.enable()
    try:
        status = _status_of(main, *args)
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO, errno.ENOSPC):
            raise
        status = 141  # the reader left, as `| head` does, or the terminal
        if error.errno == errno.ENOSPC:
            _say("no space is left where the output goes")
            status = 2
        for handle in (1, 2):  # or Python complains once more when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), handle)
    if status is not None:
        sys.exit(status)


def _status_of(main, *args):
    """What `main` makes the script exit with; None where it simply returns."""
    try:
        os.getcwd()
    except FileNotFoundError:
        _say("the folder you are in is gone: change to another")
        return 2
    try:
        with Signals():
            main(*args)
            return None
    except SystemExit as leaving:
        return leaving.code or 0
    except UserError as error:
        _say(error)
        return 2
    except Interrupted as interrupt:
        _say(interrupt)
        return interrupt.status
    except KeyboardInterrupt:
        _say("interrupted at once")
        return 130


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
                for part in parts:
                    part.unlink(missing_ok=True)  # of a write that was killed, or a link elsewhere
                files = [opened.enter_context(open(part, "xb")) for part in parts]
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


class InUseError(UserError):
    """Another process writes to the folder."""


class Claim:
    """A folder that this process alone writes to, made where it is missing.

    Raises InUseError where another process writes to it, UserError where the disk refuses.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.path = self.folder / LOCK

    def __enter__(self):
        with self._told(), ExitStack() as opened:
            Path(os.path.realpath(self.folder)).mkdir(parents=True, exist_ok=True)
            self.handle = None
            if os.name == "posix":  # elsewhere a folder in use cannot be moved or removed
                self.handle = os.open(self.folder, os.O_RDONLY)
                opened.callback(os.close, self.handle)
            self._lock()
            self.opened = opened.pop_all()
        return self

    def __exit__(self, *_):
        with suppress(OSError):  # whoever opened it before finds it without a name, and lets go
            if os.path.samestat(self.mine, self.path.stat()):
                self.path.unlink()
        self.lock.release()
        self.opened.close()

    def check(self):
        """Raise UserError where the folder was moved, removed or replaced by another.

        Where its lock alone was removed, it is locked anew.
        """
        with suppress(FileNotFoundError):
            if os.path.samestat(self.mine, self.path.stat()):
                return
        with self._told():
            now = self.folder.stat()
            if self.handle is not None and not os.path.samestat(os.fstat(self.handle), now):
                raise UserError(f"{self.folder} is another folder than at the start")
            self._lock()

    def _lock(self):
        from filelock import FileLock, Timeout  # here, as it takes longer than --help may

        lock = FileLock(self.path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise InUseError(
                f"another process is writing to {self.folder}: wait for it, or choose another one"
            ) from None
        self.lock, self.mine = lock, self.path.stat()

    @contextmanager
    def _told(self):
        try:
            yield
        except OSError as error:
            raise refusal("write to", self.folder, error) from error


def move_aside(folder, names):
    """Move those files of `folder` into a new folder.1 (or .2, and so on) beside it.

    Returns that, or None where there are none of them. Raises UserError where the disk refuses.
    """
    place = Path(os.path.realpath(folder))  # of a link, what it leads to
    found = [name for name in names if os.path.lexists(place / name)]
    if not found:
        return None
    number = 1
    while os.path.lexists(f"{place}.{number}"):
        number += 1
    aside = Path(f"{place}.{number}")
    moved = []
    try:
        aside.mkdir()
        for name in found:
            (place / name).rename(aside / name)
            moved.append(name)
    except BaseException as error:  # Ctrl-C, too, must leave the run in one place
        with suppress(OSError):
            for name in moved:
                (aside / name).rename(place / name)
            aside.rmdir()
        if not isinstance(error, OSError):
            raise
        raise UserError(
            f"the earlier run in {folder} cannot be moved to {aside} ({error.strerror}): choose "
            "another --out_dir, or use --init_from=resume or --overwrite=True"
        ) from error
    for changed in (aside, place, place.parent):
        sync_folder(changed)
    return os.path.relpath(aside) if not os.path.isabs(folder) else aside
