"""Device memory: its limits, and activation checkpointing."""

from pathlib import Path

import pytest
import tiny
import torch

from folio.hardware import memory
from folio.hardware.memory import memory_bytes, recompute_activations

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
    model = tiny.random_model(**changes).train()
    model.dtype = dtype
    if recomputes:
        recompute_activations(model)
    ids, losses, calls = tiny.random_ids(model, rows=2), [], []
    model.transformer.h[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for step in range(2):
        losses.append(model(ids, ids))
        assert len(calls) == (2 * step if recomputes else step) + 1
        losses[-1].backward()
    assert len(calls) == (4 if recomputes else 2)  # the backward passes call each block again
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return losses, gradients, torch.get_rng_state()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{"dropout": 0.3}, {"position": "rotary"}], ids=str)
def test_losses_gradients_and_dropout_are_the_same(changes, dtype):
    expected = losses_and_gradients(False, dtype, **changes)
    assert tiny.equal(losses_and_gradients(True, dtype, **changes), expected)
