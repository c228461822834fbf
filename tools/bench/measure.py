"""Runs commands alternately, and reads figures such as the time per step in what they print."""

import os
import platform
import re
import shlex
import sys
import time
from pathlib import Path
from statistics import median
from subprocess import PIPE, STDOUT, run

import torch

from folio.cli.errors import UserError, os_errors
from folio.cli.settings import ROOT

PROGRAMS = ("folio", "other")
HEADER = ["", *PROGRAMS, "folio / other"]
FORMATS = {  # of figures in a table
    "step_ms": ".2f",
    "tokens_per_s": ",.0f",
    "val_loss": ".4f",  # the best
    "compile_s": ".0f",
    "seconds": ".2f",  # of the whole process
    "gpu_memory_gib": ".2f",
}
PATTERNS = {  # "iter" lines count from step 10 on, because the first steps are a warmup
    "step_ms": r"iter \d{2,}: loss \d+\.?\d*, time (\d+\.?\d*)ms",
    "tokens_per_s": r"(?:iter \d{2,}: .*|tokens in \d+\.?\d* s,) ([\d,]+) tokens/s",
    "tokens_per_step": r"(?:tokens per iteration will be:| steps of) ([\d,]+)",
    "compile_s": r"^compiled in (\d+) s",
    "gpu_memory_gib": r"^peak memory: (\d+\.?\d*) GiB",
}
LOSS = r"step[ :]\d+.* val[ _]loss[ :](\d+\.?\d*)"  # of folio, nanoGPT or modded-nanogpt


def measure_alternately(commands, runs, measure):
    """Measures commands, {program: command}, alternately. Returns {program: figures of each run}.

    measure(command, number) returns the figures of a run, {figure: value}, {} if it failed.
    """
    measured: dict[str, list] = {program: [] for program in commands}
    for number in range(runs):
        for program, command in commands.items():
            figures = measure(command, number)
            values = [f"{name} {value:.6g}" for name, value in figures.items()]
            print(f"run {number + 1} of {program}: {', '.join(values) or 'failed'}", flush=True)
            measured[program].append(figures)
    return measured


def make_row(title, figure, measured):
    """Returns the cells of a table: a title, the median of each program, and the ratio of two."""
    medians = []
    for program in PROGRAMS:
        values = [figures[figure] for figures in measured.get(program, []) if figure in figures]
        medians.append(median(values) if values else None)
    cells = ["" if value is None else format(value, FORMATS[figure]) for value in medians]
    folio, other = medians
    return [title, *cells, f"{folio / other:.3f}" if folio and other else ""]


def measure_command(command, folder=".", output=None):
    """Runs a command, appends what it prints to `output`, and returns its figures, {name: value}.

    Raises UserError if the command cannot be started, or if it fails.
    """
    env = os.environ | {"PYTHONUNBUFFERED": "1"}  # so that errors are printed last
    start = time.perf_counter()
    with os_errors("run", command[0]):
        ended = run(command, cwd=folder, env=env, stdout=PIPE, stderr=STDOUT, errors="replace")
    seconds = time.perf_counter() - start
    if output:
        with open(output, "a", encoding="utf-8") as file:
            print(f"$ {shlex.join(command)}", ended.stdout, sep="\n", file=file)
    if ended.returncode:
        tail = " / ".join(ended.stdout.splitlines()[-5:])
        raise UserError(f"{shlex.join(command)} ended with status {ended.returncode}: {tail}")
    return read_figures(ended.stdout) | {"seconds": seconds}


def read_figures(output):
    """Returns the figures in what a command has printed, {name: value}."""
    figures = {}
    for figure, pattern in PATTERNS.items():
        if texts := re.findall(pattern, output, re.MULTILINE):
            figures[figure] = median(float(text.replace(",", "")) for text in texts)
    losses = re.findall(f"final .*{LOSS}", output) or re.findall(LOSS, output)
    if losses:
        figures["val_loss"] = min(map(float, losses))
    if {"tokens_per_step", "step_ms"} <= figures.keys():  # nanoGPT prints no speed
        speed = figures["tokens_per_step"] / figures["step_ms"] * 1e3
        figures.setdefault("tokens_per_s", speed)
    return figures


def describe_machine():
    """Returns the date, the machine, the versions and the commit of a measurement."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    cpuinfo = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    cpu = re.search(r"model name\s*: (.*)", cpuinfo)
    return (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores of "
        f"{cpu[1] if cpu else platform.machine()}, {gpu}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"commit {describe_commit()}"
    )


def describe_commit():
    """Returns the commit of folio, which ends with -dirty if files were changed since."""
    git = "git describe --always --dirty"  # in a shell, because git may not be installed
    commit = run(git, shell=True, cwd=ROOT, capture_output=True, text=True).stdout
    return commit.strip() or "unknown"
