"""The number of steps that fit into a time budget, --minutes."""

import copy
import dataclasses
import time
from fractions import Fraction
from math import ceil, sqrt
from statistics import median

from folio.cli.errors import UserError
from folio.data.batches import Batches

STEP_COUNTS = ("max_iters", "warmup_iters", "lr_decay_iters")
WARMUP_STEPS, MEASURED_STEPS = 2, 20
MEASURED_FRACTION = 0.05  # largest part of the budget that measuring takes
FORWARD_FRACTION = 1 / 3  # a backward pass takes twice as long as a forward pass


def fit_to_minutes(trainer):
    """Returns the settings of a train.Trainer, with fewer steps if they would take too long.

    A resumed run keeps its step counts, so that its results do not depend on the speed of the
    machine, unless the budget or the requested number of steps has changed.
    """
    plan, progress = trainer.plan, trainer.progress
    requested = plan.settings
    saved = plan.resumed.settings if plan.resumed else {}
    if not requested.minutes:
        progress.fitted_iters = None
    elif any(saved.get(name) != getattr(requested, name) for name in ("minutes", "max_iters")):
        step_s = seconds_per_step(trainer)
        cost = steps_per_evaluation(requested, plan.dataset)
        progress.fitted_iters = steps_within(requested, step_s, cost)
    return with_max_iters(progress.fitted_iters, requested)


def steps_per_evaluation(settings, dataset):
    """Returns how many training steps take as long as an evaluation."""
    limit = settings.eval_iters * settings.batch_size * settings.block_size
    tokens = sum(min(len(split), limit) for split in (dataset.train, dataset.val))
    return FORWARD_FRACTION * tokens / settings.tokens_per_step


def steps_within(settings, step_s, cost):
    """Returns how many of max_iters steps fit into --minutes. Prints the time they take.

    `cost`: see steps_per_evaluation.
    """
    budget = 60 * settings.minutes / step_s - 2 * cost  # in steps, without two evaluations
    if budget < 1:
        raise UserError(
            f"--minutes={settings.minutes:g} is too short for steps of {step_s:.2g} s and two "
            f"evaluations of {cost * step_s:.2g} s: increase it, or decrease --eval_iters"
        )
    # Besides the first and the last, n steps have sqrt(n * max_iters) / eval_interval evaluations
    # (see with_max_iters). So the largest n is the solution of n + 2 * half * sqrt(n) = budget.
    half = cost * sqrt(settings.max_iters) / settings.eval_interval / 2
    steps = max(1, int(min((sqrt(half**2 + budget) - half) ** 2, settings.max_iters)))
    fitted = with_max_iters(steps, settings)
    evaluations = -(-steps // fitted.eval_interval) + 1  # the first is at step 0
    minutes = (steps + evaluations * cost) * step_s / 60
    print(f"time: about {minutes:.2g} minutes for {steps:,} steps", flush=True)
    return steps


def with_max_iters(max_iters, settings):
    """Returns the settings with fewer steps, if `max_iters` is given, and fewer evaluations.

    A quarter of the steps has a quarter of the warmup steps, and half as many evaluations.
    """
    if max_iters is None:
        return settings
    fraction = Fraction(max_iters, settings.max_iters)
    changes = {"eval_interval": ceil(settings.eval_interval * sqrt(fraction))}
    for name in STEP_COUNTS:
        if count := getattr(settings, name):  # not None or 0
            changes[name] = ceil(count * fraction)
    return dataclasses.replace(settings, **changes)


def seconds_per_step(trainer):
    """Returns the median time of a training step, the same on all processes of a run.

    The trainer's state does not change.
    """
    plan, seconds = trainer.plan, []
    batches = Batches(plan.dataset.train, plan.settings, plan.world)
    states = copy.deepcopy([optimizer.state_dict() for optimizer in trainer.optimizers.values()])
    scaler = trainer.scaler.state_dict()
    limit_s = MEASURED_FRACTION * 60 * plan.settings.minutes
    for step in range(WARMUP_STEPS + MEASURED_STEPS):
        if step > WARMUP_STEPS and plan.world.from_main(sum(seconds)) > limit_s:
            break
        start = time.perf_counter()
        _, grad_norm = trainer.forward_backward(batches.at(step), step)
        trainer.clip_and_step(grad_norm, lr=0.0)  # does not change the weights
        plan.machine.synchronize()
        seconds.append(time.perf_counter() - start)
    for optimizer, state in zip(trainer.optimizers.values(), states, strict=True):
        optimizer.load_state_dict(state)
    trainer.scaler.load_state_dict(scaler)
    trainer.divergence.check()
    return plan.world.from_main(median(seconds[WARMUP_STEPS:]))
