"""Simulates the memory of a training step, without a GPU and without computing anything.

torch's fake tensors have shapes but no values, and its fake backend stands for the other processes.
The simulated device is a CPU, whose operations save the same tensors for the backward pass.
"""

import dataclasses
from unittest.mock import patch

import torch
import torch.distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import device_mesh
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from folio.checkpoint.run_dir import RunDir
from folio.cli.settings import load_settings
from folio.data.dataset import load_tokenizer
from folio.distributed.world import World
from folio.hardware.device import choose_machine
from folio.training.run import Run
from folio.training.setup import Plan, check_parallel, model_config
from train import TrainConfig, train_step


def print_memory(arguments, processes):
    """Prints the simulated peak of a step with one micro-batch in each of `processes` processes."""
    settings = load_settings(TrainConfig, arguments)  # presets choose for a GPU
    dtype = "bfloat16" if settings.dtype == "auto" else settings.dtype
    settings = dataclasses.replace(settings, dtype=dtype, gradient_accumulation_steps=processes)
    check_parallel(settings, processes)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        peak = simulate(settings, processes)
    finally:
        torch.distributed.destroy_process_group()
    print(
        f"{processes} processes, {settings.parallel}, not compiled: {peak / 2**30:.2f} GiB in each"
    )


def simulate(settings, processes):
    """Returns the peak in bytes.

    An ordinary model stands for DDP. Its gradients take as much memory, and are kept.
    """
    is_sharded = settings.parallel == "fsdp"
    config = model_config(settings, load_tokenizer(settings.dataset))
    machine = choose_machine("cpu", settings.dtype, compile=False)
    mesh = device_mesh.init_device_mesh("cpu", (processes,))  # needs real tensors
    with FakeTensorMode(), patch.object(device_mesh, "init_device_mesh", lambda *_: mesh):
        world = World(size=processes, device="cpu", is_launched=is_sharded)
        run = Run(Plan(settings, config, None, machine, RunDir(settings.out_dir), world))
        run.can_free_gradients = is_sharded or processes == 1
        batch = torch.zeros(settings.batch_size, settings.block_size, dtype=torch.int64)
        if is_sharded:
            tracker = FSDPMemTracker(run.model)
            tracker.track_inputs((batch,))
        else:
            tracker = MemTracker()
            tracker.track_external(run.model, batch)
        for optimizer in run.optimizers.values():
            tracker.track_external(optimizer)
        for step in range(2):  # the first allocates the moments
            tracker.reset_mod_stats()
            with tracker:
                train_step(run, [(batch, batch)], step, settings.learning_rate)
    peak = tracker.get_tracker_snapshot("peak")
    return peak[torch.device("cpu")]["Total"]
