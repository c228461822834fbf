"""The processes of a run: their ranks, and communication through torch.distributed.

torchrun starts one process per device and describes it in the environment: RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT. All processes must call the collective functions in the
same order.
"""

import os
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed

from folio.cli.errors import RankError, UserError, cause_of, is_out_of_memory
from folio.cli.process import is_launched
from folio.hardware.device import device_type

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

    def any(self, flag):
        """Returns whether a flag is true in any process. Does not wait for a GPU's queue."""
        return bool(self.sum(torch.tensor(float(flag))))

    def all_gather(self, tensor):
        """Returns the tensors of all processes, of the same shape, concatenated in dimension 0."""
        if not self.is_launched:
            return tensor
        result = tensor.new_empty(self.size * len(tensor), *tensor.shape[1:])
        torch.distributed.all_gather(list(result.chunk(self.size)), tensor)
        return result

    def gather(self, value):
        """Returns the plain data that each process passes, in the order of the ranks."""
        values = [value] * self.size
        if self.is_launched:
            torch.distributed.all_gather_object(values, value)
        return values

    def from_main(self, value):
        """Returns the plain data that rank 0 passes."""
        return self.gather(value)[0]

    def call_together(self, function, *args):
        """Returns function(*args). If it raises a UserError on any process, all raise one.

        The function must not communicate.
        """
        result = own_error = None
        try:
            result = function(*args)
        except UserError as error:
            own_error = str(error)
        for rank, error in enumerate(self.gather(own_error)):
            if error:
                raise UserError(f"rank {rank}: {error}" if rank else error)
        return result

    def check_same(self, values):
        """Raises UserError unless all processes pass the same {name: plain data}."""
        everywhere = self.gather(values)
        for name, value in everywhere[0].items():
            others = [values[name] for values in everywhere if values[name] != value]
            if others:
                raise UserError(
                    f"{name} differs between processes ({value} and {others[0]}): start all with "
                    "the same command, and give all the same files in data/ and out_dir"
                )


SINGLE_PROCESS = World()


# Start and end


@contextmanager
def process_group(device):
    """A context with the World of this process, on the given device or on its own GPU.

    Raises UserError if the processes cannot connect, RankError if one of them ends unexpectedly.
    """
    if not is_launched():
        yield World(device=device)
        return
    try:
        world, backend = _read_world(device), BACKENDS[device_type(device)]
        torch.distributed.init_process_group(backend, timeout=TIMEOUT)  # reads RANK, too
    except (RuntimeError, ValueError) as error:  # torch has no type for all of them
        raise RankError(
            f"rank {os.environ['RANK']} cannot connect to the other processes ({cause_of(error)}): "
            "start all with torchrun, and check the address and port of --rdzv_endpoint"
        ) from error
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
    kind = device_type(device)
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
