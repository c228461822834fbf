"""The GPT: GPT-2's decoder-only transformer, and its counting.

Pure torch: no files, no settings, no printing. Parameter names, defaults and initialisation are
those of GPT-2 as nanoGPT spells them, so that checkpoints travel between the two. What has come
since is switched on by GPTConfig: rotary positions, RMSNorm, squared ReLU, and others.

References: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2);
Kaplan et al. 2020, "Scaling Laws for Neural Language Models" (parameters, FLOPs).
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn


def relu2(x):
    """The square of ReLU (So et al. 2021, "Primer")."""
    positive = F.relu(x)
    return positive * positive  # whose gradient is faster on a CPU than that of square()


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": relu2,
}
NORMS = {"layernorm": F.layer_norm, "rmsnorm": F.rms_norm}
POSITIONS = ("learned", "rotary")
BIGRAM_ROWS = 65_537  # at most, for pairs of tokens; a prime, so that pairs share rows evenly


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. Raises ValueError for a shape that cannot be built.

    `gelu_tanh` is what OpenAI's GPT-2 weights were trained with, `gelu` what nanoGPT trains with.
    With `n_layer=0` a token's logits depend on nothing but the token and its position.
    """

    block_size: int = 1024  # longest context, in tokens
    vocab_size: int = 50304  # GPT-2's 50257, rounded up to a multiple of 64 for faster products
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # in the linear layers and layer norms
    activation: str = "gelu"
    tie_weights: bool = True  # the output head shares the token embedding
    position: str = "learned"  # or rotary, which turns queries and keys by where they are
    norm: str = "layernorm"  # or rmsnorm, which subtracts no mean and has no bias
    qk_norm: bool = False  # normalise the queries and keys of each head
    zero_init: bool = False  # what ends a branch, or the model, starts at zero
    smear: int = 0  # how many of the embeddings before it are mixed into each
    bigrams: bool = False  # embed each token with the one before it, too
    window: int = 0  # tokens that attention sees, itself and those before; 0 is all

    def __post_init__(self):
        for name in ("block_size", "vocab_size", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("n_layer", "smear", "window"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, as {getattr(self, name)} is")
        if self.smear >= self.block_size:
            raise ValueError(f"smear={self.smear} does not fit block_size={self.block_size}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), not {self.dropout}")
        if self.position == "rotary" and self.n_embd // self.n_head % 2:
            raise ValueError(
                f"position=rotary turns pairs, but n_embd={self.n_embd} and n_head={self.n_head} "
                "make heads of odd size"
            )
        choices = {"activation": ACTIVATIONS, "norm": NORMS, "position": POSITIONS}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, not {getattr(self, name)}"
                )


def attend(q, k, v, window=0, dropout=0.0):
    """Causal attention: (B, n_head, T, head size) each -> the same shape.

    A position sees itself and all before it, or, with a window, itself and window - 1 before it.
    """
    T = q.shape[2]
    if 0 < window < T:
        return attend_nearby(q, k, v, window, dropout)
    if products_are_faster(q, T):
        future = torch.full((1, T, T), -math.inf, dtype=q.dtype, device=q.device).triu(1)
        return attend_by_products(q, k, v, future, dropout)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


def attend_nearby(q, k, v, window, dropout):
    """The same where T is above the window, in time that grows with T * window.

    The sequence is cut into pieces of `window` positions, and each sees itself and the one before
    (Child et al. 2019, "Generating Long Sequences with Sparse Transformers", have such pieces).
    """
    B, n_head, T, size = q.shape
    count = -(-T // window)
    cut = (F.pad(each, (0, 0, 0, count * window - T)) for each in (q, k, v))
    q, k, v = (each.reshape(B * n_head, count, window, size) for each in cut)
    k, v = (torch.cat((F.pad(each, (0, 0, 0, 0, 1, -1)), each), dim=2) for each in (k, v))
    there = torch.arange(2 * window, device=q.device)
    distance = there[window:, None] - there
    hidden = ((distance < 0) | (distance >= window)).repeat(count, 1, 1)
    hidden[0, :, :window] = True  # before the first piece is nothing
    mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill(hidden, -math.inf)
    if products_are_faster(q, 2 * window):
        y = attend_by_products(q, k, v, mask.repeat(B * n_head, 1, 1), dropout)
    else:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    return y.reshape(B, n_head, count * window, size)[:, :, :T]


def products_are_faster(q, keys):
    """Whether plain products beat torch's own kernel, whose backward pass is slow on CPUs.

    Forward and backward in bfloat16 on two AMD cores, they took 1/4 of its time with 128 keys, 1/2
    with 512, and more than it from 1024 on.
    """
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and keys <= 512


def attend_by_products(q, k, v, mask, dropout):
    """Attention by its definition, softmax(q k' / sqrt(size)) v (Vaswani et al. 2017, 3.2.1).

    `mask` is added to the scores of the first two dimensions of q as one: (1 or all, T, keys).
    """
    flat_q, flat_k, flat_v = (each.flatten(0, 1) for each in (q, k, v))
    scores = torch.baddbmm(mask, flat_q, flat_k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
    weights = F.dropout(scores.softmax(dim=-1), dropout)
    return (weights @ flat_v).unflatten(0, q.shape[:2])


def rotary_tables(length, size):
    """Cosines and signed sines that `rotate` takes, (length, size) float32 each.

    Pair i of a head turns by position / 10000^(2i/size) radians (Su et al. 2021, "RoFormer").
    """
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(length), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x, cos, sin):
    """Turn the pairs (i, i + size/2) of each head: (..., T, size) -> the same shape."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos.to(x.dtype), swapped, sin.to(x.dtype))


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and what came before it, or a window.

    `recall`, a function of queries, keys and values, attends in the place of `attend`: to keys and
    values of earlier calls, too.
    """

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.window = config.window
        self.qk_norm = NORMS[config.norm] if config.qk_norm else None
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x, rotation=None, recall=None):
        B, T, C = x.shape
        size = C // self.n_head
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, size).unbind(dim=2)
        q, k, v = (each.transpose(1, 2) for each in qkv)  # (B, n_head, T, head size)
        if self.qk_norm or rotation:
            q, k = self.prepare(torch.stack((q, k)), rotation)
        y = (self.attend if recall is None else recall)(q, k, v)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))

    def attend(self, q, k, v):
        return attend(q, k, v, self.window, self.dropout if self.training else 0.0)

    def prepare(self, qk, rotation):
        """Queries and keys as their products want them, both at once: (2, B, n_head, T, size)."""
        if self.qk_norm:  # Henry et al. 2020, "Query-Key Normalization"
            qk = self.qk_norm(qk, qk.shape[-1:])
        return rotate(qk, *rotation) if rotation else qk


class MLP(nn.Module):
    """Two linear layers, four times as wide in between."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.activation(self.c_fc(x))))


def make_norm(config):
    if config.norm == "rmsnorm":  # Zhang and Sennrich 2019
        return nn.RMSNorm(config.n_embd)
    return nn.LayerNorm(config.n_embd, bias=config.bias)


class Block(nn.Module):
    """Attention, then the MLP, each normalised before and added to the residual stream after."""

    def __init__(self, config):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x, rotation=None, recall=None):
        x = x + self.attn(self.ln_1(x), rotation, recall)
        return x + self.mlp(self.ln_2(x))


def bigram_rows(vocab_size):
    """Rows of the table of pairs: one each for the pairs of small vocabularies."""
    return min(vocab_size**2, BIGRAM_ROWS)


def bigram_ids(idx, vocab_size):
    """The row of each token and the one before it, (B, T) int64; before the first comes id 0."""
    before = F.pad(idx, (1, 0))[:, :-1]
    return (before * vocab_size + idx) % bigram_rows(vocab_size)


class Smear(nn.Module):
    """Adds to each embedding those of the tokens just before it, weighted by channel.

    A causal depthwise convolution; tells of pairs and triples of tokens what the first block's
    attention would have to find out (So et al. 2021 convolve queries, keys and values so).
    """

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.smear, config.n_embd))

    def forward(self, x):
        smeared = x
        for back, weight in enumerate(self.weight, start=1):
            earlier = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
            smeared = torch.addcmul(smeared, earlier, weight)
        return smeared


def initial_std(name, config):
    """The standard deviation with which a matrix or table starts: GPT-2's, or that of `zero_init`.

    Each block adds two projections to the residual stream; 1/sqrt(2 n_layer) keeps its variance
    from growing with depth (Radford et al. 2019, section 2.3). With `zero_init` they start at zero,
    and so does an untied head. Then the embeddings alone make the stream, and are larger; 0.3 was
    the best of a few trials.
    """
    if name.endswith("c_proj.weight"):
        return 0.0 if config.zero_init else 0.02 / math.sqrt(2 * config.n_layer)
    if config.zero_init and not config.tie_weights:
        if name == "lm_head.weight":
            return 0.0
        if name.endswith(("wte.weight", "bigrams.weight")):
            return 0.3
    return 0.02


class GPT(nn.Module):
    """A language model: token ids in, logits of the next token out."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        parts = {"wte": nn.Embedding(config.vocab_size, config.n_embd)}
        if config.position == "learned":
            parts["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        else:
            cos, sin = rotary_tables(config.block_size, config.n_embd // config.n_head)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)
        if config.bigrams:
            parts["bigrams"] = nn.Embedding(bigram_rows(config.vocab_size), config.n_embd)
        if config.smear:
            parts["smear"] = Smear(config)
        parts["drop"] = nn.Dropout(config.dropout)
        parts["h"] = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        parts["ln_f"] = make_norm(config)
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.lm_head.weight = self.transformer.wte.weight
        self.init_weights()

    def init_weights(self):
        """Norms start as the identity, biases at zero, matrices and tables normal."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=initial_std(name, self.config))

    def forward(self, idx, targets=None):
        """Logits, and the mean cross-entropy in nats per token where `targets` are given.

        idx, targets: (B, T) int64 with T <= block_size; a target of -1 does not count.
        Returns (logits, loss): (B, T, vocab_size) and a scalar, or, without targets, the logits of
        the last position alone, (B, 1, vocab_size), and None. Raises ValueError for a context
        that is too long; ids outside the vocabulary are the caller's to keep out.
        """
        x, rotation = self.embed(idx)
        for block in self.transformer.h:
            x = block(x, rotation)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, -1:]), None
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss

    def embed(self, idx, positions=None):
        """The residual stream at its start, (B, T, n_embd), and what `rotate` needs, or None.

        positions: (B, T) or (T,) int64, 0, 1, … if not given; no token is at a negative one.
        """
        T, size = idx.shape[1], self.config.block_size
        if not 1 <= T <= size:
            raise ValueError(f"a context of {T} tokens does not fit block_size={size}")
        parts, rotation = self.transformer, None
        places = torch.arange(T, device=idx.device)
        if positions is not None:
            there = positions >= 0
            places, idx = positions.clamp(min=0), idx.masked_fill(~there, 0)
        x = parts.wte(idx)
        if self.config.position == "learned":
            x = x + parts.wpe(places)
        else:
            rotation = self.cos[places].unsqueeze(-3), self.sin[places].unsqueeze(-3)  # by head
        if self.config.bigrams:
            x = x + parts.bigrams(bigram_ids(idx, self.config.vocab_size))
        if self.config.smear:
            x = parts.smear(x if positions is None else x * there.unsqueeze(-1))
        return parts.drop(x), rotation


def num_params(config):
    """Parameters of a GPT in closed form; shared weights count once."""
    C, L, bias = config.n_embd, config.n_layer, int(config.bias)
    norm = C * (1 + (bias if config.norm == "layernorm" else 0))
    block = 12 * C * C + bias * 9 * C + 2 * norm  # attention 4 C^2 + 4 C, MLP 8 C^2 + 5 C
    positions = config.block_size if config.position == "learned" else 0
    pairs = bigram_rows(config.vocab_size) if config.bigrams else 0
    embeddings = (config.vocab_size + pairs + positions + config.smear) * C
    head = 0 if config.tie_weights else config.vocab_size * C
    return embeddings + L * block + norm + head


def flops_per_token(config):
    """FLOPs that training spends on one token of a full context: forward, and twice that backward.

    2 FLOPs for each weight of a matrix product and each attention score and sum (Chowdhery et al.
    2022, "PaLM", appendix B; the causal mask is not credited). Embeddings cost no products.
    """
    C, L = config.n_embd, config.n_layer
    weights = L * 12 * C * C + config.vocab_size * C
    T, window = config.block_size, config.window
    scores = -(-T // window) * 2 * window**2 if 0 < window < T else T * T  # of a head, as computed
    attention = L * 2 * C * scores / T
    return 3 * 2 * (weights + attention)
