"""The runs in the working directory, for the playground: a table, and a plot of those selected."""

import os
from contextlib import suppress

from folio.run_dir import RunDir
from tools.plot import draw_losses
from tools.runs import grouped, nested, read_all
from tools.table import compared

MOST_CURVES = 8  # that are drawn at first


def logs():
    """Returns (folder, bytes of its log) of each run in the working directory and in its sweeps."""
    found = []
    for folder in nested():
        with suppress(OSError):  # there is none, or it has just been deleted
            found.append((str(folder), RunDir(folder).log.stat().st_size))
    return found


def table(folders, measure="loss"):
    """Returns the header and the rows of the table of runs, the best first."""
    header, *rows = compared(grouped(read_all(folders), measure)) if folders else [["run"]]
    return header, rows


def curves(folders, axis, measure="loss"):
    """Returns a figure of the losses of runs, or None if none of them has been evaluated."""
    groups = grouped(read_all(folders), measure)
    return draw_losses(groups, axis) if any(group.evaluated for group in groups) else None


def selection(folders, path):
    """Returns the folders of the runs to draw at first: a checkpoint's, the newest, the best."""
    if not folders:
        return []
    newest = max(folders, key=_modified)
    runs = [run for run in read_all(folders) if run.val]
    runs.sort(key=lambda run: run.best()["loss"])
    found = dict.fromkeys([os.path.dirname(path), newest, *(run.folder for run in runs)])
    return [folder for folder in found if folder in folders][:MOST_CURVES]


def _modified(folder):
    with suppress(OSError):  # it has just been deleted
        return os.path.getmtime(RunDir(folder).log)
    return 0
