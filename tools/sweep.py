"""Train every combination of settings that have several values, and compare the runs.

    python -m tools.sweep config/shakespeare_char.py --learning_rate=1e-3,3e-4 --n_layer=4,6
    python -m tools.sweep config/shakespeare_char.py my_config.py --seed=1,2,3 --jobs=2

The same command continues a sweep that was stopped: finished runs are kept, stopped and failed runs
are resumed. `python -m tools.plot out-sweep` compares the runs, even while the sweep is running.
"""

import ctypes
import itertools
import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from urllib.parse import quote

from folio.cli import process
from folio.cli.errors import UserError
from folio.cli.files import lock_folder
from folio.cli.settings import ROOT, changed_settings, load_settings, names_affecting, setting

MAX_RUNS = 1000  # more are a mistake
OUTPUT_FILE = "output.txt"  # what train.py prints, in the run directory
POLL_INTERVAL_S = 0.1
SAVING_TIMEOUT_S = 60


@dataclass(frozen=True)
class SweepSettings:
    """Train every combination of the settings that have several values, each in its own folder.

    Several values are separated by commas: --learning_rate=1e-3,3e-4
    The values of seed repeat each combination, which is compared by its mean loss: --seed=1,2,3
    All settings except teachers and those about files can have several: python train.py --help
    """

    sweep_dir: str = setting("out-sweep", "folder of the run directories", affects="files")
    jobs: int = setting(
        1, "number of concurrent runs, which share the cores or GPUs", "[1, inf)", affects="machine"
    )


process.start(__name__, SweepSettings, only_help=True)  # which must not wait for torch

import torch

from folio.checkpoint.run_dir import RunDir
from folio.data.dataset import load_dataset
from folio.hardware.device import resolve_device
from folio.pretrained.load import RESUME_NAMES
from folio.training.setup import MODEL_SETTINGS, choose_model
from tools.plot.runs import compare_groups, group_runs, read_run, read_runs
from tools.table import format_table
from train import TrainConfig

# Settings that a sweep passes on to train.py. Only they can have several values.
RUN_SETTINGS = names_affecting(TrainConfig, "results", "machine", "display")


@dataclass(frozen=True)
class RunConfig(TrainConfig, SweepSettings):
    """All settings of a run of a sweep."""


@dataclass(frozen=True)
class SweepConfig(RunConfig):
    """The settings of a command line. A sweep itself sets those about files."""

    def __post_init__(self):
        super().__post_init__()
        forbidden = names_affecting(TrainConfig, "files") - {"out_dir"}  # which presets set
        if self.init_from not in RESUME_NAMES:  # presets set it, too
            forbidden -= {"init_from"}
        if names := sorted(forbidden & changed_settings(self).keys()):
            raise ValueError(f"a sweep starts and resumes runs automatically: remove {names[0]}")


def main(argv=None):
    runs, load = combine_values(sys.argv[1:] if argv is None else argv), cache(load_dataset)
    sweep = next(iter(runs.values()))
    unfinished = {}
    for folder, settings in runs.items():
        dataset = load(settings.dataset)
        if settings.init_from == "scratch":
            choose_model(settings, dataset)  # raises UserError for a model that cannot be built
        if not has_finished(folder, settings, dataset.fingerprint):
            unfinished[folder] = settings
    with lock_folder(sweep.sweep_dir):
        print(f"{len(runs)} runs", flush=True)
        failed = train_runs(unfinished, sweep.jobs)
        if ended := [folder for folder in runs if folder not in failed]:
            print("", *format_table(compare_groups(group_runs(read_runs(ended)))), sep="\n")
    if failed:
        outputs = f"see {OUTPUT_FILE} in {failed[0]}; to try again, run the same command"
        raise UserError(f"{len(failed)} of {len(runs)} runs failed: {outputs}")


def combine_values(argv):
    """Returns {folder: settings} of all combinations of the values in a command line, each once.

    The setting that is named last varies fastest. Raises UserError like load_settings, or if there
    is only one combination.
    """
    names, choices, remaining = [], [], list(argv)
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith("--"):
            choices.append([argument])
            continue
        following = "".join(remaining[:1])
        if "=" not in argument and "," in following and not following.startswith("--"):
            argument += "=" + remaining.pop(0)  # --seed 1,2
        name, equals, text = argument.removeprefix("--").partition("=")
        if name == "out_dir":  # presets may set it
            raise UserError("each run of a sweep has its own folder: use --sweep_dir instead")
        texts = text.split(",") if equals and name in RUN_SETTINGS - {"teachers"} else [text]
        if len(texts) > 1:
            names.append(name)
        choices.append([f"--{name}={each}" for each in texts] if equals else [argument])
    if (number := math.prod(map(len, choices))) > MAX_RUNS:
        raise UserError(f"a sweep can have {MAX_RUNS:,} runs, not {number:,}: give fewer values")
    runs = {}
    for flags in itertools.product(*choices):
        resolvers = {"device": resolve_device}
        settings = load_settings(SweepConfig, flags, resolvers)
        values = [f"{name}={getattr(settings, name)}" for name in dict.fromkeys(names)]
        folder = Path(settings.sweep_dir, quote(",".join(values), safe=",+="))  # n_layer=4,seed=1
        runs[folder] = settings
        if RunDir(folder).exists():
            # config/own_text.py keeps the settings of a run that it resumes.
            resume_flags = [*flags, f"--out_dir={folder}", "--init_from=auto"]
            runs[folder] = load_settings(RunConfig, resume_flags, resolvers)
            vars(runs[folder])["init_from"] = settings.init_from  # frozen otherwise
    if len(runs) < 2:
        advice = "give a setting several values, as in --learning_rate=1e-3,3e-4"
        raise UserError(f"there is nothing to compare: {advice}")
    return runs


def has_finished(folder, settings, fingerprint):
    """Returns whether an earlier sweep has trained a run to its end, and evaluated it.

    Raises UserError if the folder contains a run with other settings or a different dataset.
    """
    earlier = RunDir(folder).load_newest(required=False, optimizers=False)
    if not earlier:
        return False
    names = names_affecting(TrainConfig, "results") & earlier.settings.keys()
    if settings.init_from != "scratch":  # its model is the default
        names -= MODEL_SETTINGS - changed_settings(settings).keys()
    refusal = f"{folder} contains a different run; choose a different --sweep_dir:"
    for name in sorted(names):
        old, new = earlier.settings[name], getattr(settings, name)
        if new not in (old, "auto"):
            raise UserError(f"{refusal} {name} was {old!r}, now {new!r}")
    old, new = earlier.settings.get("init_from", "resume"), settings.init_from
    # Older releases saved "resume" for a run that was resumed.
    if old not in RESUME_NAMES and os.path.realpath(old) != os.path.realpath(new):
        raise UserError(f"{refusal} init_from was {old!r}, now {new!r}")
    if earlier.data != fingerprint:
        raise UserError(f"{refusal} the content of dataset {settings.dataset} has changed")
    events = RunDir(folder).read_events()
    has_final = bool(events) and events[-1]["event"] == "final"
    has_evaluated = has_final or not settings.has_final_evaluation
    return earlier.progress.is_finished(settings) and has_evaluated


# Workers, which are processes of train.py


def train_runs(runs, jobs):
    """Trains runs, {folder: settings}, up to `jobs` at a time, even if one fails.

    Returns the folders of the runs that failed. After a stop signal, waits until the workers have
    saved their state, and raises Interrupted.
    """
    waiting, failed, jobs = list(runs), [], min(jobs, len(runs))
    workers: dict[int, tuple[Path, Popen]] = {}  # by number, below jobs
    with process.StopSignal("waiting until the runs are saved") as stop:
        try:
            while (waiting or workers) and not stop:
                for number in range(jobs):
                    if number in workers and workers[number][1].poll() is not None:
                        folder, worker = workers.pop(number)
                        if worker.returncode:
                            failed.append(folder)
                        ended = len(runs) - len(waiting) - len(workers)
                        outcome = describe_outcome(folder, worker.returncode)
                        print(f"{ended} of {len(runs)}: {folder.name}: {outcome}", flush=True)
                    if number not in workers and waiting:
                        folder = waiting.pop(0)
                        print(f"{folder.name}: training, see {folder / OUTPUT_FILE}", flush=True)
                        workers[number] = folder, start_worker(folder, runs[folder], number, jobs)
                time.sleep(POLL_INTERVAL_S)
        finally:
            for _, worker in workers.values():
                worker.terminate()
            for _, worker in workers.values():
                worker.wait()
    if stop:
        raise process.Interrupted(stop.number, "stopped; to continue, run the same command")
    return failed


def start_worker(folder, settings, number, jobs):
    """Starts train.py for a run, and appends its output to OUTPUT_FILE. Returns the Popen."""
    with lock_folder(folder, SAVING_TIMEOUT_S):  # a worker of a killed sweep may still be saving
        (folder / OUTPUT_FILE).touch()
        command = [sys.executable, str(ROOT / "train.py"), *train_flags(folder, settings)]
    env = os.environ | worker_environment(settings.device, number, jobs)
    end = end_with_parent if sys.platform == "linux" else None
    with open(folder / OUTPUT_FILE, "ab") as output:
        return Popen(command, stdin=DEVNULL, stdout=output, stderr=STDOUT, env=env, preexec_fn=end)


def end_with_parent():
    """Makes Linux send SIGTERM to this process when its parent ends, even if that is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def train_flags(folder, settings):
    """Returns the flags of train.py that start or resume a run."""
    changed = changed_settings(settings)
    flags = {name: value for name, value in changed.items() if name in RUN_SETTINGS}
    if settings.wandb_log:
        flags.setdefault("wandb_run_name", folder.name)
    flags["out_dir"] = folder
    flags["init_from"] = "resume" if RunDir(folder).exists() else settings.init_from
    flags["overwrite"] = True
    return [f"--{name}={value}" for name, value in flags.items()]


def worker_environment(device, number, jobs):
    """Returns environment variables that give worker `number` of `jobs` its cores or its GPU."""
    variables = {}
    if jobs > 1 and "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // jobs))
    if device == "cuda":  # cuda:N is one GPU for all
        all_gpus = ",".join(map(str, range(torch.cuda.device_count())))
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", all_gpus).split(",")
        variables["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    return variables


def describe_outcome(folder, status):
    """Returns the loss of a run whose worker has ended, or why it failed.

    `status` is that of the worker; -9 if signal 9 has ended it.
    """
    if status:
        output = (folder / OUTPUT_FILE).read_text(errors="replace")
        cause = process.printable(output.strip().rpartition("\n")[2])
        return f"failed with status {status}: {cause}"
    return f"val loss {read_run(folder).loss:.4f}"


if __name__ == "__main__":
    process.run(main)
