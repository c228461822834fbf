"""Measure a training: time per step, time to a loss, memory, and where the time goes.

    python -m tools.bench -- config/shakespeare_char.py --max_iters=300
    python -m tools.bench --target=1.9 --vs="python train.py …" --vs_dir=../nanoGPT -- config/…
    python -m tools.bench --profile=True -- config/shakespeare_char.py

What follows the lone -- are arguments of train.py. Both commands run as whole processes, in turn,
and are read by the lines that folio and nanoGPT alike print; figures are medians over the runs.
"""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from config import UserError, load, setting
from safety import replacing, run

ROOT = Path(__file__).parent.parent
STEP = re.compile(r"iter (\d+): loss [\d.]+, time ([\d.]+)ms")
RATES = re.compile(r"mfu (-?[\d.]+)%, ([\d,]+) tokens/s")
EVALUATION = re.compile(r"step (\d+): train loss [\d.]+, val loss ([\d.]+)")
WARM_UP_STEPS = 10  # are not counted


@dataclass(frozen=True)
class BenchConfig:
    """Measure train.py with the arguments after a lone --, beside another command if one is given.

    Times are from the start of a process, losses those on validation."""

    runs: int = setting(3, "runs of each command, in turn", bounds="[1, inf)")
    target: float | None = setting(None, "validation loss whose time is measured")
    vs: str | None = setting(None, "command to compare with, which prints nanoGPT's lines")
    vs_dir: str = setting(".", "folder to run it in")
    json: str | None = setting(None, "file for all that was measured")
    profile: bool = setting(False, "tell where the time of a step goes, instead")


@dataclass
class Measured:
    """One run of a command, as read from what it printed and from the system."""

    seconds: float = 0.0  # from the start of the process to its end
    memory_gib: float = 0.0  # the most it held at once
    step_ms: list = field(default_factory=list)
    mfu: list = field(default_factory=list)  # percent
    tokens_per_s: list = field(default_factory=list)
    evaluations: list = field(default_factory=list)  # (seconds, step, validation loss)

    def read(self, line, seconds):
        """Take what a line tells that was printed `seconds` after the start."""
        if found := EVALUATION.search(line):
            self.evaluations.append((seconds, int(found[1]), float(found[2])))
        elif (found := STEP.search(line)) and int(found[1]) >= WARM_UP_STEPS:
            self.step_ms.append(float(found[2]))
            if rates := RATES.search(line):
                self.mfu.append(float(rates[1]))
                self.tokens_per_s.append(float(rates[2].replace(",", "")))

    def summary(self, target):
        """{figure: value}; None where the run had nothing of the kind."""
        reached = [seconds for seconds, _, loss in self.evaluations if loss <= (target or 0)]
        middle = {name: getattr(self, name) for name in ("step_ms", "tokens_per_s", "mfu")}
        return {
            **{name: median(values) if values else None for name, values in middle.items()},
            "to_target_s": reached[0] if reached else None,
            "val_loss": min((loss for *_, loss in self.evaluations), default=None),
            "seconds": self.seconds,
            "memory_gib": self.memory_gib,
        }


COLUMNS = {  # of the table: heading and format
    "step_ms": ("ms/step", ".2f"),
    "tokens_per_s": ("tokens/s", ",.0f"),
    "mfu": ("MFU, %", ".1f"),
    "to_target_s": ("s to target", ".1f"),
    "val_loss": ("best val loss", ".4f"),
    "seconds": ("whole process, s", ".1f"),
    "memory_gib": ("memory, GiB", ".2f"),
}


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)
    config, arguments = load(BenchConfig, argv[:cut]), argv[cut + 1 :]
    if config.profile:
        from tools.roofline import profile  # torch, which the other measurements do without

        print(where())
        profile(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:  # a measurement leaves no run behind
        ours = [sys.executable, str(ROOT / "train.py"), *arguments, "--overwrite=True"]
        commands = {"folio": ([*ours, f"--out_dir={folder}"], ".")}
        if config.vs:
            commands["other"] = (shlex.split(config.vs), config.vs_dir)
        measured = {name: [] for name in commands}
        for turn in range(config.runs):
            for name, command in commands.items():
                measured[name].append(measure(*command))
                figures = measured[name][-1].summary(config.target)
                print(f"run {turn + 1} of {name}: {in_words(figures)}", flush=True)
    report(config, {"folio": shlex.join(["train.py", *arguments]), "other": config.vs}, measured)


def measure(command, folder):
    """Run a command to its end and read what it prints. Raises UserError where it fails."""
    measured, start, tail = Measured(), time.perf_counter(), []
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},  # lines count when they are printed
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except OSError as error:
        raise UserError(f"cannot run {shlex.join(command)} in {folder}: {error}") from error
    with process.stdout as lines:
        for line in lines:
            measured.read(line, time.perf_counter() - start)
            tail = [*tail[-4:], line.strip()]
    _, status, usage = os.wait4(process.pid, 0)
    measured.seconds = time.perf_counter() - start
    measured.memory_gib = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 2**30
    if status:
        raise UserError(f"{shlex.join(command)} failed: {' / '.join(tail)}")
    return measured


def in_words(figures):
    parts = (
        f"{COLUMNS[name][0]} {value:{COLUMNS[name][1]}}"
        for name, value in figures.items()
        if value is not None
    )
    return "; ".join(parts)


def report(config, commands, measured):
    """Print the medians as a table for RESULTS.md; write all figures as JSON if asked."""
    medians = {}
    for name, runs in measured.items():
        summaries = [each.summary(config.target) for each in runs]
        columns = {key: [summary[key] for summary in summaries] for key in COLUMNS}
        medians[name] = {
            key: None if None in values else median(values) for key, values in columns.items()
        }
    rows = dict(medians)
    if config.vs:
        pairs = {key: (medians["folio"][key], medians["other"][key]) for key in COLUMNS}
        rows["folio / other"] = {
            key: ours / theirs if ours and theirs else None for key, (ours, theirs) in pairs.items()
        }
    print(f"\nmedians of {config.runs} runs in turn; {where()}\n")
    for name in measured:
        print(f"    {name}: {commands[name]}")
    print(f"\n| | {' | '.join(heading for heading, _ in COLUMNS.values())} |")
    print(f"| --- {'| --- ' * len(COLUMNS)}|")
    for name, row in rows.items():
        form = {key: ".3f" if "/" in name else COLUMNS[key][1] for key in COLUMNS}
        cells = ("" if row[key] is None else f"{row[key]:{form[key]}}" for key in COLUMNS)
        print(f"| {name} | {' | '.join(cells)} |")
    if config.json:
        content = {
            "where": where(),
            "settings": asdict(config),
            "commands": commands,
            "medians": medians,
            "runs": {name: [asdict(each) for each in runs] for name, runs in measured.items()},
        }
        with replacing(config.json) as [file]:
            file.write(json.dumps(content, indent=1).encode())


def where():
    """The machine, the versions, the date and the commit of a measurement."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    processor = platform.processor() or platform.machine()
    with open(os.devnull if not os.path.exists("/proc/cpuinfo") else "/proc/cpuinfo") as file:
        models = re.findall(r"model name\s*: (.*)", file.read())
    return (
        f"{time.strftime('%Y-%m-%d')}, {len(models) or os.cpu_count()} cores of "
        f"{models[0] if models else processor}, {gpu}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, commit {commit}"
    )


if __name__ == "__main__":
    run(main)
