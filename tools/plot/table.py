"""Tables in Markdown, and the table that compares groups of runs."""

from itertools import accumulate
from statistics import median, stdev

from folio.cli.process import printable


def compare_groups(groups, measure="loss"):
    """Returns the rows of a table of groups, which are sorted, the best first.

    The first row is the header. Losses are means and standard deviations over seeds, padded to
    equal lengths. The last columns are settings in which the groups differ.
    """
    is_repeated = any(len(group.runs) > 1 for group in groups)
    loss_name = f"best val {measure}".replace("_", " ")
    settings = find_differing_settings(groups)
    rows = []
    for group in groups:
        losses = group.losses
        row = {"run": group.name, loss_name: f"{group.mean_loss:.4f}" if losses else ""}
        if is_repeated:
            row[loss_name] += f" ± {stdev(losses):.4f}" if len(losses) > 1 else " " * 9
            row["seeds"] = str(len(losses))
        row |= compute_figures(group)
        row |= {name: group.values(name)[0] for name in settings}
        rows.append(row)
    return [list(rows[0]), *(list(row.values()) for row in rows)]


def find_differing_settings(groups):
    """Returns the names of settings that have one value in each group, but not the same in all."""
    differing = []
    for name in dict.fromkeys(name for group in groups for name in group.runs[0].settings):
        values = [group.values(name) for group in groups]
        is_same = all(other == values[0] for other in values)
        if not is_same and max(map(len, values)) == 1:
            differing.append(name)
    return differing


def compute_figures(group):
    """Returns {column: cell} of the columns after the loss: medians over the runs of a group."""
    figures = {
        "at step": [run.best["step"] for run in group.evaluated_runs],
        "time, s": [run.seconds for run in group.runs if run.seconds],
        "tokens/s": [event["tokens_per_s"] for run in group.runs for event in run.train],
        "parameters": [run.parameters for run in group.runs],
        "steps": [run.val[-1]["step"] for run in group.evaluated_runs],
    }
    return {name: f"{median(values):,.0f}" if values else "" for name, values in figures.items()}


def select_columns(rows, width):
    """Returns rows without columns that are equal in all, and as many columns as `width` allows.

    The first two columns stay, and all of a single row.
    """
    columns = list(zip(*rows, strict=True))
    if len(rows) > 2:
        columns = columns[:2] + [column for column in columns[2:] if len(set(column[1:])) > 1]
    widths = [3 + max(2, *map(len, column)) for column in columns]
    count = max(2, sum(end < width for end in accumulate(widths)))
    return list(zip(*columns[:count], strict=True))


def format_table(rows):
    """Returns the lines of a Markdown table. The first row is the header, the first column text."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(2, *map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for row in (rows[0], rule, *rows[1:]):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
