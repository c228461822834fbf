import math
from itertools import islice

import pytest
import torch

from folio.inference.sampling import UNIFORMS_PER_DRAW, SamplingParams, sample_next, uniforms


def frequencies(logits, draws=10_000, present=None, **params):
    """Returns how often each id is drawn with evenly spaced uniform numbers."""
    uniform = (torch.arange(draws) + 0.5) / draws
    rows = torch.tensor(logits).expand(draws, -1)
    ids = sample_next(rows, uniform, SamplingParams(**params), present)
    return torch.bincount(ids, minlength=len(logits)) / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_frequencies_equal_probabilities(temperature):
    logits = [0.0, 1.0, -0.5, -math.inf, 2.0]
    expected = (torch.tensor(logits) / temperature).softmax(0)
    assert torch.allclose(frequencies(logits, temperature=temperature), expected, atol=2e-4)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.45}, {1}),
        ({"top_p": 0.47}, {1, 3}),
        ({"top_p": 0.9}, {0, 1, 3}),
        ({"min_p": 0.61}, {1}),
        ({"min_p": 0.6}, {1, 3}),
        ({"top_k": 3, "top_p": 0.9}, {0, 1, 3}),
    ],
    ids=str,
)
def test_tokens_that_the_params_exclude_are_never_drawn(params, kept):
    """The probabilities are 0.169, 0.459, 0.094 and 0.278."""
    drawn = frequencies([0.0, 1.0, -0.587, 0.5], **params).nonzero()
    assert set(drawn.flatten().tolist()) == kept


def test_top_k_keeps_k_tokens_if_logits_are_equal():
    assert (frequencies([0.0, 1.0, 1.0, 1.0], top_k=2) > 0).sum() == 2


@pytest.mark.parametrize("temperature", [0, 1e-40])
def test_temperatures_near_zero_are_greedy(temperature):
    assert frequencies([1.0, 3.0, 2.0], temperature=temperature).tolist() == [0, 1, 0]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    present = torch.tensor([[True, False, True, False]])
    actual = frequencies([2.0, 2.0, -1.0, -1.0], present=present, repetition_penalty=2.0)
    expected = torch.tensor([1.0, 2.0, -2.0, -1.0]).softmax(0)
    assert torch.allclose(actual, expected, atol=2e-4)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_extreme_uniform_numbers_draw_possible_tokens(uniform):
    size = 50_000
    logits = torch.full((1, size), -math.inf)
    logits[0, : size // 2] = torch.randn(size // 2, generator=torch.Generator().manual_seed(0))
    assert sample_next(logits, torch.tensor([uniform]), SamplingParams()).item() < size // 2


def test_each_text_has_its_own_stream_of_uniform_numbers():
    def stream(*seeds):
        return torch.stack(list(islice(uniforms(seeds, "cpu"), UNIFORMS_PER_DRAW + 5)), dim=1)

    both = stream(7, 8)
    assert torch.equal(both, torch.cat((stream(7), stream(8))))
    assert ((both >= 0) & (both < 1)).all()
    assert (both[0] != both[1]).all()
