"""Detection of losses and gradients that are not finite."""

import math

import torch

from folio.errors import UserError
from folio.optim import learning_rate_at


class DivergenceMonitor:
    """Finds the first step whose loss or gradient norm is not finite.

    `record` does not wait for the device; `check` does.
    """

    def __init__(self, settings):
        """`settings` is a TrainConfig, for the learning rate in the message."""
        self.settings, self.unchecked = settings, []

    def record(self, step, loss, norm, scaler):
        """Args: loss and norm are scalar tensors; scaler is the GradScaler."""
        checked = loss + norm
        if scaler.is_enabled():  # an overflow only skips the step while the scale can be reduced
            scale = scaler.scale(torch.ones_like(norm))  # get_scale() would wait for the device
            checked = torch.where(scale > 1, loss, checked)
        self.unchecked.append((step, loss, norm, checked))

    def check(self):
        """Raises UserError if a recorded step diverged."""
        for step, loss, norm, checked in self.unchecked:
            if not math.isfinite(checked):
                raise self.error(step, f"loss {loss:.3g}, gradient norm {norm:.3g}")
        self.unchecked.clear()

    def error(self, step, what):
        lr = learning_rate_at(step, self.settings)
        return UserError(
            f"training diverged at step {step}: {what}, learning rate {lr:.3g}. Nothing from this "
            "step was saved. Lower --learning_rate, increase --warmup_iters or set --grad_clip=1"
        )
