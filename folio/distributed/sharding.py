"""Models, gradients and parameters that are distributed over the processes of a run.

With DDP, each process has the whole model and a part of the batch. With FSDP, parameters, gradients
and optimizer state are also sharded: each process has some rows of every tensor.
"""

from contextlib import contextmanager
from warnings import catch_warnings

import torch
from torch.nn.parallel import DistributedDataParallel

from folio.hardware.device import DTYPES, device_type


def replicate(forward, world):
    """Returns a module, wrapped in DDP if there are several processes.

    DDP averages gradients, which are views of its buffers: set them to zero, not to None, which
    would allocate others. Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data
    Parallel Training".
    """
    if not world.is_launched:
        return forward
    with catch_warnings(action="ignore", category=FutureWarning):  # torch 2.11 lacks the new name
        return DistributedDataParallel(
            forward, broadcast_buffers=False, gradient_as_bucket_view=True
        )


def shard_model(model, world, dtype):
    """Shards a GPT on the meta device over the processes, in place. Weights stay uninitialized.

    Before a block computes, its parameters are gathered in `dtype`. Gradients are averaged in
    float32 (Zhao et al. 2023, "PyTorch FSDP").
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device_type(world.device), (world.size,))
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32)
    for module in (*model.transformer.h, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    model.to_empty(device=world.device)
    if model.rotary is not None:
        model.rotary.reset_parameters()  # its tables are not weights
    idx = torch.zeros(1, 1, dtype=torch.int64, device=world.device)
    with torch.no_grad():
        model(idx, idx)  # FSDP initializes itself in the first call
    model.reshard()


@contextmanager
def unshard(model):
    """A context in which methods of a GPT other than forward() can be called.

    It gathers the parameters outside of blocks; blocks gather theirs when they are called.
    """
    is_sharded = hasattr(model, "unshard")
    if is_sharded:
        model.unshard()
    yield
    if is_sharded:
        model.reshard()


def set_gradient_sync(forward, enabled):
    """Sets whether the next backward pass averages gradients. Only the last of a step should."""
    if isinstance(forward, DistributedDataParallel):
        forward.require_backward_grad_sync = enabled
    elif hasattr(forward, "set_requires_gradient_sync"):  # sharded
        forward.set_requires_gradient_sync(enabled)


# Parameters


def is_sharded(tensor):
    """Whether a tensor is a DTensor, distributed over the processes."""
    return hasattr(tensor, "placements")


def local_shard(tensor):
    """Returns this process's shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def shard_like(parameter, full):
    """Returns a full tensor as a DTensor that is sharded like a parameter or moment.

    Returns `full` itself if the parameter is not sharded, or if `full` is sharded already.
    """
    if not is_sharded(parameter) or is_sharded(full):
        return full
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(full.to(parameter.device), mesh, placements, src_data_rank=None)


def from_shard(parameter, shard):
    """Returns a DTensor that is sharded like a parameter and has the given local shard."""
    from torch.distributed.tensor import DTensor

    mesh, placements, size = parameter.device_mesh, parameter.placements, parameter.shape
    stride = parameter.stride()
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=size, stride=stride)


def full_tensor(tensor):
    """Returns the full tensor. Collective if it is sharded."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


@torch.no_grad()
def assign(parameter, full):
    """Sets a parameter to a full tensor. They share memory if dtype and device are the same."""
    if is_sharded(parameter):
        parameter.copy_(shard_like(parameter, full))
    else:
        parameter.data = full.to(parameter).contiguous()


def clip_gradients(model, max_norm):
    """Clips the gradient, if max_norm is not 0. Returns its norm before that, a scalar tensor."""
    parameters = list(model.parameters())
    norm = full_tensor(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
    if max_norm:
        # After an overflow in float16, NaN must not spread to the gradients of other optimizers.
        finite = norm.nan_to_num(torch.inf)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, finite)
    return norm


def gather_on_cpu(tree, is_main=True):
    """Returns nested dicts and lists with their tensors on the CPU; all else is shared.

    Tied weights, which are one object, stay tied. Sharded tensors are gathered one by one, which
    all processes must do, but only rank 0 keeps them.
    """
    gathered = {}

    def gather(value):
        if isinstance(value, dict):
            return {key: gather(item) for key, item in value.items()}
        if isinstance(value, list):
            return [gather(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in gathered:
            full = full_tensor(value.detach())
            gathered[id(value)] = full.cpu() if is_main else None
        return gathered[id(value)]

    return gather(tree)
