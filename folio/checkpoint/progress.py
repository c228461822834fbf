"""How far a training run has come, and when it is finished."""

import math
from dataclasses import dataclass


@dataclass
class Progress:
    """The progress of a training run."""

    step: int = 0  # updates made
    tokens: int = 0  # trained on
    evaluated_schedule_step: float = -1.0  # of the last evaluation; see Run.schedule_step
    evaluated_step: int = 0  # its step
    best_step: int = -1  # step of the best evaluation
    best_val_loss: float = math.inf  # nats per token
    evaluations_since_best: int = 0
    elapsed_s: float = 0.0  # wall time of the earlier processes of the run
    val_windows: int = 0  # of the last evaluation; 0: unknown
    steps_in_time: float = math.inf  # that fit into --minutes, estimated when the run began

    def add_step(self, tokens):
        self.step += 1
        self.tokens += tokens

    def record(self, losses, schedule_step):
        """Adds the losses of an evaluation. Returns whether it is the best."""
        if self.val_windows not in (0, losses["val_windows"]):
            self.best_val_loss = math.inf  # losses over other windows cannot be compared
        self.val_windows = losses["val_windows"]
        self.evaluated_schedule_step, self.evaluated_step = schedule_step, self.step
        self.evaluations_since_best += 1
        is_best = losses["loss"] < self.best_val_loss
        if is_best:
            self.best_step, self.best_val_loss = self.step, losses["loss"]
            self.evaluations_since_best = 0
        return is_best

    def is_patience_exhausted(self, settings):
        return bool(settings.patience) and self.evaluations_since_best >= settings.patience

    def is_finished(self, settings):
        """Whether the evaluation at the end is made, or patience is exhausted."""
        is_end = self.evaluated_schedule_step >= settings.max_iters
        return self.evaluated_step == self.step and (is_end or self.is_patience_exhausted(settings))
