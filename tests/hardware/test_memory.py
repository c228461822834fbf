"""Device memory: its limits, models that do not fit, and activation checkpointing."""

from pathlib import Path

import pytest
import tiny
import torch

from folio.cli.errors import UserError
from folio.hardware import memory
from folio.hardware.memory import explain_out_of_memory, memory_bytes, recompute_activations
from model import GPT, GPTConfig

SHAPE = {"block_size": 16, "vocab_size": 30, "n_layer": 2, "n_head": 2, "n_embd": 32}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_errors_become_user_errors_with_advice(error):
    caught = pytest.raises(UserError, match="cuda.*use less")
    with caught, explain_out_of_memory("cuda", "use less"):
        raise error
    with pytest.raises(RuntimeError, match="a bug"), explain_out_of_memory("cpu", ""):
        raise RuntimeError("a bug")


# Limits


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_the_limit_of_a_container_is_the_memory_of_the_device(folder, name, monkeypatch):
    monkeypatch.setattr(memory, "CONTAINER_LIMITS", str(folder))
    Path(name).parent.mkdir(exist_ok=True)
    for text, limited in (("max\n", False), ("5000\n", True)):
        Path(name).write_text(text)
        assert (memory_bytes("cpu") == 5000) == limited


# Activation checkpointing


def losses_and_gradients(recomputes, dtype, **changes):
    """Returns the losses of two steps, the gradients by name, and the generator's state."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPE, **changes)).init_weights()
    model.dtype = dtype
    if recomputes:
        recompute_activations(model)
    ids, losses = torch.randint(30, (2, 16)), []
    for _ in range(2):
        loss = model(ids, ids)
        loss.backward()
        losses.append(loss.detach())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return losses, gradients, torch.get_rng_state()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{"dropout": 0.3}, {"position": "rotary"}], ids=str)
def test_losses_gradients_and_dropout_are_the_same(changes, dtype):
    expected = losses_and_gradients(False, dtype, **changes)
    assert tiny.equal(losses_and_gradients(True, dtype, **changes), expected)


def saved_bytes(recomputes):
    """Returns the bytes in storages that autograd saves in a forward pass, except weights."""
    model = GPT(GPTConfig(vocab_size=10, n_layer=6, n_head=2, n_embd=64, block_size=32))
    if recomputes:
        recompute_activations(model)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = tensor  # keeps it, so that no address is used twice
        return tensor

    ids = torch.zeros(8, 32, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, ids)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def test_only_the_input_of_each_block_is_kept():
    inputs = 6 * 4 * 64 * 8 * 32
    assert inputs < saved_bytes(True) < 1.6 * inputs < saved_bytes(False) / 4
