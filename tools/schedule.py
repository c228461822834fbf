"""Trains the combinations of a sweep: all to the end, or only the best, by successive halving.

Jamieson and Talwalkar 2016, "Non-stochastic Best Arm Identification and Hyperparameter
Optimization".
"""

import math
from statistics import fmean

from folio.errors import UserError
from tools.workers import Task, train_runs

# With halving, combinations are compared at max_iters divided by these. Before the first of these
# steps, high learning rates look worse than they are.
RUNGS = (5, 3, 1)


def train_all(combinations, factor, jobs):
    """Trains combinations, `jobs` runs at a time. Returns {folder: error} of the runs that failed.

    Args:
        combinations: tuples of (folder, settings), a run for each seed; they are compared by the
            mean validation loss of their runs.
        factor: the best 1 / factor of those compared continue. None: all are trained to the end.
    """
    errors = {}
    for rung in range(len(RUNGS) if factor else 1):
        tasks = [
            Task(folder, settings, rung_steps(settings, factor)[rung])
            for combination in combinations
            for folder, settings in combination
        ]
        losses, failed = train_runs(tasks, jobs)
        errors |= failed
        means = {each: fmean(losses[folder] for folder, _ in each) for each in combinations}
        combinations = promoted(means, factor or 1)
    return errors


def promoted(losses, factor):
    """Returns the combinations that continue, from {combination: loss}; not those that failed."""
    best = sorted(losses, key=losses.get)[: max(1, len(losses) // factor)]
    return [each for each in best if math.isfinite(losses[each])]


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
