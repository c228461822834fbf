"""Optimizers and the learning-rate schedule."""

import math
from collections import defaultdict

import torch
from torch import nn

from folio.device import DTYPES
from folio.errors import UserError, cause_of

MOMENTS = {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "muon": {"momentum_buffer"}}
EMBEDDING_LR_SCALE = 5.0  # with Muon; chosen empirically


def make_optimizers(model, settings):
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
    try:
        adamw = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, fused=True)
    except OSError as error:  # torch imports its compiler here, which creates a folder
        raise UserError(f"torch needs a temporary folder ({error}): set TMPDIR") from error
    if not matrices:
        return {"adamw": adamw}
    dtype = DTYPES["bfloat16" if settings.dtype == "bfloat16" else "float32"]
    return {"adamw": adamw, "muon": Muon(matrices, settings.learning_rate, decay, dtype=dtype)}


class Muon(torch.optim.Optimizer):
    """Muon (Jordan 2024): momentum SGD with orthogonalized updates.

    Updates are scaled to the root mean square of AdamW's updates (Liu et al. 2025, "Muon is
    Scalable for LLM Training", section 2.2), so that one learning rate and weight decay suit both.
    The result equals torch.optim.Muon with adjust_lr_fn="match_rms_adamw", but all matrices of a
    shape are updated together, because the number of calls limits the speed for small matrices.
    """

    def __init__(self, params, lr, weight_decay=0.0, momentum=0.95, dtype=torch.bfloat16):
        """`params` are matrices; `dtype` is that of the matrix products."""
        self.dtype = dtype
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "lr_scale": 1.0}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in group["params"]:
                by_shape[tuple(sorted(p.shape))].append(p)  # (a, b) and (b, a) together
            for parameters in by_shape.values():
                self._update(parameters, group["lr"], group["weight_decay"], group["momentum"])

    def _update(self, parameters, lr, weight_decay, momentum):
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in parameters]
        gradients = [p.grad for p in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        nesterov = torch._foreach_lerp(gradients, buffers, momentum)
        updates = orthogonalize(torch.stack([as_wide(each) for each in nesterov]).to(self.dtype))
        scale = 0.2 * math.sqrt(max(parameters[0].shape))
        torch._foreach_mul_(parameters, 1 - lr * weight_decay)
        torch._foreach_add_([as_wide(p) for p in parameters], list(updates), alpha=-lr * scale)


def as_wide(matrix):
    """Returns a view with no more rows than columns, for a smaller Gram matrix."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T


def orthogonalize(x):
    """Brings the singular values of each matrix close to 1: (N, a, b), a <= b -> the same shape.

    Five Newton-Schulz iterations of Jordan's quintic polynomial. Its coefficients favor speed:
    singular values above 0.002 of the Frobenius norm end between about 0.7 and 1.2.
    """
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x


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
            _check_moments(optimizer, state, MOMENTS[name])
            optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group["lr"] = before["lr"]  # a save before the next step stores it again
    except Exception as error:  # the content may be anything
        raise UserError(
            f"{checkpoint.path}: the optimizer state does not fit: {cause_of(error)}"
        ) from error


def _check_moments(optimizer, state, keys):
    """Raises ValueError unless the state fits; fused AdamW would crash the process otherwise."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if state and state.keys() != set(range(len(parameters))):  # empty before the first step
        raise ValueError("it belongs to other parameters")
    for index, moments in state.items():
        if moments.keys() != keys:
            raise ValueError(f"parameter {index} has {', '.join(moments)}")
        for key, moment in moments.items():
            shape = () if key == "step" else parameters[index].shape
            if (
                torch.as_tensor(moment).shape != shape
                or not torch.as_tensor(moment).is_contiguous()
            ):
                raise ValueError(f"{key} of parameter {index} has a different shape or layout")


def learning_rate_at(step, settings):
    """Returns the learning rate of a step: linear warmup, then cosine decay to min_lr."""
    if not settings.decay_lr:
        return settings.learning_rate
    end = settings.max_iters if settings.lr_decay_iters is None else settings.lr_decay_iters
    low = settings.learning_rate / 10 if settings.min_lr is None else settings.min_lr
    if step < settings.warmup_iters:
        return settings.learning_rate * (step + 1) / (settings.warmup_iters + 1)
    if step >= end:
        return low
    progress = (step - settings.warmup_iters) / (end - settings.warmup_iters)
    return low + (settings.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * progress))
