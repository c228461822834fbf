"""Train every combination of settings that have several values, and compare the runs.

    python -m tools.sweep config/shakespeare_char.py --learning_rate=1e-3,3e-4 --n_layer=4,6
    python -m tools.sweep config/shakespeare_char.py config/mine.py --random=10 --jobs=2
    python -m tools.sweep config/shakespeare_char.py --learning_rate=log:1e-4:1e-2 --random=24 \\
        --eval_interval=200 --halving=3

In a config file, several values are a list: learning_rate = [1e-3, 3e-4]. The same command
continues a sweep that was stopped: finished runs are kept, stopped and failed runs are resumed.
`python -m tools.plot out-sweep` compares the runs, even while the sweep is running.
"""

import math
import os
import re
import sys
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from folio import process
from folio.errors import UserError
from folio.fields import RANGE_SIZE, setting
from folio.files import is_file, locked
from folio.process import Interrupted
from folio.settings import changed, names_in, parse_arguments


@dataclass(frozen=True)
class SweepSettings:
    """Train every combination of the settings that have several values, each in its own folder.

    In a flag, several values are separated by commas: --learning_rate=1e-3,3e-4
    In a config file, they are a list: learning_rate = [1e-3, 3e-4]
    With --random, also ranges: --learning_rate=log:1e-4:1e-2 --dropout=uniform:0:0.3
    All settings of train.py except those about files can have several: see python train.py --help
    """

    ARGUMENTS: ClassVar[str] = "[CONFIG_FILE ...] [--name=value[,value ...] ...]"

    sweep_dir: str = setting("out-sweep", "parent folder of the runs", scope="files")
    jobs: int = setting(
        1, "number of concurrent runs, which share the cores or GPUs", "[1, inf)", scope="machine"
    )
    random: int | None = setting(None, "combinations to draw at random; None: all", "[1, inf)")
    halving: int | None = setting(
        None, "compare runs after 1/5 and 2/5 of the steps; the best 1/N continue", "[2, inf)"
    )


def answer_help():
    """Prints the help text and exits, if it is requested."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        parse_arguments(SweepSettings)


if __name__ == "__main__":
    process.start(answer_help)  # --help must not wait for torch

from folio.checkpoint import load
from folio.run_dir import RunDir
from folio.tracking import run_settings
from tools import runs
from tools.crew import FINISHED, RUN_SETTINGS, STOPPED, Crew
from tools.grid import Grid
from tools.halving import Halving, rung_steps
from train import RESOLVERS, TrainConfig


@dataclass(frozen=True)
class SweepConfig(TrainConfig, SweepSettings):
    """All settings of a sweep."""

    def __post_init__(self):
        super().__post_init__()
        if not self.sweep_dir:
            raise UserError("sweep_dir must not be empty")
        refused = names_in(TrainConfig, "files") - {"out_dir"}  # which presets set
        if wrong := sorted(refused & changed(self).keys()):
            raise UserError(f"a sweep starts and resumes runs automatically: remove {wrong[0]}")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if any(re.match(r"--out_dir\b", argument) for argument in argv):
        raise UserError("each run of a sweep has its own folder: use --sweep_dir, not --out_dir")
    grid = Grid(SweepConfig, argv, RESOLVERS)
    check_names(grid.names)
    if not grid.first.random and grid.size >= RANGE_SIZE:
        raise UserError(f"there are {grid.size:,} combinations: use --random=N to train N of them")
    sweep_dir, found = Path(grid.first.sweep_dir), grid.combinations(grid.first.random)
    planned = {sweep_dir / name: settings for name, settings in found.items()}
    with locked(sweep_dir):
        check_earlier_runs(planned)
        results = train_all(planned, grid.first.jobs, grid.first.halving)
        folders = [folder for folder in planned if is_file(RunDir(folder).log)]
        print("\n" + "\n".join(runs.table(list(map(runs.read, folders)), grid.names)))
    if failed := failures(results):
        raise UserError(
            f"{len(failed)} of {len(planned)} runs failed: {'; '.join(failed)}; to try them again, "
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


def check_earlier_runs(planned):
    """Raises UserError if a folder contains a run with other settings."""
    may_change = names_in(TrainConfig, "machine", "display") | {"max_iters"}
    for folder, settings in planned.items():
        if not os.path.exists(RunDir(folder).log):
            continue
        now = run_settings(settings)
        for name, before in runs.read(folder).settings.items():
            if name in now.keys() - may_change and now[name] not in (before, "auto"):
                raise UserError(
                    f"{folder} contains a run with other settings: {name} was {before!r}, now "
                    f"{now[name]!r}; choose another --sweep_dir"
                )


def final_loss(folder, settings):
    """Returns the best validation loss of a finished run, or None if the run is not finished."""
    with suppress(UserError, FileNotFoundError):
        progress = load(RunDir(folder).last, optimizers=False).progress
        if progress.is_finished(settings) and is_file(RunDir(folder).best):
            return progress.best_val_loss
    return None


def loss_at(folder, settings, step):
    """Returns the validation loss of a run at a step, or None if it has not come so far.

    The loss of a finished run is its best.
    """
    loss = final_loss(folder, settings)
    if loss is None and step < settings.max_iters and is_file(RunDir(folder).log):
        loss = next((e["loss"] for e in runs.read(folder).val if e["step"] == step), None)
    return loss


def train_all(planned, jobs, factor=None):
    """Trains the runs that are not finished, even if one fails. Returns {folder: result}."""
    finished = sum(final_loss(*run) is not None for run in planned.items())
    print(f"{len(planned)} runs, {finished} of them already finished", flush=True)
    steps = {folder: rung_steps(settings, factor) for folder, settings in planned.items()}
    jobs = min(jobs, len(planned))
    scheduler, crew = Halving(planned, factor), Crew(jobs)
    results, active = {}, {}
    try:
        while True:
            while len(active) < jobs and (task := scheduler.next()):
                folder, rung = task
                loss = loss_at(folder, planned[folder], steps[folder][rung])
                if loss is None:
                    future = crew.start(folder, planned[folder], steps[folder][rung])
                    active[future] = task
                else:
                    results[folder] = FINISHED
                    scheduler.report(folder, rung, loss)
            if not active:
                return results
            for future in wait(active, return_when=FIRST_COMPLETED).done:
                folder, rung = active.pop(future)
                results[folder] = future.result()
                loss = loss_at(folder, planned[folder], steps[folder][rung])
                scheduler.report(folder, rung, math.inf if loss is None else loss)
                about = describe(folder, results[folder])
                place = "" if factor else f"{len(results)} of {len(planned)}: "
                print(f"{place}{folder.name}: {about}", flush=True)
    except Interrupted as error:
        crew.stop()
        failed = failures({k: f.result() for f, (k, _) in active.items() if not f.cancelled()})
        outcome = f", but {'; '.join(failed)}" if failed else " and saved"
        message = f"stopped{outcome}; to continue, run the same command"
        raise Interrupted(error.number, message) from error
    finally:
        crew.stop()


def failures(results):
    """Returns 'NAME: error' for each run that has failed."""
    expected = (FINISHED, STOPPED)
    return [f"{folder.name}: {each}" for folder, each in results.items() if each not in expected]


def describe(folder, result):
    """Returns the result of a run as text: its best loss if it has finished."""
    if result == FINISHED:
        best = runs.read(folder).best
        return f"best val loss {best['loss']:.4f} at step {best['step']:,}"
    return result if result == STOPPED else f"failed: {result}"


if __name__ == "__main__":
    process.run(main)
