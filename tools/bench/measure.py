"""Runs commands alternately, and reads figures such as the time per step in what they print."""

import os
import platform
import re
import shlex
import sys
import time
from pathlib import Path
from statistics import median
from subprocess import PIPE, STDOUT, Popen, run

import torch

from folio.cli.errors import UserError, os_errors
from folio.cli.settings import ROOT

FIGURES = {  # figure: (its name in a table, format)
    "step_ms": ("ms/step", ".2f"),
    "tokens_per_s": ("tokens/s", ",.0f"),
    "to_target_s": ("s to target", ".1f"),
    "val_loss": ("best val loss", ".4f"),
    "first_s": ("s to first token", ".2f"),
    "seconds": ("whole process, s", ".2f"),
    "gpu_memory_gib": ("GPU memory, GiB", ".2f"),
}
PATTERNS = (  # "iter" lines count from step 10 on, because the first steps are a warmup
    r"iter \d{2,}: loss \d+\.?\d*, time (?P<step_ms>\d+\.?\d*)ms",
    r"iter \d{2,}: .* (?P<tokens_per_s>[\d,]+) tokens/s",
    r"(?:tokens per iteration will be:| steps of) (?P<tokens_per_step>[\d,]+)",
    r"tokens in \d+\.?\d* s, (?P<tokens_per_s>[\d,]+) tokens/s",
    r"; first token (?:after )?(?P<first_s>\d+\.?\d*) s",
    r"^peak memory: (?P<gpu_memory_gib>\d+\.?\d*) GiB",
)
EVALUATION = r"(final .*)?step \d+: train loss \d+\.?\d*, val loss (\d+\.?\d*)"
SEPARATOR = "---------------"  # printed after each text


def measure_alternately(commands, runs, keep_going=False):
    """Measures commands alternately, and returns {name: medians of its figures, {figure: value}}.

    `commands` is {name: function of the number of a run that runs the command and returns its
    figures}. One that fails raises UserError or, if `keep_going`, is reported and left out.
    """
    figures = {name: [] for name in commands}
    for number in range(runs):
        for name in list(figures):
            try:
                run = commands[name](number)
                print(f"run {number + 1} of {name}: {format_figures(run)}", flush=True)
                figures[name].append(run)
            except UserError as error:
                if not keep_going:
                    raise
                print(error, flush=True)
                del figures[name]
    medians = {name: {} for name in figures}
    for name, of_runs in figures.items():
        for figure in of_runs[0]:
            if all(figure in run for run in of_runs):
                medians[name][figure] = median(run[figure] for run in of_runs)
    return medians


def format_figures(figures):
    """Returns figures, {figure: value}, as a line."""
    parts = FIGURES.items()
    return "; ".join(f"{name} {figures[key]:{f}}" for key, (name, f) in parts if key in figures)


def make_row(title, figure, values, missing=""):
    """Returns the cells of a table: a title, the figure of each command, and the ratio of two.

    `missing` is the text for None.
    """
    cells = [missing if v is None else format(v, FIGURES[figure][1]) for v in values]
    if len(values) == 2:
        cells.append(f"{values[0] / values[1]:.3f}" if all(values) else "")
    return [title, *cells]


def measure_command(command, folder=".", target=None, output=None):
    """Runs a command in a folder, and returns its figures, {name: value}.

    `target` is the validation loss of "to_target_s", `output` a file to which what the command
    prints is appended. Raises UserError if the command cannot be started, or if it fails.
    """
    start = time.perf_counter()
    lines = []  # of output, with the seconds since the start
    env = os.environ | {"PYTHONUNBUFFERED": "1"}  # times are those of printing
    with os_errors("run", command[0]):
        child = Popen(command, cwd=folder, env=env, stdout=PIPE, stderr=STDOUT, errors="replace")
    try:
        for line in child.stdout:
            lines.append((time.perf_counter() - start, line.strip()))
        code = child.wait()
    finally:
        child.terminate()  # has no effect if it has ended
    seconds = time.perf_counter() - start
    if output:
        with open(output, "a", encoding="utf-8") as file:
            print(f"$ {shlex.join(command)}", *(line for _, line in lines), sep="\n", file=file)
    if code:
        tail = " / ".join(line for _, line in lines[-5:])
        raise UserError(f"{shlex.join(command)} ended with status {code}: {tail}")
    return read_figures(lines, command, target) | {"seconds": seconds}


def read_figures(lines, command, target=None):
    """Returns the figures in lines of output, [(seconds, line), ...]; see `measure_command`."""
    figures, evaluations = {}, []
    for pattern in PATTERNS:
        matches = [match for _, line in lines if (match := re.search(pattern, line))]
        if matches:
            numbers = [float(match[1].replace(",", "")) for match in matches]
            figures[matches[0].lastgroup] = median(numbers)
    for seconds, line in lines:
        if match := re.search(EVALUATION, line):
            evaluations.append((seconds, match[1], float(match[2])))
    finals = [evaluation for evaluation in evaluations if evaluation[1]]
    for seconds, _, loss in finals or evaluations:  # finals cover the whole split
        figures["val_loss"] = min(loss, figures.get("val_loss", loss))
        if target is not None and loss <= target:
            figures.setdefault("to_target_s", seconds)
    tokens_per_step = figures.get("tokens_per_step")
    text_ends = [seconds for seconds, line in lines if line == SEPARATOR]
    if "tokens_per_s" not in figures:  # nanoGPT prints no speed
        if tokens_per_step and "step_ms" in figures:
            figures["tokens_per_s"] = tokens_per_step / figures["step_ms"] * 1e3
        elif len(text_ends) > 1:
            flag = re.search(r"--max_new_tokens[= ](\d+)", shlex.join(command))
            tokens = (len(text_ends) - 1) * int(flag[1] if flag else 500)  # the default
            figures["tokens_per_s"] = tokens / (text_ends[-1] - text_ends[0])
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
