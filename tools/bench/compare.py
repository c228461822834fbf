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
    for command, runs in measure_alternately(settings).items():
        names = [name for name in COLUMNS if all(name in figures for figures in runs)]
        medians[command] = {name: median(figures[name] for figures in runs) for name in names}
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


def print_medians(medians):
    """Prints {name of a command: figures} as a Markdown table, with ratios if there are two."""
    names = [name for name in COLUMNS if any(name in figures for figures in medians.values())]
    rows = [["", *(COLUMNS[name][0] for name in names)]]
    for command, figures in medians.items():
        rows.append([command, *(format_figure(name, figures) for name in names)])
    if "other" in medians:
        rows.append(["folio / other", *(format_ratio(name, medians) for name in names)])
    print("", *format_table(rows), sep="\n")


def format_ratio(name, medians):
    """Returns the ratio of a figure of folio to that of the other command, empty if unknown."""
    folio, other = medians["folio"].get(name), medians["other"].get(name)
    return f"{folio / other:.3f}" if folio and other else ""
