"""What changes the weights: AdamW, Muon, and the learning rate of each step."""

import math
from collections import defaultdict

import torch
from torch import nn

from device import DTYPES

EMBEDDING_RATE = 5.0  # of Muon's rate, as few of the rows are in a batch; found by trial


def make_optimizers(model, config):
    """{name: optimiser}: AdamW for everything, or, beside Muon, for all but the blocks' matrices.

    AdamW is Loshchilov and Hutter's (2019), with weight decay on matrices and embeddings alone.
    Each group of parameters has the factor `rate` for the learning rate of a step. `config` has
    its dtype resolved.
    """
    matrices, tables = [], []
    if config.optimizer == "muon":
        matrices = [p for p in model.transformer.h.parameters() if p.dim() == 2]
        tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    taken = {id(p) for p in matrices + tables}
    rest = [p for p in model.parameters() if id(p) not in taken]
    decay = config.weight_decay
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": decay, "rate": 1.0},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0, "rate": 1.0},
    ]
    if tables:
        groups.append({"params": tables, "weight_decay": decay, "rate": EMBEDDING_RATE})
    betas = (config.beta1, config.beta2)
    # Fused updates exist wherever folio runs: CPUs, CUDA and mps.
    adamw = torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=True)
    if not matrices:
        return {"adamw": adamw}
    dtype = DTYPES["bfloat16" if config.dtype == "bfloat16" else "float32"]
    return {"adamw": adamw, "muon": Muon(matrices, config.learning_rate, decay, dtype=dtype)}


class Muon(torch.optim.Optimizer):
    """Muon (Jordan 2024): momentum whose matrix is made orthogonal, so that no direction prevails.

    Updates have the root mean square of AdamW's (Liu et al. 2025, "Muon is Scalable for LLM
    Training", section 2.2), so that one learning rate and one weight decay serve both. It computes
    what torch.optim.Muon does with adjust_lr_fn="match_rms_adamw", but for all matrices of a shape
    at once, since for small matrices it is the calls that cost.
    """

    def __init__(self, params, lr, weight_decay=0.0, momentum=0.95, dtype=torch.bfloat16):
        """`params` are matrices; `dtype` is that of the products."""
        self.dtype = dtype
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "rate": 1.0}
        )

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            alike = defaultdict(list)
            for p in group["params"]:
                alike[tuple(sorted(p.shape))].append(p)
            for parameters in alike.values():
                self._update(parameters, group["lr"], group["weight_decay"], group["momentum"])

    def _update(self, parameters, lr, weight_decay, momentum):
        buffers = [self._momentum_of(p) for p in parameters]
        gradients = [p.grad for p in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        ahead = torch._foreach_lerp(gradients, buffers, momentum)  # Nesterov's
        updates = orthogonal(torch.stack([lying(each) for each in ahead]).to(self.dtype))
        scale = 0.2 * math.sqrt(max(parameters[0].shape))
        torch._foreach_mul_(parameters, 1 - lr * weight_decay)
        torch._foreach_add_([lying(p) for p in parameters], list(updates), alpha=-lr * scale)

    def _momentum_of(self, parameter):
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]


def lying(matrix):
    """A view of it that is not higher than wide: its smaller side makes the smaller product."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T


def orthogonal(x):
    """Each matrix of (N, a, b), a <= b, with its singular values brought near 1: the same shape.

    Five Newton-Schulz iterations of Jordan's quintic polynomial, whose coefficients favour speed:
    singular values from 0.002 of the matrix's norm on come to lie between about 0.7 and 1.2.
    """
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x


def learning_rate_at(step, config):
    """The rate of a step: linear warm-up, then a cosine from learning_rate down to min_lr."""
    if not config.decay_lr:
        return config.learning_rate
    last = config.max_iters if config.lr_decay_iters is None else config.lr_decay_iters
    low = config.learning_rate / 10 if config.min_lr is None else config.min_lr
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    if step >= last:
        return low
    way = (step - config.warmup_iters) / (last - config.warmup_iters)
    return low + (config.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * way))
