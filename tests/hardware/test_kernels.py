"""Kernels in place of torch's: attention with windows, dropout, linear layers."""

import math

import pytest
import torch
import torch.nn.functional as F
from tiny import random_ids, random_model

from folio.distributed.world import SINGLE_PROCESS
from folio.hardware import kernels
from folio.hardware.device import Machine
from folio.hardware.kernels import apply_dropout, explicit_attention, fast_linear
from folio.hardware.optimize import optimize_for_training, use_fast_kernels
from model import CausalSelfAttention, GPTConfig, Linear


def causal_attention(q, k, v, window, kernel=kernels.fast_attention):
    """Calls CausalSelfAttention.causal_attention with a kernel."""
    module = CausalSelfAttention(GPTConfig(n_head=1, n_embd=2, window=window))
    module.kernel = kernel
    return module.causal_attention(q, k, v)


# Attention


@pytest.mark.parametrize(
    "kernel", [F.scaled_dot_product_attention, kernels.fast_attention, explicit_attention]
)
@pytest.mark.parametrize("window", [0, 1, 4, 5, 40])
@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (1, 1, 1, 4)], ids=str)
def test_attention_and_its_gradients_follow_the_definition(shape, window, kernel):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, *shape, requires_grad=True).unbind()
    distance = torch.arange(shape[2])[:, None] - torch.arange(shape[2])
    visible = (distance >= 0) & (distance < (window or shape[2]))
    scores = (q @ k.mT / math.sqrt(shape[3])).masked_fill(~visible, -math.inf)
    expected, y = scores.softmax(dim=-1) @ v, causal_attention(q, k, v, window, kernel)
    assert torch.allclose(y, expected, atol=1e-6)
    direction = torch.randn(shape)
    gradients = [torch.autograd.grad((of * direction).sum(), (q, k, v)) for of in (y, expected)]
    for ours, reference in zip(*gradients, strict=True):
        assert torch.allclose(ours, reference, atol=1e-5)


def test_attention_in_bfloat16_on_a_cpu_is_explicit():
    q, k, v = torch.randn(3, 2, 3, 5, 8, dtype=torch.bfloat16).unbind()
    expected = causal_attention(q, k, v, 0, explicit_attention)
    assert torch.equal(causal_attention(q, k, v, 0), expected)
    assert not torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=True), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 64, 96])
def test_gpu_attention_with_very_low_scores_has_correct_gradients(window):
    """cuDNN has NaN with a mask, scores below -89, and 64 keys or queries modulo 128."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 192, 64)
    q, k = q / 10, k / 10
    q[..., 0], k[..., 0] = 1, -960  # all scores are about -960 / sqrt(64)
    results = {}
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        inputs = [x.bfloat16().to(device, dtype).requires_grad_() for x in (q, k, v)]
        y = causal_attention(*inputs, window)
        gradients = torch.autograd.grad(y.square().sum(), inputs)
        results[device] = [x.detach().float().cpu() for x in (y, *gradients)]
    for ours, expected in zip(results["cuda"], results["cpu"], strict=True):
        assert ours.isfinite().all()
        ours, expected = ours[..., 1:], expected[..., 1:]  # rounding dominates the first gradient
        assert (ours - expected).norm() < 0.06 * expected.norm()


# Dropout


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.9])
def test_a_fraction_is_dropped_and_the_mean_is_kept(rate):
    torch.manual_seed(0)
    y = apply_dropout(torch.full((1001, 1001), 2.0, dtype=torch.bfloat16), rate)
    assert y.dtype == torch.bfloat16
    assert (y == 0).float().mean() == pytest.approx(rate, abs=2e-3)
    assert y.float().mean() == pytest.approx(2.0, rel=1e-2)
    kept = y[y != 0]
    assert (kept == kept[0]).all()
    rows = (y == 0).float().mean(dim=0)  # no pattern along a dimension
    assert rows.std() == pytest.approx((rate * (1 - rate) / 1001) ** 0.5, rel=0.1, abs=1e-9)


def test_a_model_drops_in_training_only_and_the_seed_sets_which_elements():
    model = random_model(dropout=0.5)
    use_fast_kernels(model)
    idx, logits = random_ids(model), []
    assert torch.equal(model.logits(idx), random_model().logits(idx))
    model.train()
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        logits.append(model.logits(idx))
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


# Loss and gradients


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("changes", [{"bias": False}, {"window": 3}], ids=str)
def test_an_optimized_model_has_the_same_loss_and_gradients(norm, changes):
    plain, fast = (random_model(norm=norm, **changes).train() for _ in range(2))
    optimize_for_training(fast, None, Machine("cpu", "float32", False), SINGLE_PROCESS)
    idx = random_ids(plain)
    losses = [model(idx, idx, 0.9) for model in (plain, fast)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    assert plain.state_dict().keys() == fast.state_dict().keys()
    for ours, reference in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, reference.grad, atol=1e-6, rtol=1e-4)


# Linear layers


@pytest.mark.parametrize("has_mkl", [False, True])
@pytest.mark.parametrize("has_bfloat16", [False, True])
def test_layers_depend_on_what_the_cpu_has(has_mkl, has_bfloat16, monkeypatch):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: has_mkl)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bfloat16)
    for kind in ("PackedLinear", "FewRowsLinear"):  # which the CPU may not have
        monkeypatch.setattr(kernels, kind, lambda linear, kind=kind: kind)
    linear, small = Linear(400, 400), Linear(16, 16)
    packed = "PackedLinear" if has_mkl else linear
    assert fast_linear(linear, "float32", None) is packed
    assert fast_linear(small, "float32", None) is small
    assert fast_linear(linear, "float32", 3) is ("FewRowsLinear" if has_mkl else linear)
    assert fast_linear(linear, "bfloat16", 3) is (packed if has_bfloat16 else linear)
