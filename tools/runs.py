"""What is known of runs from their folders' log.jsonl: settings, curves, and a table of them."""

import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from config import UserError, nearest
from report import LOG
from safety import refusal

NO_EVENT = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError)
AXES = {"steps": "step", "tokens": "tokens", "seconds": "elapsed_s"}  # and their keys in the log


@dataclass
class Run:
    """A run as its log tells it: events of one kind in the order of their steps."""

    folder: str
    settings: dict = field(default_factory=dict)  # as changed on resuming
    parameters: int | None = None
    train: list = field(default_factory=list)
    val: list = field(default_factory=list)

    @property
    def best(self):
        """The evaluation with the lowest validation loss; None before the first."""
        return min(self.val, key=lambda event: event["loss"], default=None)

    @property
    def newest(self):
        """The last event; None before the first."""
        return max(self.train + self.val, key=lambda event: event["elapsed_s"], default=None)

    def curve(self, split, axis):
        """([x], [loss]) of a split, over steps, tokens or seconds."""
        events = self.train if split == "train" else self.val
        return [event[AXES[axis]] for event in events], [event["loss"] for event in events]


def read(folder):
    """The Run in a folder. Raises UserError where it has no log that can be read."""
    path = Path(folder, LOG)
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        hint = nearest(str(folder), at_hand(), _list(at_hand()))
        raise UserError(f"there is no run in {folder}: {path} is missing{hint}") from None
    except OSError as error:
        raise refusal("read", path, error) from error
    run = Run(str(folder))
    for line in lines:
        with suppress(*NO_EVENT):
            _take(run, json.loads(line))  # what is no event of a run was cut short, or is foreign
    return run


def inside(folder):
    """The folders in a folder that have a run."""
    with suppress(OSError):  # of a name too long
        return sorted(path.parent for path in Path(folder).glob(f"*/{LOG}"))
    return []


def read_all(folders):
    """The runs in some folders, and in the folders of sweeps, each once."""
    found = {}
    for folder in folders:
        is_run = os.path.exists(os.path.join(folder, LOG))  # Path.exists minds names too long
        for each in ([] if is_run else inside(folder)) or [Path(folder)]:
            found.setdefault(os.path.realpath(each), each)
    return [read(each) for each in found.values()]


def _take(run, event):
    match event["split"]:
        case "start":
            run.settings, run.parameters = dict(event["settings"]), int(event["parameters"])
        case "resume":
            run.settings |= {name: now for name, (_, now) in event["changed"].items()}
        case "train" | "val" as split:
            event = {name: event[name] for name in ("step", "tokens", "elapsed_s", "loss")} | event
            if all(math.isfinite(event[name]) for name in (*AXES.values(), "loss")):
                getattr(run, split).append(event)


def at_hand():
    """Folders here that have a log."""
    return sorted(str(path.parent) for path in Path().glob(f"*/{LOG}"))


def _list(names):
    return f"; runs at hand: {', '.join(names)}" if names else ""


def best_first(runs):
    """Runs in the order of their best validation loss, those without one last."""
    return sorted(runs, key=lambda run: run.best["loss"] if run.best else math.inf)


def table(runs):
    """Markdown lines: the runs, best validation loss first, and the settings in which they differ.

    Speeds are medians of the log's lines, times those of the whole run.
    """
    runs = best_first(runs)
    names = differing([run.settings for run in runs])
    head = [
        "run", *names, "parameters", "best val loss", "at step", "steps", "time, s", "tokens/s",
    ]  # fmt: skip
    return aligned([head, *(_row(run, names) for run in runs)])


def _row(run, names):
    best, newest = run.best or {}, run.newest or {}
    speeds = [event["tokens_per_s"] for event in run.train if "tokens_per_s" in event]
    return [
        run.folder,
        *(str(run.settings.get(name, "")) for name in names),
        f"{run.parameters:,}" if run.parameters else "",
        f"{best['loss']:.4f}" if best else "",
        f"{best['step']:,}" if best else "",
        f"{run.val[-1]['step']:,}" if run.val else "",
        f"{newest['elapsed_s']:,.0f}" if newest else "",
        f"{median(speeds):,.0f}" if speeds else "",
    ]


def differing(dicts):
    """The keys whose values are not the same in all of the dicts, in the order of the first."""
    names = dict.fromkeys(name for each in dicts for name in each)
    missing = object()
    return [
        name
        for name in names
        if any(each.get(name, missing) != dicts[0].get(name, missing) for each in dicts)
    ]


def aligned(rows):
    """Rows of cells as the lines of a Markdown table, the first its head, numbers to the right."""
    columns = list(zip(*rows, strict=True))
    widths = [max(3, *map(len, column)) for column in columns]
    numeric = [all(_is_number(cell) for cell in column[1:]) for column in columns]

    def line(cells):
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    rule = [
        "-" * (width - 1) + ":" if right else "-" * width
        for width, right in zip(widths, numeric, strict=True)
    ]
    return [line(rows[0]), line(rule), *map(line, rows[1:])]


def _is_number(cell):
    with suppress(ValueError):
        float(cell.replace(",", "") or 0)
        return True
    return cell == "None"
