"""Runs as read from their logs: settings and losses."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from folio.errors import UserError, os_error
from folio.files import is_file
from folio.run_dir import RunDir

STEP_NUMBERS = ("step", "tokens", "loss", "elapsed_s")
NUMBERS = {  # of each event
    "start": ("parameters",),
    "train": (*STEP_NUMBERS, "tokens_per_s"),
    "val": STEP_NUMBERS,
}
OPTIONAL = ("bits_per_byte",)
LARGEST = 1e100  # larger numbers are from damaged logs


@dataclass
class Run:
    """A run as recorded in its log."""

    folder: str
    settings: dict = field(default_factory=dict)  # with the changes made on resuming
    parameters: int = 0
    train: list = field(default_factory=list)  # events of training steps
    val: list = field(default_factory=list)  # events of evaluations
    newest: dict | None = None  # the last event of either kind

    def add(self, event):
        """Adds an event of the log. Any exception means that it is damaged."""
        numbers = NUMBERS.get(event["split"], ())
        numbers += tuple(name for name in OPTIONAL if name in event)
        for name in numbers:
            if not abs(event[name]) < LARGEST:
                raise ValueError(f"{name} is {event[name]}")
        match event["split"]:
            case "start":
                self.settings, self.parameters = dict(event["settings"]), event["parameters"]
            case "resume":
                self.settings |= {name: new for name, (_, new) in event["changed"].items()}
            case "train" | "val" as split:
                self.newest = {name: event[name] for name in numbers}
                getattr(self, split).append(self.newest)

    def best(self, measure="loss"):
        """Returns the evaluation with the lowest `measure`, which all must have, or None."""
        return min(self.val, key=lambda event: event[measure], default=None)


def read(folder):
    """Returns the Run in a folder. Raises UserError if it has no readable log."""
    path = RunDir(folder).log
    try:
        if not is_file(path):
            available = ", ".join(map(str, inside("."))) or "none"
            raise UserError(f"there is no log {path}; available runs: {available}")
        run = Run(str(Path(folder)))  # without a slash at the end
        with open(path, "rb") as lines:
            for line in lines:
                with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    run.add(json.loads(line))  # skips a line that is incomplete or damaged
        return run
    except OSError as error:
        raise os_error("read", path, error) from error


def inside(folder):
    """Returns the folders in `folder` that contain a log, sorted."""
    return [path for path in RunDir.find(folder) if RunDir(path).log.exists()]


def nested():
    """Returns the folders of runs in this folder and in its sweeps, sorted; not hidden ones."""
    children = [each for each in Path(".").iterdir() if each.is_dir() and each.name[0] != "."]
    found = {path for parent in (".", *children) for path in RunDir.find(parent)}
    return sorted(path for path in found if path.name[0] != ".")


def read_all(folders):
    """Returns the runs in `folders`. A folder of runs, such as a sweep's, adds all of them."""
    paths = []
    for folder in folders:
        is_run = os.path.exists(RunDir(folder).log)  # Path.exists raises if the name is too long
        paths += [folder] if is_run else inside(folder) or [folder]
    return [read(path) for path in paths]
