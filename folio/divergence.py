"""Detection of losses and gradients that are not finite."""

import torch

from folio.errors import UserError
from folio.optim import learning_rate_at


class DivergenceMonitor:
    """Records the first step whose loss or gradient norm is not finite, without waiting for the
    device, except for the loss scale in float16.

    The record stays on the device until `check()`.
    """

    def __init__(self, settings, device):
        """`settings` is a TrainConfig, for the learning rate in the message."""
        self.settings = settings
        self.first = torch.zeros(4, device=device)  # found (1 or 0), step, loss, norm

    def record(self, step, loss, norm, scaler):
        """Args: loss and norm are scalar tensors; scaler is the GradScaler."""
        # The loss scaler skips steps that overflow in float16, until the scale is 1.
        skips = scaler.is_enabled() and scaler.get_scale() > 1
        finite = torch.isfinite(loss if skips else loss + norm)
        now = torch.stack((torch.ones_like(norm), torch.full_like(norm, step), loss, norm))
        self.first = torch.where((self.first[0] == 0) & ~finite, now, self.first)

    def check(self):
        """Raises UserError if a recorded step diverged. Waits for the device."""
        found, step, loss, norm = self.first.tolist()
        if found:
            raise self.error(int(step), f"loss {loss:.3g}, gradient norm {norm:.3g}")

    def error(self, step, what):
        lr = learning_rate_at(step, self.settings)
        return UserError(
            f"training diverged at step {step}: {what}, learning rate {lr:.3g}. Nothing from this "
            "step was saved. Lower --learning_rate, increase --warmup_iters or set --grad_clip=1"
        )
