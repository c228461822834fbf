"""What a run needs before its first step: checks of the machine and its memory."""

import pytest
import tiny
import torch

from folio.checkpoint.format import empty_model
from folio.cli.errors import UserError
from folio.distributed.world import SINGLE_PROCESS
from folio.hardware.device import Machine
from folio.hardware.optimize import optimize_for_training
from folio.training import setup
from model import GPTConfig

MACHINE = Machine("cpu", "float32", False)


@pytest.fixture
def check_memory(monkeypatch):
    """A function that calls check_memory with a number of bytes of memory."""

    def check(model, memory, **changes):
        monkeypatch.setattr(setup, "memory_bytes", lambda device: memory)
        setup.check_memory(model, tiny.settings(**changes), MACHINE, SINGLE_PROCESS)

    return check


def test_weights_gradients_and_moments_that_exceed_the_memory_are_refused(check_memory):
    model = empty_model(GPTConfig(vocab_size=65, **tiny.SHAPE), "meta")
    count = model.num_params()
    small = {"batch_size": 1}
    check_memory(model, 16 * count, **small)
    check_memory(model, 16 * count - 1, optimizer="muon", **small)  # one moment less
    check_memory(model, 16 * count - 1, eval_only=True, **small)
    with pytest.raises(UserError, match="the model needs more than .*: decrease --n_layer"):
        check_memory(model, 16 * count - 1, **small)


@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("changes", [*tiny.SHAPES, tiny.SWITCHES | {"n_layer": 2}], ids=str)
def test_activations_that_exceed_the_memory_are_refused(check_memory, changes, is_recomputed):
    """Steps that fit are not: the memory is at least that of the tensors that autograd keeps."""
    model, kept = tiny.random_model(**changes).train(), {}
    batch = {"batch_size": 64, "block_size": model.config.block_size}
    if is_recomputed:
        batch["activation_checkpointing"] = True
    weights = 4 * model.num_params()

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    optimize_for_training(model, None, MACHINE, SINGLE_PROCESS, is_recomputed)
    ids = tiny.random_ids(model, rows=64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(ids, ids)
    activations = sum(kept.values())
    check_memory(model, 3 * weights + max(weights, activations), **batch)
    if activations > 8 * weights:
        with pytest.raises(UserError, match="the model needs more than .*: halve --batch_size"):
            check_memory(model, 3 * weights + activations // 8, **batch)
