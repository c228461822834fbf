"""Tables in Markdown, and the table that compares groups of runs."""

from statistics import median, stdev

from folio.cli.process import printable

FIGURES = {  # {column: function of runs that returns values, of which the table has the median}
    "at step": lambda runs: [run.best["step"] for run in runs],
    "time, s": lambda runs: [run.seconds for run in runs],
    "tokens/s": lambda runs: [event["tokens_per_s"] for run in runs for event in run.train],
    "parameters": lambda runs: [run.parameters for run in runs],
    "steps": lambda runs: [run.val[-1]["step"] for run in runs],
}


def compare_groups(groups, measure="loss"):
    """Returns the rows of a table of groups, which are sorted, the best first.

    The first row is the header. The columns are the loss, medians over the runs of a group and
    settings. Of several groups, those columns after the loss are left out that are equal in all.
    """
    columns = {
        "run": [group.name for group in groups],
        f"best val {measure}".replace("_", " "): format_losses(groups),
        "seeds": [str(len(group.runs)) for group in groups],
    }
    for name, values_of in FIGURES.items():
        values = [values_of(group.runs) for group in groups]
        columns[name] = [f"{median(numbers):,.0f}" if numbers else "" for numbers in values]
    if len(groups) > 1:
        for name in dict.fromkeys(name for group in groups for name in group.runs[0].settings):
            columns[name] = [", ".join(group.values(name)) for group in groups]
        for name in list(columns)[2:]:
            if len(set(columns[name])) == 1:
                del columns[name]
    return [list(columns), *zip(*columns.values(), strict=True)]


def format_losses(groups):
    """Returns the mean loss of each group as text of equal length, and its standard deviation."""
    cells = []
    for group in groups:
        deviation = f" ± {stdev(group.losses):.4f}" if len(group.runs) > 1 else ""
        cells.append(f"{group.mean_loss:.4f}{deviation}")
    return [cell.ljust(max(map(len, cells))) for cell in cells]


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
