"""Measure training or sampling: time per step, to a loss or a text, memory, where the time goes.

    python -m tools.bench -- config/shakespeare_char.py --max_iters=300
    python -m tools.bench --target=1.9 --vs="python train.py …" --vs_dir=../nanoGPT -- config/…
    python -m tools.bench --script=sample --vs="python sample.py …" -- --out_dir=…
    python -m tools.bench --profile -- config/shakespeare_char.py
    python -m tools.bench --count config/shakespeare_char.py

What follows the lone -- are arguments of the script. Both commands run as whole processes, in turn,
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
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import ClassVar, Literal

from config import UserError, changed, load, setting
from safety import replacing, run

ROOT = Path(__file__).parent.parent
STEP = re.compile(r"iter (\d+): loss [\d.]+, time ([\d.]+)ms")
RATES = re.compile(r"mfu (-?[\d.]+)%, ([\d,]+) tokens/s")
EVALUATION = re.compile(r"step (\d+): train loss [\d.]+, val loss ([\d.]+)")
WRITTEN = re.compile(r"[\d,]+ tokens in [\d.]+ s, ([\d,]+) tokens/s; the first after ([\d.]+) s")
BREAK = "---------------"  # comes after each text
LENGTH = re.compile(r"--max_new_tokens[= ](\d+)")  # 500 if not told, here and in nanoGPT
WARM_UP_STEPS = 10  # are not counted


@dataclass(frozen=True)
class BenchConfig:
    """Measure a script, and another command in turn with it; times are from a process's start."""

    ARGUMENTS: ClassVar[str] = "[--key=value ...] -- ARGUMENTS OF THE SCRIPT"

    script: Literal["train", "sample"] = setting("train", "what to measure")
    runs: int = setting(3, "runs of each command, in turn", bounds="[1, inf)")
    target: float | None = setting(None, "validation loss whose time is measured")
    vs: str | None = setting(
        None, "command to compare with, which prints folio's or nanoGPT's lines"
    )
    vs_dir: str = setting(".", "folder to run it in")
    json: str | None = setting(None, "file for all that was measured")
    profile: bool = setting(False, "tell where the time of a step goes, instead")
    count: bool = setting(
        False, "count parameters and time of a token, instead; train.py's arguments follow"
    )

    def __post_init__(self):
        if self.json is not None and not Path(self.json).name:
            raise UserError(f"--json={self.json} names no file")
        if self.vs is None and self.vs_dir != ".":
            raise UserError("--vs_dir is the folder for --vs, which is not given")
        if self.count:
            raise UserError("--count comes first, and is another measurement")
        if self.profile and set(changed(self)) - {"script"} != {"profile"}:
            raise UserError("--profile is another measurement, and takes no setting but --script")


@dataclass
class Measured:
    """One run of a command, as read from what it printed and from the system."""

    seconds: float = 0.0  # from the start of the process to its end
    memory_gib: float = 0.0  # the most it held at once
    step_ms: list = field(default_factory=list)
    mfu: list = field(default_factory=list)  # percent
    tokens_per_s: list = field(default_factory=list)
    evaluations: list = field(default_factory=list)  # (seconds, step, validation loss)
    first_s: float | None = None  # to the first token, as the script says
    last_s: float = 0.0  # to the last line
    texts: list = field(default_factory=list)  # seconds, when each was there
    tail: list = field(default_factory=list)  # the last lines

    def read(self, line, seconds):
        """Take what a line tells that was printed `seconds` after the start."""
        self.last_s, self.tail = seconds, [*self.tail[-4:], line.strip()]
        if found := EVALUATION.search(line):
            self.evaluations.append((seconds, int(found[1]), float(found[2])))
        elif (found := STEP.search(line)) and int(found[1]) >= WARM_UP_STEPS:
            self.step_ms.append(float(found[2]))
            if rates := RATES.search(line):
                self.mfu.append(float(rates[1]))
                self.tokens_per_s.append(float(rates[2].replace(",", "")))
        elif found := WRITTEN.search(line):
            self.tokens_per_s.append(float(found[1].replace(",", "")))
            self.first_s = float(found[2])
        elif line.strip() == BREAK:
            self.texts.append(seconds)

    def rate_texts(self, length):
        """Take the tokens/s of one text after the other, where the script does not say."""
        if len(self.texts) > 1 and not self.tokens_per_s:
            spent = self.texts[-1] - self.texts[0]
            self.tokens_per_s.append((len(self.texts) - 1) * length / spent)

    def summary(self, target):
        """{figure: value}; None where the run had nothing of the kind."""
        reached = [seconds for seconds, _, loss in self.evaluations if loss <= (target or 0)]
        middle = {name: getattr(self, name) for name in ("step_ms", "tokens_per_s", "mfu")}
        return {
            **{name: median(values) if values else None for name, values in middle.items()},
            "to_target_s": reached[0] if reached else None,
            "val_loss": min((loss for *_, loss in self.evaluations), default=None),
            "first_s": self.first_s,
            "last_s": self.last_s,
            "seconds": self.seconds,
            "memory_gib": self.memory_gib,
        }


COLUMNS = {  # of the table: heading and format
    "step_ms": ("ms/step", ".2f"),
    "tokens_per_s": ("tokens/s", ",.0f"),
    "mfu": ("MFU, %", ".1f"),
    "to_target_s": ("s to target", ".1f"),
    "val_loss": ("best val loss", ".4f"),
    "first_s": ("s to first token", ".2f"),
    "last_s": ("s to last line", ".2f"),
    "seconds": ("whole process, s", ".2f"),
    "memory_gib": ("memory, GiB", ".2f"),
}
OF_TRAINING, OF_SAMPLING = ("step_ms", "mfu", "to_target_s", "val_loss"), ("first_s", "last_s")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--count"]:
        from tools import count

        count.print_counts([each for each in argv[1:] if each != "--"])
        return
    cut = argv.index("--") if "--" in argv else len(argv)
    if any(each.endswith(".py") for each in argv[:cut]):
        raise UserError("the arguments of the script, config files too, come after a lone --")
    config, arguments = load(BenchConfig, argv[:cut]), argv[cut + 1 :]
    if config.profile:
        from tools import roofline  # torch, which the other measurements do without

        print(where())
        profiles = {"train": roofline.profile, "sample": roofline.profile_sampling}
        profiles[config.script](arguments)
        return
    with replacing(config.json) if config.json else nullcontext([None]) as [file]:
        measured = measure_in_turn(config, arguments)
        medians = {name: medians_of(runs, config.target) for name, runs in measured.items()}
        commands = {"folio": shlex.join([f"{config.script}.py", *arguments]), "other": config.vs}
        print_table(config, commands, medians)
        if file:
            runs = {name: [asdict(each) for each in runs] for name, runs in measured.items()}
            content = {"where": where(), "settings": asdict(config), "commands": commands}
            file.write(json.dumps(content | {"medians": medians, "runs": runs}, indent=1).encode())


def measure_in_turn(config, arguments):
    """{name: a Measured for each of its runs} of folio and of the other command."""
    # The other goes first: if a command is mistyped, it is that one.
    commands = {"other": (split(config.vs), config.vs_dir)} if config.vs is not None else {}
    commands["folio"] = ([sys.executable, str(ROOT / f"{config.script}.py"), *arguments], ".")
    measured = {name: [] for name in reversed(commands)}
    for turn in range(config.runs):
        for name, (command, folder) in commands.items():
            with tempfile.TemporaryDirectory() as out_dir:  # a measurement leaves no run behind
                alone = [f"--out_dir={out_dir}", "--init_from=scratch", "--overwrite=True"]
                trains = name == "folio" and config.script == "train"
                run = measure([*command, *(alone if trains else [])], folder)
            if config.script == "train" and not run.step_ms and not run.evaluations:
                lines = " / ".join(run.tail)
                raise UserError(f"{shlex.join(command)} printed no line of a training: {lines}")
            if config.script == "sample":
                told = LENGTH.search(shlex.join(command))
                run.rate_texts(length=int(told[1]) if told else 500)
            measured[name].append(run)
            print(f"run {turn + 1} of {name}: {in_words(run.summary(config.target))}", flush=True)
    return measured


def split(command):
    """A command's words. Raises UserError where a shell would not understand it either."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"--vs={command}: {error}") from error
    if not words:
        raise UserError("--vs is empty: it is the command to compare with")
    return words


def measure(command, folder):
    """Run a command to its end and read what it prints. Raises UserError where it fails.

    Whatever stops the measurement stops the command, too.
    """
    measured, start = Measured(), time.perf_counter()
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},  # lines count when they are printed
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise UserError(f"cannot run {shlex.join(command)} in {folder}: {error}") from error
    try:
        for line in process.stdout:
            measured.read(line, time.perf_counter() - start)
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    measured.seconds = time.perf_counter() - start
    measured.memory_gib = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 2**30
    if status:
        status = os.waitstatus_to_exitcode(status)
        lines = " / ".join(measured.tail)
        raise UserError(f"{shlex.join(command)} ended with status {status}: {lines}")
    return measured


def in_words(figures):
    parts = (
        f"{COLUMNS[name][0]} {value:{COLUMNS[name][1]}}"
        for name, value in figures.items()
        if value is not None
    )
    return "; ".join(parts)


def medians_of(runs, target):
    """{figure: its median over the runs}; None where one of them has none."""
    summaries = [each.summary(target) for each in runs]
    columns = {key: [summary[key] for summary in summaries] for key in COLUMNS}
    return {key: None if None in values else median(values) for key, values in columns.items()}


def print_table(config, commands, medians):
    """Print the medians, and their ratios, as a table for RESULTS.md."""
    others = OF_TRAINING if config.script == "sample" else OF_SAMPLING
    rows, columns = dict(medians), {key: COLUMNS[key] for key in COLUMNS if key not in others}
    if "other" in medians:
        pairs = {key: (medians["folio"][key], medians["other"][key]) for key in columns}
        rows["folio / other"] = {
            key: ours / theirs if ours and theirs else None for key, (ours, theirs) in pairs.items()
        }
    print(f"\nmedians of {config.runs} runs in turn; {where()}\n")
    for name in medians:
        print(f"    {name}: {commands[name]}")
    print(f"\n| | {' | '.join(heading for heading, _ in columns.values())} |")
    print(f"| --- {'| --- ' * len(columns)}|")
    for name, row in rows.items():
        form = {key: ".3f" if "/" in name else columns[key][1] for key in columns}
        cells = ("" if row[key] is None else f"{row[key]:{form[key]}}" for key in columns)
        print(f"| {name} | {' | '.join(cells)} |")


def where():
    """The machine, the versions, the date and the commit of a measurement."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    models = re.findall(r"model name\s*: (.*)", cpuinfo)
    return (
        f"{time.strftime('%Y-%m-%d')}, {len(models) or os.cpu_count()} cores of "
        f"{models[0] if models else processor}, {gpu}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, commit {commit()}"
    )


def commit():
    """The commit that is checked out, with -dirty where files differ from it."""
    try:
        git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        return subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    except OSError:  # no git here
        return "unknown"


if __name__ == "__main__":
    run(main)
