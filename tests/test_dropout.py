"""Dropout on a CPU."""

import pytest
import torch

from folio.dropout import Dropout, apply_dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_a_fraction_is_dropped_and_the_mean_is_kept(rate, dtype):
    torch.manual_seed(0)
    x = torch.full((1001, 1001), 2.0, dtype=dtype)
    y = apply_dropout(x, rate)
    assert y.dtype == dtype
    assert (y == 0).float().mean() == pytest.approx(rate, abs=2e-3)
    assert y.float().mean() == pytest.approx(2.0, rel=1e-2)
    kept = y[y != 0]
    assert (kept == kept[0]).all()
    rows = (y == 0).float().mean(dim=0)  # no pattern along a dimension
    assert rows.std() == pytest.approx((rate * (1 - rate) / 1001) ** 0.5, rel=0.1, abs=1e-9)


def test_the_gradient_has_the_same_mask():
    x = torch.randn(7, 3, 5, requires_grad=True)
    y = apply_dropout(x, 0.3)
    y.sum().backward()
    assert torch.equal(x.grad == 0, y == 0)
    assert torch.allclose(x * x.grad, y)


def test_the_seed_sets_the_mask():
    def mask(seed):
        torch.manual_seed(seed)
        return apply_dropout(torch.ones(100), 0.5)

    assert torch.equal(mask(1), mask(1))
    assert not torch.equal(mask(1), mask(2))


def test_a_module_drops_in_training_only():
    module, x = Dropout(0.5), torch.ones(1000)
    assert (module(x) == 0).any()
    assert torch.equal(module.eval()(x), x)


def test_neighboring_elements_are_independent():
    torch.manual_seed(0)
    dropped = (apply_dropout(torch.ones(10**6), 0.5) == 0).double() - 0.5
    for distance in range(1, 9):
        correlation = (dropped[:-distance] * dropped[distance:]).mean() * 4
        assert abs(correlation) < 5e-3
