"""64 and 256 processes: this one is real, and torch's fake backend stands for the others.

It returns at once: a sum over the processes has only this one's values, and gathered tensors are
copies of this one's.
"""

from dataclasses import replace

import pytest
import tiny
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

import train
from folio.data.batches import Batches, to_device
from folio.distributed.sharding import gather_on_cpu
from folio.distributed.world import World
from folio.training.setup import model_config

pytestmark = pytest.mark.parametrize("size", [64, 256])


@pytest.fixture
def world(size):
    """One rank per size: a second one would read what torch has cached for the first."""
    rank = size // 2 + 1
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    yield World(rank, size, "cpu", is_launched=True)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_step_with_more_processes_than_rows(verse, world, parallel):
    changes = {"parallel": parallel, "optimizer": "muon"} | tiny.SWITCHES
    settings = tiny.settings(gradient_accumulation_steps=2 * world.size, **changes)
    config = model_config(settings, verse.tokenizer)
    plan = tiny.plan_of(config, settings, to_device(verse, "cpu"))
    run = train.make_run(replace(plan, world=world))
    if parallel == "ddp":  # its own average needs a backend
        run.forward.register_comm_hook(None, keep_gradients)
    batches = Batches(run.dataset.train, run.settings, world)
    loss, grad_norm = train.train_step(run, batches.at(0), 0, 1e-3)
    assert loss > 0
    assert torch.isfinite(grad_norm)
    weights = gather_on_cpu(run.state_dict())["weights"]
    expected = tiny.new_run(optimizer="muon", **tiny.SWITCHES).model.state_dict()
    assert {k: v.shape for k, v in weights.items()} == {k: v.shape for k, v in expected.items()}


def keep_gradients(_, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
