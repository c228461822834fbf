"""The Muon optimizer, whose work is divided over the processes of a run."""

import math
from collections import defaultdict

import torch
import torch.nn.functional as F

from folio.dist import ALONE
from folio.sharding import is_sharded, local


class Muon(torch.optim.Optimizer):
    """Muon (Jordan 2024): momentum SGD with orthogonalized updates.

    Updates are scaled to the root mean square of AdamW's updates (Liu et al. 2025, "Muon is
    Scalable for LLM Training", section 2.2), so that one learning rate and weight decay suit both.
    The result equals torch.optim.Muon with adjust_lr_fn="match_rms_adamw", but all matrices of a
    shape are updated together, because the number of calls limits the speed for small matrices.
    """

    def __init__(
        self, params, lr, weight_decay=0.0, momentum=0.95, dtype=torch.bfloat16, world=ALONE
    ):
        """`params` are matrices, sharded or not. `dtype` is that of the matrix products."""
        self.dtype, self.world = dtype, world
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "lr_scale": 1.0}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in group["params"]:
                # (a, b) and (b, a) together, unless their rows are divided over processes
                by_shape[tuple(p.shape if is_sharded(p) else sorted(p.shape))].append(p)
            for parameters in by_shape.values():
                self._update(parameters, group["lr"], group["weight_decay"], group["momentum"])

    def _update(self, parameters, lr, weight_decay, momentum):
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [local(self.state[p]["momentum_buffer"]) for p in parameters]
        gradients = [local(p.grad) for p in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        nesterov = [
            each.to(self.dtype) for each in torch._foreach_lerp(gradients, buffers, momentum)
        ]
        if is_sharded(parameters[0]):
            updates = orthogonalize_shards(nesterov, parameters[0].shape[0], self.world)
        else:
            updates = orthogonalize_copies(nesterov, self.world)
        scale, weights = 0.2 * math.sqrt(max(parameters[0].shape)), [local(p) for p in parameters]
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
        torch._foreach_add_(weights, updates, alpha=-lr * scale)


def orthogonalize_copies(matrices, world):
    """Orthogonalizes N matrices, (a, b) or (b, a), of which each process takes N / size.

    All processes must pass the same matrices. Returns a list of the same shapes.
    """
    wide = torch.stack([as_wide(each) for each in matrices])
    per_rank = -(-len(wide) // world.size)
    padded = F.pad(wide, (0, 0, 0, 0, 0, world.size * per_rank - len(wide)))
    mine = padded[world.rank * per_rank :][:per_rank]
    results = world.all_gather(orthogonalize(mine))
    return [
        result if result.shape == matrix.shape else result.T
        for matrix, result in zip(matrices, results, strict=False)  # without the padding
    ]


def orthogonalize_shards(shares, rows, world):
    """Orthogonalizes N matrices with divided rows, of which each process gathers N / size.

    Args:
        shares: this process's rows of each matrix, (at most ceil(rows / size), b) each.
        rows: of a whole matrix.

    Returns this process's rows of the results, a list.
    """
    count, size = len(shares), world.size
    per_rank, most = -(-count // size), -(-rows // size)
    padded = [F.pad(each, (0, 0, 0, most - len(each))) for each in shares]
    padded += [torch.zeros_like(padded[0])] * (size * per_rank - count)
    parts = world.all_to_all(torch.stack(padded).unflatten(0, (size, per_rank)))
    whole = parts.transpose(0, 1).flatten(1, 2)[:, :rows]  # (per_rank, rows, b)
    result = orthogonalize(whole) if rows <= whole.shape[2] else orthogonalize(whole.mT).mT
    result = F.pad(result, (0, 0, 0, size * most - rows)).unflatten(1, (size, most))
    mine = world.all_to_all(result.transpose(0, 1).contiguous()).flatten(0, 1)
    return [new[: len(old)] for old, new in zip(shares, mine, strict=False)]


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
