"""Trains the combinations that a scheduler chooses, several runs at a time."""

import math
from collections import defaultdict, deque
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from folio.budget import is_same_request, with_max_iters
from folio.checkpoint import load
from folio.errors import UserError
from folio.files import is_file
from folio.process import Interrupted
from folio.run_dir import RunDir
from tools import runs
from tools.crew import FINISHED, STOPPED, Crew
from tools.halving import rung_steps
from train import TrainConfig


class Task(NamedTuple):
    """Training a run up to a rung, together with the other runs of its combination."""

    combination: tuple
    rung: int
    folder: Path
    settings: TrainConfig

    @property
    def key(self):
        return self.combination, self.rung


class Trainer:
    """Trains combinations, each a tuple of (folder, settings) with a run for each seed.

    A scheduler has two methods. `next()` returns (combination, rung), or None if nothing can start
    before another report. `report(combination, rung, loss)` receives the mean validation
    loss of the runs, or infinity if one of them failed.
    """

    def __init__(self, scheduler, jobs, factor=None, total=None):
        """`factor` is that of rung_steps. `total`, the number of runs, is printed if known."""
        self.scheduler, self.crew = scheduler, Crew(jobs)
        self.factor, self.total = factor, total
        self.queue = deque()  # tasks whose combination has started
        self.active = {}  # {future: task}
        self.losses = defaultdict(list)  # {(combination, rung): losses of its runs}
        self.results = {}  # {folder: result}

    def train(self):
        """Trains the runs that are not finished, even if one fails. Returns {folder: result}."""
        try:
            self._start_runs()
            while self.active:
                for future in wait(self.active, return_when=FIRST_COMPLETED).done:
                    self._end_run(future)
                self._start_runs()
            return self.results
        except Interrupted as error:
            self.crew.stop()
            ended = {each: task for each, task in self.active.items() if not each.cancelled()}
            found = {task.folder: future.result() for future, task in ended.items()}
            failed = failures({folder: each for folder, each in found.items() if each != STOPPED})
            outcome = f", but {'; '.join(failed)}" if failed else " and saved"
            message = f"stopped{outcome}; to continue, run the same command"
            raise Interrupted(error.number, message) from error
        finally:
            self.crew.stop()

    def _next(self):
        if not self.queue and (found := self.scheduler.next()):
            self.queue.extend(Task(*found, *run) for run in found[0])
        return self.queue.popleft() if self.queue else None

    def _start_runs(self):
        while len(self.active) < self.crew.size and (task := self._next()):
            loss = self._loss(task)
            if loss is None:
                future = self.crew.start(task.folder, task.settings, self._last_step(task))
                self.active[future] = task
            else:
                self.results[task.folder] = FINISHED
                self._report(task, loss)

    def _end_run(self, future):
        task = self.active.pop(future)
        self.results[task.folder] = future.result()
        loss = self._loss(task)
        if loss is None and self.results[task.folder] == FINISHED:
            loss = best_loss(task.folder)  # its log is gone, or its time budget has changed
        place = f"{len(self.results)} of {self.total}: " if self.total else ""
        about = describe(task.folder, self.results[task.folder])
        print(f"{place}{task.folder.name}: {about}", flush=True)
        self._report(task, math.inf if loss is None else loss)

    def _last_step(self, task):
        return rung_steps(task.settings, self.factor)[task.rung]

    def _loss(self, task):
        return loss_at(task.folder, task.settings, self._last_step(task))

    def _report(self, task, loss):
        """Reports the mean loss to the scheduler when all runs of a combination have one."""
        losses = self.losses[task.key]
        losses.append(loss)
        if len(losses) == len(task.combination):
            self.scheduler.report(task.combination, task.rung, fmean(losses))


def best_loss(folder):
    """Returns the best validation loss so far, or None if there is no checkpoint."""
    with suppress(UserError, FileNotFoundError):
        return load(RunDir(folder).last, optimizers=False).progress.best_val_loss
    return None


def final_loss(folder, settings):
    """Returns the best validation loss of a finished run, or None if the run is not finished."""
    with suppress(UserError, FileNotFoundError):
        last = load(RunDir(folder).last, optimizers=False)
        if is_same_request(settings, last):
            settings = with_max_iters(last.progress.fitted_iters, settings)
        if last.progress.is_finished(settings) and is_file(RunDir(folder).best):
            return last.progress.best_val_loss
    return None


def loss_at(folder, settings, step):
    """Returns the validation loss of a run at a step, or None if it has not come so far.

    At the last step, and for a run that has ended before the step, it is the best loss.
    """
    if step < settings.max_iters and is_file(RunDir(folder).log):
        losses = {event["step"]: event["loss"] for event in runs.read(folder).val}
        if step in losses:
            return losses[step]
    return final_loss(folder, settings)


def failures(results):
    """Returns 'NAME: error' for each run that has not finished."""
    return [f"{folder.name}: {each}" for folder, each in results.items() if each != FINISHED]


def describe(folder, result):
    """Returns the result of a run as text: its best loss if it has finished."""
    if result == FINISHED and (best := runs.read(folder).best()):
        return f"best val loss {best['loss']:.4f} at step {best['step']:,}"
    if result == FINISHED:
        return FINISHED
    return result if result == STOPPED else f"failed: {result}"
