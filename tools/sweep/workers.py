"""Processes of train.py that train the runs of a sweep, several at a time.

With halving, only the best combinations are trained to the end: Jamieson and Talwalkar 2016,
"Non-stochastic Best Arm Identification and Hyperparameter Optimization".
"""

import math
import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch

from folio.checkpoint.format import load_checkpoint
from folio.checkpoint.run_dir import RunDir
from folio.cli.errors import UserError
from folio.cli.files import is_file
from folio.cli.process import Interrupted, StopSignal
from folio.cli.settings import ROOT, changed_settings, names_with_scope
from tools.plot.runs import read
from train import TrainConfig

OUTPUT = "output.txt"  # what train.py prints, in the folder of the run
POLL_SECONDS = 0.1
RUN_SETTINGS = names_with_scope(
    TrainConfig, "run", "machine", "display"
)  # that runs take from the sweep


class Task(NamedTuple):
    """A run that is trained up to a step, or to its end if that comes first."""

    folder: Path
    settings: TrainConfig
    step: int


# Halving


def train_all(combinations, factor, jobs):
    """Trains combinations, `jobs` runs at a time. Returns the folders of the runs that failed.

    Args:
        combinations: tuples of (folder, settings), a run for each seed; they are compared by the
            mean validation loss of their runs.
        factor: the best 1 / factor of those compared continue. None: all are trained to the end.
    """
    failed = []
    for rung in range(3 if factor else 1):
        tasks = [
            Task(folder, settings, rung_steps(settings, factor)[rung])
            for combination in combinations
            for folder, settings in combination
        ]
        losses = train_runs(tasks, jobs)
        failed += [folder for folder, loss in losses.items() if loss == math.inf]
        means = {each: fmean(losses[folder] for folder, _ in each) for each in combinations}
        best = sorted(means, key=means.get)[: max(1, len(means) // (factor or 1))]
        combinations = [each for each in best if math.isfinite(means[each])]
    return failed


def rung_steps(settings, factor):
    """Returns the steps at which a run is compared with others, the last of which is max_iters.

    With halving, the others are about 1/5 of it, before which high learning rates look worse than
    they are, and 1/3. They are multiples of eval_interval, so that a run that stops there evaluates
    there.
    """
    total, interval = settings.max_iters, settings.eval_interval
    if not factor:
        return [total]
    if total < 5 * interval:
        raise UserError(
            f"--halving compares runs after 1/5 of the steps: eval_interval={interval} must be at "
            f"most 1/5 of max_iters={total}"
        )
    return [total // 5 // interval * interval, round(total / 3 / interval) * interval, total]


# Processes


def train_runs(tasks, jobs):
    """Trains the runs of tasks, up to `jobs` at a time, even if one fails.

    Returns {folder: best validation loss up to the step, infinity if the run failed}. After a stop
    signal, waits until the processes have saved their state, and raises Interrupted.
    """
    losses, active = {task.folder: known_loss(task) for task in tasks}, {}
    waiting = deque(task for task in tasks if losses[task.folder] is None)
    total = len(waiting)
    free = list(range(min(jobs, total)))  # numbers of jobs
    with StopSignal() as stop:
        try:
            while (waiting or active) and not stop:
                while waiting and free:
                    task, number = waiting.popleft(), free.pop()
                    variables = environment(task.settings.device, number, jobs)
                    active[number] = task, start(task, variables)
                time.sleep(POLL_SECONDS)
                for number, (task, process) in list(active.items()):
                    if process.poll() is not None:
                        del active[number]
                        free.append(number)
                        place = f"{total - len(waiting) - len(active)} of {total}"
                        losses[task.folder] = end(task, process.returncode, place)
        finally:
            for _, process in active.values():
                process.terminate()
            for _, process in active.values():
                process.wait()
    if stop:
        raise Interrupted(stop.number, "stopped; to continue, run the same command")
    return losses


def start(task, variables):
    """Starts train.py with a task. Returns the subprocess.Popen.

    `variables` are added to its environment. What it prints is appended to OUTPUT.
    """
    command = [sys.executable, str(ROOT / "train.py"), *train_flags(task)]
    streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    task.folder.mkdir(exist_ok=True)
    with open(task.folder / OUTPUT, "ab") as output:
        return subprocess.Popen(command, stdout=output, **streams, env=os.environ | variables)


def train_flags(task):
    """Returns the flags of train.py that start or resume the run of a task."""
    folder, settings, step = task
    flags = {
        name: value for name, value in changed_settings(settings).items() if name in RUN_SETTINGS
    }
    if settings.wandb_log:
        flags = {"wandb_run_name": folder.name} | flags
    init_from = "resume" if RunDir(folder).exists() else settings.init_from
    flags |= {"out_dir": folder, "init_from": init_from, "overwrite": True}
    flags |= {"stop_at": step} if step < settings.max_iters else {}
    return [f"--{name}={value}" for name, value in flags.items()]


def environment(device, number, jobs):
    """Returns variables that divide CPU cores or GPUs between `jobs` processes, for one of them."""
    variables = {}
    if jobs > 1 and "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // jobs))
    if device == "cuda":  # cuda:N is one GPU for all
        all_gpus = ",".join(map(str, range(torch.cuda.device_count())))
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", all_gpus).split(",")
        variables["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    return variables


def end(task, status, place):
    """Returns the loss of a run whose process has ended, and prints it after `place`."""
    name = task.folder.name
    if status:
        print(f"{place}: {name}: failed: {last_line(task.folder)} (status {status})", flush=True)
        return math.inf
    loss = best_loss(task)
    print(f"{place}: {name}: val loss {loss:.4f}, trained to step {task.step:,}", flush=True)
    return loss


def last_line(folder):
    """Returns the last line that a process has printed."""
    return (folder / OUTPUT).read_text(errors="replace").strip().rpartition("\n")[2]


# Losses


def known_loss(task):
    """Returns best_loss(task), or None if the run has not been trained so far.

    Raises UserError if its checkpoint is damaged.
    """
    folder, settings, step = task
    if not is_file(RunDir(folder).last):
        return None
    progress = load_checkpoint(RunDir(folder).last, optimizers=False).progress
    is_done = progress.evaluated >= step or progress.is_finished(settings)
    return best_loss(task) if is_done else None


def best_loss(task):
    """Returns the best validation loss of a run up to the step of a task."""
    return min(event["loss"] for event in read(task.folder).val if event["step"] <= task.step)
