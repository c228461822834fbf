"""The Muon optimizer, and how its work is divided over the processes of a run."""

import math
from collections import defaultdict

import torch
import torch.nn.functional as F

from folio.distributed.sharding import is_sharded, shard_like
from folio.distributed.world import SINGLE_PROCESS

NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's, for fast convergence
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
            is_fsdp = is_sharded(directions[0])
            divide = orthogonalize_shards if is_fsdp else orthogonalize_copies
            self._apply(group, divide(directions, self.world))

    def _add_momentum(self, group):
        """Adds the gradients to the momentum. Returns Nesterov's directions, in `dtype`."""
        parameters, momentum = group["params"], group["momentum"]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[p]["momentum_buffer"] for p in parameters]
        gradients = [p.grad for p in parameters]
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
        torch._foreach_mul_(group["params"], 1 - lr * group["weight_decay"])
        for weight, update in zip(group["params"], updates, strict=True):
            weight.addcmul_(update, -UPDATE_RMS * lr)


def orthogonalize(x):
    """Makes the singular values of each matrix nearly equal: (N, a, b), a <= b -> the same shape.

    The Newton-Schulz iteration with a quintic polynomial: X <- a X + (b A + c A²) X, A = X Xᵀ.
    Singular values above 0.002 of the Frobenius norm end between about 0.7 and 1.2. They are then
    multiplied by sqrt(b), so that the root mean square of the elements is about 1.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
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

    Those that have the same shape, some transposed, are concatenated. Each process computes n of
    them; the last parts are padded with zeros.
    """
    results, stacks = list(matrices), [wide_stack(matrix) for matrix in matrices]
    groups = defaultdict(list)
    for i, stack in enumerate(stacks):
        groups[stack.shape[1:]].append(i)
    for indices in groups.values():
        together = torch.cat([stacks[i] for i in indices])
        n = math.ceil(len(together) / world.size)
        padded = F.pad(together, (0, 0, 0, 0, 0, world.size * n - len(together)))
        together = world.all_gather(orthogonalize(padded[world.rank * n :][:n]))
        sizes = [len(stacks[i]) for i in indices]
        for i, result in zip(indices, together[: sum(sizes)].split(sizes), strict=True):
            is_tall = result.shape[2] != matrices[i].shape[1]
            results[i] = (result.mT if is_tall else result).reshape(matrices[i].shape)
    return results


def wide_stack(matrix):
    """Returns a stack of the matrices in a matrix, (1 or 3, a, b), a <= b, for a small Gram matrix.

    A c_attn has three: queries, keys and values. Only it has three times as many rows as columns.
    """
    rows, columns = matrix.shape
    if rows == 3 * columns:
        return matrix.reshape(3, columns, columns)
    return (matrix if rows <= columns else matrix.T).unsqueeze(0)


def orthogonalize_shards(matrices, world):
    """Orthogonalizes sharded matrices. Returns a list of matrices with the same shards. Collective.

    To save memory, only as many full matrices as there are processes exist at a time.
    """
    results = list(matrices)
    order = sorted(range(len(matrices)), key=lambda i: matrices[i].shape)  # equal shapes together
    for start in range(0, len(order), world.size):
        batch = order[start : start + world.size]
        full = orthogonalize_copies([matrices[i].full_tensor() for i in batch], world)
        for i, result in zip(batch, full, strict=True):
            results[i] = shard_like(matrices[i], result)
    return results
