"""Runs as read from their logs: settings, losses, and a table that compares them."""

import json
import math
import os
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median

from folio.errors import UserError, os_error
from folio.files import is_file
from folio.run_dir import RunDir

FIGURES = ("best val loss", "at step", "time, s", "tokens/s", "parameters", "steps")  # of the table

STEP_NUMBERS = ("step", "tokens", "loss", "elapsed_s")
NUMBERS = {  # of each event
    "start": ("parameters",),
    "train": (*STEP_NUMBERS, "tokens_per_s"),
    "val": STEP_NUMBERS,
}
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
        for name in NUMBERS.get(event["split"], ()):
            if not abs(event[name]) < LARGEST:
                raise ValueError(f"{name} is {event[name]}")
        match event["split"]:
            case "start":
                self.settings, self.parameters = dict(event["settings"]), event["parameters"]
            case "resume":
                self.settings |= {name: new for name, (_, new) in event["changed"].items()}
            case "train" | "val" as split:
                getattr(self, split).append(event)
                self.newest = event

    @property
    def best(self):
        """The evaluation with the lowest validation loss, or None."""
        return min(self.val, key=lambda event: event["loss"], default=None)


# Reading


def read(folder):
    """Returns the Run in a folder. Raises UserError if it has no readable log."""
    path = RunDir(folder).log
    try:
        if not is_file(path):
            available = ", ".join(map(str, inside("."))) or "none"
            raise UserError(f"there is no log {path}; available runs: {available}")
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise os_error("read", path, error) from error
    run = Run(str(folder))
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            run.add(json.loads(line))  # skips a line that is incomplete or damaged
    return run


def inside(folder):
    """Returns the folders in `folder` that contain a log, sorted."""
    return [path for path in RunDir.find(folder) if RunDir(path).log.exists()]


def read_all(folders):
    """Returns the runs in `folders`. A folder of runs, such as a sweep's, adds all of them."""
    paths = []
    for folder in folders:
        is_run = os.path.exists(RunDir(folder).log)  # Path.exists raises if the name is too long
        paths += [folder] if is_run else inside(folder) or [folder]
    return [read(path) for path in paths]


# Comparing


def best_first(runs):
    """Returns runs sorted by best validation loss; runs without an evaluation come last."""
    return sorted(runs, key=lambda run: run.best["loss"] if run.best else math.inf)


def table(runs, first=(), fit=True):
    """Returns the lines of a Markdown table of runs, the best first.

    It has the settings `first`, the figures, and the other settings that differ. If `fit`, columns
    on the right that do not fit into the terminal are left out. Speeds are medians over the log.
    """
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in first)
    names = [name for name in names if len({str(run.settings.get(name)) for run in runs}) > 1]
    rows = [["run", *first, *FIGURES, *names]]
    rows += [_row(run, first, names) for run in best_first(runs)]
    lines, hidden = aligned(rows), 0
    width = shutil.get_terminal_size().columns if fit and sys.stdout.isatty() else math.inf
    while len(lines[0]) > width and len(rows[0]) - hidden > 2 + len(first):  # keeps the loss
        hidden += 1
        lines = aligned([row[:-hidden] for row in rows])
    note = f"{hidden} more column{'s' * (hidden > 1)}: add --all to python -m tools.plot"
    return [*lines, note] if hidden else lines


def _row(run, first, names):
    best, newest = run.best, run.newest
    speeds = [event["tokens_per_s"] for event in run.train]
    return [
        run.folder,
        *(str(run.settings.get(name, "")) for name in first),
        f"{best['loss']:.4f}" if best else "",
        f"{best['step']:,}" if best else "",
        f"{newest['elapsed_s']:,.0f}" if newest else "",
        f"{median(speeds):,.0f}" if speeds else "",
        f"{run.parameters:,}",
        f"{run.val[-1]['step']:,}" if best else "",
        *(str(run.settings.get(name, "")) for name in names),
    ]


def aligned(rows):
    """Returns the lines of a Markdown table. The first row is the header, the first column text."""
    widths = [max(2, *map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for first, *rest in (rows[0], rule, *rows[1:]):
        numbers = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append(f"| {' | '.join([first.ljust(widths[0]), *numbers])} |")
    return lines
