"""Workers, which are processes of train.py that train the runs of a sweep, several at a time.

With halving, only the best combinations are trained to the end: Jamieson and Talwalkar 2016,
"Non-stochastic Best Arm Identification and Hyperparameter Optimization".
"""

import math
import os
import sys
import time
from collections import deque
from pathlib import Path
from statistics import fmean
from subprocess import DEVNULL, STDOUT, Popen
from typing import NamedTuple

import torch

from folio.checkpoint.run_dir import RunDir
from folio.cli.errors import UserError
from folio.cli.process import Interrupted, StopSignal, printable
from folio.cli.settings import ROOT, changed_settings, names_with_scope
from tools.plot.runs import read_run
from train import TrainConfig

OUTPUT_FILE = "output.txt"  # what train.py prints, in the run directory
POLL_INTERVAL_S = 0.1
# Settings that a sweep passes on to train.py
RUN_SETTINGS = names_with_scope(TrainConfig, "run", "machine", "display")


class Task(NamedTuple):
    """A run to train up to a step, or to its end if that comes first."""

    folder: Path
    settings: TrainConfig
    step: int


# Halving


def train_combinations(combinations, factor, jobs):
    """Trains combinations, `jobs` runs at a time. Returns the folders of the runs that failed.

    Args:
        combinations: tuples of (folder, settings), a run for each seed; they are compared by the
            mean validation loss of their runs.
        factor: the best 1 / factor of those compared continue. None: all are trained to the end.
    """
    failed = []
    for rung in range(3 if factor else 1):
        tasks = []
        for combination in combinations:
            for folder, settings in combination:
                tasks.append(Task(folder, settings, rung_steps(settings, factor)[rung]))
        losses = train_runs(tasks, jobs)
        failed += [folder for folder, loss in losses.items() if loss == math.inf]
        combinations = select_best(combinations, losses, factor or 1)
    return failed


def select_best(combinations, losses, factor):
    """Returns the best 1 / factor of the combinations, except those with a run that failed."""
    means = {runs: fmean(losses[folder] for folder, _ in runs) for runs in combinations}
    best = sorted(combinations, key=means.get)[: max(1, len(combinations) // factor)]
    return [combination for combination in best if math.isfinite(means[combination])]


def rung_steps(settings, factor):
    """Returns the step of each rung, at which runs are compared; the last is max_iters.

    With halving, two earlier rungs are at about 1/5 of max_iters, before which high learning rates
    look worse than they are, and 1/3. They are multiples of eval_interval, so that a run that stops
    at a rung evaluates there.
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


# Workers


def train_runs(tasks, jobs):
    """Trains the runs of tasks, up to `jobs` at a time, even if one fails.

    Returns {folder: best validation loss up to the step, infinity if the run failed}. After a stop
    signal, waits until the workers have saved their state, and raises Interrupted.
    """
    losses = {task.folder: read_earlier_loss(task) for task in tasks}
    waiting = deque(task for task in tasks if losses[task.folder] is None)
    total, ended = len(waiting), 0
    workers = {}  # {number below jobs: (task, process)}
    with StopSignal("waiting until the runs are saved") as stop:
        try:
            while (waiting or workers) and not stop:
                for number in range(jobs):
                    if waiting and number not in workers:
                        task = waiting.popleft()
                        workers[number] = task, start_worker(task, number, jobs)
                time.sleep(POLL_INTERVAL_S)
                for number, (task, process) in list(workers.items()):
                    if process.poll() is not None:
                        del workers[number]
                        ended += 1
                        progress = f"{ended} of {total}"
                        losses[task.folder] = report_loss(task, process.returncode, progress)
        finally:
            for _, process in workers.values():
                process.terminate()
            for _, process in workers.values():
                process.wait()
    if stop:
        raise Interrupted(stop.number, "stopped; to continue, run the same command")
    return losses


def start_worker(task, number, jobs):
    """Starts train.py with a task, as worker `number` of `jobs`. Returns the Popen.

    What it prints is appended to OUTPUT_FILE.
    """
    env = os.environ | worker_environment(task.settings.device, number, jobs)
    command = [sys.executable, str(ROOT / "train.py"), *train_flags(task)]
    task.folder.mkdir(exist_ok=True)
    with open(task.folder / OUTPUT_FILE, "ab") as output:
        return Popen(command, stdin=DEVNULL, stdout=output, stderr=STDOUT, env=env)


def train_flags(task):
    """Returns the flags of train.py that start or resume the run of a task."""
    folder, settings, step = task
    changed = changed_settings(settings)
    flags = {name: value for name, value in changed.items() if name in RUN_SETTINGS}
    if settings.wandb_log:
        flags.setdefault("wandb_run_name", folder.name)
    flags["out_dir"] = folder
    flags["init_from"] = "resume" if RunDir(folder).exists() else settings.init_from
    flags["overwrite"] = True
    if step < settings.max_iters:
        flags["stop_at"] = step
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


def report_loss(task, status, progress):
    """Prints and returns the loss of a run whose worker has ended, infinity if it failed.

    `status`: of the worker; -9 if signal 9 has ended it.
    """
    name = task.folder.name
    if status:
        output = (task.folder / OUTPUT_FILE).read_text(errors="replace")
        cause = printable(output.strip().rpartition("\n")[2])
        print(f"{progress}: {name}: failed with status {status}: {cause}", flush=True)
        return math.inf
    loss = read_best_loss(task)
    print(f"{progress}: {name}: val loss {loss:.4f}, trained to step {task.step:,}", flush=True)
    return loss


def read_earlier_loss(task):
    """Returns the best loss of a run that an earlier sweep has trained up to the step, else None.

    Raises UserError if its checkpoint is damaged.
    """
    folder, settings, step = task
    newest = RunDir(folder).load_newest(required=False, optimizers=False)
    if newest is None:
        return None
    progress = newest.progress
    is_done = progress.evaluated_at >= step or progress.is_finished(settings)
    return read_best_loss(task) if is_done else None


def read_best_loss(task):
    """Returns the best validation loss of a run up to the step of a task, infinity if none."""
    run = read_run(task.folder)
    if run.final and run.final["step"] <= task.step:
        return run.final["loss"]
    return min((e["loss"] for e in run.val if e["step"] <= task.step), default=math.inf)
