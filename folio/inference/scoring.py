"""Scores: probabilities of the tokens of texts, and of texts as a whole."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from folio.cli.errors import UserError
from folio.inference.generate import TOKENS_PER_PASS, check_finite, stride_of
from folio.inference.trained_model import TrainedModel
from model import GPT


def score_texts(trained: TrainedModel, texts, context_stride=None):
    """Returns the losses of the tokens of texts, and totals of each text and of all, the last.

    The texts are lists of ids, and the losses those of token_nll. The totals are "tokens", "loss"
    (nats per token), "perplexity" and "bits_per_byte". Raises UserError if a text has 1 token.
    """
    tokenizer, lengths = trained.tokenizer, trained.tokenizer.byte_lengths()
    sizes = [lengths[ids[1:]].sum().item() for ids in texts]  # of scored tokens
    if not all(sizes):
        count = len(texts[sizes.index(0)])
        raise UserError(f"a score needs text after the first token; tokens of the text: {count}")
    # Ids of padding have no probability, as in generation.
    losses = token_nll(trained.model, texts, context_stride, tokenizer.vocab_size)
    all_losses, totals = torch.cat(losses), []
    check_finite(all_losses)
    for nll, size in zip([*losses, all_losses], [*sizes, sum(sizes)], strict=True):
        loss = nll.double().mean().item()
        row = {"tokens": len(nll), "loss": loss, "perplexity": math.exp(min(loss, 700))}
        totals.append(row | {"bits_per_byte": loss * len(nll) / math.log(2) / size})
    return losses, totals


@torch.inference_mode()
def token_nll(model: GPT, texts, context_stride=None, vocab_size=None):
    """Returns the negative log-likelihood of each token but the first, in nats.

    The texts are lists of ids. Returns a tensor (N - 1,) for one of N ids. Windows of block_size
    advance by the stride (see stride_of); the last one ends with the text. Each token is scored in
    the first window that contains it, after at least block_size - stride tokens, except in the
    first window. Ids from `vocab_size` on are left out, as in generate.
    """
    windows, losses = [], []
    for ids in map(torch.tensor, texts):
        last, stride = len(ids) - 1, stride_of(model, context_stride)
        size = min(model.config.block_size, last)
        starts = [*range(0, last - size, stride), last - size]
        counts = [size, *(start - earlier for earlier, start in pairwise(starts))]  # to score
        windows += [(ids[i : i + size + 1], n) for i, n in zip(starts, counts, strict=True)]
    windows_per_pass = max(1, TOKENS_PER_PASS // max(len(window) for window, _ in windows))
    for first in range(0, len(windows), windows_per_pass):
        part = windows[first : first + windows_per_pass]
        idx = pad_sequence([window for window, _ in part], batch_first=True)  # padding is last
        idx = idx.to(model.transformer.wte.weight.device)
        states = model.trunk(idx[:, :-1])
        for state, targets, (window, count) in zip(states, idx[:, 1:], part, strict=True):
            # the logits of one window, because they are large
            scored = slice(len(window) - 1 - count, len(window) - 1)
            logits = model.lm_head(state[scored])[:, :vocab_size].float()
            losses.append(F.cross_entropy(logits, targets[scored], reduction="none").cpu())
    return torch.cat(losses).split([len(ids) - 1 for ids in texts])
