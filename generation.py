"""Writing with a model: its memory of what it has read, and how the next token is drawn.

Pure torch, like model.py. Texts are written in a batch, a row for each, and a row's column is the
place of a token in what the model sees of that text.

References: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration" (top-p); Nguyen et
al. 2025, "Turning Up the Heat" (min-p); Keskar et al. 2019, "CTRL" (repetition penalty).
"""

import math
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise

import torch
import torch.nn.functional as F
from torch import nn

from model import attend

CHANCES_AT_ONCE = 256  # drawn for each text before they go to the device
TOKENS_AT_ONCE = 2**14  # read in one pass, whose activations take memory
ROWS_TO_PACK_FOR = 16  # a hint; from 10 on it was as good as any for every number of rows
LINE = 16  # floats
FUSED = {"gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", "none")}


class KVCache:
    """Keys and values of each layer for a batch of texts, allocated once.

    Who calls it says which rows and columns. What is beyond a row's newest column is never seen,
    and may be anything.
    """

    def __init__(self, config, rows, device, dtype=torch.float32, columns=None):
        """Room for `rows` texts of `columns`, block_size unless told; attention is in `dtype`."""
        self.size, self.window = columns or config.block_size, config.window
        self.head_size = config.n_embd // config.n_head
        self.on_cpu, self.dtype = torch.device(device).type == "cpu", dtype
        shape = (rows, config.n_head, self.size + LINE, self.head_size)
        zeros = partial(torch.zeros, shape, device=device, dtype=dtype)
        self.keys = [zeros() for _ in range(config.n_layer)]
        self.values = [zeros() for _ in range(config.n_layer)]

    def read(self, layer, rows, q, k, v):
        """Keep keys and values of the first T columns of some rows, and attend within them.

        q, k, v: (rows, n_head, T, head size) -> the same shape.
        """
        keys, values = self.keys[layer], self.values[layer]
        keys[rows, :, : k.shape[2]] = k.to(keys.dtype)
        values[rows, :, : k.shape[2]] = v.to(keys.dtype)
        return attend(q, k, v, self.window)

    def extend(self, layer, place, seen, q, k, v):
        """Keep those of one column more in each row; attend to what is there of the row.

        q, k, v: (rows, n_head, 1, head size) -> the same shape. `place`: an index into (rows,
        n_head, columns) of where they go. `seen`: for all rows in turn, some of them, columns that
        these look at, and a mask of the columns that broadcasts to (rows, 1, 1, columns), or None.
        """
        keys, values = self.keys[layer], self.values[layer]
        keys[place] = k[:, :, 0].to(keys.dtype)
        values[place] = v[:, :, 0].to(keys.dtype)
        query = q.to(keys.dtype)
        parts = [
            F.scaled_dot_product_attention(
                query[rows], keys[rows, :, columns], values[rows, :, columns], attn_mask=mask
            )
            for rows, columns, mask in seen
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(q.dtype)

    def what_is_there(self, columns):
        """For extend(), what rows see that have come to these columns, ints.

        A text must not depend on its batch. But torch's kernel for CPUs gives each thread a piece
        of one buffer, of columns (at most 512) + head size + 2 floats, and where a piece does not
        begin with a cache line it rounds otherwise. So it gets more columns, masked, that each
        does; where there are too many for that, rows attend alone.
        """
        same, seen = len(set(columns)) == 1, []
        for row, column in enumerate(columns):
            end = column + 1
            begin, mask = max(0, end - (self.window or self.size)), None
            if self.on_cpu:
                more = -(end - begin + self.head_size + 2) % LINE
                mask = torch.zeros(1, end - begin, dtype=self.dtype)
                mask, end = F.pad(mask, (0, more), value=-math.inf), end + more
            if same and not (self.on_cpu and end - begin > 512):
                return [(slice(None), slice(begin, end), mask)]
            seen.append((slice(row, row + 1), slice(begin, end), mask))
        return seen


def prefill(model, cache, idx, rows=slice(None)):
    """Read the beginning of some texts, (rows, T) int64, into the first T columns of the cache.

    T is at most block_size. The model should be in eval mode.
    """
    x, rotation = model.embed(idx)
    for layer, block in enumerate(model.transformer.h):
        x = block(x, rotation, partial(cache.read, layer, rows))


def decode_one(model, cache, tail, columns):
    """Read one token more of each text: -> logits of what follows, (rows, vocab_size).

    tail: (rows, 1 + lookback(model.config)) int64, the last tokens of each text up to the new one.
    columns: where that stands in each row, with the cache holding those before it. With a list of
    ints, attention looks at no more than there is. With a tensor, (rows,) int64, it looks at the
    whole cache under a mask: the same work each time, as compilers and CUDA graphs want it.
    """
    config, back = model.config, tail.shape[1] - 1
    steps = torch.arange(-back, 1, device=tail.device)
    if isinstance(columns, torch.Tensor):
        distance = columns[:, None] - torch.arange(cache.size, device=tail.device)
        mask = (distance >= 0) & (distance < (config.window or cache.size))
        seen = [(slice(None), slice(cache.size), mask[:, None, None])]
    else:
        seen, same = cache.what_is_there(columns), len(set(columns)) == 1
        columns = columns[0] if same else torch.tensor(columns, device=tail.device)
    if isinstance(columns, int):
        place, positions = (slice(None), slice(None), columns), steps + columns
    else:
        rows = torch.arange(len(columns), device=tail.device)
        place, positions = (rows, slice(None), columns), steps + columns[:, None]
    x, rotation = model.embed(tail, positions)
    x, rotation = x[:, back:], rotation and [table[..., back:, :] for table in rotation]
    for layer, block in enumerate(model.transformer.h):
        x = block(x, rotation, partial(cache.extend, layer, place, seen))
    return model.lm_head(model.transformer.ln_f(x[:, 0]))


def lookback(config):
    """How many tokens before a new one its embedding takes in."""
    return min(config.smear + config.bigrams, config.block_size - 1)


@dataclass(frozen=True)
class Controls:
    """How the next token is drawn from its logits; the defaults draw from all, as they are."""

    temperature: float = 1.0  # below 1 safer, above 1 bolder; 0 takes the likeliest
    top_k: int | None = None  # only the k likeliest
    top_p: float = 1.0  # only the likeliest that together reach this probability
    min_p: float = 0.0  # only those with this share of the likeliest's probability
    repetition_penalty: float = 1.0  # divides the logits of what the text has already


def sample_next(logits, chance, controls, present=None):
    """Draw a token for each row: logits (rows, vocab_size) -> ids (rows,), int64.

    chance: (rows,) float32 in [0, 1); a row draws the same whatever others there are. present:
    (rows, vocab_size) bool, the ids that each text has, which repetition_penalty is about.
    """
    scores, ids, size = logits.float(), None, logits.shape[-1]
    if controls.repetition_penalty != 1:
        less = torch.where(
            scores > 0, scores / controls.repetition_penalty, scores * controls.repetition_penalty
        )
        scores = torch.where(present, less, scores)
    if controls.temperature < 1e-5:  # the same in effect, and smaller ones would overflow float32
        return scores.argmax(dim=-1)
    scores = scores / controls.temperature
    kept = min(controls.top_k or size, size)
    if kept < size or controls.top_p < 1:
        scores, ids = scores.topk(kept)  # the likeliest first
    if controls.top_p < 1:
        probabilities = scores.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        scores = scores.masked_fill(before >= controls.top_p, -math.inf)
    if controls.min_p > 0:
        least = scores.amax(dim=-1, keepdim=True) + math.log(controls.min_p)
        scores = scores.masked_fill(scores < least, -math.inf)
    place = _draw(scores.softmax(dim=-1), chance)
    return place if ids is None else ids.gather(1, place[:, None])[:, 0]


def _draw(probabilities, chance):
    """For each row the place where the sum of its probabilities first exceeds its chance."""
    reached = probabilities.cumsum(dim=-1)
    total = reached[:, -1:]
    # Rounding must not carry the last bit of chance beyond what is likely at all.
    below = torch.nextafter(total, torch.zeros_like(total))
    chance = torch.minimum(chance[:, None] * total, below)
    place = torch.searchsorted(reached, chance, right=True)[:, 0]
    return place.clamp(max=probabilities.shape[-1] - 1)  # nan is beyond all


def chances(seeds, device):
    """Yield (rows,) float32 uniform in [0, 1) without end, each row from the stream of its seed."""
    generators = [
        torch.Generator().manual_seed(seed % 2**63) for seed in seeds
    ]  # the most it takes
    while True:
        block = [torch.rand(CHANCES_AT_ONCE, generator=each) for each in generators]
        yield from torch.stack(block, dim=1).to(device)


@torch.inference_mode()
def continuations(
    model, prompts, seeds, controls, count, context_stride=1, limit=None, accelerate=None
):
    """Yield the next `count` tokens of each text: ids (rows,) int64, log-probabilities (rows,).

    prompts: for each text a list of ids, at least one. The model sees the last block_size tokens of
    each; when they are that many, the oldest `context_stride` go to make room, and the rest is read
    anew: with 1 before each token, as a model without a cache does. Only ids below `limit` are
    drawn: a vocabulary padded for speed has ids that no tokenizer knows. Log-probabilities are the
    model's own, whatever the controls.

    accelerate: takes the function that reads a token and draws the next, and arguments like those
    that it will have each time, and returns a faster one, or None.
    """
    config, wte = model.config, model.transformer.wte.weight
    size, device = config.block_size, wte.device
    lengths = [min(len(ids), size) for ids in prompts]  # of what the model sees
    # One query attends faster in float32 on CPUs; in bfloat16 it took up to three times as long.
    dtype = torch.float32 if device.type == "cpu" else wte.dtype
    cache = KVCache(config, len(prompts), device, dtype, min(size, max(lengths) + count))
    texts = [[0] * (size - n) + ids[-n:] for n, ids in zip(lengths, prompts, strict=True)]
    texts = torch.tensor(texts, device=device)  # the last `size` ids of each, the newest last
    present = None
    if controls.repetition_penalty != 1:
        present = occurring(prompts, limit or config.vocab_size, device)

    def step(tail, columns, chance):
        logits = decode_one(model, cache, tail, columns)[:, :limit].float()
        ids = sample_next(logits, chance, controls, present)
        return ids, logits.log_softmax(dim=-1).gather(1, ids[:, None])[:, 0]

    to_read, fast = range(len(prompts)), None
    for chance in islice(chances(seeds, device), count):
        if to_read:
            read_all_but_newest(model, cache, texts, lengths, to_read)
            places = torch.tensor(lengths, device=device) - 1
        tail = texts[:, size - 1 - lookback(config) :]
        if accelerate:
            fast, accelerate = accelerate(step, tail, places, chance), None
        place = places if fast else [n - 1 for n in lengths]
        ids, logprobs = (fast or step)(tail, place, chance)
        yield ids, logprobs
        texts = torch.cat((texts[:, 1:], ids[:, None]), dim=1)
        if present is not None:
            present.scatter_(1, ids[:, None], True)
        places = places + 1
        to_read = [row for row, n in enumerate(lengths) if n == size]
        lengths = [n + 1 if n < size else size + 1 - context_stride for n in lengths]


def read_all_but_newest(model, cache, texts, lengths, rows):
    """Fill rows of the cache with the last `lengths` tokens of their texts, the newest left out.

    Only those of one length together: padding would change how their sums are rounded.
    """
    for length in {lengths[row] for row in rows} - {1}:
        alike = [row for row in rows if lengths[row] == length]
        together = max(1, TOKENS_AT_ONCE // length)
        for begin in range(0, len(alike), together):
            some = alike[begin : begin + together]
            prefill(model, cache, texts[some, texts.shape[1] - length : -1], some)


def occurring(prompts, size, device):
    """Which ids each of the prompts has: (rows, size) bool."""
    present = torch.zeros(len(prompts), size, dtype=torch.bool)
    for row, ids in zip(present, prompts, strict=True):
        row[ids] = True
    return present.to(device)


class PackedLinear(nn.Module):
    """A linear layer, and the activation after it, with weights as oneDNN's kernels want them.

    torch.compile makes the same calls. On two AMD cores a product with 10 rows took half of
    nn.Linear's time in float32, and two thirds in bfloat16.
    """

    def __init__(self, linear, after="none", variant="none"):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight, ROWS_TO_PACK_FOR)
        self.bias, self.after, self.variant = linear.bias, after, variant

    def forward(self, x):
        if x.numel() == x.shape[-1]:  # a lone row, whose sums oneDNN rounds otherwise than others'
            return self.multiply(torch.cat((x, x)))[:1]
        return self.multiply(x)

    def multiply(self, x):
        multiply = torch.ops.mkldnn._linear_pointwise
        return multiply(x, self.weight, self.bias, self.after, [], self.variant)


@torch.no_grad()
def prepare_to_write(model, compiled=False):
    """Make a model faster at writing, in place; it cannot be trained any more.

    With `compiled`, what torch.compile does itself is left to it.
    """
    model.eval()
    for module in list(model.modules()):
        for name, part in module.named_children():
            if isinstance(part, nn.Dropout):
                setattr(module, name, nn.Identity())
    weight = model.transformer.wte.weight
    if compiled or weight.device.type != "cpu" or not packs(weight.dtype):
        return model
    for block in model.transformer.h:
        if (after := FUSED.get(model.config.activation)) is not None:
            block.mlp.c_fc = PackedLinear(block.mlp.c_fc, *after)
            block.mlp.activation = nn.Identity()
    for module in list(model.modules()):
        for name, part in module.named_children():
            if isinstance(part, nn.Linear):
                setattr(module, name, PackedLinear(part))
    return model


def packs(dtype):
    """Whether oneDNN has packed products in a dtype here; what comes with MKL is for x86."""
    if not torch.backends.mkl.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


@torch.inference_mode()
def surprisals(model, ids, stride):
    """Nats by which each token but the first surprises the model: (N,) int64 -> (N - 1,) float32.

    The model reads as it does in continuations(): block_size tokens at most, of which the oldest
    `stride` go when it is full. So a smaller stride leaves a token more context, and takes longer.
    """
    last = len(ids) - 1
    size = min(model.config.block_size, last)
    stride, nats = min(stride, size), []
    starts = [*range(0, last - size, stride), last - size]  # the last window ends with the text
    together = max(1, TOKENS_AT_ONCE // size)
    for begin in range(0, len(starts), together):
        windows = [ids[start : start + size + 1] for start in starts[begin : begin + together]]
        windows = torch.stack(windows).to(model.transformer.wte.weight.device)
        logits = all_logits(model, windows[:, :-1]).float()
        nats += F.cross_entropy(logits.mT, windows[:, 1:], reduction="none").cpu()
    fresh = [size, *(now - before for before, now in pairwise(starts))]  # told by none before
    return torch.cat([each[size - count :] for each, count in zip(nats, fresh, strict=True)])


def all_logits(model, idx):
    """What the model says about each next token, as forward() does: (B, T, vocab_size)."""
    x, rotation = model.embed(idx)
    for block in model.transformer.h:
        x = block(x, rotation)
    return model.lm_head(model.transformer.ln_f(x))
