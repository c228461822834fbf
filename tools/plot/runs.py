"""Runs as read from their logs, and groups of runs that differ only in their seed."""

import json
import math
import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np

from folio.checkpoint.run_dir import RunDir
from folio.cli.errors import UserError
from folio.cli.files import is_file

SEED = re.compile(r"\bseed=\d+")  # in the name of a folder


@dataclass
class Run:
    """A run as recorded in its log."""

    folder: str
    settings: dict = field(default_factory=dict)  # with the changes made on resuming
    parameters: int = 0
    train: list = field(default_factory=list)  # events of training steps
    val: list = field(default_factory=list)  # events of evaluations
    seconds: float | None = None  # that the run has taken

    def best(self, measure="loss"):
        """Returns the evaluation with the lowest `measure`, which all must have."""
        return min(self.val, key=lambda event: event[measure])


# Reading


def read(folder):
    """Returns the Run in a folder. Raises UserError if it has no log."""
    path = RunDir(folder).log
    if not is_file(path):
        available = ", ".join(map(str, inside("."))) or "none"
        raise UserError(f"there is no log {path}; available runs: {available}")
    run = Run(str(Path(folder)))  # without a slash at the end
    for line in path.read_bytes().splitlines():
        # skips a line that is incomplete, because a process is writing it, or of another program
        with suppress(ValueError, KeyError, TypeError):
            add_event(run, json.loads(line))
    return run


def add_event(run, event):
    """Adds an event of a log to a Run."""
    match event["split"]:
        case "start":
            run.settings, run.parameters = event["settings"], event["parameters"]
        case "resume":
            run.settings |= {name: new for name, (_, new) in event["changed"].items()}
        case "train" | "val" as split:
            run.seconds = event["elapsed_s"]
            getattr(run, split).append(event)


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
        paths += [folder] if is_file(RunDir(folder).log) else inside(folder) or [folder]
    return [read(path) for path in paths]


# Grouping


@dataclass
class Group:
    """Runs that differ only in their seed. Their losses are values of `measure`."""

    name: str  # the folder of a single run, or a pattern: out-sweep/n_layer=2,seed=*
    runs: list
    measure: str = "loss"  # or bits_per_byte, which compares runs with different tokenizers

    @property
    def evaluated(self):
        """The runs that have been evaluated, with a value of the measure."""
        return [run for run in self.runs if run.val and self.measure in run.val[0]]

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

    Runs whose folders differ only in "seed=NUMBER", as those of a sweep, are a group.
    """
    found = defaultdict(list)
    for run in runs:
        found[SEED.sub("seed=*", run.folder)].append(run)
    groups = []
    for pattern, each in found.items():
        groups.append(Group(pattern if len(each) > 1 else each[0].folder, each, measure))
    return sorted(groups, key=lambda group: group.mean)
