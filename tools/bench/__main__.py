"""Measure a script: time per step, speed, loss and memory.

    python -m tools.bench -- config/shakespeare_char.py --max_iters=300
    python -m tools.bench --vs="python train.py ..." --vs_dir=../nanoGPT -- config/...
    python -m tools.bench --script=sample --vs="python sample.py ..." -- --out_dir=...
    python -m tools.bench --profile -- config/shakespeare_char.py

Commands run alternately as whole processes, and the figures are medians over the runs.
"""

import shlex
import sys
import tempfile
from dataclasses import dataclass
from typing import Literal

from folio.cli import process
from folio.cli.settings import ROOT, load_settings, setting


@dataclass(frozen=True)
class BenchConfig:
    """Measure a script, and optionally another command, alternately."""

    arguments: tuple = setting((), "arguments of the script")
    script: Literal["train", "sample", "prepare"] = setting("train", "script to measure")
    runs: int = setting(3, "runs of each command", "[1, inf)")
    vs: str | None = setting(None, "command to compare with, such as nanoGPT's script")
    vs_dir: str = setting(".", "folder of the --vs command")
    profile: bool = setting(False, "print where the time of a step of train.py goes")

    def __post_init__(self):
        if self.profile and self.script != "train":
            raise ValueError("--profile is for --script=train only")


process.start(__name__, BenchConfig)  # --help must not wait for torch

from tools.bench import measure
from tools.bench.profile import profile_training
from tools.table import format_table


def main(argv=None):
    settings = load_settings(BenchConfig, argv)
    if settings.profile:
        print(measure.describe_machine())
        profile_training(settings.arguments)
        return
    commands = {}  # {program: (command, folder)}
    with tempfile.TemporaryDirectory() as out_dir:
        folio = [sys.executable, str(ROOT / f"{settings.script}.py"), *settings.arguments]
        if settings.script == "train":
            folio += [f"--out_dir={out_dir}", "--overwrite=True"]
        if settings.vs:  # runs first, because it is the command that may be mistyped
            commands["other"] = shlex.split(settings.vs), settings.vs_dir
        commands["folio"] = folio, "."
        measured = measure.measure_alternately(
            commands, settings.runs, lambda command, _: measure.measure_command(*command)
        )
    print(f"\nmedians of {settings.runs} alternating runs; {measure.describe_machine()}\n")
    print(f"    folio: {settings.script}.py {shlex.join(settings.arguments)}")
    if settings.vs:
        print(f"    other: {settings.vs}")
    rows = [measure.make_row(figure, figure, measured) for figure in measure.FORMATS]
    print("", *format_table([measure.HEADER, *rows]), sep="\n")


if __name__ == "__main__":
    process.run(main)
