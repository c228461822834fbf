"""Runs as recorded in their logs, and groups of runs that differ only in their seed."""

import math
import os
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np

from folio.checkpoint.run_dir import RunDir
from folio.cli.errors import UserError

FOLDER_SEED_PATTERN = re.compile(r"\bseed=\d+")


@dataclass
class Run:
    """A run as recorded in its log."""

    folder: str
    settings: dict = field(default_factory=dict)  # with the changes made on resuming
    parameters: int = 0
    train: list = field(default_factory=list)  # events of training steps
    val: list = field(default_factory=list)  # events of evaluations
    final: dict | None = None  # event of the evaluation of the best model, which covers more text
    seconds: float | None = None  # of training so far

    def best(self, measure="loss"):
        """Returns the evaluation with the lowest `measure`, which all must have."""
        return min(self.val, key=lambda event: event[measure])

    def loss(self, measure="loss"):
        """Returns the loss of the best model, from its final evaluation if there is one."""
        return (self.final or self.best(measure))[measure]


def read_run(folder):
    """Returns the Run in a folder. Raises UserError if it has no log."""
    run_dir = RunDir(folder)
    if not run_dir.log.is_file():
        available = ", ".join(map(str, find_runs("."))) or "none"
        raise UserError(f"there is no log {run_dir.log}; available runs: {available}")
    run = Run(str(Path(folder)))  # without a slash at the end
    for event in run_dir.read_events():
        add_event(run, event)
    return run


def add_event(run, event):
    """Adds an event of a log to a Run."""
    match event["event"]:
        case "start":
            run.settings, run.parameters = dict(event["settings"]), event["parameters"]
        case "resume":
            run.settings |= {name: new for name, (_, new) in event["changed"].items()}
        case "train" | "val" as kind:
            run.seconds = event["elapsed_s"]
            getattr(run, kind).append(event)
            run.final = None  # that of an earlier end
        case "final":
            run.seconds, run.final = event["elapsed_s"], event


def read_runs(folders):
    """Returns the runs in `folders`. A folder of runs, such as a sweep's, adds all of them."""
    runs = []
    for folder in dict.fromkeys(map(Path, folders)):  # each once
        paths = [] if RunDir(folder).log.is_file() else find_runs(folder)
        runs += map(read_run, paths or [folder])
    return runs


def find_runs(folder):
    """Returns the folders in `folder` that contain a log, sorted."""
    return [path for path in RunDir.find(folder) if RunDir(path).log.exists()]


@dataclass
class Group:
    """Runs that differ only in their seed. Their losses are values of `measure`."""

    name: str  # that of a single run's folder, or a pattern: n_layer=2,seed=*
    runs: list
    measure: str = "loss"  # or bits_per_byte, which compares runs with different tokenizers

    @property
    def evaluated_runs(self):
        """The runs that have been evaluated, with a value of the measure."""
        return [run for run in self.runs if run.val and all(self.measure in e for e in run.val)]

    @property
    def losses(self):
        """The best validation loss of each evaluated run."""
        return [run.loss(self.measure) for run in self.evaluated_runs]

    @property
    def mean_loss(self):
        """The mean of the losses; infinity if there are none."""
        return fmean(self.losses) if self.losses else math.inf

    def values(self, name):
        """Returns the set of values of a setting, as text."""
        return {str(run.settings.get(name, "")) for run in self.runs}

    def curve(self, kind, key):
        """Returns the means of `key`, a key of events, and the means and deviations of the losses.

        They are (3, events), over the evaluated runs, of which there must be at least one, for as
        many events of the kind, "train" or "val", as all these runs have.
        """
        logs = [getattr(run, kind) for run in self.evaluated_runs]
        length = min(map(len, logs))
        x = np.array([[event[key] for event in log[:length]] for log in logs])
        loss = np.array([[event[self.measure] for event in log[:length]] for log in logs])
        deviation = loss.std(axis=0, ddof=int(len(logs) > 1))
        return np.stack([x.mean(axis=0), loss.mean(axis=0), deviation])


def group_runs(runs, measure="loss"):
    """Returns the groups of runs, the best mean loss first; groups without a loss come last.

    Runs whose folders differ only in "seed=NUMBER" are a group. Names of groups are relative to the
    innermost folder that contains all runs. Losses are compared per dataset and tokenizer.
    """
    runs = list(runs)
    parents = [os.path.abspath(Path(run.folder).parent) for run in runs]
    parent = os.path.commonpath(parents) if runs else None
    runs_of_pattern = defaultdict(list)
    for run in runs:
        runs_of_pattern[FOLDER_SEED_PATTERN.sub("seed=*", run.folder)].append(run)
    groups = []
    for pattern, similar_runs in runs_of_pattern.items():
        name = pattern if len(similar_runs) > 1 else similar_runs[0].folder
        groups.append(Group(os.path.relpath(name, parent), similar_runs, measure))
    groups.sort(key=lambda group: group.mean_loss)
    if measure == "loss":
        for name in ("tokenizer", "dataset"):
            groups.sort(key=lambda group, name=name: sorted(group.values(name)))
        groups.sort(key=lambda group: not group.losses)
    return groups
