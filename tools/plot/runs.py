"""Runs as recorded in their logs, and groups of runs that differ only in their seed."""

import math
import os
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

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
    loss: float = math.inf  # of the best model, from its final evaluation if there is one
    seconds: float = 0.0  # of training so far

    @property
    def best(self):
        """The evaluation with the lowest loss."""
        return min(self.val, key=lambda event: event["loss"])


def read_run(folder, measure="loss"):
    """Returns the Run in a folder. Raises UserError if it has no log.

    With the measure "bits_per_byte", the losses of evaluations are these numbers, and evaluations
    without them are left out.
    """
    run_dir = RunDir(folder)
    if not run_dir.log.is_file():
        available = ", ".join(map(str, find_runs("."))) or "none"
        raise UserError(f"there is no log {run_dir.log}; available runs: {available}")
    run = Run(str(run_dir.folder))
    for event in run_dir.read_events():
        match event["event"]:
            case "start":
                run.settings, run.parameters = dict(event["settings"]), event["parameters"]
            case "resume":
                run.settings |= {name: new for name, (_, new) in event["changed"].items()}
            case "train":
                run.train.append(event)
            case "val" if measure in event:
                run.val.append(event | {"loss": event[measure]})
                run.loss = run.best["loss"]
            case "final" if measure in event:
                run.loss = event[measure]
        run.seconds = event.get("elapsed_s", run.seconds)
    return run


def read_runs(folders, measure="loss"):
    """Returns the evaluated runs in `folders`. A folder of runs, such as a sweep's, adds its runs.

    Raises UserError if there are none.
    """
    runs = []
    for folder in dict.fromkeys(map(Path, folders)):  # each once
        paths = [] if RunDir(folder).log.is_file() else find_runs(folder)
        runs += [read_run(path, measure) for path in paths or [folder]]
    runs = [run for run in runs if run.val]
    if not runs:
        name = measure.replace("_", " ")
        raise UserError(f"there is nothing to compare: the runs have no {name} yet")
    return runs


def find_runs(folder):
    """Returns the folders in `folder` that contain a log, sorted."""
    return [path for path in RunDir.find(folder) if RunDir(path).log.exists()]


def group_runs(runs, measure="loss"):
    """Returns groups of runs, {name: runs}, the best mean loss first.

    Runs whose folders differ only in "seed=NUMBER" are a group, such as n_layer=2,seed=*. Names are
    relative to the innermost folder that contains all runs. Losses are compared per dataset and
    tokenizer.
    """

    def rank(group):
        _, runs = group
        names = ("dataset", "tokenizer") if measure == "loss" else ()
        return [values_of(runs, name) for name in names], mean_loss(runs)

    parent = os.path.commonpath([os.path.abspath(Path(run.folder).parent) for run in runs])
    runs_of_pattern, groups = defaultdict(list), {}
    for run in runs:
        runs_of_pattern[FOLDER_SEED_PATTERN.sub("seed=*", run.folder)].append(run)
    for pattern, similar_runs in runs_of_pattern.items():
        name = pattern if len(similar_runs) > 1 else similar_runs[0].folder
        groups[os.path.relpath(name, parent)] = similar_runs
    return dict(sorted(groups.items(), key=rank))


def mean_loss(runs):
    return fmean(run.loss for run in runs)


def values_of(runs, name):
    """Returns the values of a setting in runs, each once, as sorted texts."""
    return sorted({str(run.settings.get(name, "")) for run in runs})
