"""Runs commands alternately, and reads figures such as the time per step in what they print."""

import json
import os
import platform
import re
import shlex
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from subprocess import PIPE, STDOUT, Popen, run

import torch

from folio.cli.errors import UserError
from folio.cli.settings import ROOT
from tools.plot.table import format_table

COLUMNS = {  # figure: (heading in the table, format)
    "step_ms": ("ms/step", ".2f"),
    "tokens_per_s": ("tokens/s", ",.0f"),
    "to_target_s": ("s to target", ".1f"),
    "val_loss": ("best val loss", ".4f"),
    "first_s": ("s to first token", ".2f"),
    "seconds": ("whole process, s", ".2f"),
    "memory_gib": ("memory, GiB", ".2f"),
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
EVALUATION = r"(final .*)?step (\d+): train loss \d+\.?\d*, val loss (\d+\.?\d*)"
SEPARATOR = "---------------"  # printed after each text


def compare_commands(settings):
    """Measures the commands of a BenchConfig alternately, and prints a table of medians.

    train.py writes to a temporary folder. With `logs`, losses are written to logs/folio/log.jsonl
    and logs/other/log.jsonl.
    """
    runs = defaultdict(list)  # {"folio" or "other": figures of each run}
    with tempfile.TemporaryDirectory() as out_dir:
        folio = [sys.executable, str(ROOT / f"{settings.script}.py"), *settings.arguments]
        if settings.script == "train":
            folio += [f"--out_dir={out_dir}", "--overwrite=True"]
        commands = {}
        if settings.vs:  # runs first, because it is the command that may be mistyped
            commands["other"] = shlex.split(settings.vs), settings.vs_dir
        commands["folio"] = folio, "."
        for number in range(1, settings.runs + 1):
            for name, (command, folder) in commands.items():
                log = Path(settings.logs, name, "log.jsonl") if settings.logs else None
                figures = measure_command(command, folder, settings.target, log)
                runs[name].append(figures)
                print(f"run {number} of {name}: {format_figures(figures)}", flush=True)
    print(f"\nmedians of {settings.runs} alternating runs; {describe_machine()}\n")
    print(f"    folio: {settings.script}.py {shlex.join(settings.arguments)}")
    if settings.vs:
        print(f"    other: {settings.vs}")
    medians = {}
    for command, command_runs in runs.items():
        names = [name for name in COLUMNS if all(name in figures for figures in command_runs)]
        medians[command] = {name: median(run[name] for run in command_runs) for name in names}
    print_medians(medians)


def measure_command(command, folder=".", target=None, log=None, output=None):
    """Runs a command in a folder, and returns its figures, {name: value}.

    `target` is the validation loss of "to_target_s", `log` a file for write_log, `output` a file to
    which what the command prints is appended. Raises OSError if the command cannot be started, and
    UserError if it fails.
    """
    start = time.perf_counter()
    lines = []  # of output, with the seconds since the start
    env = os.environ | {"PYTHONUNBUFFERED": "1"}  # times are those of printing
    child = Popen(command, cwd=folder, env=env, stdout=PIPE, stderr=STDOUT, errors="replace")
    try:
        for line in child.stdout:
            lines.append((time.perf_counter() - start, line.strip()))
        _, status, usage = os.wait4(child.pid, 0)
    finally:
        child.terminate()  # has no effect if it has ended
    seconds = time.perf_counter() - start
    if output:
        with open(output, "a", encoding="utf-8") as file:
            print(f"$ {shlex.join(command)}", *(line for _, line in lines), sep="\n", file=file)
    if code := os.waitstatus_to_exitcode(status):
        tail = " / ".join(line for _, line in lines[-5:])
        raise UserError(f"{shlex.join(command)} ended with status {code}: {tail}")
    figures = read_figures(lines, command, target)
    if log:
        write_log(log, lines, figures.get("tokens_per_step", 0))
    unit = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
    # On Linux, at least the peak of this process, which the command inherits.
    figures["memory_gib"] = usage.ru_maxrss * unit / 2**30
    figures["seconds"] = seconds
    return figures


def read_figures(lines, command, target=None):
    """Returns the figures in lines of output, [(seconds, line), ...]; see `measure_command`."""
    values = defaultdict(list)
    for _, line in lines:
        for pattern in PATTERNS:
            if match := re.search(pattern, line):
                values[match.lastgroup].append(float(match[1].replace(",", "")))
    figures = {name: median(numbers) for name, numbers in values.items()}
    evaluations = list(read_evaluations(lines))
    finals = [evaluation for evaluation in evaluations if evaluation[1] == "final"]
    for seconds, _, _, loss in finals or evaluations:  # finals cover the whole split
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


def read_evaluations(lines):
    """Yields (seconds, "val" or "final", step, loss) of each evaluation in lines of output."""
    for seconds, line in lines:
        if match := re.search(EVALUATION, line):
            yield seconds, "final" if match[1] else "val", int(match[2]), float(match[3])


def write_log(path, lines, tokens_per_step):
    """Writes the evaluations in lines of output, [(seconds, line), ...], for tools.plot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as log:
        for seconds, kind, step, loss in read_evaluations(lines):
            event = {"event": kind, "step": step, "tokens": int(step * tokens_per_step)}
            event |= {"elapsed_s": round(seconds, 2), "loss": loss}
            log.write(json.dumps(event) + "\n")


def print_medians(medians):
    """Prints {name of a command: figures} as a Markdown table, with ratios if there are two."""
    names = [name for name in COLUMNS if any(name in figures for figures in medians.values())]
    rows = [["", *(COLUMNS[name][0] for name in names)]]
    for command, figures in medians.items():
        rows.append([command, *(format_figure(name, figures) for name in names)])
    if "other" in medians:
        pairs = [(medians["folio"].get(name), medians["other"].get(name)) for name in names]
        ratios = [f"{folio / other:.3f}" if folio and other else "" for folio, other in pairs]
        rows.append(["folio / other", *ratios])
    print("", *format_table(rows), sep="\n")


def format_figures(figures):
    """Returns figures, {name: value}, as a line."""
    names = [name for name in COLUMNS if name in figures]
    return "; ".join(f"{COLUMNS[name][0]} {format_figure(name, figures)}" for name in names)


def format_figure(name, figures):
    """Returns a figure as text, empty if it is missing."""
    return format(figures[name], COLUMNS[name][1]) if name in figures else ""


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
