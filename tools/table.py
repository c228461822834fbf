"""Tables: aligned Markdown, and the table that compares groups of runs."""

import math
import shutil
import sys
from statistics import median, stdev

FIGURES = ("at step", "time, s", "tokens/s", "parameters", "steps")  # after the loss


def table(groups, first=(), fit=True):
    """Returns the lines of a Markdown table of groups; see `compared`.

    If `fit`, columns on the right that do not fit into the terminal are left out.
    """
    rows = compared(groups, first)
    least = 1 + rows[0].index(_heading(groups))
    lines, hidden = _fitted(rows, least) if fit else (aligned(rows), 0)
    if hidden:
        columns = f"{hidden} more column{'s' * (hidden > 1)}"
        lines.append(f"{columns}: add --all to python -m tools.plot")
    return lines


def compared(groups, first=()):
    """Returns the rows of a table of groups, which are sorted, the best first.

    The first row is the header. The columns are the settings `first`, the figures, and the other
    settings that differ, except those that differ within a group. Losses are means and standard
    deviations over seeds, padded to equal lengths; the other figures are medians.
    """
    first, others = _columns(groups, first)
    losses = [_heading(groups), "seeds"] if _is_repeated(groups) else [_heading(groups)]
    rows = [["run", *first, *losses, *FIGURES, *others]]
    for group in groups:
        loss = _repeated_loss(group) if _is_repeated(groups) else [_loss(group)]
        settings = [[*group.values(name)][0] for name in (*first, *others)]
        figures = [*loss, *_medians(group)]
        rows.append([group.name, *settings[: len(first)], *figures, *settings[len(first) :]])
    return rows


def _heading(groups):
    """Returns the header of the losses."""
    return f"best val {groups[0].measure}".replace("_", " ")


def _is_repeated(groups):
    """Whether a group has several runs, which differ in their seed."""
    return any(len(group.runs) > 1 for group in groups)


def _columns(groups, first):
    """Returns the settings that are the first columns, and those that are the last."""
    names = dict.fromkeys(name for group in groups for run in group.runs for name in run.settings)
    values = {name: [group.values(name) for group in groups] for name in (*first, *names)}
    shared = {name for name, sets in values.items() if all(len(each) == 1 for each in sets)}
    differing = {name for name in shared if len(set().union(*values[name])) > 1}
    first = [name for name in first if name in shared]
    return first, [name for name in names if name in differing and name not in first]


def _loss(group):
    return f"{group.mean:.4f}" if group.losses else ""


def _repeated_loss(group):
    """Returns the cells of the loss and the number of seeds."""
    spread = f" ± {stdev(group.losses):.4f}" if len(group.losses) > 1 else " " * 9
    return [f"{_loss(group)}{spread}", str(len(group.losses))]


def _medians(group):
    """Returns the cells of FIGURES."""
    newest = [run.newest for run in group.runs if run.newest]
    figures = (
        [run.best(group.measure)["step"] for run in group.evaluated],
        [event["elapsed_s"] for event in newest],
        [event["tokens_per_s"] for run in group.runs for event in run.train],
        [run.parameters for run in group.runs],
        [run.val[-1]["step"] for run in group.evaluated],
    )
    return [f"{median(values):,.0f}" if values else "" for values in figures]


def _fitted(rows, least):
    """Returns the lines of a table, and how many columns do not fit into the terminal."""
    lines, hidden = aligned(rows), 0
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    while len(lines[0]) > width and len(rows[0]) - hidden > least:
        hidden += 1
        lines = aligned([row[:-hidden] for row in rows])
    return lines, hidden


def aligned(rows):
    """Returns the lines of a Markdown table. The first row is the header, the first column text."""
    widths = [max(2, *map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for first, *rest in (rows[0], rule, *rows[1:]):
        numbers = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append(f"| {' | '.join([first.ljust(widths[0]), *numbers])} |")
    return lines
