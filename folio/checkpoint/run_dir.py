"""The run directory, a training run's output folder: ckpt.pt, last.pt and log.jsonl.

ckpt.pt is the best state on the validation split (with always_save_checkpoint, the last evaluated
one), which sample.py loads. last.pt is the newest state. log.jsonl has one event of the run per
line, a JSON object. With keep_checkpoints, ckpt-STEP.pt has the weights of each evaluation. A
resumed run also keeps a best model there that ckpt.pt would lose.

| state of the folder | ckpt.pt | last.pt | a run resumes from |
| --- | --- | --- | --- |
| new | missing | missing | nothing: it starts |
| nanoGPT's, or a copy of ckpt.pt | of any step | missing | ckpt.pt |
| running, or finished | the best step | the newest step; best: linked | last.pt |
| killed before last.pt was linked | the newest step | an earlier step or evaluation | ckpt.pt |
| killed before an earlier run was gone; has .replacing | any | any | nothing: it starts |
"""

import dataclasses
import json
import math
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from folio.checkpoint.format import Checkpoint, load_checkpoint, save_checkpoint
from folio.cli.errors import UserError, check_types, os_errors
from folio.cli.files import check_lfs, make_folder_beside, replace_by_link, write_atomically

BEST, LAST, LOG = "ckpt.pt", "last.pt", "log.jsonl"
NUMBER = int | float
COUNTS = {"step": int, "tokens": int, "elapsed_s": NUMBER, "loss": NUMBER}
EVENT_TYPES: dict = {  # of log.jsonl: those of the values that are read
    "start": {"settings": dict, "parameters": int, "elapsed_s": NUMBER},
    "resume": {"changed": dict, "elapsed_s": NUMBER},
    "train": COUNTS | {"tokens_per_s": NUMBER},
    "val": COUNTS | {"train_loss": NUMBER | None},  # None: missing in docs/runs
    "final": COUNTS,
}


class RunDir:
    """A run directory. Only rank 0 may write to it, in the context of lock_folder()."""

    def __init__(self, folder):
        self.folder = Path(folder)
        if not folder or os.path.isfile(folder):  # in a list of teachers, or with /ckpt.pt
            raise UserError(f"'{folder}' is not a run's folder: give one, such as --out_dir=out")
        self.best, self.last, self.log = (self.folder / name for name in (BEST, LAST, LOG))
        self.replacing = self.folder / ".replacing"  # exists while an earlier run is removed
        self.log_end_s = math.inf  # of the resumed run; later events are cut before one is added

    @staticmethod
    def find(parent="."):
        """Returns the run directories in `parent`, sorted."""
        paths = Path(parent).glob("*/*")
        return sorted({path.parent for path in paths if path.name in (BEST, LOG)})

    @staticmethod
    def parse_list(folders):
        """Returns the RunDirs of folders that are separated by commas."""
        # A comma before NAME= belongs to the name of a run of a sweep, such as n_layer=4,seed=1.
        names = re.split(r",(?!\w+=)", folders)
        return [RunDir(os.path.expanduser(name.strip())) for name in names]

    def exists(self):
        """Whether there is a checkpoint, which is not the rest of an earlier run."""
        has_file = os.path.isfile(self.last) or os.path.isfile(self.best)
        return has_file and not os.path.isfile(self.replacing)

    def files(self):
        """Returns the paths of a run's files, not all of which exist."""
        kept = [p for p in self.folder.glob("ckpt-*.pt") if p.stem.removeprefix("ckpt-").isdigit()]
        return [self.best, self.last, self.log, *kept]

    # Reading

    def load_best(self) -> Checkpoint:
        """Returns the best checkpoint, without optimizer state."""
        return self._load(self.best, optimizers=False)

    def load_newest(self, required=True, optimizers=True) -> Checkpoint | None:
        """Returns the newest checkpoint, or None if there is none and it is not required."""
        if not (required or self.exists()):
            return None
        if os.path.isfile(self.replacing):
            advice = f"start again with --init_from=auto, or delete {self.replacing} to resume it"
            raise UserError(f"{self.folder} has the rest of a run that was being moved: {advice}")
        if not os.path.isfile(self.last):
            return self._load(self.best, optimizers)
        newest = self._load(self.last, optimizers)
        if os.path.isfile(self.best) and not os.path.samefile(self.best, self.last):
            check_lfs(self.best)  # raises if it cannot be read: an evaluation would replace it
            with suppress(UserError):  # a damaged file
                newest_at, best_at = newest.progress, self.load_best().progress
                best_steps = best_at.step, best_at.evaluated_step
                if best_steps > (newest_at.step, newest_at.evaluated_step):
                    return self._load(self.best, optimizers)
        return newest

    def _load(self, path, optimizers=True):
        if not os.path.isfile(path):
            runs = [str(run) for run in self.find() if os.path.isfile(run / path.name)]
            known = ", ".join(runs) or "none; first run python train.py CONFIG_FILE"
            raise UserError(f"there is no checkpoint {path}; available: {known}")
        return load_checkpoint(path, optimizers)

    # Writing

    def begin(self, settings, resumed: Checkpoint | None = None):
        """Prepares the folder for a run. Returns where an earlier run was moved, or None."""
        with os_errors("write to", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if resumed:
                self.log_end_s = resumed.progress.elapsed_s
                later = [e for e in self.read_events() if e["elapsed_s"] > self.log_end_s]
                # A final event alone stays until one is added: a finished run may add none.
                if any(event["event"] != "final" for event in later):
                    self._cut_log()
                return None
            paths = [path for path in self.files() if path.exists()]
            target = make_folder_beside(self.folder) if paths and not settings.overwrite else None
            self.replacing.touch()
            for path in paths:
                if target:
                    shutil.move(path, target)  # on another disk if the folder is a mount
                else:
                    path.unlink()
            self.replacing.unlink()
            return target

    def append(self, event):
        """Appends an event to log.jsonl. Raises UserError if writing fails."""
        with os_errors("write", self.log):
            if self.log_end_s < math.inf:
                self._cut_log()
            with open(self.log, "ab") as file:
                file.write(json.dumps(event).encode() + b"\n")

    def _cut_log(self):
        """Removes what kept_log() leaves out. A link becomes a file."""
        log = self.kept_log()
        with write_atomically(self.log) as [file]:
            file.write(log)
        self.log_end_s = math.inf

    def _kept(self, step):
        return self.folder / f"ckpt-{step}.pt"

    def keep_best(self, step):
        """Makes ckpt-STEP.pt a link to ckpt.pt, or a copy. Returns its path."""
        if self.load_best().progress.step == step:  # else a run that was killed has kept it
            replace_by_link(self.best, self._kept(step))
        return self._kept(step)

    def kept_log(self):
        """Returns log.jsonl, b"" without one; of a resumed run, without events that it repeats."""
        lines = []
        for line, event in self._read_log():
            is_torn = not line.endswith(b"\n")
            if is_torn or (event and event["elapsed_s"] > self.log_end_s):
                break
            lines.append(line)
        return b"".join(lines)

    def read_events(self):
        """Returns the events of log.jsonl, [] without a log. Other lines are left out."""
        return [event for _, event in self._read_log() if event]

    def _read_log(self):
        """Yields each line of log.jsonl and its event, which is None in a torn or foreign line."""
        for line in self.log.read_bytes().splitlines(True) if self.log.is_file() else []:
            event = None
            with suppress(KeyError, RecursionError, TypeError, UserError, ValueError):
                content = json.loads(line, parse_constant=int)  # an error for NaN, too
                check_types(content, EVENT_TYPES[content["event"]], "event")
                event = content
            yield line, event

    def save(self, checkpoint: Checkpoint, best, keep=False):
        """Writes last.pt or, if `best`, ckpt.pt, which last.pt then links to.

        If `keep`, first writes the weights to ckpt-STEP.pt. Raises UserError if writing fails.
        """
        if keep:
            path = self._kept(checkpoint.progress.step)
            save_checkpoint(path, dataclasses.replace(checkpoint, optimizers={}))
        best = best or not os.path.isfile(self.best)  # somebody has deleted it
        save_checkpoint(self.best if best else self.last, checkpoint)
        if best:
            replace_by_link(self.best, self.last)
