"""Scores: probabilities of the tokens of a text, and of the text as a whole."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F

from folio.cli.errors import UserError
from folio.inference.generate import TOKENS_PER_PASS, check_finite, stride_of
from folio.inference.trained_model import TrainedModel
from model import GPT


def score_text(trained: TrainedModel, text, context_stride=None, allow_special=False):
    """Returns the ids of a text, their log-probabilities for a TrainedModel in nats, and totals.

    The first log-probability is None. The totals are "tokens", "loss" (nats per token),
    "perplexity" and "bits_per_byte". Raises UserError if the text has no token after the first.
    """
    tokenizer = trained.tokenizer
    ids = tokenizer.encode(text, allow_special)
    size = tokenizer.byte_lengths()[ids[1:]].sum().item()  # of scored tokens
    if not size:
        raise UserError(f"a score needs text after the first token; tokens of the text: {len(ids)}")
    # Ids of padding have no probability, as in generation.
    idx = torch.from_numpy(ids.astype("int64"))
    nll = token_nll(trained.model, idx, context_stride, tokenizer.vocab_size)
    check_finite(nll)
    total, count = nll.double().sum().item(), len(nll)
    totals = {
        "tokens": count,
        "loss": total / count,
        "perplexity": math.exp(min(total / count, 700)),
        "bits_per_byte": total / math.log(2) / size,
    }
    return ids.tolist(), [None, *(-nll).tolist()], totals


@torch.inference_mode()
def token_nll(model: GPT, ids, context_stride=None, vocab_size=None):
    """Returns the negative log-likelihood of each token but the first: (N,) -> (N - 1,), nats.

    Windows of block_size advance by the stride (see stride_of); the last one ends with the text.
    Each token is scored in the first window that contains it, after at least block_size - stride
    tokens, except in the first window. Ids from `vocab_size` on are left out, as in generate.
    """
    last, stride, losses = len(ids) - 1, stride_of(model, context_stride), []
    size = min(model.config.block_size, last)
    starts = [*range(0, last - size, stride), last - size]
    counts = [size, *(start - earlier for earlier, start in pairwise(starts))]  # tokens to score
    windows_per_pass = max(1, TOKENS_PER_PASS // size)
    for first in range(0, len(starts), windows_per_pass):
        part = slice(first, first + windows_per_pass)
        windows = torch.stack([ids[start : start + size + 1] for start in starts[part]])
        windows = windows.to(model.transformer.wte.weight.device)
        states = model.trunk(windows[:, :-1])
        for state, window, count in zip(states, windows, counts[part], strict=True):
            # the logits of one window, because they are large
            logits = model.lm_head(state[-count:])[:, :vocab_size].float()
            losses.append(F.cross_entropy(logits, window[-count:], reduction="none").cpu())
    return torch.cat(losses)
