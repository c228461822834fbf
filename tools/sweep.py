"""Train every combination of settings that have several values, and compare the runs.

    python -m tools.sweep config/shakespeare_char.py --learning_rate=1e-3,3e-4 --n_layer=4,6
    python -m tools.sweep config/shakespeare_char.py config/mine.py --seed=1,2,3 --jobs=2
    python -m tools.sweep config/shakespeare_char.py --learning_rate=log:1e-4:1e-2 --trials=24 \\
        --eval_interval=200 --halving=3
    python -m tools.sweep config/shakespeare_char.py --learning_rate=log:1e-4:1e-2 --trials=24 \\
        --search=tpe

In a config file, several values are a list: learning_rate = [1e-3, 3e-4]. The same command
continues a sweep that was stopped: finished runs are kept, stopped and failed runs are resumed.
`python -m tools.plot out-sweep` compares the runs, even while the sweep is running.
"""

import itertools
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal

from folio import process
from folio.errors import UserError
from folio.fields import RANGE_SIZE, setting
from folio.files import is_file, locked
from folio.settings import changed, names_in, parse_arguments


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
    trials: int | None = setting(None, "combinations to try; None: all", "[1, inf)")
    search: Literal["random", "tpe"] = setting(
        "random", "how trials are chosen; tpe: Optuna's tree-structured Parzen estimator"
    )
    halving: int | None = setting(
        None, "compare runs after 1/5 and 1/3 of the steps; the best 1/N continue", "[2, inf)"
    )


def answer_help():
    """Prints the help text and exits, if it is requested."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        parse_arguments(SweepSettings)


if __name__ == "__main__":
    process.start(answer_help)  # --help must not wait for torch

from folio.checkpoint import load
from folio.dataset import fingerprint
from folio.device import resolve_device
from folio.initial import RESUMING
from folio.plan import MODEL_SETTINGS
from folio.run_dir import RunDir
from folio.tracking import run_settings
from tools import runs
from tools.crew import RUN_SETTINGS
from tools.grid import Grid
from tools.groups import REPEATED, grouped
from tools.halving import Halving, rung_steps
from tools.search import Search
from tools.table import table
from tools.trainer import Trainer, failures, final_loss
from train import TrainConfig


@dataclass(frozen=True)
class SweepConfig(TrainConfig, SweepSettings):
    """All settings of a sweep."""

    def __post_init__(self):
        super().__post_init__()
        if not self.sweep_dir:
            raise UserError("sweep_dir must not be empty")
        if self.search == "tpe":
            self._check_tpe()
        if self.halving and self.minutes:
            raise UserError("--halving compares runs at the same step: add --minutes=None")
        allowed = {"out_dir"}  # which presets set
        if self.init_from not in RESUMING:
            allowed.add("init_from")
        refused = names_in(TrainConfig, "files") - allowed
        if wrong := sorted(refused & changed(self).keys()):
            raise UserError(f"a sweep starts and resumes runs automatically: remove {wrong[0]}")

    def _check_tpe(self):
        if not self.trials:
            raise UserError("--search=tpe needs the number of combinations to try: add --trials=N")
        if self.halving:
            raise UserError("--search=tpe trains all runs to the end: remove --halving")
        if not find_spec("optuna"):
            raise UserError("--search=tpe needs Optuna: pip install optuna")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if any(re.match(r"--out_dir\b", argument) for argument in argv):
        raise UserError("each run of a sweep has its own folder: use --sweep_dir, not --out_dir")
    grid = Grid(SweepConfig, argv, {"device": resolve_device})
    first = grid.first
    check_names(grid.values)
    if not first.trials and grid.size >= RANGE_SIZE:
        raise UserError(f"there are {grid.size:,} combinations: use --trials=N to train N of them")
    if first.search == "random":
        combinations = [located(each, first.sweep_dir) for each in grid.combinations(first.trials)]
    with locked(first.sweep_dir):
        results = search(grid) if first.search == "tpe" else train_all(combinations, first)
        folders = [folder for folder in sorted(results) if is_file(RunDir(folder).log)]
        if folders:
            print("", *table(grouped(map(runs.read, folders)), grid.values), sep="\n")
    if failed := failures(results):
        raise UserError(
            f"{len(failed)} of {len(results)} runs failed: {'; '.join(failed)}; to try them again, "
            "run the same command"
        )


def check_names(names):
    """Raises UserError unless one or more settings, all of train.py, have several values."""
    for name in names:
        if name not in RUN_SETTINGS:
            raise UserError(f"{name} has several values, but must be the same for all runs")
    if not names:
        raise UserError(
            "there is nothing to compare: give a setting several values, in a flag as "
            "--learning_rate=1e-3,3e-4 or in a config file as learning_rate = [1e-3, 3e-4]"
        )


def train_all(combinations, settings):
    """Trains all combinations with the settings of the sweep. Returns {folder: result}."""
    planned, factor = list(itertools.chain(*combinations)), settings.halving
    for run in planned:
        check_run(*run)
    finished = sum(final_loss(*run) is not None for run in planned)
    print(f"{len(planned)} runs, {finished} of them already finished", flush=True)
    jobs, total = min(settings.jobs, len(planned)), None if factor else len(planned)
    return Trainer(Halving(combinations, factor), jobs, factor, total).train()


def search(grid):
    """Trains combinations that Optuna chooses. Returns {folder: result}."""
    settings = grid.first

    def locate(indices):
        combination = located(grid.runs_at(indices), settings.sweep_dir)
        for run in combination:
            check_run(*run)
        return combination

    scheduler = Search(grid, settings.sweep_dir, locate)
    print(f"{settings.trials} trials, {scheduler.complete} of them already complete", flush=True)
    total = settings.trials * len(grid.values.get(REPEATED, [None]))
    return Trainer(scheduler, min(settings.jobs, total), total=total).train()


def located(runs, sweep_dir):
    """Returns a combination as Trainer takes it, from one of Grid."""
    return tuple((Path(sweep_dir, name), settings) for name, settings in runs.items())


def check_run(folder, settings):
    """Raises UserError if a run has no rungs, or if its folder contains another run."""
    rung_steps(settings, settings.halving)
    if not os.path.exists(RunDir(folder).log):
        return
    check_data(folder, settings)
    may_change = names_in(TrainConfig, "machine", "display") | {"max_iters"}
    if settings.init_from != "scratch":  # its model is the default
        may_change |= MODEL_SETTINGS - changed(settings).keys()
    now = run_settings(settings)
    for name, before in runs.read(folder).settings.items():
        if name in now.keys() - may_change and now[name] not in (before, "auto"):
            raise UserError(
                f"{folder} contains a run with other settings: {name} was {before!r}, now "
                f"{now[name]!r}; choose another --sweep_dir"
            )


def check_data(folder, settings):
    """Raises UserError if a run was trained on another version of its dataset."""
    data = None
    with suppress(FileNotFoundError, UserError):  # train.py reports a damaged file
        data = load(RunDir(folder).last, optimizers=False).data
    if data and data != fingerprint(settings.dataset):
        raise UserError(
            f"the content of dataset {settings.dataset} has changed since {folder} was trained; "
            "choose another --sweep_dir"
        )


if __name__ == "__main__":
    process.run(main)
