"""Autoregressive generation with a KV cache: prefill and decode. Scoring of a text.

Pure torch, like model.py. A batch has one text per row; a row's `position` is the index of its
newest token within the context that the model sees.
"""

from collections import Counter
from itertools import islice

import torch
import torch.nn.functional as F

from folio.inference.sampling import occurrences, sample_next, uniforms

TOKENS_PER_PASS = 2**14  # tokens in one forward pass, which limits its activations


class KVCache:
    """Keys and values of each layer, allocated once: two lists of (B, H, length, D) tensors."""

    def __init__(self, config, batch_size, device, dtype=torch.float32, length=None):
        """`length` is the number of positions. Default: block_size."""
        self.length, self.window = length or config.block_size, config.window
        self.dtype = dtype
        shape = (batch_size, config.n_head, self.length, config.n_embd // config.n_head)
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layer)]
        self.values = [torch.zeros_like(keys) for keys in self.keys]

    def write(self, layer, rows, positions, k, v):
        """Stores (B, H, T, D) keys and values at `positions`: an int, a slice or (B,) int64.

        Args:
            rows: a slice or indices; all rows if `positions` is an int.
        """
        for cached, new in ((self.keys[layer], k), (self.values[layer], v)):
            if isinstance(positions, int):  # all rows; this is faster than indexing
                cached.select(2, positions).copy_(new.select(2, 0))
            else:
                new = new if isinstance(positions, slice) else new[:, :, 0]
                cached[rows, :, positions] = new.to(self.dtype)


def prefill(model, cache, idx, rows):
    """Writes keys and values of idx, (len(rows), T) int64, to the cache rows with indices `rows`.

    Shorter rows can be padded at the end; no token attends to what follows it.
    """

    def attend(layer, q, k, v):
        cache.write(layer, some, slice(q.shape[2]), k, v)
        return model.transformer.h[layer].attn.attend(q, k, v)

    if not idx.shape[1]:
        return
    rows_per_pass = max(1, TOKENS_PER_PASS // idx.shape[1])
    for start in range(0, len(rows), rows_per_pass):
        some = rows[start : start + rows_per_pass]
        model.trunk(idx[start : start + rows_per_pass], attend=attend)


def decode_one(model, cache, tail, position, length=None, attention=F.scaled_dot_product_attention):
    """Processes one token per row and returns the logits of the next: (B, vocab_size).

    Args:
        tail: (B, 1 + n) int64, the newest token of each row, preceded by n earlier tokens, at most
            config.receptive_field.
        position: the position of the newest token; the cache holds all before it. An int if it is
            the same for all rows, else (B,) int64.
        length: for a tensor of positions, the number of cache positions that the mask covers.
            Default: all, so that all calls have the same shapes.
        attention: a function like the default. Its mask is None if the position is an int.
    """
    device, mask = tail.device, None
    if isinstance(position, int):
        rows, positions = slice(None), torch.tensor([position], device=device)
        start = max(0, position + 1 - (cache.window or cache.length))
        count = position + 1 - start
    else:
        rows, positions = torch.arange(len(tail), device=device), position[:, None]
        start, count = 0, length or cache.length
        distance = positions - torch.arange(count, device=device)
        mask = (distance >= 0) & (distance < (cache.window or cache.length))
        mask = mask[:, None, None]  # (B, 1, 1, length)

    def attend(layer, q, k, v):
        cache.write(layer, rows, position, k, v)
        keys, values = (each[layer].narrow(2, start, count) for each in (cache.keys, cache.values))
        return attention(q.to(cache.dtype), keys, values, attn_mask=mask).to(q.dtype)

    return model.lm_head(model.trunk(tail, positions, attend)[:, 0])


# Generation


class Context:
    """The tokens of each text that the model sees, left-aligned.

    ids: (B, width) int64; row b holds lengths[b] tokens. positions: (B,) int64, lengths - 1.
    """

    def __init__(self, prompts, block_size, count, device):
        """Keeps the last block_size tokens of each prompt, with room for `count` more."""
        self.block_size = block_size
        self.lengths = [min(len(prompt), block_size) for prompt in prompts]
        width = min(block_size, max(self.lengths) + count)
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        for row, length, prompt in zip(ids, self.lengths, prompts, strict=True):
            row[:length] = torch.tensor(prompt[-length:])
        self.ids = ids.to(device)
        self.positions = torch.tensor(self.lengths, device=device) - 1

    def append(self, ids, stride):
        """Appends a token to each row. Full rows first drop `stride` tokens, and are returned."""
        full = [row for row, length in enumerate(self.lengths) if length == self.block_size]
        kept = self.block_size - stride
        self.lengths = [kept + 1 if n == self.block_size else n + 1 for n in self.lengths]
        self.positions = self.positions + 1
        if full:
            self.ids[full, :kept] = self.ids[full, stride:]
            self.positions[full] = kept
        self.ids.scatter_(1, self.positions[:, None], ids[:, None])
        return full

    def newest(self, earlier, fixed_shape):
        """Returns (tail, position) for decode_one, with `earlier` tokens before the newest.

        The position is an int if all rows share it, unless `fixed_shape` is true.
        """
        if not fixed_shape and len(set(self.lengths)) == 1:
            position = self.lengths[0] - 1
            return self.ids[:, max(0, position - earlier) : position + 1], position
        steps = torch.arange(-earlier, 1, device=self.ids.device)
        return self.ids.gather(1, (self.positions[:, None] + steps).clamp(min=0)), self.positions


@torch.inference_mode()
def generate(
    model,
    prompts,
    seeds,
    controls,
    count,
    context_stride=None,
    vocab_size=None,
    accelerate=None,
    decode=decode_one,
):
    """Yields the next token of each text, `count` times: ids (B,) int64, log-probabilities (B,).

    The model sees at most the last block_size tokens of each text. When the context of a row is
    full, its oldest `context_stride` tokens are dropped and the rest is processed again. Stride 1
    equals sampling without a cache. Log-probabilities are the model's, before `controls`.

    Args:
        prompts: for each text a nonempty list of ids.
        seeds: for each text an int.
        context_stride: see stride_of.
        vocab_size: only smaller ids are drawn, for models with a padded vocabulary.
        accelerate: see folio.hardware.compile.step_accelerator.
        decode: replaces decode_one. It is called with a tensor of positions and a cache of
            block_size + 1 positions.
    """
    config, weight = model.config, model.transformer.wte.weight
    vocab_size, stride = vocab_size or config.vocab_size, stride_of(model, context_stride)
    context = Context(prompts, config.block_size, count, weight.device)
    # With one query, attention on a CPU is up to three times as fast in float32 as in bfloat16.
    dtype = torch.float32 if weight.device.type == "cpu" else weight.dtype
    is_compiled = decode is not decode_one
    length = config.block_size + 1 if is_compiled else context.ids.shape[1]
    cache = KVCache(config, len(prompts), weight.device, dtype, length)
    present = None
    if controls.repetition_penalty != 1:
        present = occurrences(prompts, vocab_size, weight.device)

    def step(tail, position, uniform, length=None):
        logits = decode(model, cache, tail, position, length)[:, :vocab_size].float()
        ids = sample_next(logits, uniform, controls, present)
        return ids, logits.log_softmax(dim=-1).gather(1, ids[:, None])[:, 0]

    earlier, to_prefill, fast = model.config.receptive_field, list(range(len(prompts))), None
    for uniform in islice(uniforms(seeds, weight.device), count):
        if to_prefill:
            longest = max(context.lengths[row] for row in to_prefill)
            prefill(model, cache, context.ids[to_prefill, : longest - 1], to_prefill)
        newest = context.newest(earlier, fixed_shape=is_compiled or accelerate is not None)
        if accelerate:
            fast = fast or accelerate(step, *newest, uniform)
            ids, logprobs = fast(*newest, uniform)
        else:
            ids, logprobs = step(*newest, uniform, max(context.lengths))
        yield ids, logprobs
        if present is not None:
            present.scatter_(1, ids[:, None], True)
        to_prefill = context.append(ids, stride)


def stride_of(model, context_stride):
    """Returns the number of tokens that a full context drops. Default: half of block_size."""
    size = model.config.block_size
    return min(context_stride or max(1, size // 2), size)


def context_start(index, block_size, stride, filled=0):
    """Returns the first token that the model sees when it predicts token `index` of a text.

    A full context drops `stride` tokens. At first it held the `filled` tokens of the prompt, or the
    last block_size of them.
    """
    beyond = index - max(filled, block_size)  # tokens appended to a full context
    if beyond <= 0:
        return max(0, index - block_size)
    return index - (block_size - stride + 1 + (beyond - 1) % stride)


# Scoring


def scoring_starts(model, length, stride=None):
    """Returns the start of the window in which token_nll scores each token but the first.

    Windows of block_size advance by `stride` (see stride_of); the last one ends with the text. Each
    token is scored in the first window that contains it, after at least block_size - stride tokens,
    except in the first window.
    """
    last, stride = length - 1, stride_of(model, stride)
    size = min(model.config.block_size, last)
    return [min(context_start(at, size, stride), last - size) for at in range(1, length)]


@torch.inference_mode()
def token_nll(model, ids, stride=None, vocab_size=None):
    """Returns the negative log-likelihood of each token but the first: (N,) -> (N - 1,), nats.

    See scoring_starts. The likelihood is that among the ids below `vocab_size`, as in `generate`.
    """
    size, losses = min(model.config.block_size, len(ids) - 1), []
    new = Counter(scoring_starts(model, len(ids), stride))  # tokens scored in each window
    starts, windows_per_pass = list(new), max(1, TOKENS_PER_PASS // size)
    for first in range(0, len(starts), windows_per_pass):
        some = starts[first : first + windows_per_pass]
        windows = torch.stack([ids[start : start + size + 1] for start in some])
        windows = windows.to(model.transformer.wte.weight.device)
        states = model.trunk(windows[:, :-1])
        for state, window, start in zip(states, windows, some, strict=True):
            # The logits of one window, because they are large.
            logits = model.lm_head(state[-new[start] :])[:, :vocab_size].float()
            losses.append(F.cross_entropy(logits, window[-new[start] :], reduction="none").cpu())
    return torch.cat(losses)
