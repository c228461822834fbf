"""Processes of train.py that train the runs of a sweep, several at a time."""

import math
import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import torch

from folio.checkpoint import load
from folio.errors import os_error
from folio.files import is_file
from folio.process import Interrupted, StopSignal
from folio.run_dir import RunDir
from folio.settings import ROOT, changed, names_in
from tools.runs import read
from train import TrainConfig

OUTPUT = "output.txt"  # what train.py prints, in the folder of the run
POLL_SECONDS = 0.1
STOP_STATUSES = (0, -1, -2, -15, 129, 130, 143)  # after SIGHUP, SIGINT, SIGTERM; 0: just finished
RUN_SETTINGS = names_in(TrainConfig, "run", "machine", "display")  # that runs take from the sweep


class Task(NamedTuple):
    """A run that is trained up to a step, or to its end if that comes first."""

    folder: Path
    settings: TrainConfig
    step: int


def train_runs(tasks, jobs):
    """Trains the runs of tasks, up to `jobs` at a time, even if one fails.

    Returns {folder: validation loss at the step; infinity if the run failed} and {folder: error}.
    After a stop signal, waits until the processes have saved their state, and raises Interrupted.
    """
    losses, errors, active = {task.folder: known_loss(task) for task in tasks}, {}, {}
    waiting = deque(task for task in tasks if losses[task.folder] is None)
    total, numbers = len(waiting), range(min(jobs, len(waiting)))
    with StopSignal() as stop:
        try:
            while (waiting or active) and not stop:
                for number in [each for each in numbers if each not in active][: len(waiting)]:
                    task = waiting.popleft()
                    variables = environment(task.settings.device, number, jobs)
                    active[number] = task, start(task, variables)
                time.sleep(POLL_SECONDS)
                for number, (task, process) in list(active.items()):
                    if process.poll() is not None:
                        del active[number]
                        about = end(task, process.returncode, losses, errors)
                        place = f"{total - len(waiting) - len(active)} of {total}"
                        print(f"{place}: {task.folder.name}: {about}", flush=True)
        finally:
            unsaved = stop_all(active.values())
    if stop:
        outcome = f", but {'; '.join(unsaved)}" if unsaved else " and saved"
        raise Interrupted(stop.number, f"stopped{outcome}; to continue, run the same command")
    return losses, errors


def end(task, status, losses, errors):
    """Records the loss or the error of a run whose process has ended. Returns it as text."""
    folder = task.folder
    if status:
        losses[folder], errors[folder] = math.inf, error_of(folder, status)
        return f"failed: {errors[folder]}"
    losses[folder] = known_loss(task, has_ended=True)
    return f"val loss {losses[folder]:.4f}, trained to step {task.step:,}"


def stop_all(active):
    """Stops the processes of (task, process) and waits. Returns the errors of unsaved runs."""
    for _, process in active:
        process.terminate()
    statuses = {task.folder: process.wait() for task, process in active}
    return [
        f"{folder.name}: {error_of(folder, status)}"
        for folder, status in statuses.items()
        if status not in STOP_STATUSES
    ]


# Processes


def start(task, variables):
    """Starts train.py with a task. Returns the subprocess.Popen.

    `variables` are added to its environment. What it prints is appended to OUTPUT.
    """
    command = [sys.executable, str(ROOT / "train.py"), *train_flags(task)]
    streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    try:
        task.folder.mkdir(exist_ok=True)
        with open(task.folder / OUTPUT, "ab") as output:
            return subprocess.Popen(command, stdout=output, **streams, env=os.environ | variables)
    except OSError as error:
        raise os_error("write to", task.folder, error) from error


def train_flags(task):
    """Returns the flags of train.py that start or resume the run of a task."""
    folder, settings, step = task
    flags = {name: value for name, value in changed(settings).items() if name in RUN_SETTINGS}
    if settings.wandb_log:
        flags = {"wandb_run_name": folder.name} | flags
    init_from = "resume" if RunDir(folder).exists() else settings.init_from
    flags |= {"out_dir": folder, "init_from": init_from, "overwrite": True}
    flags |= {"stop_at": step} if step < settings.max_iters else {}
    return [f"--{name}={value}" for name, value in flags.items()]


def environment(device, number, jobs):
    """Returns variables that divide CPU cores or GPUs between `jobs` processes, for one of them."""
    variables, gpus = {}, torch.cuda.device_count()
    if jobs > 1 and "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // jobs))
    if device == "cuda" and gpus > 1:  # cuda:N is one GPU for all
        ids = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        variables["CUDA_VISIBLE_DEVICES"] = ids[number % len(ids)]
    return variables


def error_of(folder, status):
    """Returns the last line that a process has printed, and its exit status."""
    lines = (folder / OUTPUT).read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    return f"{last} (status {status})"


# Losses


def known_loss(task, has_ended=False):
    """Returns the validation loss of a run at the step of a task, or None if it is not there yet.

    At the last step, and for a run that has ended before the step, it is the best loss.
    `has_ended`: whether train.py has just finished the task.
    """
    folder, settings, step = task
    if not is_file(RunDir(folder).log):
        return math.inf if has_ended else None
    losses = {event["step"]: event["loss"] for event in read(folder).val}
    if step < settings.max_iters and step in losses:
        return losses[step]
    if has_ended or is_finished(folder, settings):
        return min(losses.values(), default=math.inf)
    return None


def is_finished(folder, settings):
    """Whether the newest checkpoint of a run is its last. Raises UserError if it is damaged."""
    run_dir = RunDir(folder)
    if not (is_file(run_dir.last) and is_file(run_dir.best)):
        return False
    return load(run_dir.last, optimizers=False).progress.is_finished(settings)
