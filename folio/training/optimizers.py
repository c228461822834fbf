"""Optimizers, and the detection of steps that diverged."""

import math

import torch
from torch import nn

from folio.cli.errors import UserError, cause_of
from folio.distributed.sharding import shard_like
from folio.distributed.world import SINGLE_PROCESS
from folio.hardware.device import DTYPES
from folio.training.muon import Muon

MOMENTS = {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "muon": {"momentum_buffer"}}
EMBEDDING_LR_SCALE = 5.0  # with Muon; chosen empirically


def make_optimizers(model, settings, world=SINGLE_PROCESS):
    """Returns {"adamw": AdamW}, or {"adamw": AdamW, "muon": Muon} for optimizer="muon".

    Muon takes the matrices of the blocks. AdamW takes the other parameters and decays matrices and
    embeddings only (Loshchilov and Hutter 2019). Each parameter group has an `lr_scale`, a factor
    for the learning rate of a step.

    Args:
        settings: a TrainConfig with its dtype resolved.
    """
    matrices, embeddings = [], []
    if settings.optimizer == "muon":
        matrices = [p for p in model.transformer.h.parameters() if p.dim() == 2]
    if matrices:
        embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    taken = {id(p) for p in matrices + embeddings}
    rest = [p for p in model.parameters() if id(p) not in taken]
    decay = settings.weight_decay
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": decay, "lr_scale": 1.0},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0, "lr_scale": 1.0},
    ]
    if embeddings:
        groups.append({"params": embeddings, "weight_decay": decay, "lr_scale": EMBEDDING_LR_SCALE})
    betas = (settings.beta1, settings.beta2)
    adamw = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, fused=True)
    if not matrices:
        return {"adamw": adamw}
    dtype = DTYPES["bfloat16" if settings.dtype == "bfloat16" else "float32"]
    muon = Muon(matrices, settings.learning_rate, decay, dtype=dtype, world=world)
    return {"adamw": adamw, "muon": muon}


def restore_optimizers(optimizers, checkpoint):
    """Loads a Checkpoint's moments into {name: optimizer}; other than `lr`, settings are kept.

    Raises UserError if the state belongs to other optimizers or parameters.
    """
    saved = checkpoint.optimizers
    if not saved:
        raise UserError(f"{checkpoint.path} has no optimizer state to resume from")
    try:
        if saved.keys() != optimizers.keys():
            raise ValueError(f"it belongs to {' and '.join(saved)}")
        for name, optimizer in optimizers.items():
            state, groups = saved[name]["state"], saved[name]["param_groups"]
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            _check_moments(parameters, state, MOMENTS[name])
            state = {i: _shares(parameters[i], state[i]) for i in state}
            optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group["lr"] = before["lr"]  # a save before the next step stores it again
    except Exception as error:  # the content may be anything
        raise UserError(
            f"{checkpoint.path}: the optimizer state does not fit: {cause_of(error)}"
        ) from error


def _shares(parameter, moments):
    """Returns this process's share of a parameter's moments; see sharding.shard_like."""
    return {k: v if k == "step" else shard_like(parameter, v) for k, v in moments.items()}


def _check_moments(parameters, state, keys):
    """Raises ValueError unless the state fits; fused AdamW would crash the process otherwise."""
    if state and state.keys() != set(range(len(parameters))):  # empty before the first step
        raise ValueError("it belongs to other parameters")
    for index, moments in state.items():
        if moments.keys() != keys:
            raise ValueError(f"parameter {index} has {', '.join(moments)}")
        for key, moment in moments.items():
            shape = () if key == "step" else parameters[index].shape
            tensor = torch.as_tensor(moment)
            if tensor.shape != shape or not tensor.is_contiguous():
                raise ValueError(f"{key} of parameter {index} has a different shape or layout")


class DivergenceMonitor:
    """Finds the first step whose loss or gradient norm is not finite.

    `record` does not wait for the device; `check` does.
    """

    def __init__(self):
        self.unchecked = []

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

    @staticmethod
    def error(step, values):
        """Returns the UserError for a step with these values, of which one is not finite."""
        return UserError(
            f"training diverged at step {step}: {values}. Nothing from this step was saved. Lower "
            "--learning_rate, increase --warmup_iters or set --grad_clip=1"
        )
