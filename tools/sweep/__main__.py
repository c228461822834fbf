"""Train every combination of settings that have several values, and compare the runs.

    python -m tools.sweep config/shakespeare_char.py --learning_rate=1e-3,3e-4 --n_layer=4,6
    python -m tools.sweep config/shakespeare_char.py my_config.py --seed=1,2,3 --jobs=2

The same command continues a sweep that was stopped: finished runs are kept, stopped and failed runs
are resumed. `python -m tools.plot out-sweep` compares the runs, even while the sweep is running.
"""

import itertools
import math
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from folio.cli import process
from folio.cli.errors import UserError
from folio.cli.files import lock_folder
from folio.cli.settings import changed_settings, load_settings, names_affecting, setting

MAX_RUNS = 1000  # more are a mistake


@dataclass(frozen=True)
class SweepSettings:
    """Train every combination of the settings that have several values, each in its own folder.

    Several values are separated by commas: --learning_rate=1e-3,3e-4
    The values of seed repeat each combination, which is compared by its mean loss: --seed=1,2,3
    All settings except teachers and those about files can have several: python train.py --help
    """

    USAGE: ClassVar[str] = "[CONFIG_FILE ...] [--name=value[,value ...] ...]"

    sweep_dir: str = setting("out-sweep", "folder of the run directories", affects="files")
    jobs: int = setting(
        1, "number of concurrent runs, which share the cores or GPUs", "[1, inf)", affects="machine"
    )


process.start(__name__, SweepSettings, only_help=True)  # which must not wait for torch

from folio.checkpoint.run_dir import RunDir
from folio.data.dataset import load_dataset
from folio.hardware.device import resolve_device
from folio.training.setup import MODEL_SETTINGS
from tools.plot.runs import compare_groups, group_runs, read_run
from tools.sweep.workers import RUN_SETTINGS, train_runs
from tools.table import format_table
from train import TrainConfig


@dataclass(frozen=True)
class SweepConfig(TrainConfig, SweepSettings):
    """All settings of a sweep."""

    def __post_init__(self):
        super().__post_init__()
        forbidden = names_affecting(TrainConfig, "files") - {"out_dir", "init_from"}  # in presets
        if names := sorted(forbidden & changed_settings(self).keys()):
            raise ValueError(f"a sweep starts and resumes runs automatically: remove {names[0]}")


def main(argv=None):
    runs, load = combine_values(argv), cache(load_dataset)
    sweep = next(iter(runs.values()))
    if "out_dir" in {argument.name for argument in sweep.parsed_arguments}:  # presets may set it
        raise UserError("each run of a sweep has its own folder: use --sweep_dir, not --out_dir")
    unfinished = {}
    for folder, settings in runs.items():
        if not has_finished(folder, settings, load(settings.dataset).fingerprint):
            unfinished[folder] = settings
    with lock_folder(sweep.sweep_dir):
        print(f"{len(runs)} runs", flush=True)
        failed = train_runs(unfinished, sweep.jobs)
        ended = [read_run(folder) for folder in runs if folder not in failed]
        if ended:
            print("", *format_table(compare_groups(group_runs(ended))), sep="\n")
    if failed:
        outputs = f"see output.txt in {failed[0]}; to try again, run the same command"
        raise UserError(f"{len(failed)} of {len(runs)} runs failed: {outputs}")


def combine_values(argv):
    """Returns {folder: settings} of all combinations of the values in a command line.

    The setting that is named last varies fastest. Equal combinations count once. Raises UserError
    like load_settings, or if no setting of train.py has several values.
    """
    names, choices = [], []
    for argument in sys.argv[1:] if argv is None else argv:
        name, equals, text = argument.removeprefix("--").partition("=")
        texts = text.split(",") if equals and name in RUN_SETTINGS - {"teachers"} else [text]
        if len(texts) > 1:
            names.append(name)
        choices.append([f"--{name}={each}" for each in texts] if equals else [argument])
    if not names:
        raise UserError(
            "there is nothing to compare: give a setting several values, as in "
            "--learning_rate=1e-3,3e-4"
        )
    if (number := math.prod(map(len, choices))) > MAX_RUNS:
        raise UserError(f"a sweep can have {MAX_RUNS:,} runs, not {number:,}: give fewer values")
    runs = {}
    for flags in itertools.product(*choices):
        settings = load_settings(SweepConfig, flags, {"device": resolve_device})
        values = [f"{name}={getattr(settings, name)}" for name in dict.fromkeys(names)]
        folder = quote(",".join(values), safe=",+=")  # n_layer=4,seed=1
        runs[Path(settings.sweep_dir, folder)] = settings
    return runs


def has_finished(folder, settings, fingerprint):
    """Returns whether an earlier sweep has trained a run to its end.

    Raises UserError if the folder contains a run with other settings or another dataset.
    """
    earlier = RunDir(folder).load_newest(required=False, optimizers=False)
    if not earlier:
        return False
    names = names_affecting(TrainConfig, "results") & earlier.settings.keys()
    if settings.init_from != "scratch":  # its model is the default
        names -= MODEL_SETTINGS - changed_settings(settings).keys()
    refusal = f"{folder} contains another run; choose another --sweep_dir:"
    for name in sorted(names):
        old, new = earlier.settings[name], getattr(settings, name)
        if new not in (old, "auto"):
            raise UserError(f"{refusal} {name} was {old!r}, now {new!r}")
    if earlier.data != fingerprint:
        raise UserError(f"{refusal} the content of dataset {settings.dataset} has changed")
    return RunDir(folder).is_complete(earlier.progress, settings)


if __name__ == "__main__":
    process.run(main)
