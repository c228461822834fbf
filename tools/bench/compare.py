"""Compares a script of folio with another command by running them alternately."""

import shlex
import sys
import tempfile
from statistics import median

from folio.cli.settings import ROOT
from tools.bench.measure import (
    COLUMNS,
    describe_machine,
    format_figure,
    format_figures,
    measure_command,
)
from tools.plot.table import format_table


def compare_commands(settings):
    """Measures the commands of a BenchConfig and prints a table of medians."""
    medians = {}
    for name, runs in measure_alternately(settings).items():
        medians[name] = compute_medians(runs)
    print(f"\nmedians of {settings.runs} alternating runs; {describe_machine()}\n")
    print(f"    folio: {settings.script}.py {shlex.join(settings.arguments)}")
    if settings.vs:
        print(f"    other: {settings.vs}")
    print_medians(medians)


def measure_alternately(settings):
    """Returns {"folio": [figures of each run]}, and likewise "other" if there is --vs.

    train.py writes to a temporary folder.
    """
    with tempfile.TemporaryDirectory() as out_dir:
        folio = [sys.executable, str(ROOT / f"{settings.script}.py"), *settings.arguments]
        if settings.script == "train":
            folio += [f"--out_dir={out_dir}", "--overwrite=True"]
        commands = {}
        if settings.vs:  # runs first, because it is the command that may be mistyped
            commands["other"] = shlex.split(settings.vs), settings.vs_dir
        commands["folio"] = folio, "."
        runs = {name: [] for name in commands}
        for number in range(1, settings.runs + 1):
            for name, (command, folder) in commands.items():
                figures = measure_command(command, folder, settings.target)
                runs[name].append(figures)
                print(f"run {number} of {name}: {format_figures(figures)}", flush=True)
    return runs


def compute_medians(runs):
    """Returns the median of each figure that all runs have."""
    names = [name for name in COLUMNS if all(name in figures for figures in runs)]
    return {name: median(figures[name] for figures in runs) for name in names}


def print_medians(medians):
    """Prints {name of a command: figures} as a Markdown table, with ratios if there are two."""
    columns = []
    for name, (heading, _) in COLUMNS.items():
        cells = [format_figure(name, figures) for figures in medians.values()]
        if not any(cells):
            continue
        if "other" in medians:
            cells.append(format_ratio(name, medians["folio"], medians["other"]))
        columns.append([heading, *cells])
    names = ["", *medians]
    if "other" in medians:
        names.append("folio / other")
    rows = zip(names, *columns, strict=True)
    print("", *format_table(list(rows)), sep="\n")


def format_ratio(name, figures, other):
    """Returns the ratio of a figure of two commands, empty if it is unknown."""
    dividend, divisor = figures.get(name), other.get(name)
    return f"{dividend / divisor:.3f}" if dividend and divisor else ""
