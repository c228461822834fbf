"""The Muon optimizer, and how its work is divided over the processes of a run."""

import math
from collections import defaultdict

import torch
import torch.nn.functional as F

from folio.distributed.sharding import from_shard, full_tensor, is_sharded, local_shard, shard_like
from folio.distributed.world import SINGLE_PROCESS

NEWTON_SCHULZ_STEPS = 5
MOMENTUM = 0.95
UPDATE_RMS = 0.2  # root mean square of AdamW's updates, as observed by Liu et al.


class Muon(torch.optim.Optimizer):
    """Muon: momentum SGD with orthogonalized updates, for matrices.

    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks",
    https://kellerjordan.github.io/posts/muon/. Updates are scaled to the root mean square of
    AdamW's updates (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2), so that one
    learning rate and weight decay suit both. The result equals torch.optim.Muon with
    adjust_lr_fn="match_rms_adamw", except that the query, key and value matrices in a c_attn are
    orthogonalized separately. All matrices of a shape are computed together, because the number of
    kernel launches limits the speed for small matrices.

    If `found_inf` is a scalar tensor of 1, a step changes nothing, as with torch's fused AdamW.
    """

    found_inf = None
    _step_supports_amp_scaling = True  # GradScaler sets found_inf

    def __init__(self, params, lr, weight_decay, dtype, world=SINGLE_PROCESS):
        """`params` are matrices, sharded or not. `dtype` is that of the matrix products.

        `lr` is a scalar tensor on their device.
        """
        self.dtype, self.world = dtype, world
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": MOMENTUM, "lr_scale": 1.0}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            directions = self._add_momentum(group)
            if is_sharded(group["params"][0]):
                updates = orthogonalize_shards(directions, group["params"], self.world)
            else:
                updates = orthogonalize_copies(directions, self.world)
            self._apply(group, updates)

    def _add_momentum(self, group):
        """Adds the gradients to the momentum. Returns Nesterov's directions, in `dtype`."""
        parameters, momentum = group["params"], group["momentum"]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [local_shard(self.state[p]["momentum_buffer"]) for p in parameters]
        gradients = [local_shard(p.grad) for p in parameters]
        if self.found_inf is not None:  # a gradient that equals the momentum does not change it
            skips = self.found_inf > 0
            pairs = zip(buffers, gradients, strict=True)
            gradients = [torch.where(skips, buffer, gradient) for buffer, gradient in pairs]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        directions = torch._foreach_lerp(gradients, buffers, momentum)
        return [direction.to(self.dtype) for direction in directions]

    def _apply(self, group, updates):
        """Decays the weights and subtracts the scaled updates."""
        lr = group["lr"]
        if self.found_inf is not None:
            lr = lr * (1 - self.found_inf)
        weights = [local_shard(p) for p in group["params"]]
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        for weight, update in zip(weights, updates, strict=True):
            weight.addcmul_(update, -UPDATE_RMS * lr)


def orthogonalize(x):
    """Makes the singular values of each matrix nearly equal: (N, a, b), a <= b -> the same shape.

    The Newton-Schulz iteration with a quintic polynomial: X <- a X + (b A + c A²) X, A = X Xᵀ.
    Singular values above 0.002 of the Frobenius norm end between about 0.7 and 1.2. They are then
    multiplied by sqrt(b), so that the root mean square of the elements is about 1.
    """
    a, b, c = 3.4445, -4.7750, 2.0315  # Jordan's, for fast convergence
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # no singular value is above 1
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x * math.sqrt(x.shape[2])


def momentum_at(step, settings):
    """Returns the momentum: a linear warmup from 0.85 to 0.95, then constant.

    Early in training, gradients change quickly, so that earlier ones should count less (Jordan et
    al. 2024, https://github.com/KellerJordan/modded-nanogpt, record 9).
    """
    if step >= settings.momentum_warmup_iters:
        return MOMENTUM
    return MOMENTUM - 0.1 * (1 - step / settings.momentum_warmup_iters)


# Division over processes


def orthogonalize_copies(matrices, world):
    """Orthogonalizes matrices of which every process has a copy. Returns a list. Collective.

    Matrices of the same shape, some transposed, form a stack. Each process computes n of them; the
    last parts are padded with zeros.
    """
    parts = [split_attention(matrix) for matrix in matrices]
    results = [part for group in parts for part in group]
    # No more rows than columns, for a smaller Gram matrix.
    wide = [part if part.shape[0] <= part.shape[1] else part.T for part in results]
    for indices in group_indices([matrix.shape for matrix in wide]):
        stack = torch.stack([wide[i] for i in indices])
        n = math.ceil(len(stack) / world.size)
        padded = F.pad(stack, (0, 0, 0, 0, 0, world.size * n - len(stack)))
        stack = world.all_gather(orthogonalize(padded[world.rank * n :][:n]))
        for i, result in zip(indices, stack, strict=False):  # the stack can end with padding
            results[i] = result if result.shape == results[i].shape else result.T
    remaining = iter(results)
    return [torch.cat([next(remaining) for _ in group]) for group in parts]


def split_attention(matrix):
    """Returns the query, key and value matrices in a c_attn, or only the matrix if it is another.

    Only a c_attn has three times as many rows as columns.
    """
    rows, columns = matrix.shape
    return matrix.chunk(3) if rows == 3 * columns else (matrix,)


def orthogonalize_shards(shards, parameters, world):
    """Orthogonalizes matrices that are sharded like parameters. Returns local shards. Collective.

    `shards` are this process's rows of the matrices, `parameters` the DTensors. To save memory,
    only as many full matrices as there are processes exist at a time.
    """
    results = list(shards)
    for indices in group_indices([parameter.shape for parameter in parameters]):
        for start in range(0, len(indices), world.size):
            batch = indices[start : start + world.size]
            matrices = [full_tensor(from_shard(parameters[i], shards[i])) for i in batch]
            for i, result in zip(batch, orthogonalize_copies(matrices, world), strict=True):
                results[i] = local_shard(shard_like(parameters[i], result))
    return results


def group_indices(keys):
    """Returns lists of the indices of equal keys."""
    groups = defaultdict(list)
    for i, key in enumerate(keys):
        groups[key].append(i)
    return list(groups.values())
