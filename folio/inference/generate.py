"""The loop over tokens: prompts are read into a KV cache, and each step adds a token per text.

A new token does not change the keys and values of earlier tokens, so these are kept in a cache.
`prefill` computes those of a prompt; `decode_one` computes one new token per row. When a full
context drops its oldest tokens, all positions change, and the row is prefilled again.

A batch has one text per row; a row's `position` is the index of its newest token within the context
that the model sees.
"""

from itertools import islice

import torch
import torch.nn.functional as F

from folio.checkpoint.format import empty_model
from folio.cli.errors import UserError
from folio.cli.process import print_error
from folio.hardware.compile import step_accelerator
from folio.hardware.device import limit_threads
from folio.hardware.memory import memory_bytes
from folio.inference.sampling import sample_next, uniforms
from model import causal_mask

TOKENS_PER_PASS = 2**14  # limits the activations of a forward pass
TOKENS_PER_SYNC = 16  # reading results waits for the device
MAX_BATCH_SIZE = 1024  # more are not much faster, and nothing is printed before they end
BATCH_MEMORY_FRACTION = 1 / 4  # more texts take several batches


def complete(trained, completions, params, stream=False):
    """Generates the continuations of a batch of Completions with a TrainedModel.

    `params` are SamplingParams or a SampleConfig. Yields whenever tokens were added; after every
    token if `stream`.
    """
    steps = generate(
        trained.model,
        [completion.prompt_ids for completion in completions],
        [completion.seed for completion in completions],
        params,
        trained.tokenizer.vocab_size,
        step_accelerator(trained.machine),
    )
    # The layers of the model can be packed, and most parameters of n-grams take no multiplication.
    products = empty_model(trained.model.config, "meta").flops_per_token() / 6
    count = 1  # the first token is yielded immediately
    while not all(completion.stopped for completion in completions):
        with limit_threads(len(completions) * products):
            new_tokens = list(islice(steps, count))
            if message := trained.cores.check():
                print_error(message)
        if not new_tokens:
            break
        ids = torch.stack([step_ids for step_ids, _ in new_tokens])  # (steps, B)
        logprobs = torch.stack([step_logprobs for _, step_logprobs in new_tokens])
        check_finite(logprobs)
        for step in zip(ids.tolist(), logprobs.tolist(), strict=True):
            for completion, token, logprob in zip(completions, *step, strict=True):
                completion.add(token, logprob)
        yield  # outside of limit_threads, which changes the whole process
        count = 1 if stream else TOKENS_PER_SYNC
    for completion in completions:
        completion.finish("length")


@torch.inference_mode()
def generate(model, prompts, seeds, params, vocab_size=None, accelerate=None):
    """Yields the next token of each text, step by step: ids (B,) int64, log-probabilities (B,).

    The model sees at most the last block_size tokens of each text. When the context of a row is
    full, its oldest tokens are dropped and the others are processed again (see stride_of). A
    context_stride of 1 equals sampling without a cache. Log-probabilities are the model's, before
    temperature and the other parameters.

    Args:
        prompts: for each text a nonempty list of ids.
        seeds: for each text an int.
        vocab_size: only smaller ids are drawn, for models with a padded vocabulary.
        accelerate: accelerate(step, *arguments) returns a faster step.
    """
    config, weight = model.config, model.transformer.wte.weight
    vocab_size, stride = vocab_size or config.vocab_size, stride_of(model, params.context_stride)
    fixed_shapes = accelerate is not None
    context = Context(prompts, config.block_size, params.max_new_tokens, weight.device)
    cache = KVCache(model, len(prompts), context.ids.shape[1])
    present = None
    if params.repetition_penalty != 1:
        present = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=weight.device)
        for row, prompt in zip(present, prompts, strict=True):
            row[prompt] = True

    def step(tail, position, uniform):
        length = None if fixed_shapes else max(context.lengths)
        logits = decode_one(model, cache, tail, position, length)[:, :vocab_size].float()
        ids = sample_next(logits, uniform, params, present)
        return ids, logits.log_softmax(dim=-1).gather(1, ids[:, None])[:, 0]

    rows = list(range(len(prompts)))  # to prefill: all at first, later those that drop tokens
    for uniform in islice(uniforms(seeds, weight.device), params.max_new_tokens):
        if rows:
            longest = max(context.lengths[row] for row in rows)
            prefill(model, cache, context.ids[rows, : longest - 1], rows)  # all but the newest
        tail, position = context.newest(config.preceding_tokens, fixed_shapes)
        if accelerate:  # before the first step
            step, accelerate = accelerate(step, tail, position, uniform), None
        ids, logprobs = step(tail, position, uniform)
        yield ids, logprobs
        if present is not None:
            present.scatter_(1, ids[:, None], True)
        rows = context.append(ids, stride)


def max_batch_size(config, device):
    """Returns for how many texts the cache and the logits fit into a share of the memory."""
    cache = 2 * config.n_layer * config.block_size * config.n_embd
    logits = 8 * config.vocab_size  # and the tensors of sampling
    available = memory_bytes(device) or 2**33
    size = int(BATCH_MEMORY_FRACTION * available) // (4 * (cache + logits))
    return min(max(1, size), MAX_BATCH_SIZE)


def stride_of(model, context_stride):
    """Returns the number of tokens that a full context drops. Default: half of block_size."""
    size = model.config.block_size
    return min(context_stride or max(1, size // 2), size)


def check_finite(logprobs):
    """Raises UserError unless log-probabilities or logits are finite."""
    if not logprobs.isfinite().all():
        advice = "try --dtype=float32, or train with a lower learning rate"
        raise UserError(f"the model's output is not finite: {advice}")


class Context:
    """The tokens of each text that the model sees, left-aligned.

    ids: (B, width) int64; row b holds lengths[b] tokens. positions: (B,) int64, lengths - 1.
    """

    def __init__(self, prompts, block_size, new_tokens, device):
        """Keeps the last block_size tokens of each prompt, with room for `new_tokens` more."""
        self.block_size = block_size
        self.lengths = [min(len(prompt), block_size) for prompt in prompts]
        width = min(block_size, max(self.lengths) + new_tokens)
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

    def newest(self, earlier, fixed_shapes):
        """Returns (tail, position) for decode_one, with `earlier` tokens before the newest.

        The position is an int if all rows share it, unless `fixed_shapes` is true.
        """
        if not fixed_shapes and len(set(self.lengths)) == 1:
            position = self.lengths[0] - 1
            return self.ids[:, max(0, position - earlier) : position + 1], position
        offsets = torch.arange(-earlier, 1, device=self.ids.device)
        return self.ids.gather(1, (self.positions[:, None] + offsets).clamp(min=0)), self.positions


class KVCache:
    """Keys and values of each layer, allocated once: two lists of (B, H, length, D) tensors."""

    def __init__(self, model, batch_size, length=None):
        """`length` is the number of positions. Default: block_size."""
        config, weight = model.config, model.transformer.wte.weight
        self.length, self.window = length or config.block_size, config.window
        # With one query, attention in bfloat16 takes half the time of float32 on a CPU with AMX,
        # and up to three times as long on others.
        has_amx = weight.dtype == torch.bfloat16 and torch.cpu.get_capabilities().get("amx_bf16")
        self.dtype = weight.dtype if weight.device.type != "cpu" or has_amx else torch.float32
        shape = (batch_size, config.n_head, self.length, config.n_embd // config.n_head)
        empty = torch.zeros(shape, device=weight.device, dtype=self.dtype)
        self.keys = [empty.clone() for _ in range(config.n_layer)]
        self.values = [torch.zeros_like(keys) for keys in self.keys]

    def write(self, layer, rows, positions, k, v):
        """Stores (B, H, T, D) keys and values at `positions`: an int, a slice or (B,) int64."""
        for cached, new in ((self.keys[layer], k), (self.values[layer], v)):
            if isinstance(positions, int):  # all rows; this is faster than indexing
                cached.select(2, positions).copy_(new.select(2, 0))
            else:
                new = new if isinstance(positions, slice) else new[:, :, 0]
                cached[rows, :, positions] = new.to(self.dtype)


def prefill(model, cache, idx, rows):
    """Writes keys and values of idx, (len(rows), T) int64, to the cache rows with indices `rows`.

    Shorter rows can be padded at the end; no token attends to the tokens after it.
    """

    def attend(layer, q, k, v):
        cache.write(layer, pass_rows, slice(q.shape[2]), k, v)
        return model.transformer.h[layer].attn.causal_attention(q, k, v)

    if not idx.shape[1]:
        return
    rows_per_pass = max(1, TOKENS_PER_PASS // idx.shape[1])
    for start in range(0, len(rows), rows_per_pass):
        pass_rows = rows[start : start + rows_per_pass]
        model.trunk(idx[start : start + rows_per_pass], attend=attend)


def decode_one(model, cache, tail, position, length=None):
    """Processes one token per row and returns the logits of the next: (B, vocab_size).

    Args:
        tail: (B, 1 + n) int64, the newest token of each row, preceded by n earlier tokens, at most
            config.preceding_tokens.
        position: the position of the newest token; the cache holds all before it. An int if it is
            the same for all rows, else (B,) int64.
        length: for a tensor of positions, the number of cache positions that the mask covers.
            Default: all, so that all calls have the same shapes.
    """
    device, mask = tail.device, None
    if isinstance(position, int):
        rows, positions = slice(None), torch.tensor([position], device=device)
        start = max(0, position + 1 - (cache.window or cache.length))
        count = position + 1 - start
    else:
        rows, positions = torch.arange(len(tail), device=device), position[:, None]
        start, count = 0, length or cache.length
        mask = causal_mask(positions, torch.arange(count, device=device), cache.window, cache.dtype)
        mask = mask[:, None]  # (B, 1, 1, length)

    def attend(layer, q, k, v):
        cache.write(layer, rows, position, k, v)
        keys = cache.keys[layer].narrow(2, start, count)
        values = cache.values[layer].narrow(2, start, count)
        y = F.scaled_dot_product_attention(q.to(cache.dtype), keys, values, attn_mask=mask)
        return y.to(q.dtype)

    return model.lm_head(model.trunk(tail, positions, attend)[:, 0])
