"""Measure a script: time per step, to a validation loss or to a text, and memory.

    python -m tools.bench -- config/shakespeare_char.py --max_iters=300
    python -m tools.bench --target=1.9 --vs="python train.py ..." --vs_dir=../nanoGPT -- config/...
    python -m tools.bench --script=sample --vs="python sample.py ..." -- --out_dir=...
    python -m tools.bench --profile -- config/shakespeare_char.py
    python -m tools.bench --count -- config/shakespeare_char.py

The arguments after -- are passed to the script. Commands run alternately as whole
processes, and the figures are medians over the runs. Instead, --profile prints the time of
each operation of a step, and --count a model's parameters and FLOPs.
"""

import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import ClassVar, Literal

from folio import process
from folio.errors import UserError
from folio.fields import setting
from folio.settings import ROOT, load, parse_arguments

COLUMNS = {  # figure: (heading in the table, format)
    "step_ms": ("ms/step", ".2f"),
    "tokens_per_s": ("tokens/s", ",.0f"),
    "mfu": ("MFU (%)", ".1f"),
    "to_target_s": ("s to target", ".1f"),
    "val_loss": ("best val loss", ".4f"),
    "first_s": ("s to first token", ".2f"),
    "last_s": ("s to last line", ".2f"),
    "seconds": ("whole process, s", ".2f"),
    "memory_gib": ("memory, GiB", ".2f"),
}
PATTERNS = (  # "iter" lines count from step 10 on, because the first steps are a warmup
    r"iter \d{2,}: loss \d+\.?\d*, time (?P<step_ms>\d+\.?\d*)ms",
    r"iter \d{2,}: .* mfu (?P<mfu>\d+\.?\d*)%",
    r"iter \d{2,}: .* (?P<tokens_per_s>[\d,]+) tokens/s",
    r"tokens per iteration will be: (?P<tokens_per_step>[\d,]+)",  # nanoGPT
    r"step \d+: train loss \d+\.?\d*, val loss (?P<val_loss>\d+\.?\d*)",
    r"tokens in \d+\.?\d* s, (?P<tokens_per_s>[\d,]+) tokens/s",
    r"; first token after (?P<first_s>\d+\.?\d*) s",
    r"^compiled in (?P<compile_s>\d+) s",
    r"\b(?P<passed>\d+) passed",
    r"\b(?P<skipped>\d+) skipped",
)
SEPARATOR = "---------------"  # printed after each text


@dataclass(frozen=True)
class BenchConfig:
    """Measure a script, and optionally another command, alternately."""

    ARGUMENTS: ClassVar[str] = "[--name=value ...] -- ARGUMENTS OF THE SCRIPT"
    OPERANDS: ClassVar[str] = "arguments"

    arguments: tuple = setting((), "arguments of the script")
    script: Literal["train", "sample", "prepare"] = setting("train", "script to measure")
    runs: int = setting(3, "runs of each command", "[1, inf)")
    target: float | None = setting(None, "measure the time to reach this validation loss")
    vs: str | None = setting(None, "command to compare with, such as nanoGPT's script")
    vs_dir: str = setting(".", "folder of the --vs command")
    profile: bool = setting(False, "print the time of each operation in a step instead")
    count: bool = setting(False, "print the parameters and FLOPs of train.py's model instead")

    def __post_init__(self):
        if self.count and self.profile:
            raise UserError("use only one of --count and --profile")
        if self.profile and self.script == "prepare":
            raise UserError("--profile needs --script=train or sample, not prepare")
        try:
            shlex.split(self.vs or "")
        except ValueError as error:  # an open quote
            raise UserError(f"--vs={self.vs} is not a command: {error}") from error


if __name__ == "__main__":
    process.start(parse_arguments, BenchConfig)  # --help must not wait for torch

import torch

from tools import count, roofline
from tools.table import aligned


def main(argv=None):
    settings = load(BenchConfig, argv)
    if settings.count:
        count.print_counts(settings.arguments)
    elif settings.profile:
        print(where())
        profiles = {"train": roofline.profile_training, "sample": roofline.profile_sampling}
        profiles[settings.script](settings.arguments)
    else:
        compare(settings)


# Comparing


def compare(settings):
    """Measures the commands and prints a table of medians."""
    medians = {}
    for name, runs in measure_alternately(settings).items():
        known = [key for key in COLUMNS if all(key in run for run in runs)]
        medians[name] = {key: median(run[key] for run in runs) for key in known}
    print(f"\nmedians of {settings.runs} alternating runs; {where()}\n")
    print(f"    folio: {settings.script}.py {shlex.join(settings.arguments)}")
    if settings.vs:
        print(f"    other: {settings.vs}")
    print_table(medians)


def measure_alternately(settings):
    """Returns {"folio": [figures of each run]}, and likewise "other" if there is --vs.

    train.py writes to a temporary folder.
    """
    with tempfile.TemporaryDirectory() as out_dir:
        ours = [sys.executable, str(ROOT / f"{settings.script}.py"), *settings.arguments]
        if settings.script == "train":
            ours += [f"--out_dir={out_dir}", "--overwrite=True"]
        commands = {"folio": (ours, ".")}
        if settings.vs:  # runs first, because it is the command that may be mistyped
            commands = {"other": (shlex.split(settings.vs), settings.vs_dir)} | commands
        found = {name: [] for name in commands}
        for turn in range(settings.runs):
            for name, command in commands.items():
                run = figures(measure(*command), settings.target)
                found[name].append(run)
                known = [f"{COLUMNS[key][0]} {cell(key, run)}" for key in COLUMNS if key in run]
                print(f"run {turn + 1} of {name}: {'; '.join(known)}", flush=True)
    return found


def print_table(medians):
    """Prints {name of a command: figures} as a Markdown table, with ratios if there are two."""
    rows = [["", *(heading for heading, _ in COLUMNS.values())]]
    rows += [[name, *(cell(key, medians[name]) for key in COLUMNS)] for name in medians]
    if "other" in medians:
        pairs = [(medians["folio"].get(key), medians["other"].get(key)) for key in COLUMNS]
        rows.append(["folio / other", *(f"{a / b:.3f}" if a and b else "" for a, b in pairs)])
    filled = [column for column in zip(*rows, strict=True) if any(column[1:])]
    print("", *aligned(list(zip(*filled, strict=True))), sep="\n")


def cell(name, found):
    """Returns a figure as text, empty if it is missing."""
    return f"{found[name]:{COLUMNS[name][1]}}" if name in found else ""


def where():
    """Returns the date, the machine, the versions and the commit of a measurement."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    cpuinfo = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    names = re.findall(r"model name\s*: (.*)", cpuinfo)
    processor = names[0] if names else platform.processor() or platform.machine()
    git = "git describe --always --dirty"  # in a shell, because git may not be installed
    found = subprocess.run(git, shell=True, cwd=ROOT, capture_output=True, text=True).stdout
    return (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores of {processor}, {gpu}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"commit {found.strip() or 'unknown'}"
    )


# Measuring one command


def measure(command, folder="."):
    """Runs a command in a folder, and returns {name: [(seconds, value), ...]}.

    Seconds count from the start of the process to the line with the value. Raises UserError if
    the command cannot be started or fails. An exception, such as Interrupted, ends the command too.
    """
    start, lines = time.perf_counter(), []
    try:
        child = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},  # times are those of printing
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise UserError(f"cannot run {shlex.join(command)} in {folder}: {error}") from error
    try:
        for line in child.stdout:
            lines.append((time.perf_counter() - start, line.strip()))
        _, status, usage = os.wait4(child.pid, 0)
    except BaseException:
        child.terminate()
        child.wait()
        raise
    seconds = time.perf_counter() - start
    if code := os.waitstatus_to_exitcode(status):
        tail = " / ".join(line for _, line in lines[-5:])
        raise UserError(f"{shlex.join(command)} ended with status {code}: {tail}")
    unit = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
    values = read_values(lines, command)
    values["seconds"] = [(seconds, seconds)]
    # On Linux, at least the peak of this process, which the command inherits.
    values["memory_gib"] = [(seconds, usage.ru_maxrss * unit / 2**30)]
    return values


def read_values(lines, command):
    """Returns the values in lines of output, [(seconds, line), ...], like `measure`."""
    values = defaultdict(list)
    for seconds, line in lines:
        for pattern in PATTERNS:
            if found := re.search(pattern, line):
                for name, text in found.groupdict().items():
                    values[name].append((seconds, float(text.replace(",", ""))))
        values["last_s"] = [(seconds, seconds)]
    ends = [seconds for seconds, line in lines if line == SEPARATOR]
    if len(ends) > 1 and "tokens_per_s" not in values:  # nanoGPT's sample.py
        length = re.search(r"--max_new_tokens[= ](\d+)", shlex.join(command))
        tokens = (len(ends) - 1) * (int(length[1]) if length else 500)  # the default
        values["tokens_per_s"] = [(ends[-1], tokens / (ends[-1] - ends[0]))]
    return values


def figures(values, target=None):
    """Returns {name: value} of one run: the lowest validation loss, medians of other values.

    `target` is the validation loss of "to_target_s".
    """
    found = {name: median(value for _, value in pairs) for name, pairs in values.items()}
    tokens = found.pop("tokens_per_step", None)
    if tokens and "step_ms" in found:  # nanoGPT's train.py prints no speed
        found.setdefault("tokens_per_s", tokens / found["step_ms"] * 1e3)
    if losses := values.get("val_loss", []):
        found["val_loss"] = min(loss for _, loss in losses)
    reached = [seconds for seconds, loss in losses if target is not None and loss <= target]
    if reached:
        found["to_target_s"] = reached[0]
    return found


if __name__ == "__main__":
    process.run(main)
