"""The number of steps that fit into a time budget, --minutes."""

import copy
import dataclasses
import time
from math import ceil
from statistics import median

from folio.batches import Batches
from folio.errors import UserError

STEP_COUNTS = ("max_iters", "eval_interval", "warmup_iters", "lr_decay_iters")
WARMUP_STEPS, MEASURED_STEPS = 2, 20
MEASURED_FRACTION = 0.05  # of the budget, at most
FORWARD_FRACTION = 1 / 3  # of a training step; a backward pass takes twice as long


def fit_to_minutes(run):
    """Reduces all step counts of a train.Run in proportion, if it would take too long.

    Increases eval_interval if evaluations would otherwise take more than half of the time.

    A resumed run keeps its step counts, so that its results do not depend on the speed of the
    machine, unless the budget or the requested number of steps has changed.
    """
    requested, progress = run.requested, run.progress
    cost = steps_per_evaluation(requested, run.dataset)
    if not requested.minutes:
        progress.fitted_iters = None
    elif not is_same_request(requested, run.resumed):
        step_s = seconds_per_step(requested, run.learner, run.dataset)
        progress.fitted_iters = steps_within(requested, step_s, cost)
    run.settings = with_max_iters(progress.fitted_iters, requested, cost)
    run.learner.divergence.settings = run.settings


def is_same_request(settings, checkpoint):
    """Whether settings ask for as many steps in as much time as a Checkpoint's, if there is one."""
    names = ("minutes", "max_iters")
    return bool(checkpoint) and all(
        checkpoint.settings.get(name) == getattr(settings, name) for name in names
    )


def steps_per_evaluation(settings, dataset):
    """Returns how many training steps take as long as an evaluation."""
    most = settings.eval_iters * settings.batch_size * settings.block_size
    tokens = sum(min(len(split), most) for split in (dataset.train, dataset.val))
    return FORWARD_FRACTION * tokens / settings.tokens_per_step


def steps_within(settings, step_s, cost):
    """Returns how many of max_iters steps fit into the budget. Prints the time they take.

    `step_s`: seconds per step; `cost`: see steps_per_evaluation.
    """
    budget = 60 * settings.minutes / step_s  # in steps; evaluations take at most half of it
    count = evaluations(with_max_iters(settings.max_iters, settings, cost))
    steps = max(budget - count * cost, budget / 2 - cost)
    if steps < 1:
        raise UserError(
            f"--minutes={settings.minutes:g} is too short for steps of {step_s:.2g} s and two "
            f"evaluations of {cost * step_s:.2g} s: increase it, or decrease --eval_iters"
        )
    steps = int(min(steps, settings.max_iters))
    total = steps + evaluations(with_max_iters(steps, settings, cost)) * cost
    print(f"time: about {total * step_s / 60:.2g} minutes for {steps:,} steps", flush=True)
    return steps


def evaluations(settings):
    """Returns the number of evaluations of a run. The first is at step 0."""
    return -(-settings.max_iters // settings.eval_interval) + 1


def with_max_iters(max_iters, settings, cost=0):
    """Returns the settings with all step counts in proportion to `max_iters`, if it is given.

    Two evaluations are at least `cost` steps apart.
    """
    if max_iters is None:
        return settings
    counts = {name: getattr(settings, name) for name in STEP_COUNTS}
    counts = {k: n and -(-n * max_iters // settings.max_iters) for k, n in counts.items()}
    counts["eval_interval"] = max(counts["eval_interval"], ceil(cost))
    return dataclasses.replace(settings, **counts)


def seconds_per_step(settings, learner, dataset):
    """Returns the median time of a training step, the same on all processes of a run.

    The learner's state does not change.
    """
    world, batches = learner.world, Batches(dataset.train, settings, learner.world)
    states = copy.deepcopy([each.state_dict() for each in learner.optimizers.values()])
    scaler, seconds = learner.scaler.state_dict(), []
    limit_s = MEASURED_FRACTION * 60 * settings.minutes
    for step in range(WARMUP_STEPS + MEASURED_STEPS):
        if step > WARMUP_STEPS and world.from_main(sum(seconds)) > limit_s:
            break
        start = time.perf_counter()
        _, norm = learner.gradient(batches.at(step), step)
        learner.update(norm, lr=0.0)  # does not change the weights
        learner.machine.synchronize()
        seconds.append(time.perf_counter() - start)
    for optimizer, state in zip(learner.optimizers.values(), states, strict=True):
        optimizer.load_state_dict(state)
    learner.scaler.load_state_dict(scaler)
    learner.divergence.check()
    return world.from_main(median(seconds[WARMUP_STEPS:]))
