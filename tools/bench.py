"""Measure a script: time per step, to a validation loss or to a text, and memory.

    python -m tools.bench -- config/shakespeare_char.py --max_iters=300
    python -m tools.bench --target=1.9 --vs="python train.py ..." --vs_dir=../nanoGPT -- config/...
    python -m tools.bench --script=sample --vs="python sample.py ..." -- --out_dir=...
    python -m tools.bench --profile -- config/shakespeare_char.py
    python -m tools.bench --count -- config/shakespeare_char.py
    python -m tools.bench --gpu_suite --vs_dir=../nanoGPT

The arguments after -- are passed to the script. Commands run alternately as whole
processes, and the figures are medians over the runs. Instead, --profile prints the time of
each operation of a step, and --count a model's parameters and FLOPs. --gpu_suite makes the
measurements of tools/gpu_parts.py.
"""

import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
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


# Methods of gpu_parts.Parts.
PARTS = ("speed", "curve", "fast", "sampling", "memory", "tests", "lecture", "candidates")
DEFAULT_PARTS = ",".join(PARTS)
MODES = ("profile", "count", "gpu_suite")


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
    vs_dir: str = setting(".", "folder of the --vs command, or of nanoGPT for --gpu_suite")
    profile: bool = setting(False, "print the time of each operation in a step instead")
    count: bool = setting(False, "print the parameters and FLOPs of train.py's model instead")
    gpu_suite: bool = setting(False, "measure folio and nanoGPT (--vs_dir) on a GPU instead")
    parts: str = setting(DEFAULT_PARTS, "parts of --gpu_suite, separated by commas")
    results: str = setting("out-gpu-suite", "folder for the results of --gpu_suite")


def split_arguments(argv):
    """Returns the arguments before and after --."""
    cut = argv.index("--") if "--" in argv else len(argv)
    return argv[:cut], argv[cut + 1 :]


if __name__ == "__main__":  # --help must not wait for torch
    process.start(parse_arguments, BenchConfig, split_arguments(sys.argv[1:])[0])

import torch

from tools import count, gpu_suite, roofline
from tools.measure import figures, measure
from tools.table import aligned


def main(argv=None):
    own, rest = split_arguments(sys.argv[1:] if argv is None else argv)
    settings = load(BenchConfig, own)
    settings = replace(settings, arguments=(*settings.arguments, *rest))
    modes = [name for name in MODES if getattr(settings, name)]
    if len(modes) > 1:
        raise UserError(f"use only one of --{' --'.join(modes)}")
    if settings.parts != DEFAULT_PARTS and not settings.gpu_suite:
        raise UserError("--parts needs --gpu_suite")
    if settings.gpu_suite:
        run_gpu_suite(settings)
    elif settings.count:
        count.print_counts(settings.arguments)
    elif settings.profile:
        print(where())
        profiles = {"train": roofline.profile_training, "sample": roofline.profile_sampling}
        if settings.script not in profiles:
            raise UserError("--profile needs --script=train or sample")
        profiles[settings.script](settings.arguments)
    else:
        compare(settings)


def run_gpu_suite(settings):
    """Runs the selected parts of tools.gpu_suite."""
    parts = [name.strip() for name in settings.parts.split(",")]
    if unknown := set(parts) - set(PARTS):
        raise UserError(f"--parts has {unknown.pop()!r}; the parts are {', '.join(PARTS)}")
    if not Path(settings.vs_dir, "configurator.py").is_file():  # folio has none
        raise UserError(f"--vs_dir={settings.vs_dir} is not a copy of nanoGPT")
    has_device = any(each.startswith("--device=") for each in settings.arguments)
    if not torch.cuda.is_available() and not has_device:
        raise UserError("--gpu_suite needs a GPU; to try it on a CPU, add -- --device=cpu")
    gpu_suite.Suite(settings.results, settings.vs_dir, settings.arguments, where()).run(parts)


def compare(settings):
    """Measures the commands and prints a table of medians."""
    medians = {}
    for name, runs in measure_alternately(settings).items():
        found = [figures(values, settings.target) for values in runs]
        known = [key for key in COLUMNS if all(key in each for each in found)]
        medians[name] = {key: median(each[key] for each in found) for key in known}
    print(f"\nmedians of {settings.runs} alternating runs; {where()}\n")
    print(f"    folio: {settings.script}.py {shlex.join(settings.arguments)}")
    if settings.vs is not None:
        print(f"    other: {settings.vs}")
    print_table(medians)


def measure_alternately(settings):
    """Returns {"folio": [values of each run]}, and likewise "other" if there is --vs.

    See tools.measure for the values. train.py writes to a temporary folder.
    """
    with tempfile.TemporaryDirectory() as out_dir:
        ours = [sys.executable, str(ROOT / f"{settings.script}.py"), *settings.arguments]
        if settings.script == "train":
            ours += [f"--out_dir={out_dir}", "--overwrite=True"]
        commands = {"folio": (ours, ".")}
        if settings.vs is not None:  # runs first, because it is the command that may be mistyped
            commands = {"other": (split_command(settings.vs), settings.vs_dir)} | commands
        measured = {name: [] for name in commands}
        for turn in range(settings.runs):
            for name, command in commands.items():
                values = measure(*command)
                measured[name].append(values)
                found = figures(values, settings.target)
                known = [f"{COLUMNS[key][0]} {cell(key, found)}" for key in COLUMNS if key in found]
                print(f"run {turn + 1} of {name}: {'; '.join(known)}", flush=True)
    return measured


def split_command(text):
    """Returns the arguments of a command as typed into a shell."""
    try:
        words = shlex.split(text)
    except ValueError as error:  # an open quote
        raise UserError(f"--vs is not a command: {error}: {text}") from error
    if not words:
        raise UserError("--vs must not be empty")
    return words


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


if __name__ == "__main__":
    process.run(main)
