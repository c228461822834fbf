"""The loop over tokens: prompts are read into a KV cache, and each step adds a token per text.

A new token does not change the keys and values of earlier tokens, so that a Context keeps them.
prefill() computes those of a prompt; decode_one() computes one new token per row. When a full
context drops its oldest tokens, all positions change, and the row is prefilled again.

A batch has one text per row. A row's `position` is the index of its newest token in the context.
"""

from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F

from folio.checkpoint.format import empty_model
from folio.cli.errors import UserError
from folio.cli.process import print_error
from folio.hardware.device import one_thread_for_small
from folio.hardware.memory import memory_bytes
from folio.hardware.optimize import accelerate
from folio.inference.sampling import sample_next, uniforms
from folio.inference.trained_model import TrainedModel
from model import GPT, GPTConfig, causal_mask

TOKENS_PER_PASS = 2**14  # limits the activations of a forward pass
TOKENS_PER_SYNC = 16  # reading results waits for the device
MAX_BATCH_SIZE = 1024  # more are not much faster, and nothing is printed before they end
BATCH_MEMORY_FRACTION = 1 / 4  # more texts take several batches


def complete(trained: TrainedModel, completions, params, stream=False):
    """Generates the continuations of a batch of Completions with a TrainedModel.

    `params` are SamplingParams or a SampleConfig. Yields whenever tokens were added; after every
    token if `stream`.
    """
    machine = trained.machine
    steps = generate(
        trained.model,
        [completion.prompt_ids for completion in completions],
        [completion.seed for completion in completions],
        params,
        trained.tokenizer.vocab_size,
        partial(accelerate, machine) if machine.compile or machine.kind == "cuda" else None,
        trained.tokenizer.end,
    )
    # The layers of the model can be packed, and most parameters of n-grams take no multiplication.
    products = empty_model(trained.model.config, "meta").flops_per_token() / 6
    count = 1  # the first token is yielded immediately
    while not all(completion.stopped for completion in completions):
        with one_thread_for_small(len(completions) * products):
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
        yield  # outside of one_thread_for_small, which changes the whole process
        count = 1 if stream else TOKENS_PER_SYNC
    for completion in completions:
        completion.finish("length")


@torch.inference_mode()
def generate(model: GPT, prompts, seeds, params, vocab_size=None, accelerate=None, end=None):
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
        end: id of the end-of-text token, or None.
    """
    vocab_size, device = vocab_size or model.config.vocab_size, model.transformer.wte.weight.device
    context = Context(model, prompts, params, fixed_shapes=accelerate is not None)
    present = None
    if params.repetition_penalty != 1:
        present = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=device)
        for row, prompt in zip(present, prompts, strict=True):
            row[[token for token in prompt if token != end]] = True
    banned = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    min_tokens = params.max_new_tokens if params.ignore_end else params.min_new_tokens

    def step(tail, position, uniform):
        logits = context.decode_one(tail, position)[:, :vocab_size].float()
        allowed = logits.masked_fill(banned, -torch.inf)
        ids = sample_next(allowed, uniform, params, present)
        return ids, logits.log_softmax(dim=-1).gather(1, ids[:, None])[:, 0]

    for count, uniform in enumerate(islice(uniforms(seeds, device), params.max_new_tokens)):
        if end is not None:
            banned[end] = count < min_tokens
        context.prefill()  # in the first step, and when contexts have dropped tokens
        tail, position = context.newest()
        if accelerate and not count:
            step = accelerate(step, tail, position, uniform)
        ids, logprobs = step(tail, position, uniform)
        yield ids, logprobs
        if present is not None:
            present.scatter_(1, ids[:, None], True)
        context.append(ids)


def max_batch_size(config: GPTConfig, device):
    """Returns for how many texts the cache and the logits fit into a share of the memory."""
    cache = 2 * config.n_layer * config.block_size * config.n_embd
    logits = 8 * config.vocab_size  # and the tensors of sampling
    available = memory_bytes(device) or 2**33
    size = int(BATCH_MEMORY_FRACTION * available) // (4 * (cache + logits))
    return min(max(1, size), MAX_BATCH_SIZE)


def stride_of(model: GPT, context_stride):
    """Returns the number of tokens that a full context drops. Default: half of block_size."""
    size = model.config.block_size
    return min(context_stride or max(1, size // 2), size)


def check_finite(logprobs):
    """Raises UserError unless log-probabilities or logits are finite."""
    if not logprobs.isfinite().all():
        advice = "try --dtype=float32, or train with a lower learning rate"
        raise UserError(f"the model's output is not finite: {advice}")


class Context:
    """The tokens of each text that the model sees, left-aligned, and their keys and values.

    ids: (B, width) int64; row b holds lengths[b] tokens. positions: (B,) int64, lengths - 1.
    keys, values: for each layer (B, H, width, D). Those of the newest tokens are not computed yet.
    """

    def __init__(self, model: GPT, prompts, params, fixed_shapes):
        """Keeps the last block_size tokens of each prompt, with room for max_new_tokens more.

        If `fixed_shapes` is true, decode_one() has the same shapes in all steps.
        """
        config, weight = model.config, model.transformer.wte.weight
        self.model, self.fixed_shapes = model, fixed_shapes
        self.stride = stride_of(model, params.context_stride)
        self.lengths = [min(len(prompt), config.block_size) for prompt in prompts]
        self.width = min(config.block_size, max(self.lengths) + params.max_new_tokens)
        ids = torch.zeros(len(prompts), self.width, dtype=torch.int64)
        for row, length, prompt in zip(ids, self.lengths, prompts, strict=True):
            row[:length] = torch.tensor(prompt[-length:])
        self.ids = ids.to(weight.device)
        self.positions = torch.tensor(self.lengths, device=weight.device) - 1
        self.changed_rows = list(range(len(prompts)))  # whose keys and values are missing
        # With one query, attention in bfloat16 takes half the time of float32 on a CPU with AMX,
        # and up to three times as long on others.
        has_amx = weight.dtype == torch.bfloat16 and torch.cpu.get_capabilities().get("amx_bf16")
        self.dtype = weight.dtype if weight.device.type != "cpu" or has_amx else torch.float32
        shape = (len(prompts), config.n_head, self.width, config.n_embd // config.n_head)
        empty = torch.zeros(shape, device=weight.device, dtype=self.dtype)
        self.keys = [empty.clone() for _ in range(config.n_layer)]
        self.values = [torch.zeros_like(keys) for keys in self.keys]

    def prefill(self):
        """Computes the missing keys and values. Shorter rows have padding, which no token sees."""
        count = max((self.lengths[row] for row in self.changed_rows), default=1) - 1
        if not count:
            return

        def attend(layer, q, k, v):
            self.keys[layer][rows, :, :count] = k.to(self.dtype)
            self.values[layer][rows, :, :count] = v.to(self.dtype)
            return self.model.transformer.h[layer].attn.causal_attention(q, k, v)

        idx = self.ids[self.changed_rows, :count]
        rows_per_pass = max(1, TOKENS_PER_PASS // count)
        for start in range(0, len(idx), rows_per_pass):
            rows = self.changed_rows[start : start + rows_per_pass]
            self.model.trunk(idx[start : start + rows_per_pass], attend=attend)

    def newest(self):
        """Returns (tail, position) for decode_one().

        tail: (B, 1 + n) int64, the newest token of each row, preceded by n earlier tokens, at most
            config.preceding_tokens.
        position: its position, (B,) int64; an int if all rows have the same and shapes may change.
        """
        earlier = self.model.config.preceding_tokens
        if not self.fixed_shapes and len(set(self.lengths)) == 1:
            position = self.lengths[0] - 1
            return self.ids[:, max(0, position - earlier) : position + 1], position
        offsets = torch.arange(-earlier, 1, device=self.ids.device)
        return self.ids.gather(1, (self.positions[:, None] + offsets).clamp(min=0)), self.positions

    def decode_one(self, tail, position):
        """Processes the newest token of each row, and returns the logits: (B, vocab_size)."""
        device, window, mask = tail.device, self.model.config.window, None
        same_position = isinstance(position, int)
        if same_position:
            positions = torch.tensor([position], device=device)
            start = max(0, position + 1 - (window or self.width))
            count = position + 1 - start
        else:
            rows, positions = torch.arange(len(tail), device=device), position[:, None]
            start, count = 0, self.width if self.fixed_shapes else max(self.lengths)
            mask = causal_mask(positions, torch.arange(count, device=device), window, self.dtype)
            mask = mask[:, None]  # (B, 1, 1, count)

        def attend(layer, q, k, v):
            for cached, new in ((self.keys[layer], k), (self.values[layer], v)):
                if same_position:  # this is faster than indexing
                    cached.select(2, position).copy_(new.select(2, 0))
                else:
                    cached[rows, :, position] = new[:, :, 0].to(self.dtype)
            keys = self.keys[layer].narrow(2, start, count)
            values = self.values[layer].narrow(2, start, count)
            y = F.scaled_dot_product_attention(q.to(self.dtype), keys, values, attn_mask=mask)
            return y.to(q.dtype)

        return self.model.lm_head(self.model.trunk(tail, positions, attend)[:, 0])

    def append(self, ids):
        """Appends a token to each row. Full rows first drop `stride` tokens."""
        size = self.model.config.block_size
        full = [row for row, length in enumerate(self.lengths) if length == size]
        kept = size - self.stride
        self.lengths = [kept + 1 if n == size else n + 1 for n in self.lengths]
        self.positions = self.positions + 1
        if full:
            self.ids[full, :kept] = self.ids[full, self.stride :]
            self.positions[full] = kept
        self.ids.scatter_(1, self.positions[:, None], ids[:, None])
        self.changed_rows = full
