"""Drawing the next token from a model's logits.

References: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration" (top-p); Nguyen et
al. 2025, "Turning Up the Heat" (min-p); Keskar et al. 2019, "CTRL" (repetition penalty).
"""

import math
from dataclasses import dataclass

import torch

UNIFORMS_PER_DRAW = 256  # random numbers per text that are generated at once


@dataclass(frozen=True)
class SamplingParams:
    """Settings of generation, which a SampleConfig has, too. The defaults change no probability."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int | None = None  # keep the k most likely tokens
    top_p: float = 1.0  # keep the most likely tokens whose probabilities sum to p
    min_p: float = 0.0  # keep tokens with at least this fraction of the highest probability
    repetition_penalty: float = 1.0  # above 1 lowers the logits of tokens that already occur
    max_new_tokens: int = 500  # per text
    min_new_tokens: int = 0  # the end-of-text token cannot be drawn before
    ignore_end: bool = False  # it is never drawn
    context_stride: int | None = None  # see stride_of in folio/inference/generate.py


def sample_next(logits, uniform, params, present=None):
    """Draws a token per row: logits (B, vocab_size) -> ids (B,) int64.

    Args:
        uniform: (B,) float32 in [0, 1); determines each row's draw.
        present: (B, vocab_size) bool, tokens that occur in each text, for repetition_penalty.
    """
    scores, ids, size = logits.float(), None, logits.shape[-1]
    if (penalty := params.repetition_penalty) != 1:
        penalized = torch.where(scores > 0, scores / penalty, scores * penalty)
        scores = torch.where(present, penalized, scores)
    if params.temperature < 1e-5:  # equivalent to greedy, and smaller values overflow float32
        return scores.argmax(dim=-1)
    scores = scores / params.temperature
    top_k = min(params.top_k or size, size)
    if top_k < size or params.top_p < 1:
        scores, ids = scores.topk(top_k)  # in descending order
    if params.top_p < 1:
        probabilities = scores.softmax(dim=-1)
        preceding = probabilities.cumsum(dim=-1) - probabilities  # sum over more likely tokens
        scores = scores.masked_fill(preceding >= params.top_p, -math.inf)
    if params.min_p > 0:
        threshold = scores.amax(dim=-1, keepdim=True) + math.log(params.min_p)
        scores = scores.masked_fill(scores < threshold, -math.inf)
    index = _inverse_cdf(scores.softmax(dim=-1), uniform)
    return index if ids is None else ids.gather(1, index[:, None])[:, 0]


def _inverse_cdf(probabilities, uniform):
    """Returns the first index of each row whose cumulative probability exceeds `uniform`."""
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Rounding must not select an index of probability 0 at the end.
    largest = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniform[:, None] * total, largest)
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return index.clamp(max=probabilities.shape[-1] - 1)  # for rows of nan


def uniforms(seeds, device):
    """Yields (B,) float32 in [0, 1) endlessly; each row has its own random stream."""
    generators = [torch.Generator().manual_seed(seed % 2**63) for seed in seeds]
    while True:
        block = [torch.rand(UNIFORMS_PER_DRAW, generator=generator) for generator in generators]
        yield from torch.stack(block, dim=1).to(device)
