"""The processes of a run: their ranks, their communication, and models distributed over them.

torchrun starts one process per device and describes it in the environment: RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT. All must call the collective functions in the same order.

With DDP, each process has the whole model and a part of the batch. With FSDP, parameters, gradients
and optimizer state are also sharded: each process has some rows of every tensor, a DTensor.
"""

import os
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from warnings import catch_warnings

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from folio.cli.errors import RankError, UserError, cause_of, is_out_of_memory
from folio.cli.process import is_launched

# Plain data and flags are exchanged on the CPU, so that they do not wait for a GPU's queue.
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}
GLOO_NETWORK = "/gloo/transport/"  # its messages begin with a path; torch has no type for them
TIMEOUT = timedelta(minutes=30)  # while rank 0 writes, for example; an end is noticed sooner


@dataclass(frozen=True)
class World:
    """The processes of a run. This one has number `rank` and computes on `device`."""

    rank: int = 0
    size: int = 1
    device: str | None = None
    is_launched: bool = False  # by torchrun, possibly as the only process

    @property
    def is_main(self):
        """Whether this process prints and writes files."""
        return self.rank == 0

    def sum(self, value):
        """Sums a scalar tensor over all processes, in place, and returns it."""
        if self.is_launched:
            torch.distributed.all_reduce(value)
        return value

    def all_gather(self, tensor):
        """Returns the tensors of all processes, of the same shape, concatenated in dimension 0."""
        if not self.is_launched:
            return tensor
        result = tensor.new_empty(self.size * len(tensor), *tensor.shape[1:])
        torch.distributed.all_gather(list(result.chunk(self.size)), tensor)
        return result

    def all_gather_object(self, value):
        """Returns the plain data that each process passes, in the order of the ranks."""
        values = [value] * self.size
        if self.is_launched:
            torch.distributed.all_gather_object(values, value)
        return values

    @contextmanager
    def share_errors(self):
        """A context in which a UserError of any process is raised by all of them, at its end.

        The code in it must not communicate.
        """
        own_error = None
        try:
            yield
        except UserError as error:
            own_error = str(error)
        for rank, message in enumerate(self.all_gather_object(own_error)):
            if message:
                raise UserError(f"rank {rank}: {message}" if rank else message)

    def share_settings(self, settings):
        """Returns rank 0's settings. A config file can compute others on each machine.

        Raises UserError if the processes have different command lines.
        """
        self.check_same({"the command line": settings.command_line})
        return self.all_gather_object(settings)[0]

    def check_same(self, inputs):
        """Raises UserError unless all processes pass equal {name: plain data}."""
        everywhere = self.all_gather_object(inputs)
        for name, value in everywhere[0].items():
            others = [values[name] for values in everywhere if values[name] != value]
            if others:
                cause = f"{name} differs between processes ({value} and {others[0]})"
                advice = "the same command, and give all the same files in data/ and out_dir"
                raise UserError(f"{cause}: start all with {advice}")


SINGLE_PROCESS = World()


@contextmanager
def process_group(device):
    """A context with the World of this process, on the given device or on its own GPU.

    Raises UserError if the processes cannot connect, RankError if one of them ends unexpectedly.
    """
    if not is_launched():
        yield World(device=device)
        return
    try:
        world, backend = _read_world(device), BACKENDS[torch.device(device).type]
        torch.distributed.init_process_group(backend, timeout=TIMEOUT)  # reads RANK, too
    except (RuntimeError, ValueError) as error:  # torch has no type for all of them
        cause = f"rank {os.environ['RANK']} cannot connect to the other processes"
        advice = "start all with torchrun, and check the address and port of --rdzv_endpoint"
        raise RankError(f"{cause} ({cause_of(error)}): {advice}") from error
    try:
        yield world
    except RuntimeError as error:
        is_gloos = GLOO_NETWORK in str(error).replace("\\", "/")
        is_of_connection = is_gloos or isinstance(error, torch.distributed.DistError)
        if is_out_of_memory(error) or not is_of_connection:
            raise
        raise RankError(
            f"rank {world.rank}: another process of the run has ended or cannot be reached "
            f"({cause_of(error)}); its message says why, unless it was killed. To continue, run "
            "the same command with --init_from=resume"
        ) from error
    torch.distributed.destroy_process_group()


def _read_world(device):
    """Returns the World that torchrun describes in the environment."""
    rank, size, local = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    kind = torch.device(device).type
    if kind not in BACKENDS:
        raise UserError(f"several processes cannot train on {kind}: use --device=cpu")
    if kind == "cuda":
        count = torch.cuda.device_count()
        if device != "cuda":
            raise UserError(f"--device={device} with torchrun: use cuda, one GPU per process")
        if local >= count:
            raise UserError(f"this machine has fewer GPUs: use --nproc_per_node={count}")
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
    return World(rank, size, device, is_launched=True)


# DDP


def replicate(loss_fn, world: World):
    """Returns a module, wrapped in DDP if there are several processes that do not shard it.

    DDP averages gradients, which are views of its buffers: set them to zero, not to None. Li et al.
    2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
    """
    if not world.is_launched or is_sharded(loss_fn):
        return loss_fn
    with catch_warnings(action="ignore", category=FutureWarning):  # torch 2.11 lacks the new name
        return DistributedDataParallel(
            loss_fn, broadcast_buffers=False, gradient_as_bucket_view=True
        )


def set_gradient_sync(loss_fn, enabled):
    """Sets whether the next backward pass averages gradients. Only the last of a step should."""
    if isinstance(loss_fn, DistributedDataParallel):
        loss_fn.require_backward_grad_sync = enabled
    elif is_sharded(loss_fn):
        loss_fn.set_requires_gradient_sync(enabled)


# FSDP (Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel")


def shard_model(model, world: World):
    """Moves a GPT from the CPU to the devices of the processes, each of which keeps a shard."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    idx = torch.zeros(1, 1, dtype=torch.int64, device=world.device)
    mesh = init_device_mesh(idx.device.type, (world.size,))
    policy = MixedPrecisionPolicy(param_dtype=model.dtype, reduce_dtype=torch.float32)
    for module in (*model.transformer.h, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    with torch.no_grad():
        model(idx, idx)  # FSDP initializes itself in the first call
    model.reshard()


def is_sharded(value):
    """Whether a model or a tensor is sharded over the processes."""
    return hasattr(value, "unshard") or hasattr(value, "placements")


def full_tensor(tensor):
    """Returns the full tensor. Collective if it is sharded."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def shard_like(parameter, full):
    """Returns `full`, which all processes have, sharded like `parameter` if that is sharded."""
    if not is_sharded(parameter):
        return full
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(full.to(parameter.device), mesh, placements, src_data_rank=None)


def gather_on_cpu(state, is_main=True):
    """Returns nested dicts and lists with their tensors, in full, on the CPU; all else is shared.

    Tied weights stay tied. Collective if tensors are sharded; then only rank 0 keeps them.
    """

    @cache
    def gather(tensor):
        full = full_tensor(tensor.detach())
        return full.cpu() if is_main else None

    return tree_map_only(torch.Tensor, gather, state)
