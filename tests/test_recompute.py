"""Activation checkpointing must not change anything but memory and rounding."""

import pytest
import tiny
import torch

import train
from folio.recompute import recompute_activations
from model import GPT, GPTConfig

SHAPE = {"block_size": 16, "vocab_size": 30, "n_layer": 2, "n_head": 2, "n_embd": 32}


def losses_and_gradients(recomputes, dtype=torch.float32, compiled=False, **changes):
    """Returns the losses of two steps, the gradients and the generator's state."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPE, **changes))
    if recomputes:
        recompute_activations(model)
    forward = torch.compile(model, backend="aot_eager") if compiled else model
    ids, losses = torch.randint(30, (2, 16)), []
    for _ in range(2):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = forward(ids, ids)
        loss.backward()
        losses.append(loss.detach())
    return losses, [p.grad for p in model.parameters()], torch.get_rng_state()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
@pytest.mark.parametrize("changes", [{}, {"dropout": 0.3}, {"position": "rotary"}], ids=str)
def test_losses_gradients_and_dropout_are_the_same(changes, dtype, tolerance):
    losses, gradients, state = losses_and_gradients(False, dtype, **changes)
    found, recomputed, end = losses_and_gradients(True, dtype, **changes)
    torch.testing.assert_close(found, losses, rtol=1e-6, atol=0)
    for ours, expected in zip(recomputed, gradients, strict=True):
        assert (ours - expected).norm() <= tolerance * expected.norm()
    assert torch.equal(end, state)


@pytest.mark.slow
def test_a_compiled_model_has_the_same_gradients():
    losses, gradients, state = losses_and_gradients(False, compiled=True, dropout=0.3)
    found, recomputed, end = losses_and_gradients(True, compiled=True, dropout=0.3)
    assert tiny.same((found, end), (losses, state))
    for a, b in zip(recomputed, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # fused differently


def test_names_and_samples_are_the_same():
    model = tiny.random_model()
    ids, names = tiny.random_ids(model), list(model.state_dict())
    expected = model.logits(ids)
    recompute_activations(model)
    assert list(model.state_dict()) == names
    assert torch.equal(model.logits(ids), expected)


def test_training_with_it_has_nearly_the_same_losses(folder):
    tiny.prepare_verse()
    common = {"dropout": 0.2, "sample_interval": 3}
    for name, value in (("a", False), ("b", True)):
        train.main(tiny.flags(out_dir=name, activation_checkpointing=value, **common))
    plain, recomputed = (tiny.log_events(name) for name in "ab")
    for ours, expected in zip(recomputed, plain, strict=True):
        assert ours.get("loss") == pytest.approx(expected.get("loss"), abs=1e-5)


def test_targets_of_minus_one_do_not_count():
    model, rows = tiny.random_model(), 3
    ids = tiny.random_ids(model, rows=rows)
    targets = ids.clone()
    targets[1:] = -1  # most parts have none that counts
    expected = model(ids, targets)
    recompute_activations(model)
    torch.testing.assert_close(model(ids, targets), expected)
