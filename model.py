"""The GPT: GPT-2's decoder-only transformer, its counting and its sampling.

Pure torch: no files, no settings, no printing. Parameter names, defaults and initialisation are
those of GPT-2 as nanoGPT spells them, so that checkpoints travel between the two.

References: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2);
Kaplan et al. 2020, "Scaling Laws for Neural Language Models" (parameters, FLOPs).
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu}


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

    def __post_init__(self):
        for name in ("block_size", "vocab_size", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.n_layer < 0:
            raise ValueError(f"n_layer must not be negative, as {self.n_layer} is")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), not {self.dropout}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {', '.join(ACTIVATIONS)}, not {self.activation}"
            )


def attend(q, k, v, dropout=0.0):
    """Causal attention: (B, n_head, T, head size) each -> the same shape.

    torch's own kernel, except for bfloat16 on a CPU, where its backward pass is slow: forward and
    backward on two AMD cores, plain products took 1/4 of its time at T=128, 1/2 at 512, and more
    than it from 1024 on.
    """
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[2] <= 512:
        return attend_plainly(q, k, v, dropout)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


def attend_plainly(q, k, v, dropout=0.0):
    """The same by its definition, softmax(q k' / sqrt(size)) v (Vaswani et al. 2017, 3.2.1)."""
    T, size = q.shape[2:]
    future = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    q, k = q.flatten(0, 1), k.flatten(0, 1)
    scores = torch.baddbmm(future, q, k.transpose(1, 2), alpha=size**-0.5)
    weights = F.dropout(scores.softmax(dim=-1), dropout)
    return (weights @ v.flatten(0, 1)).view(v.shape)


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and what came before it."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).unbind(dim=2)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))  # (B, n_head, T, head size)
        y = attend(q, k, v, self.dropout if self.training else 0.0)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))


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


class Block(nn.Module):
    """Attention, then the MLP, each normalised before and added to the residual stream after."""

    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A language model: token ids in, logits of the next token out."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": nn.LayerNorm(config.n_embd, bias=config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.lm_head.weight = self.transformer.wte.weight
        self.init_weights()

    def init_weights(self):
        """GPT-2's initialisation: normal of std 0.02, zero biases, scaled residual projections.

        Each block adds two projections to the residual stream; 1/sqrt(2 n_layer) keeps its
        variance from growing with depth (Radford et al. 2019, section 2.3).
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:  # layer norms start as the identity
                nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.ones_(parameter)
            elif name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.n_layer))
            else:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, idx, targets=None):
        """Logits, and the mean cross-entropy in nats per token where `targets` are given.

        idx, targets: (B, T) int64 with T <= block_size; a target of -1 does not count.
        Returns (logits, loss): (B, T, vocab_size) and a scalar, or, without targets, the logits of
        the last position alone, (B, 1, vocab_size), and None. Raises ValueError for a context
        that is too long and, on the CPU, for ids outside the vocabulary.
        """
        self._check(idx)
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(positions))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, -1:]), None
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss

    def _check(self, idx):
        T, config = idx.shape[1], self.config
        if not 1 <= T <= config.block_size:
            raise ValueError(f"a context of {T} tokens does not fit block_size={config.block_size}")
        # Elsewhere reading ids would stall the device, and compiled kernels check them themselves.
        if idx.device.type == "cpu" and not torch.compiler.is_compiling():
            low, high = (int(end) for end in idx.aminmax())
            if low < 0 or high >= config.vocab_size:
                wrong = low if low < 0 else high
                raise ValueError(f"token id {wrong} is outside vocab_size={config.vocab_size}")


def num_params(config):
    """Parameters of a GPT in closed form; shared weights count once."""
    C, L, bias = config.n_embd, config.n_layer, int(config.bias)
    norm = C * (1 + bias)
    block = 12 * C * C + bias * 9 * C + 2 * norm  # attention 4 C^2 + 4 C, MLP 8 C^2 + 5 C
    embeddings = (config.vocab_size + config.block_size) * C
    head = 0 if config.tie_weights else config.vocab_size * C
    return embeddings + L * block + norm + head


def flops_per_token(config):
    """FLOPs that training spends on one token of a full context: forward, and twice that backward.

    2 FLOPs for each weight of a matrix product and each attention score and sum (Chowdhery et al.
    2022, "PaLM", appendix B; the causal mask is not credited). Embeddings cost no products.
    """
    C, L = config.n_embd, config.n_layer
    weights = L * 12 * C * C + config.vocab_size * C
    attention = L * 2 * config.block_size * C
    return 3 * 2 * (weights + attention)


@torch.no_grad()
def generate(model, idx, max_new_tokens, temperature=1.0, top_k=None, limit=None, generator=None):
    """Continue each row of `idx` by `max_new_tokens` tokens drawn one after the other.

    idx: (B, T) int64, any T >= 1; the model sees the last block_size tokens. Only ids below
    `limit` are drawn: a vocabulary padded for speed has ids that no tokenizer knows. `generator`
    supplies the randomness. The model should be in eval mode. Returns (B, T + max_new_tokens).
    """
    for _ in range(max_new_tokens):
        logits, _ = model(idx[:, -model.config.block_size :])
        token = sample_next(logits[:, -1, :limit], temperature, top_k, generator)
        idx = torch.cat((idx, token), dim=1)
    return idx


def sample_next(logits, temperature=1.0, top_k=None, generator=None):
    """Draw one token per row: logits (B, vocab_size) -> ids (B, 1), int64.

    Temperature 0 takes the likeliest. `top_k` keeps the k likeliest and whatever ties with the
    last of them.
    """
    if temperature < 1e-5:  # the same in effect, and smaller ones would overflow float32
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    return torch.multinomial(logits.softmax(dim=-1), num_samples=1, generator=generator)
