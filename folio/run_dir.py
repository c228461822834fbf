"""The output folder of a run: ckpt.pt, last.pt and log.jsonl.

ckpt.pt is the best state on the validation split (with always_save_checkpoint, the last evaluated
one), which sample.py loads. last.pt is the newest state, from which a run resumes. log.jsonl has
one JSON object per line, an event of the run. The tensors of a large sharded run are in folders,
state-STEP, to which ckpt.pt and last.pt refer.
"""

import json
import os
import re
import shutil
import threading
from contextlib import nullcontext, suppress
from pathlib import Path

from folio import checkpoint as checkpoints
from folio.errors import UserError, nearest, os_error
from folio.files import is_file, locked, move_aside, replace_by_link, temporary_path
from folio.storage import read_file

BEST, LAST, LOG = "ckpt.pt", "last.pt", "log.jsonl"
STATE = re.compile(r"state-\d+(\.\d+)?")  # a folder of tensors


class RunDir:
    """The output folder of a run. One process at a time may write to it, inside `locked()`."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.best, self.last, self.log = (self.folder / name for name in (BEST, LAST, LOG))
        self._pending = b""  # lines of the log that could not be written yet
        self._loaded = None  # see _stamps()
        self.canceled = threading.Event()  # ends a save in another thread

    @staticmethod
    def find(parent="."):
        """Returns the folders in `parent` that contain a run, sorted."""
        with suppress(OSError):  # of a name that is too long
            paths = Path(parent).glob("*/*")
            return sorted({path.parent for path in paths if path.name in (BEST, LOG)})
        return []

    def exists(self):
        """Whether the folder contains a checkpoint."""
        return is_file(self.last) or is_file(self.best)

    # Reading

    def load_best(self):
        """Returns the best checkpoint, without optimizer state."""
        return self._load(self.best, optimizers=False)

    def load_newest(self, required=True):
        """Returns the newest checkpoint, or None if there is none and it is not required.

        If ckpt.pt has more steps than last.pt, it is the newest. If it is missing, the next
        evaluation writes it. Raises UserError if one of them is damaged, or if they are from
        different runs.
        """
        self._loaded = self._stamps()
        if not is_file(self.last):
            return self._load(self.best) if required or is_file(self.best) else None
        try:
            newest = self._load(self.last)
        except UserError as error:
            if not is_file(self.best) or os.path.samefile(self.best, self.last):
                raise
            raise UserError(f"{error}; move {self.last} away to resume from {BEST}") from error
        if not is_file(self.best):
            newest.progress.forget_best()
            return newest
        if os.path.samefile(self.best, self.last):
            return newest
        try:
            best, last = self.load_best().progress, newest.progress
        except UserError as error:
            raise UserError(f"{error}; move {self.best} away to resume without it") from error
        if (best.step, best.evaluated) > (last.step, last.evaluated):  # such as nanoGPT's
            return self._load(self.best)
        if best.best_val_loss != last.best_val_loss:
            raise UserError(
                f"{self.best} (step {best.step}) and {self.last} (step {last.step}) are from "
                "different runs: move one of them away"
            )
        return newest

    def _stamps(self):
        """Returns values that change when another process saves."""
        stats = [path.stat() for path in (self.best, self.last) if is_file(path)]
        return [(stat.st_mtime_ns, stat.st_size) for stat in stats]

    def _load(self, path, optimizers=True):
        if not is_file(path):
            raise UserError(f"there is no checkpoint {path}{self._hint()}")
        return checkpoints.load(path, optimizers)

    def _hint(self):
        if self.last.exists():
            return f"; {LAST} exists, but no best state has been saved yet"
        runs = {str(folder) for folder in self.find()} - {str(self.folder)}
        if not runs:
            return "; train a model first: python train.py config/shakespeare_char.py"
        return nearest(str(self.folder), runs, f"; available: {', '.join(sorted(runs))}")

    # Writing

    def locked(self):
        """Returns a context in which no other process can write to the folder."""
        return locked(self.folder)

    def begin(self, settings, resumed=None):
        """Prepares the folder for a run that starts or resumes.

        Returns the folder to which an earlier run was moved, or None.
        """
        if self._loaded is not None and self._stamps() != self._loaded:
            raise UserError(f"another process has just written to {self.folder}: try again")
        try:
            for path in (self.best, self.last):
                temporary_path(path).unlink(missing_ok=True)  # left by a process that was killed
            if resumed:
                if is_file(self.log) and resumed.log_bytes is not None:
                    os.truncate(self.log, min(resumed.log_bytes, self.log.stat().st_size))
            elif settings.overwrite:
                for path in (self.best, self.last, self.log):
                    path.unlink(missing_ok=True)
            self.remove_unused()
            if not resumed:
                names = (path.name for path in self._state_folders())
                return move_aside(self.folder, (BEST, LAST, LOG, *names))
        except OSError as error:
            raise os_error("write to", self.folder, error) from error
        return None

    def append(self, event):
        """Appends an event to log.jsonl. Returns the UserError if writing fails, else None.

        Events that cannot be written are kept for the next flush().
        """
        self._pending += json.dumps(event).encode() + b"\n"
        return self.flush()

    def flush(self):
        """Writes events that could not be written yet. Returns like append()."""
        size = None
        try:
            with open(self.log, "ab") as file:
                size = file.tell()
                file.write(self._pending)
        except OSError as error:
            with suppress(OSError):
                if size is not None:
                    os.truncate(self.log, size)  # removes an incomplete line
            return os_error("write", self.log, error)
        self._pending = b""
        return None

    def log_size(self):
        """Writes pending events. Returns the bytes in log.jsonl, or None if it is missing."""
        self.flush()
        with suppress(OSError):
            return self.log.stat().st_size
        return None

    def evaluations(self):
        """Returns (step, training loss, validation loss) of each evaluation in log.jsonl, in order.

        Skips damaged lines.
        """
        found = []
        with suppress(OSError):
            for line in self.log.read_bytes().splitlines():
                with suppress(ValueError, KeyError, TypeError, RecursionError):
                    event = json.loads(line)
                    if event["split"] == "val":
                        found.append((event["step"], event["train_loss"], event["loss"]))
        return found

    def save(self, checkpoint, best):
        """Writes last.pt or, if `best`, writes ckpt.pt and makes last.pt a link to it.

        Returns the UserError if writing fails, else None. If ckpt.pt is written but not last.pt,
        the state is saved, because a run resumes from the newer of the two. Another thread may call
        it; `canceled` makes it fail.
        """
        try:
            checkpoints.save(self.best if best else self.last, checkpoint, self.canceled)
            if best:
                with suppress(UserError):
                    replace_by_link(self.best, self.last)
        except UserError as error:
            return error
        finally:
            self.remove_unused()
        return None

    def new_folder(self, step):
        """Returns the path of a folder of tensors that does not exist yet."""
        path = self.folder / f"state-{step}"
        while path.exists():
            path = path.with_suffix(f".{int(path.suffix[1:] or 0) + 1}")
        return path

    def remove_unused(self):
        """Deletes the folders of tensors to which neither ckpt.pt nor last.pt refers."""
        folders = self._state_folders()
        try:
            paths = [path for path in (self.best, self.last) if folders and is_file(path)]
            used = {read_file(path, mapped=True).get("folder") for path in paths}
        except UserError:  # a damaged file could refer to any
            return
        for path in folders:
            if path.name not in used:
                shutil.rmtree(path, ignore_errors=True)

    def _state_folders(self):
        return [path for path in self.folder.glob("state-*") if STATE.fullmatch(path.name)]


class ReadOnlyRunDir(RunDir):
    """The output folder in the processes of a run that write no files."""

    def locked(self):
        return nullcontext()

    def begin(self, settings, resumed=None):
        pass

    def append(self, event):
        pass

    def flush(self):
        pass

    def log_size(self):
        pass

    def save(self, checkpoint, best):
        pass

    def remove_unused(self):
        pass
