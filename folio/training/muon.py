"""The Muon optimizer, and how its work is divided over the processes of a run."""

import math
from collections import defaultdict

import torch
import torch.nn.functional as F

from folio.distributed.world import SINGLE_PROCESS, World, full_tensor, is_sharded, shard_like

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

    def __init__(self, params, lr, weight_decay, dtype, world: World = SINGLE_PROCESS):
        """`params` are matrices, sharded or not. `dtype` is that of the matrix products.

        `lr` is a scalar tensor on their device.
        """
        self.dtype, self.world = dtype, world
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": MOMENTUM, "lr_scale": 1.0}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):  # type: ignore[override]  # without a closure, which no caller passes
        for group in self.param_groups:
            parameters, lr = group["params"], group["lr"]
            if self.found_inf is not None:
                lr = lr * (1 - self.found_inf)
            directions = self._add_momentum(group)
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
            # Only as many sharded matrices as there are processes exist in full at a time.
            most = self.world.size if is_sharded(parameters[0]) else len(parameters)
            groups = defaultdict(list)
            for pair in zip(parameters, directions, strict=True):
                groups[part_shape(pair[0])].append(pair)
            for pairs in groups.values():
                for start in range(0, len(pairs), most):
                    self._update(pairs[start : start + most], lr)

    def _update(self, pairs, lr):
        """Updates (parameter, direction) pairs, whose matrices must have one part_shape."""
        matrices = [full_tensor(direction.to(self.dtype)) for _, direction in pairs]
        updates = orthogonalize_together(matrices, self.world)
        for (parameter, _), update in zip(pairs, updates, strict=True):
            parameter.addcmul_(shard_like(parameter, update), -UPDATE_RMS * lr)

    def _add_momentum(self, group):
        """Adds the gradients to the momentum. Returns Nesterov's directions."""
        for parameter in group["params"]:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[p]["momentum_buffer"] for p in group["params"]]
        gradients = [p.grad for p in group["params"]]
        if self.found_inf is not None:  # a gradient that equals the momentum does not change it
            skips = self.found_inf > 0
            pairs = zip(buffers, gradients, strict=True)
            gradients = [torch.where(skips, buffer, gradient) for buffer, gradient in pairs]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        torch._foreach_lerp_(gradients, buffers, group["momentum"])  # the next step replaces them
        return gradients


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


def orthogonalize_together(matrices, world: World):
    """Orthogonalizes matrices of which every process has a copy. Returns a list. Collective.

    Their parts must have the same part_shape. Each process computes `n` of the parts.
    """
    parts = [part for matrix in matrices for part in split_attention(matrix)]
    shape = part_shape(matrices[0])
    stack = torch.stack([part if part.shape == shape else part.T for part in parts])
    n = math.ceil(len(parts) / world.size)
    padded = F.pad(stack, (0, 0, 0, 0, 0, world.size * n - len(parts)))
    stack = world.all_gather(orthogonalize(padded[world.rank * n :][:n]))
    pairs = zip(stack, parts, strict=False)  # without the padding
    results = iter([x if part.shape == shape else x.T for x, part in pairs])
    return [torch.cat([next(results) for _ in split_attention(matrix)]) for matrix in matrices]


def split_attention(matrix):
    """Returns the query, key and value matrices in a c_attn, or only the matrix if it is none."""
    rows, columns = matrix.shape
    return matrix.chunk(3) if rows == 3 * columns else (matrix,)  # only c_attn is so tall


def part_shape(matrix):
    """Returns the shape of a matrix's parts; those with more rows than columns are transposed."""
    rows, columns = matrix.shape
    return (columns, columns) if rows == 3 * columns else (min(rows, columns), max(rows, columns))
