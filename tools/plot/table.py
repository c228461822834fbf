"""Tables in Markdown, and the table that compares groups of runs."""

from statistics import median, stdev

from folio.cli.process import printable
from tools.plot.runs import mean_loss, values_of

FIGURES = {  # {column: function of runs that returns values, of which the table has the median}
    "at step": lambda runs: [run.best["step"] for run in runs],
    "time, s": lambda runs: [run.seconds for run in runs],
    "tokens/s": lambda runs: [event["tokens_per_s"] for run in runs for event in run.train],
    "parameters": lambda runs: [run.parameters for run in runs],
    "steps": lambda runs: [run.val[-1]["step"] for run in runs],
}


def compare_groups(groups, measure="loss"):
    """Returns the rows of a table of groups, {name: runs}, which are sorted, the best first.

    The first row is the header. The columns are the mean loss, its standard deviation over seeds,
    medians over the runs of a group, and settings. Of several groups, those columns after the loss
    are left out that are equal in all.
    """
    names, all_runs = zip(*groups.items(), strict=True)
    loss_name = f"best val {measure}".replace("_", " ")
    columns = {"run": names, loss_name: [f"{mean_loss(runs):.4f}" for runs in all_runs]}
    if max(map(len, all_runs)) > 1:
        losses = [[run.loss for run in runs] for runs in all_runs]
        columns["deviation"] = [f"{stdev(loss):.4f}" if len(loss) > 1 else "" for loss in losses]
        columns["seeds"] = [str(len(runs)) for runs in all_runs]
    for name, values_in in FIGURES.items():
        values = [values_in(runs) for runs in all_runs]
        columns[name] = [f"{median(numbers):,.0f}" if numbers else "" for numbers in values]
    if len(groups) > 1:
        for name in dict.fromkeys(name for runs in all_runs for name in runs[0].settings):
            columns[name] = [", ".join(values_of(runs, name)) for runs in all_runs]
        for name in list(columns)[2:]:
            if len(set(columns[name])) == 1:
                del columns[name]
    return [list(columns), *zip(*columns.values(), strict=True)]


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
