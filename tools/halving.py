"""Successive halving: trains all runs for a few steps, and only the best of them for longer.

Jamieson and Talwalkar 2016, "Non-stochastic Best Arm Identification and Hyperparameter
Optimization". With several runs at a time, a run is promoted before its rung is complete, as in
ASHA (Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning").
"""

import math
import random
from collections import deque

from folio.errors import UserError

SEED = 1337  # of the order of runs
RUNGS = 3  # with factor 3: a ninth, a third and all of the steps


def rung_steps(settings, factor):
    """Returns the steps at which a run is compared with others, the last of which is max_iters.

    The others are multiples of eval_interval, so that a run that stops there evaluates there.
    """
    total, interval = settings.max_iters, settings.eval_interval
    if not factor:
        return [total]
    shares = [total // factor**power for power in range(RUNGS - 1, 0, -1)]
    steps = [share // interval * interval for share in shares] + [total]
    if total < factor ** (RUNGS - 1):
        raise UserError(f"--halving={factor} needs --max_iters={factor ** (RUNGS - 1)} or more")
    if steps[0] < 1:
        raise UserError(
            f"--halving={factor} compares runs at step {shares[0]} of {total}, but eval_interval "
            f"is {interval}: use --eval_interval={shares[0]} or less"
        )
    return steps


class Halving:
    """Decides which run is trained next, and up to which rung, a number from 0 to RUNGS - 1.

    The best 1 / factor of the runs that were compared at a rung are promoted to the next one.
    """

    def __init__(self, runs, factor=None, is_asynchronous=False):
        """Without a factor, each run is trained once, to the end."""
        self.factor, self.is_asynchronous = factor, is_asynchronous
        runs = list(runs)
        if factor and is_asynchronous:  # in an order of values, too many of the first are promoted
            random.Random(SEED).shuffle(runs)
        self.queue = deque((run, 0) for run in runs)
        self.pending = dict(self.queue)  # {run: rung}, in the queue or training
        self.losses = [{} for _ in range(RUNGS)]  # for each rung, {run: loss}
        self.promoted = [set() for _ in range(RUNGS)]  # runs that have left each rung

    def next(self):
        """Returns (run, rung), or None if nothing can start before another report."""
        return self.queue.popleft() if self.queue else None

    def report(self, run, rung, loss):
        """Records the validation loss of a run at a rung; infinity if it failed."""
        self.losses[rung][run] = loss
        del self.pending[run]
        for each in range(RUNGS - 1 if self.factor else 0):
            self._promote(each)

    def _promote(self, rung):
        losses = self.losses[rung]
        count = len(losses) // self.factor
        if all(other > rung for other in self.pending.values()):  # no other run can enter the rung
            count = max(1, count)
        elif not self.is_asynchronous:
            return
        best = [run for run in sorted(losses, key=losses.get)[:count] if math.isfinite(losses[run])]
        for run in best:
            if run not in self.promoted[rung]:
                self.promoted[rung].add(run)
                self.pending[run] = rung + 1
                self.queue.appendleft((run, rung + 1))
