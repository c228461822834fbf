"""The output folder of a run: ckpt.pt, last.pt and log.jsonl.

ckpt.pt is the best state on the validation split (with always_save_checkpoint, the last evaluated
one), which sample.py loads. last.pt is the newest state, from which a run resumes. log.jsonl has
one JSON object per line, an event of the run.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

from folio import checkpoint as checkpoints
from folio.errors import UserError, nearest, os_error
from folio.files import is_file, locked, move_aside, replace_by_link, temporary_path

BEST, LAST, LOG = "ckpt.pt", "last.pt", "log.jsonl"


class RunDir:
    """The output folder of a run. One process at a time may write to it, inside `locked()`.

    With torchrun, this is rank 0.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.best, self.last, self.log = (self.folder / name for name in (BEST, LAST, LOG))

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
        evaluation writes it. Raises UserError if one of them is damaged.
        """
        if not is_file(self.last):
            return self._load(self.best) if required or is_file(self.best) else None
        if not is_file(self.best):
            newest = self._load(self.last)
            newest.progress.forget_best()
            return newest
        if os.path.samefile(self.best, self.last):
            return self._load(self.last)
        try:
            newest = self._load(self.last)
            if self.load_best().progress.step > newest.progress.step:  # nanoGPT may have written it
                return self._load(self.best)
            return newest
        except UserError as error:
            raise UserError(f"{error}; move this file away to resume from the other") from error

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
        try:
            for path in (self.best, self.last):
                temporary_path(path).unlink(missing_ok=True)  # left by a process that was killed
            if resumed:
                if is_file(self.log) and resumed.log_bytes is not None:
                    os.truncate(self.log, min(resumed.log_bytes, self.log.stat().st_size))
                return None
            if settings.overwrite:
                for path in (self.best, self.last, self.log):
                    path.unlink(missing_ok=True)
            return move_aside(self.folder, (BEST, LAST, LOG))
        except OSError as error:
            raise os_error("write to", self.folder, error) from error

    def append(self, event):
        """Appends an event to log.jsonl. Returns the UserError if writing fails, else None."""
        try:
            with open(self.log, "ab") as file:
                file.write(json.dumps(event).encode() + b"\n")
        except OSError as error:
            return os_error("write", self.log, error)
        return None

    def log_size(self):
        """Returns the bytes in log.jsonl, or None if it is missing."""
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

        Raises UserError if writing fails. If ckpt.pt is written but not last.pt, the state is
        saved, because a run resumes from the newer of the two.
        """
        checkpoints.save(self.best if best else self.last, checkpoint)
        if best:
            with suppress(UserError):
                replace_by_link(self.best, self.last)
