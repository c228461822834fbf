"""Runs as read from their logs, and groups of runs that differ only in their seed."""

import json
import math
import os
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np

from folio.errors import UserError, os_error
from folio.files import is_file
from folio.run_dir import RunDir
from folio.settings import names_in
from train import TrainConfig

STEP_NUMBERS = ("step", "tokens", "loss", "elapsed_s")
NUMBERS = {"train": (*STEP_NUMBERS, "tokens_per_s"), "val": STEP_NUMBERS}  # of each event
OPTIONAL = ("bits_per_byte",)
REPEATED = "seed"  # the setting whose values are repeats of one combination
IGNORED = {REPEATED} | names_in(TrainConfig, "display")  # runs that differ in them are one group


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
        match event["split"]:
            case "start":
                self.settings, self.parameters = dict(event["settings"]), int(event["parameters"])
            case "resume":
                self.settings |= {name: new for name, (_, new) in event["changed"].items()}
            case "train" | "val" as split:
                names = (*NUMBERS[split], *(name for name in OPTIONAL if name in event))
                if not all(abs(event[name]) < math.inf for name in names):
                    raise ValueError("not a finite number")
                self.newest = {name: event[name] for name in names}
                getattr(self, split).append(self.newest)

    def best(self, measure="loss"):
        """Returns the evaluation with the lowest `measure`, which all must have, or None."""
        return min(self.val, key=lambda event: event[measure], default=None)


# Reading


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


# Grouping


@dataclass
class Group:
    """Runs that differ only in their seed. Their losses are values of `measure`."""

    runs: list
    measure: str = "loss"  # or bits_per_byte, which compares runs with different tokenizers

    @property
    def name(self):
        """The folder of a single run, or a pattern: out-sweep/n_layer=2,seed=*."""
        folders, digits = [run.folder for run in self.runs], "0123456789"
        if len(folders) == 1:
            return folders[0]
        start = os.path.commonprefix(folders).rstrip(digits)
        rests = [folder[len(start) :][::-1] for folder in folders]
        return f"{start}*{os.path.commonprefix(rests)[::-1].lstrip(digits)}"

    @property
    def evaluated(self):
        """The runs that have been evaluated, with a value of the measure each time."""
        return [run for run in self.runs if run.val and all(self.measure in e for e in run.val)]

    @property
    def losses(self):
        """The best validation loss of each evaluated run."""
        return [run.best(self.measure)[self.measure] for run in self.evaluated]

    @property
    def mean(self):
        """The mean of the losses; infinity if there are none."""
        return fmean(self.losses) if self.losses else math.inf

    def values(self, name):
        """Returns the set of values of a setting, as text."""
        return {str(run.settings.get(name, "")) for run in self.runs}

    def curve(self, split, key):
        """Returns means of `key` and the losses, and the latter's standard deviation, (3, events).

        They are over the evaluated runs, of which there must be one, for the first event of the
        split, "train" or "val", the second, and so on, as far as all runs have come.
        """
        runs = [getattr(run, split) for run in self.evaluated]
        points = [
            [(event[key], event[self.measure]) for event in each]
            for each in zip(*runs, strict=False)
        ]
        points = np.array(points, float).reshape(len(points), len(runs), 2)
        spread = points[..., 1].std(axis=1, ddof=int(len(runs) > 1))
        return np.stack([*points.mean(axis=1).T, spread])


def grouped(runs, measure="loss"):
    """Returns the groups of runs, the best mean loss first; groups without a loss come last.

    Runs of a group are in the same folder, such as that of a sweep. A run with the same seed as an
    earlier one is no repeat: it belongs to another group.
    """
    groups, seen = defaultdict(list), Counter()
    for run in runs:
        values = sorted((k, repr(v)) for k, v in run.settings.items() if k not in IGNORED)
        key = (os.path.dirname(run.folder), *values)
        seed = (*key, run.settings.get(REPEATED))
        seen[seed] += 1
        groups[*key, seen[seed]].append(run)
    return sorted((Group(each, measure) for each in groups.values()), key=lambda group: group.mean)
