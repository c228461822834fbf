"""Tables: aligned Markdown, and the table that compares groups of runs."""

from statistics import median, stdev

FIGURES = ("at step", "time, s", "tokens/s", "parameters", "steps")  # after the loss


def compared(groups):
    """Returns the rows of a table of groups, which are sorted, the best first.

    The first row is the header. The columns are the loss, other figures, and the settings that
    differ, except those that differ within a group. Losses are means and standard deviations over
    seeds, padded to equal lengths; the other figures are medians.
    """
    is_repeated = any(len(group.runs) > 1 for group in groups)
    losses = [f"best val {groups[0].measure}".replace("_", " "), *["seeds"] * is_repeated]
    names = _differing(groups)
    rows = [["run", *losses, *FIGURES, *names]]
    for group in groups:
        settings = [[*group.values(name)][0] for name in names]
        rows.append([group.name, *_loss(group, is_repeated), *_medians(group), *settings])
    return rows


def _differing(groups):
    """Returns the settings that have one value in each group, but not in all."""
    names = dict.fromkeys(name for group in groups for run in group.runs for name in run.settings)
    values = {name: [group.values(name) for group in groups] for name in names}
    return [
        name
        for name, sets in values.items()
        if all(len(each) == 1 for each in sets) and len(set().union(*sets)) > 1
    ]


def _loss(group, is_repeated):
    """Returns the cells of the loss and, for a table with repeated runs, the number of seeds."""
    mean = f"{group.mean:.4f}" if group.losses else ""
    if not is_repeated:
        return [mean]
    spread = f" ± {stdev(group.losses):.4f}" if len(group.losses) > 1 else " " * 9
    return [mean + spread, str(len(group.losses))]


def _medians(group):
    """Returns the cells of FIGURES."""
    figures = (
        [run.best(group.measure)["step"] for run in group.evaluated],
        [run.seconds for run in group.runs if run.seconds],
        [event["tokens_per_s"] for run in group.runs for event in run.train],
        [run.parameters for run in group.runs],
        [run.val[-1]["step"] for run in group.evaluated],
    )
    return [f"{median(values):,.0f}" if values else "" for values in figures]


def aligned(rows):
    """Returns the lines of a Markdown table. The first row is the header, the first column text."""
    widths = [max(2, *map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for first, *rest in (rows[0], rule, *rows[1:]):
        numbers = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append(f"| {' | '.join([first.ljust(widths[0]), *numbers])} |")
    return lines
