"""The Muon optimizer, whose work is divided over the processes of a run."""

import math
from collections import defaultdict

import torch
import torch.nn.functional as F

from folio.distributed.sharding import from_shard, full_tensor, is_sharded, local_shard, shard_like
from folio.distributed.world import SINGLE_PROCESS


class Muon(torch.optim.Optimizer):
    """Muon (Jordan 2024): momentum SGD with orthogonalized updates.

    Updates are scaled to the root mean square of AdamW's updates (Liu et al. 2025, "Muon is
    Scalable for LLM Training", section 2.2), so that one learning rate and weight decay suit both.
    The result equals torch.optim.Muon with adjust_lr_fn="match_rms_adamw", but all matrices of a
    shape are computed together, because the number of calls limits the speed for small matrices.

    If `found_inf` is a scalar tensor of 1, a step changes nothing, as with torch's fused AdamW.
    """

    found_inf = None

    def __init__(
        self,
        params,
        lr,
        weight_decay=0.0,
        momentum=0.95,
        dtype=torch.bfloat16,
        world=SINGLE_PROCESS,
    ):
        """`params` are matrices, sharded or not. `dtype` is that of the matrix products."""
        self.dtype, self.world = dtype, world
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "lr_scale": 1.0}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            parameters, momentum = group["params"], group["momentum"]
            for p in parameters:
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            buffers = [local_shard(self.state[p]["momentum_buffer"]) for p in parameters]
            gradients, weights = (
                [local_shard(p.grad) for p in parameters],
                [local_shard(p) for p in parameters],
            )
            keep = 1
            if self.found_inf is not None:
                keep, skips = 1 - self.found_inf, self.found_inf > 0
                pairs = zip(buffers, gradients, strict=True)
                gradients = [torch.where(skips, old, new) for old, new in pairs]
            torch._foreach_lerp_(buffers, gradients, 1 - momentum)
            nesterov = torch._foreach_lerp(gradients, buffers, momentum)
            nesterov = [each.to(self.dtype) for each in nesterov]
            if is_sharded(parameters[0]):
                updates = orthogonalize_shards(nesterov, parameters, self.world)
            else:
                updates = orthogonalize_copies(nesterov, self.world)
            if self.found_inf is not None:
                updates = torch._foreach_mul(updates, keep)
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"] * keep)
            for p, weight, update in zip(parameters, weights, updates, strict=True):
                weight.add_(update, alpha=-0.2 * group["lr"] * math.sqrt(max(p.shape)))


def orthogonalize_copies(matrices, world):
    """Orthogonalizes matrices that all processes have, of which each computes a part.

    Returns a list of the same shapes.
    """
    groups = indices_by([tuple(sorted(each.shape)) for each in matrices])
    results, mine = list(matrices), []
    for indices in groups:
        stack = torch.stack([as_wide(matrices[i]) for i in indices])
        count = -(-len(indices) // world.size)  # for each process, the last ones with padding
        padded = F.pad(stack, (0, 0, 0, 0, 0, world.size * count - len(indices)))
        mine.append(orthogonalize(padded[world.rank * count :][:count]))
    received = world.all_gather(torch.cat([each.flatten() for each in mine]))
    parts = received.view(world.size, -1).split([each.numel() for each in mine], dim=1)
    for indices, part, like in zip(groups, parts, mine, strict=True):
        for i, result in zip(indices, part.reshape(-1, *like.shape[1:]), strict=False):
            results[i] = result if result.shape == matrices[i].shape else result.T
    return results


def orthogonalize_shards(shares, parameters, world):
    """Orthogonalizes matrices that are distributed like parameters; see orthogonalize_copies.

    `shares` are this process's rows of the matrices. Returns those of the results. Only as many
    matrices as processes are gathered at a time, to save memory.
    """
    results = list(shares)
    for indices in indices_by([p.shape for p in parameters]):
        for first in range(0, len(indices), world.size):
            some = indices[first : first + world.size]
            whole = [full_tensor(from_shard(parameters[i], shares[i])) for i in some]
            for i, update in zip(some, orthogonalize_copies(whole, world), strict=True):
                results[i] = local_shard(shard_like(parameters[i], update))
    return results


def indices_by(keys):
    """Returns lists of the indices of equal keys."""
    groups = defaultdict(list)
    for i, key in enumerate(keys):
        groups[key].append(i)
    return list(groups.values())


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
