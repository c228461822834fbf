import math

import pytest
import torch

from folio import attention
from model import causal_attention


@pytest.fixture(params=[True, False], ids=["explicit", "kernel"])
def implementation(request, monkeypatch):
    """Runs the test with each implementation of attention."""
    monkeypatch.setattr(attention, "prefers_explicit_attention", lambda *_: request.param)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("window", [0, 1, 4, 5, 8, 32, 33, 40])
@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (1, 1, 1, 4), (2, 2, 33, 16)], ids=str)
def test_attention_and_its_gradients_follow_the_definition(shape, window):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, *shape, requires_grad=True).unbind()
    distance = torch.arange(shape[2])[:, None] - torch.arange(shape[2])
    visible = (distance >= 0) & (distance < (window or shape[2]))
    scores = (q @ k.mT / math.sqrt(shape[3])).masked_fill(~visible, -math.inf)
    expected, y = scores.softmax(dim=-1) @ v, causal_attention(q, k, v, window)
    assert torch.allclose(y, expected, atol=1e-6)
    direction = torch.randn(shape)
    gradients = [torch.autograd.grad((of * direction).sum(), (q, k, v)) for of in (y, expected)]
    for ours, reference in zip(*gradients, strict=True):
        assert torch.allclose(ours, reference, atol=1e-5)


def test_explicit_attention_drops_its_share_and_keeps_the_mean():
    torch.manual_seed(0)
    q = k = torch.zeros(1, 1, 400, 8)
    v = torch.eye(400)[None, None]
    weights = attention.explicit_attention(q, k, v, torch.zeros(1, 400, 400), dropout=0.25)
    assert (weights == 0).float().mean() == pytest.approx(0.25, abs=0.01)
    assert weights.max() == pytest.approx(1 / 400 / 0.75)


def test_cudnn_is_excluded_on_cuda_only():
    for device, enabled in (("cpu", True), ("cuda", False)):
        with attention.without_cudnn(torch.device(device)):
            assert torch.backends.cuda.cudnn_sdp_enabled() == enabled
            assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("window", [0, 64, 96])
def test_gpu_attention_with_very_low_scores_has_correct_gradients(window):
    """cuDNN has NaN with a mask, scores below -89, and 64 keys or queries modulo 128."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 192, 64)
    q, k = q / 10, k / 10
    q[..., 0], k[..., 0] = 1, -960  # all scores are about -960 / sqrt(64)
    results = {}
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        inputs = [each.bfloat16().to(device, dtype).requires_grad_() for each in (q, k, v)]
        y = causal_attention(*inputs, window)
        gradients = torch.autograd.grad(y.square().sum(), inputs)
        results[device] = [each.detach().float().cpu() for each in (y, *gradients)]
    for ours, expected in zip(results["cuda"], results["cpu"], strict=True):
        assert ours.isfinite().all()
        ours, expected = ours[..., 1:], expected[..., 1:]  # rounding dominates the first gradient
        assert (ours - expected).norm() < 0.06 * expected.norm()
