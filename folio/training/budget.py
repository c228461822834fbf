"""The number of steps that fit into a time budget, --minutes.

It is planned before the first step and adapted during the run, because other programs can slow down
a machine. With fewer steps than max_iters, each advances by several positions of the schedule (see
Progress in folio/checkpoint/format.py).
"""

import time
from itertools import count
from math import ceil

from folio.checkpoint.format import evaluation_stride
from folio.cli.errors import UserError
from folio.data.batches import Batches, evaluation_iters

PLANNING_STEPS, FIRST_STEPS = 10, 5  # measured before the run, and before the plan is adapted
PLANNING_FRACTION = 0.05  # largest part of the budget that measuring before the run takes
FORWARD_FRACTION = 1 / 3  # a backward pass takes twice as long as a forward pass
ADAPTATIONS = 50  # the plan is adapted after 1/50 of the remaining steps
MIN_MEASURED_S = 1.0  # or later, because fewer seconds of training are too noisy


def start_budget(trainer):
    """Measures the time of a step, plans the number of steps, and prints it.

    A resumed run keeps its plan, unless --minutes or --max_iters has changed. `trainer` is a
    train.Trainer. Raises UserError if the budget is too short for a step.
    """
    progress, settings = trainer.progress, trainer.settings
    saved = trainer.plan.resumed.settings if trainer.plan.resumed else {}
    if all(saved.get(name) == getattr(settings, name) for name in ("minutes", "max_iters")):
        return
    shift = progress.step - progress.position
    progress.evaluated_position = max(-1.0, progress.evaluated_position + shift)
    progress.position, progress.num_steps = float(progress.step), None
    if not settings.minutes or not progress.steps_left(settings):
        return
    step_s = seconds_per_step(trainer)
    evaluation_s = step_s * steps_per_evaluation(trainer)
    if plan_steps(trainer, step_s, evaluation_s) < 1:
        raise UserError(
            f"--minutes={settings.minutes:g} is too short after {trainer.elapsed_s():.0f} s, for "
            f"steps of {step_s:.2g} s and two evaluations of {evaluation_s:.2g} s: increase it, "
            "set a smaller --eval_iters, or stop other programs"
        )
    line = f"time: {progress.num_steps:,} of {settings.max_iters:,} steps fit into --minutes"
    if progress.num_steps == settings.max_iters:
        line = "time: all steps fit into --minutes; for longer training, increase --max_iters"
    print(line, flush=True)


class TimeBudget:
    """Adapts the number of steps to --minutes during a run."""

    def __init__(self, trainer, tracking):
        """`trainer` is a train.Trainer, `tracking` its Tracking."""
        self.trainer, self.tracking = trainer, tracking
        self.measured_step, self.measured_s = trainer.progress.step, 0.0
        self.next_step, self.step_s = trainer.progress.step + FIRST_STEPS, None

    def adapt(self):
        """Measures the time of a step and plans again, if that is due."""
        progress, settings = self.trainer.progress, self.trainer.settings
        step = progress.step
        if not settings.minutes or step < self.next_step:
            return
        train_s, evaluations = self.tracking.train_seconds(), self.tracking.evaluations
        newest_s = (train_s - self.measured_s) / (step - self.measured_step)
        newest_s = self.trainer.world.from_main(newest_s)  # all must plan at the same steps
        step_s = self.step_s = (newest_s + (self.step_s or newest_s)) / 2  # single times are noisy
        # The mean of the evaluations, or more if the machine has become slower since then.
        evaluation_s = step_s * steps_per_evaluation(self.trainer)
        evaluation_s = max(evaluation_s, self.tracking.pauses_s / max(1, evaluations))
        plan_steps(self.trainer, step_s, evaluation_s)
        self.measured_step, self.measured_s = step, train_s
        fewest = ceil(MIN_MEASURED_S / step_s)
        self.next_step = step + max(fewest, ceil(progress.steps_left(settings) / ADAPTATIONS))


def plan_steps(trainer, step_s, evaluation_s):
    """Sets the number of steps of a run, the same on all its processes.

    Steps and evaluations that take `step_s` and `evaluation_s` seconds fit into the rest of
    --minutes. Returns how many steps fit; if it is less than one, one is made.
    """
    progress, settings = trainer.progress, trainer.settings
    seconds = 60 * settings.minutes - trainer.elapsed_s()
    if not settings.eval_iters:
        seconds -= step_s * steps_per_evaluation(trainer, is_final=True)
    positions = settings.max_iters - progress.position
    is_due = progress.is_evaluation_due(settings)
    for stride in (2**exponent for exponent in count()):
        evaluations = ceil(positions / (settings.eval_interval * stride))
        steps = (seconds - evaluation_s * (is_due + evaluations)) / step_s
        if evaluations <= 1 or (steps > 0 and evaluation_stride(positions, steps) <= stride):
            break
    steps = trainer.world.from_main(steps)
    progress.num_steps = min(progress.step + max(1, int(steps)), settings.max_iters)
    return steps


def steps_per_evaluation(trainer, is_final=False):
    """Returns how many training steps take as long as an evaluation."""
    settings, dataset = trainer.settings, trainer.plan.dataset
    tokens_per_batch = settings.batch_size * settings.block_size
    train_iters, val_iters = evaluation_iters(settings, is_final)
    tokens = min(len(dataset.train), train_iters * tokens_per_batch)
    tokens += min(len(dataset.val), val_iters * tokens_per_batch)
    return FORWARD_FRACTION * tokens / settings.tokens_per_step


def seconds_per_step(trainer):
    """Returns the least time of a step without its update, the same on all processes of a run."""
    plan, seconds = trainer.plan, []
    batches = Batches(plan.dataset.train, trainer.settings, plan.world)
    for step in range(PLANNING_STEPS):
        start = time.perf_counter()
        x, y = next(batches.at(step))  # the first micro-batch
        trainer.loss(x, y, trainer.settings.train_temperature).backward()
        plan.machine.synchronize()
        seconds.append(time.perf_counter() - start)
        if plan.world.from_main(sum(seconds)) > PLANNING_FRACTION * 60 * trainer.settings.minutes:
            break
    trainer.model.zero_grad(set_to_none=False)  # DDP and CUDA graphs keep their gradient tensors
    return plan.world.from_main(batches.count * min(seconds))
