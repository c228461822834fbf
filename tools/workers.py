"""Processes of train.py that train the runs of a sweep, several at a time."""

import math
import os
import subprocess
import sys
import time
from collections import defaultdict, deque
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch

from folio.checkpoint import load
from folio.errors import os_error
from folio.files import is_file
from folio.process import Interrupted, StopSignal
from folio.run_dir import RunDir
from folio.settings import ROOT, changed, names_in
from tools import runs
from tools.schedule import rung_steps
from train import TrainConfig

OUTPUT = "output.txt"  # what train.py prints, in the folder of the run
POLL_SECONDS = 0.1
STOP_STATUSES = (0, -1, -2, -15, 129, 130, 143)  # after SIGHUP, SIGINT, SIGTERM; 0: just finished
RUN_SETTINGS = names_in(TrainConfig, "run", "machine", "display")  # that runs take from the sweep


class Task(NamedTuple):
    """Training a run up to a rung, together with the other runs of its combination."""

    combination: tuple
    rung: int
    folder: Path
    settings: TrainConfig


class Workers:
    """Up to `jobs` processes of train.py, which train the runs that a schedule chooses.

    A schedule is a Halving. Its combinations are tuples of (folder, settings), a run for each seed.
    They are compared by the mean validation loss of their runs.
    """

    def __init__(self, schedule, jobs):
        self.schedule, self.jobs = schedule, jobs
        self.queue = deque()  # tasks whose combination has started
        self.active = {}  # {number from 0 to jobs - 1: (task, process)}
        self.losses = defaultdict(list)  # {(combination, rung): losses of its runs}
        self.errors = {}  # {folder: error message}

    def train(self):
        """Trains the runs that are not finished, even if one fails. Returns {folder: error}.

        After a stop signal, the processes save their state; raises Interrupted.
        """
        with StopSignal() as stop:
            try:
                self._start_tasks()
                while self.active and not stop:
                    time.sleep(POLL_SECONDS)
                    self._end_tasks()
                    self._start_tasks()
            finally:
                failed = self._stop()
        if stop:
            outcome = f", but {'; '.join(failed)}" if failed else " and saved"
            message = f"stopped{outcome}; to continue, run the same command"
            raise Interrupted(stop.number, message)
        return self.errors

    def _start_tasks(self):
        while len(self.active) < self.jobs and (task := self._next()):
            loss = known_loss(task.folder, task.settings, self._last_step(task))
            if loss is None:
                number = next(each for each in range(self.jobs) if each not in self.active)
                variables = environment(task.settings.device, number, self.jobs)
                process = start(task.folder, task.settings, self._last_step(task), variables)
                self.active[number] = task, process
            else:
                self._report(task, loss)

    def _next(self):
        if not self.queue and (found := self.schedule.next()):
            self.queue.extend(Task(*found, *run) for run in found[0])
        return self.queue.popleft() if self.queue else None

    def _last_step(self, task):
        return rung_steps(task.settings, self.schedule.factor)[task.rung]

    def _end_tasks(self):
        for number, (task, process) in list(self.active.items()):
            if (status := process.poll()) is None:
                continue
            del self.active[number]
            step, loss = self._last_step(task), math.inf
            if status:
                self.errors[task.folder] = error_of(task.folder, status)
                about = f"failed: {self.errors[task.folder]}"
            else:
                loss = known_loss(task.folder, task.settings, step, has_ended=True)
                about = f"val loss {loss:.4f} (trained to step {step:,})"
            print(f"{task.folder.name}: {about}", flush=True)
            self._report(task, loss)

    def _report(self, task, loss):
        """Reports the mean loss to the schedule when all runs of a combination have one."""
        losses = self.losses[task.combination, task.rung]
        losses.append(loss)
        if len(losses) == len(task.combination):
            self.schedule.report(task.combination, task.rung, fmean(losses))

    def _stop(self):
        """Stops the processes and waits for them. Returns the errors of those that did not save."""
        for _, process in self.active.values():
            process.terminate()
        statuses = {task.folder: process.wait() for task, process in self.active.values()}
        return [
            f"{folder.name}: {error_of(folder, status)}"
            for folder, status in statuses.items()
            if status not in STOP_STATUSES
        ]


# Processes


def start(folder, settings, stop_at, variables):
    """Starts a process of train.py that trains a run up to a step. Returns the subprocess.Popen.

    `variables` are added to its environment. What it prints is appended to OUTPUT.
    """
    command = [sys.executable, str(ROOT / "train.py"), *train_flags(folder, settings, stop_at)]
    streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    try:
        folder.mkdir(exist_ok=True)
        with open(folder / OUTPUT, "ab") as output:
            return subprocess.Popen(command, stdout=output, **streams, env=os.environ | variables)
    except OSError as error:
        raise os_error("write to", folder, error) from error


def train_flags(folder, settings, stop_at):
    """Returns the flags of train.py that start or resume a run, up to a step."""
    flags = {name: value for name, value in changed(settings).items() if name in RUN_SETTINGS}
    if settings.wandb_log:
        flags = {"wandb_run_name": folder.name} | flags
    init_from = "resume" if RunDir(folder).exists() else settings.init_from
    flags |= {"out_dir": folder, "init_from": init_from, "overwrite": True}
    flags |= {"stop_at": stop_at} if stop_at < settings.max_iters else {}
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


def known_loss(folder, settings, step, has_ended=False):
    """Returns the validation loss of a run at a step, or None if it has not come so far.

    At the last step, and for a run that has ended before the step, it is the best loss.
    `has_ended`: whether train.py has just trained the run to the step or to its end.
    """
    if not is_file(RunDir(folder).log):
        return math.inf if has_ended else None
    run = runs.read(folder)
    losses = {event["step"]: event["loss"] for event in run.val}
    if step < settings.max_iters and step in losses:
        return losses[step]
    return (
        min(losses.values(), default=math.inf)
        if has_ended or is_finished(folder, settings)
        else None
    )


def is_finished(folder, settings):
    """Whether the last checkpoint of a run says so. Raises UserError if it is damaged."""
    run_dir = RunDir(folder)
    if not (is_file(run_dir.last) and is_file(run_dir.best)):
        return False
    return load(run_dir.last, optimizers=False).progress.is_finished(settings)
