"""The size of a model that suits a text, the time and the machine; see docs/own-text.md."""

import math
from typing import NamedTuple

MIN_STEPS = 300


class ModelSize(NamedTuple):
    """A model, the tokens of a training step, and what the model needs."""

    n_layer: int
    n_head: int
    n_embd: int
    step_tokens: int
    tokens_per_parameter: float  # that the time must allow,
    passes: float  # or else so many passes over the text
    megabytes: float  # of training text, at least

    def parameters(self, vocab_size):
        """Returns the number of weights in matrix products."""
        return 12 * self.n_layer * self.n_embd**2 + vocab_size * self.n_embd


# The first four were chosen on CPUs. The others are published sizes and rules (config/gpt2_fast.py
# names the papers), which have not been compared here.
MODEL_SIZES = (
    ModelSize(1, 2, 128, 2048, 0, 0, 0),
    ModelSize(2, 2, 128, 2048, 1, 2, 0),
    ModelSize(3, 3, 192, 4096, 2, 2, 0.5),
    ModelSize(4, 4, 256, 4096, 2, 2, 0.5),
    ModelSize(6, 6, 384, 16_384, 20, math.inf, 17),
    ModelSize(8, 8, 512, 32_768, 20, math.inf, 40),
    ModelSize(12, 6, 768, 65_536, 20, math.inf, 130),
)


def choose_model_size(train_tokens, train_bytes, vocab_size, flops):
    """Returns the largest ModelSize that suits a text and a number of FLOPs.

    `flops` is the peak speed times the time. If that allows too few steps, they have fewer tokens.
    """
    for size in MODEL_SIZES:
        possible_tokens = count_possible_tokens(size, vocab_size, flops)
        needed_tokens = size.tokens_per_parameter * size.parameters(vocab_size)
        has_time = possible_tokens >= min(needed_tokens, size.passes * train_tokens)
        if has_time and train_bytes >= 1e6 * size.megabytes:
            chosen = size._replace(step_tokens=min(size.step_tokens, possible_tokens / MIN_STEPS))
    return chosen


def count_possible_tokens(size: ModelSize, vocab_size, flops):
    """Returns on how many tokens a model is trained if a quarter of the peak speed is reached."""
    return flops / 4 / (6 * size.parameters(vocab_size))
