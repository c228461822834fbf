"""Measure a script: time per step, to a validation loss or to a text.

    python -m tools.bench -- config/shakespeare_char.py --max_iters=300
    python -m tools.bench --target=1.9 --vs="python train.py ..." --vs_dir=../nanoGPT -- config/...
    python -m tools.bench --runs=1 --logs=runs --vs="python train.py ..." --vs_dir=../nanoGPT -- ...
    python -m tools.bench --script=sample --vs="python sample.py ..." -- --out_dir=...
    python -m tools.bench --profile -- config/shakespeare_char.py

Commands run alternately as whole processes, and the figures are medians over the runs.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from folio.cli import process
from folio.cli.settings import load_settings, setting


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
    logs: str | None = setting(None, "folder for the losses of the last runs, for tools.plot")
    profile: bool = setting(False, "print where the time of a step of the script goes")


process.start(__name__, BenchConfig)  # --help must not wait for torch

from tools.bench.measure import compare_commands, describe_machine
from tools.bench.profile import profile_sampling, profile_training


def main(argv=None):
    settings = load_settings(BenchConfig, argv)
    if settings.profile:
        print(describe_machine())
        profile = profile_sampling if settings.script == "sample" else profile_training
        profile(settings.arguments)
    else:
        compare_commands(settings)


if __name__ == "__main__":
    process.run(main)
