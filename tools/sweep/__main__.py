"""Train every combination of settings that have several values, and compare the runs.

    python -m tools.sweep config/shakespeare_char.py --learning_rate=1e-3,3e-4 --n_layer=4,6
    python -m tools.sweep config/shakespeare_char.py config/mine.py --seed=1,2,3 --jobs=2
    python -m tools.sweep config/shakespeare_char.py --learning_rate=log:1e-4:1e-2 --trials=24 \\
        --eval_interval=200 --halving=3

The same command continues a sweep that was stopped: finished runs are kept, stopped and failed runs
are resumed. `python -m tools.plot out-sweep` compares the runs, even while the sweep is running.
"""

import itertools
import math
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from folio.cli import process
from folio.cli.errors import UserError
from folio.cli.files import is_file, lock_folder
from folio.cli.settings import (
    changed_settings,
    load_settings,
    names_with_scope,
    parse_arguments,
    setting,
)


@dataclass(frozen=True)
class SweepSettings:
    """Train every combination of the settings that have several values, each in its own folder.

    In a flag, several values are separated by commas: --learning_rate=1e-3,3e-4
    In a config file, they are a list: learning_rate = [1e-3, 3e-4]
    With --trials, also ranges: --learning_rate=log:1e-4:1e-2 --dropout=uniform:0:0.3
    The values of seed repeat each combination, which is compared by its mean loss: --seed=1,2,3
    All settings of train.py except those about files can have several: see python train.py --help
    """

    ARGUMENTS: ClassVar[str] = "[CONFIG_FILE ...] [--name=value[,value ...] ...]"

    sweep_dir: str = setting("out-sweep", "parent folder of the runs", scope="files")
    jobs: int = setting(
        1, "number of concurrent runs, which share the cores or GPUs", "[1, inf)", scope="machine"
    )
    trials: int | None = setting(None, "random combinations to try; None: all", "[1, inf)")
    halving: int | None = setting(
        None, "compare runs after 1/5 and 1/3 of the steps; the best 1/N continue", "[2, inf)"
    )


def answer_help():
    """Prints the help text and exits, if it is requested."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        parse_arguments(SweepSettings)


if __name__ == "__main__":
    process.start(answer_help)  # --help must not wait for torch

import numpy as np

from folio.checkpoint.format import load_checkpoint
from folio.checkpoint.run_dir import RunDir
from folio.data.dataset import load_dataset
from folio.hardware.device import resolve_device
from folio.training.setup import MODEL_SETTINGS
from tools.plot.runs import grouped, read
from tools.plot.table import aligned, compared
from tools.sweep.workers import RUN_SETTINGS, last_line, rung_steps, train_all
from train import TrainConfig

LIMIT = 200  # most values of a range, and combinations without --trials
SEED = 1337  # of the random choice, which is the same when a sweep continues
SPACINGS = {"uniform": np.linspace, "log": np.geomspace}  # of the values of a range


@dataclass(frozen=True)
class SweepConfig(TrainConfig, SweepSettings):
    """All settings of a sweep."""

    def __post_init__(self):
        super().__post_init__()
        if self.halving and self.minutes:
            raise ValueError("--halving compares runs at the same step: add --minutes=None")
        allowed = {"out_dir", "init_from"}  # presets set out_dir
        forbidden = names_with_scope(TrainConfig, "files") - allowed
        if names := sorted(forbidden & changed_settings(self).keys()):
            raise ValueError(f"a sweep starts and resumes runs automatically: remove {names[0]}")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if any(re.match(r"--out_dir\b", argument) for argument in argv):
        raise UserError("each run of a sweep has its own folder: use --sweep_dir, not --out_dir")
    grid = Grid(argv)
    sweep, combinations = grid.first, grid.combinations()
    planned = [run for combination in combinations for run in combination]
    datasets = dict.fromkeys(settings.dataset for _, settings in planned)
    data = {name: load_dataset(name).fingerprint for name in datasets}
    for folder, settings in planned:
        rung_steps(settings, settings.halving)  # raises UserError if there are too few steps
        check_earlier(folder, settings, data[settings.dataset])
    with lock_folder(sweep.sweep_dir):
        print(f"{len(planned)} runs", flush=True)
        failed = train_all(combinations, sweep.halving, sweep.jobs)
        trained = [read(folder) for folder, _ in planned if is_file(RunDir(folder).log)]
        if trained:
            print("", *aligned(compared(grouped(trained))), sep="\n")
    if failed:
        errors = "; ".join(f"{folder.name}: {last_line(folder)}" for folder in failed)
        raise UserError(
            f"{len(failed)} of {len(planned)} runs failed: {errors}; to try them again, run the "
            "same command"
        )


def check_earlier(folder, settings, data):
    """Raises UserError if a folder contains a run with other settings or data.

    `data` is the fingerprint of the dataset.
    """
    if not is_file(RunDir(folder).last):
        return
    earlier = load_checkpoint(RunDir(folder).last, optimizers=False)
    names = names_with_scope(TrainConfig, "run") - {"max_iters"}
    if settings.init_from != "scratch":  # its model is the default
        names -= MODEL_SETTINGS - changed_settings(settings).keys()
    differences = []
    for name in sorted(names & earlier.settings.keys()):
        before, now = earlier.settings[name], getattr(settings, name)
        if now not in (before, "auto"):
            differences.append(f"{name} was {before!r}, now {now!r}")
    if earlier.data != data:
        differences.append(f"the content of dataset {settings.dataset} has changed")
    if differences:
        raise UserError(
            f"{folder} contains another run: {'; '.join(differences)}; choose another --sweep_dir"
        )


# Combinations


class Grid:
    """The settings of a command line in which some have several values.

    `first` has the first value of each, `names` are those with several. Each combination of their
    values has a run for each value of the seed.
    """

    def __init__(self, argv):
        """Raises UserError like load_settings, or if no setting of train.py has several values."""
        self.argv, self.sizes = argv, {}  # {name: number of values}
        self.first = self._at({}, quiet=False)
        self.names = [name for name, size in self.sizes.items() if size > 1]
        for name in self.names:
            if name not in RUN_SETTINGS:
                raise UserError(f"{name} has several values, but must be the same for all runs")
        if not self.names:
            raise UserError(
                "there is nothing to compare: give a setting several values, in a flag as "
                "--learning_rate=1e-3,3e-4 or in a config file as learning_rate = [1e-3, 3e-4]"
            )

    def combinations(self):
        """Returns a list of combinations, tuples of (folder, settings): one run for each seed.

        They are all, or --trials of them at random. The last setting varies fastest. Equal
        combinations count once. Raises UserError if there are too many.
        """
        compared = [name for name in self.names if name != "seed"]
        sizes = [self.sizes[name] for name in compared]
        if not self.first.trials and (total := math.prod(sizes)) >= LIMIT:
            raise UserError(f"there are {total:,} combinations: use --trials=N to train N of them")
        combinations = {}
        for row in draw(sizes, self.first.trials):
            runs = {}
            for seed in range(self.sizes.get("seed", 1)):
                settings = self._at(dict(zip(compared, row, strict=True)) | {"seed": seed})
                runs[Path(settings.sweep_dir, run_name(settings, self.names))] = settings
            combinations[tuple(runs)] = tuple(runs.items())
        return list(combinations.values())

    def _at(self, indices, quiet=True):
        """Returns the settings with the values at `indices`, and the first of every other list."""

        def choose(name, value):
            values = values_of(name, value)
            self.sizes[name] = max(len(values), self.sizes.get(name, 1))
            return values[indices.get(name, 0) % len(values)]  # a list may replace a longer one

        return load_settings(SweepConfig, self.argv, {"device": resolve_device}, choose, quiet)


def values_of(name, value):
    """Returns the values that are meant by what a config file assigns, or by a flag's texts.

    They are those of a list, or of a range, "uniform:LOW:HIGH" or "log:LOW:HIGH": at most LIMIT
    evenly spaced numbers of four digits, or integers. For "log", their logarithms are evenly
    spaced. Raises UserError if the ends of a range are invalid.
    """
    values = value if isinstance(value, list | tuple | range) and len(value) else [value]
    kind, *ends = str(values[0]).split(":")
    if len(values) > 1 or kind not in SPACINGS:
        return values
    try:
        low, high = map(float, ends)
        if not low < high < math.inf:
            raise ValueError
        numbers = SPACINGS[kind](low, high, LIMIT).tolist()
    except ValueError as error:
        rule = "LOW < HIGH" if kind == "uniform" else "0 < LOW < HIGH"
        raise UserError(f"{values[0]} is not a range: write {kind}:LOW:HIGH, {rule}") from error
    is_integer = type(getattr(SweepConfig, name)) is int  # the default value
    return list(dict.fromkeys(round(x) if is_integer else float(f"{x:.4g}") for x in numbers))


def draw(sizes, count=None):
    """Returns the indices of all combinations, or of `count`. A larger `count` only adds some."""
    if count is None or count >= math.prod(sizes):
        return list(itertools.product(*map(range, sizes)))
    generator, drawn = random.Random(SEED), set()
    while len(drawn) < count:
        drawn.add(tuple(generator.randrange(size) for size in sizes))
    return sorted(drawn)


def run_name(settings, names):
    """Returns a folder name with the values of some settings: n_layer=4,seed=1."""
    return quote(",".join(f"{name}={getattr(settings, name)}" for name in names), safe=",+=")


if __name__ == "__main__":
    process.run(main)
