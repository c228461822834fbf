"""Successive halving: trains all runs for a few steps, and only the best of them for longer.

Jamieson and Talwalkar 2016, "Non-stochastic Best Arm Identification and Hyperparameter
Optimization". With several jobs, a combination can be promoted before its rung is complete, as in
ASHA (Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning"), but only when a job
would otherwise be idle.
"""

import math
import random
from collections import deque

from folio.errors import UserError

SEED = 1337  # of the order
# The steps of each rung are max_iters divided by these. Before the first rung, high learning rates
# look worse than they are.
RUNGS = (5, 3, 1)


def rung_steps(settings, factor):
    """Returns the steps at which a run is compared with others, the last of which is max_iters.

    The others are multiples of eval_interval, so that a run that stops there evaluates there.
    """
    total, interval = settings.max_iters, settings.eval_interval
    if not factor:
        return [total]
    if total < RUNGS[0]:
        raise UserError(f"--halving needs --max_iters={RUNGS[0]} or more")
    first = total // RUNGS[0]
    if first < interval:
        raise UserError(
            f"--halving compares runs at step {first} of {total}, but eval_interval is {interval}: "
            f"use --eval_interval={first} or less"
        )
    others = (round(total / divisor / interval) for divisor in RUNGS[1:-1])
    return [*(evaluations * interval for evaluations in (first // interval, *others)), total]


class Halving:
    """Decides which combination is trained next, and up to which rung, an index into RUNGS.

    The best 1 / factor of those that were compared at a rung are promoted to the next one. This
    happens only when no combination is left to start, and when none can be promoted from a lower
    rung. So each decision rests on as many comparisons as possible; with one job, on all of them.
    """

    def __init__(self, combinations, factor=None):
        """Without a factor, each combination is trained once, to the end."""
        self.factor, combinations = factor, list(combinations)
        if factor:  # with several jobs, the last ones are compared late: they must not be similar
            random.Random(SEED).shuffle(combinations)
        self.queue = deque(combinations)
        self.reached = dict.fromkeys(combinations, 0)  # {combination: rung, the highest started}
        self.unreported = set(combinations)
        self.losses = [{} for _ in RUNGS]  # for each rung, {combination: loss}

    def next(self):
        """Returns (combination, rung), or None if nothing can start before another report."""
        if self.queue:
            return self.queue.popleft(), 0
        for rung in range(len(RUNGS) - 1 if self.factor else 0):
            for combination in self._best(rung):
                if self.reached[combination] == rung:
                    self.reached[combination] += 1
                    self.unreported.add(combination)
                    return combination, rung + 1
        return None

    def report(self, combination, rung, loss):
        """Records the validation loss of a combination at a rung; infinity if a run failed."""
        self.losses[rung][combination] = loss
        self.unreported.remove(combination)

    def _best(self, rung):
        losses = self.losses[rung]
        count = len(losses) // self.factor
        if all(self.reached[each] > rung for each in self.unreported):  # the rung is complete
            count = max(1, count)
        best = sorted(losses, key=losses.get)[:count]
        return [each for each in best if math.isfinite(losses[each])]
