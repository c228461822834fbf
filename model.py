"""GPT-2, followed by later techniques, which are switches of GPTConfig.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". Pure torch: no files, no
settings, no printing. Parameter names, defaults and initialization are nanoGPT's, so that
checkpoints can be exchanged.
Shapes: B batch, T tokens, C = n_embd, H = n_head, D = C / H (head size), V = vocab_size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# GPT-2


@dataclass(frozen=True)
class GPTConfig:
    """The architecture of a GPT. Raises ValueError if its fields do not fit each other.

    OpenAI's GPT-2 weights were trained with `gelu_tanh`; nanoGPT uses `gelu`.
    """

    block_size: int = 1024  # context length in tokens
    vocab_size: int = 50304  # GPT-2's 50257, padded to a multiple of 64 for faster products
    n_layer: int = 12  # 0: no attention; logits depend on the last token and its position only
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # in linear layers and layer norms

    # Switches; the defaults are GPT-2's architecture.
    activation: str = "gelu"  # see ACTIVATIONS
    tie_weights: bool = True  # the output head shares the token embedding
    position: str = "learned"  # or rotary
    norm: str = "layernorm"  # or rmsnorm
    qk_norm: bool = False  # normalize the queries and keys of each head
    smear: int = 0  # preceding embeddings that are added to each embedding
    ngrams: int = 0  # add embeddings of n-grams for n = 2 to this; 0: none
    ngram_rows: int = 32_771  # the most rows of a table; best a prime far from a power of 2
    window: int = 0  # tokens each token attends to, itself included; 0 means all

    def __post_init__(self):
        check_config(self)

    @property
    def preceding_tokens(self):
        """Number of preceding tokens that the embedding of a token depends on, 0 in GPT-2."""
        return self.smear + max(self.ngrams - 1, 0)


class Linear(nn.Linear):
    """nn.Linear, which only GPT.init_weights initializes, so that empty models take no time."""

    def reset_parameters(self):
        pass

    def forward(self, x):
        """Computes in the dtype of x."""
        return F.linear(x, self.weight.to(x.dtype), cast(self.bias, x.dtype))


class Embedding(nn.Embedding):
    """nn.Embedding, which only GPT.init_weights initializes."""

    def reset_parameters(self):
        pass


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm, which computes in the dtype of its input."""

    def forward(self, x):
        if x.is_cpu:  # where float32 weights keep the statistics in float32
            return super().forward(x)
        weight, bias = self.weight.to(x.dtype), cast(self.bias, x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


def cast(tensor, dtype):
    """Returns a tensor, or None, in a dtype."""
    return None if tensor is None else tensor.to(dtype)


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention (Vaswani et al. 2017, "Attention Is All You Need").

    `kernel` can be replaced by a faster function with the same arguments.
    """

    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout, self.window = config.n_head, config.dropout, config.window
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.qk_norm = NORMS[config.norm] if config.qk_norm else None  # None in GPT-2
        self.kernel: Callable = F.scaled_dot_product_attention

    def forward(self, x, rotation=None, attend=None):
        """x: (B, T, C) -> (B, T, C). See RotaryEmbedding for `rotation`, GPT.trunk for `attend`."""
        B, T, C = x.shape
        qkv = self.c_attn(x)  # (B, T, 3 C)
        qkv = qkv.view(B, T, 3, self.n_head, C // self.n_head)  # (B, T, 3, H, D)
        q, k, v = qkv.unbind(dim=2)  # (B, T, H, D) each
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D) each
        if self.qk_norm or rotation:  # not in GPT-2
            q, k = normalize_and_rotate(q, k, self.qk_norm, rotation)
        if attend is None:
            attend = self.causal_attention
        y = attend(q, k, v)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, C)  # the heads side by side
        return self.resid_dropout(self.c_proj(y))

    def causal_attention(self, q, k, v):
        """Each token attends to itself and the tokens before it. (B, H, T, D) each -> the same."""
        dropout = self.dropout if self.training else 0.0
        if 0 < self.window < q.shape[2]:  # not in GPT-2
            return windowed_attention(q, k, v, self.window, self.kernel, dropout)
        return self.kernel(q, k, v, dropout_p=dropout, is_causal=True)


class MLP(nn.Module):
    """Two linear layers with an activation in between, applied to each token separately."""

    def __init__(self, config):
        super().__init__()
        fc_width = proj_width = 4 * config.n_embd
        if config.activation == "swiglu":  # not in GPT-2; returns half of its width
            fc_width, proj_width = swiglu_widths(config.n_embd)
        self.c_fc = Linear(config.n_embd, fc_width, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]
        self.c_proj = Linear(proj_width, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        """x: (B, T, C) -> (B, T, C)."""
        x = self.activation(self.c_fc(x))  # (B, T, 4 C) in GPT-2
        return self.dropout(self.c_proj(x))


class Block(nn.Module):
    """Pre-norm transformer block: attention and MLP, each added to the residual stream."""

    compiled_methods = ("forward",)  # see folio/hardware/optimize.py

    def __init__(self, config):
        super().__init__()
        self.ln_1 = make_norm(config)  # LayerNorm in GPT-2
        self.attn = CausalSelfAttention(config)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x, rotation=None, attend=None):
        """x: (B, T, C) -> (B, T, C)."""
        x = x + self.attn(self.ln_1(x), rotation, attend)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A GPT language model. Call init_weights() before training a new one.

    `dtype` is the data type of activations and matrix products; None is that of the weights.
    Training sets it to bfloat16 or float16; weights and the loss stay float32 (Micikevicius et al.
    2018, "Mixed Precision Training").
    """

    dtype = None
    compiled_methods = ("loss",)  # blocks are compiled, too

    def __init__(self, config):
        super().__init__()
        self.config = config
        modules: dict[str, nn.Module] = {}
        modules["wte"] = Embedding(config.vocab_size, config.n_embd)  # of tokens
        if config.position == "learned":
            modules["wpe"] = Embedding(config.block_size, config.n_embd)  # of positions
        if config.preceding_tokens:  # not in GPT-2
            modules["context"] = LocalContext(config)
        modules["drop"] = nn.Dropout(config.dropout)
        modules["h"] = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        modules["ln_f"] = make_norm(config)
        self.transformer: Any = nn.ModuleDict(modules)
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.lm_head.weight = self.transformer.wte.weight  # both are (V, C)
        self.rotary = RotaryEmbedding(config) if config.position == "rotary" else None

    @torch.no_grad()
    def init_weights(self):
        """Initializes all parameters like GPT-2. Returns the model.

        Weights of norms are 1, biases 0, and matrices normal with standard deviation 0.02. Each
        block adds two projections to the residual stream; their standard deviation is divided by
        sqrt(2 n_layer) so that the variance does not grow with depth (Radford et al. 2019, 2.3).
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif not name.endswith("weight"):  # such as a new kind of norm
                raise ValueError(f"init_weights has no rule for {name}")
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                std = 0.02
                if name.endswith("c_proj.weight"):
                    std /= math.sqrt(2 * self.config.n_layer)
                parameter.normal_(std=std)
        return self

    def forward(self, idx, targets, temperature=1.0):
        """Returns the loss: the mean cross-entropy in nats per token, a scalar.

        idx, targets: (B, T) int64 with T <= block_size; targets of -1 are ignored. Logits are
        divided by the temperature (Agarwala et al. 2020, "Temperature check").
        """
        return self.loss(self.trunk(idx), targets, temperature)

    def loss(self, x, targets, temperature):
        """Returns the loss of hidden states, (B, T, C). See forward."""
        x = x.flatten(0, 1) / temperature  # lm_head is linear
        return F.cross_entropy(self.lm_head(x).float(), targets.flatten(), ignore_index=-1)

    def logits(self, idx):
        """Returns the logits of the token after each position: (B, T) -> (B, T, V)."""
        return self.lm_head(self.trunk(idx))

    def trunk(self, idx, positions=None, attend=None):
        """Returns the hidden states after the final norm: all of GPT-2 but the output head.

        In training, idx is the only argument and the result is (B, T, C). With a KV cache, only the
        last T' tokens of idx are computed, and the result is (B, T', C).

        Args:
            idx: (B, T) int64, T <= block_size. Raises ValueError otherwise.
            positions: (T',) or (B, T') int64, the positions of the last T' tokens of idx. Tokens
                before those only contribute to embeddings. Default: 0 to T - 1, so that T' = T.
            attend: replaces causal attention, for a KV cache: attend(layer, q, k, v) takes and
                returns (B, H, T', D).
        """
        T = idx.shape[1]
        if not 1 <= T <= self.config.block_size:
            raise ValueError(f"{T} tokens do not fit block_size={self.config.block_size}")
        if positions is None:
            positions = torch.arange(T, device=idx.device)
        if self.config.preceding_tokens:  # smear or ngrams
            x = self.transformer.context(self.embed, idx, positions)
        else:
            x = self.embed(idx[:, -positions.shape[-1] :], positions)  # all tokens in training
        x = self.transformer.drop(x.to(self.dtype or x.dtype))  # (B, T', C)
        rotation = None if self.rotary is None else self.rotary(positions)
        for layer, block in enumerate(self.transformer.h):
            attend_in_layer = partial(attend, layer) if attend is not None else None
            x = block(x, rotation, attend_in_layer)
        return self.transformer.ln_f(x)

    def embed(self, idx, positions):
        """Returns the embeddings of tokens, with learned positions: (B, T) -> (B, T, C)."""
        x = self.transformer.wte(idx)
        if self.config.position == "learned":
            x = x + self.transformer.wpe(positions)
        return x

    def num_params(self):
        """Returns the number of parameters; tied weights count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self):
        """Returns the FLOPs of training on one token: a forward pass, and twice that for backward.

        2 FLOPs per multiplication with a weight of a linear layer, in attention scores and in sums
        of values (Chowdhery et al. 2022, "PaLM", appendix B), masked or not.
        """
        T, window = self.config.block_size, self.config.window
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        pairs = T * T  # of a query and a key
        if 0 < window < T:  # in chunks; see windowed_attention
            pairs = math.ceil(T / window) * 2 * window**2
        # For each pair, a score takes C multiplications, and a weighted sum of values C more.
        attention = self.config.n_layer * 2 * self.config.n_embd * pairs / T
        return 3 * 2 * (weights + attention)


# Later techniques, each a switch of GPTConfig


# norm: RMSNorm (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization")

NORMS = {"layernorm": F.layer_norm, "rmsnorm": F.rms_norm}


def make_norm(config):
    """Returns the norm over the C values of each token."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.n_embd)
    return LayerNorm(config.n_embd, bias=config.bias)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm, which computes in the dtype of its input."""

    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


# activation


def relu2(x):
    """Squared ReLU (So et al. 2021, "Primer")."""
    y = F.relu(x)
    return y * y  # faster backward than square() on a CPU


def swiglu(x):
    """Gated linear unit (Shazeer 2020, "GLU Variants Improve Transformer"): (…, 2 N) -> (…, N)."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def swiglu_widths(n_embd):
    """Returns the widths before and after swiglu, for as many parameters as without a gate."""
    width = 32 * math.ceil(n_embd / 12)  # 8 C / 3, rounded up to a multiple of 32
    return 2 * width, width


ACTIVATIONS: dict[str, Callable] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": relu2,
    "swiglu": swiglu,
}


# position=rotary, and qk_norm


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (Su et al. 2021, "RoFormer"), in place of learned positions.

    Pair i of a head, its elements i and i + D/2, is rotated by position / 10000^(2i/D) radians.
    """

    def __init__(self, config):
        super().__init__()
        shape = config.block_size, config.n_embd // config.n_head
        self.register_buffer("cos", torch.empty(shape), persistent=False)
        self.register_buffer("sin", torch.empty(shape), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        """Computes the cosines and signed sines, on the CPU. They are not in checkpoints."""
        T, D = self.cos.shape
        frequencies = 10_000.0 ** (-torch.arange(0, D, 2, dtype=torch.float32, device="cpu") / D)
        angles = torch.outer(torch.arange(T, device="cpu"), frequencies)  # (T, D/2)
        cos, sin = angles.cos(), angles.sin()
        self.cos.copy_(torch.cat((cos, cos), dim=-1))
        self.sin.copy_(torch.cat((-sin, sin), dim=-1))

    def forward(self, positions):
        """positions: (T,) or (B, T) -> cosines and sines, (1, T, D) or (B, 1, T, D) each."""
        return self.cos[positions].unsqueeze(-3), self.sin[positions].unsqueeze(-3)


def normalize_and_rotate(q, k, norm, rotation):
    """Returns q and k, (B, H, T, D) each, with a norm or rotation if they are not None.

    The norm is over the D values of each head (Henry et al. 2020, "Query-Key Normalization").
    """
    qk = torch.stack((q, k))  # both at once, for fewer operations
    if norm:
        qk = norm(qk, qk.shape[-1:])
    if rotation:
        cos, sin = rotation
        first, second = qk.chunk(2, dim=-1)  # of each pair
        swapped = torch.cat((second, first), dim=-1)  # compiled roll() would take more time
        # (a, b) becomes (a cos - b sin, b cos + a sin); `sin` has the signs.
        qk = torch.addcmul(qk * cos.to(qk.dtype), swapped, sin.to(qk.dtype))
    return qk.unbind()


# window (Child et al. 2019, "Generating Long Sequences with Sparse Transformers")


def causal_mask(queries, keys, window, dtype=torch.float32):
    """Returns what is added to the scores: 0 where a query attends to a key, else -inf.

    queries, keys: their positions, (…, T) and (S,) int64 -> (…, T, S).
    """
    queries = queries.unsqueeze(-1)
    masked = keys > queries
    if window:
        masked |= keys <= queries - window
    return torch.zeros_like(masked, dtype=dtype).masked_fill_(masked, -math.inf)


def windowed_attention(q, k, v, window, kernel, dropout):
    """Causal attention over the last `window` < T tokens. (B, H, T, D) each -> the same.

    It takes O(T * window) time: the sequence is cut into chunks of `window` tokens; each chunk
    attends to itself and to the chunk before.
    """
    B, H, T, D = q.shape
    chunks = math.ceil(T / window)
    padding = (0, 0, 0, chunks * window - T)  # after the last token
    q, k, v = (F.pad(x, padding).reshape(B * H, chunks, window, D) for x in (q, k, v))
    # Keys and values of the previous chunk, zeros before the first, and of this one.
    k, v = (torch.cat((F.pad(x, (0, 0, 0, 0, 1, -1)), x), dim=2) for x in (k, v))
    columns = torch.arange(2 * window, device=q.device)
    mask = causal_mask(columns[window:], columns, window, q.dtype).repeat(chunks, 1, 1)
    mask[0, :, :window] = -math.inf  # the first chunk has no predecessor
    y = kernel(q, k, v, mask, dropout)
    return y.reshape(B, H, chunks * window, D)[:, :, :T]


# smear and ngrams


class LocalContext(nn.Module):
    """Adds information about the preceding tokens to each embedding.

    `ngrams` adds embeddings of n-grams, hashed (Pagnoni et al. 2024, "Byte Latent
    Transformer", section 3.2.1). Those of n = 2 to N are side by side, C / (N - 1) channels each.
    `smear` is a causal depthwise convolution (So et al. 2021, "Primer", where it is applied to
    queries, keys and values).
    """

    def __init__(self, config):
        super().__init__()
        self.vocab_size, self.n_embd = config.vocab_size, config.n_embd
        self.ngrams = nn.ModuleDict()
        for n in range(2, config.ngrams + 1):
            rows = min(config.vocab_size**n, config.ngram_rows)  # one per n-gram if there are few
            self.ngrams[str(n)] = Embedding(rows, config.n_embd // (config.ngrams - 1))
        self.smear = None
        if config.smear:
            weight = torch.empty(config.smear, config.n_embd)
            self.smear = nn.ParameterDict({"weight": weight})  # smear.weight in checkpoints

    def forward(self, embed, idx, positions):
        """Returns the embeddings of the last T' tokens, (B, T', C). See GPT.trunk and GPT.embed."""
        earlier = idx.shape[1] - positions.shape[-1]  # tokens before the first position
        absent = None
        if earlier:
            steps = torch.arange(-earlier, 0, device=idx.device)
            positions = torch.cat((positions[..., :1] + steps, positions), dim=-1)  # (…, T)
            absent = positions < 0  # before the start of the text
            positions = positions.clamp(min=0)
            idx = idx.masked_fill(absent, 0)
        x = embed(idx, positions)  # (B, T, C)
        if self.ngrams:
            x = x + self.embed_ngrams(idx)
        if absent is not None:
            x = x.masked_fill(absent.unsqueeze(-1), 0)
        if self.smear:
            x = self.add_preceding(x)
        return x[:, earlier:]

    def embed_ngrams(self, idx):
        """Returns the embeddings of the n-grams that end at each token: (B, T) -> (B, T, C)."""
        parts = []
        for n, table in self.ngrams.items():
            parts.append(table(self.ngram_ids(idx, int(n), table.num_embeddings)))
        x = torch.cat(parts, dim=-1)
        return F.pad(x, (0, self.n_embd - x.shape[-1]))  # if C is not divisible by N - 1

    def ngram_ids(self, idx, n, rows):
        """Returns the row of the n-gram that ends at each token: (B, T) -> the same shape."""
        ids = torch.zeros_like(idx)
        for back in reversed(range(n)):
            token = F.pad(idx, (back, 0))[:, : idx.shape[1]]  # id 0 precedes the first token
            ids = (ids * self.vocab_size + token) % rows
        return ids

    def add_preceding(self, x):
        """Adds weighted preceding embeddings to each one: (B, T, C) -> the same shape."""
        smeared = x
        for back, weight in enumerate(self.smear["weight"], start=1):
            preceding = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
            smeared = torch.addcmul(smeared, preceding, weight)
        return smeared


# Checks of GPTConfig

CHOICES: dict = {"activation": ACTIVATIONS, "norm": NORMS, "position": ("learned", "rotary")}
LARGEST = 2**63 - 1  # the largest integer of torch
BOUNDS: dict = {"n_layer": (0, 10_000), "dropout": (0.0, 1.0)}  # (lowest, highest), as in train.py
BOUNDS |= {"ngrams": (0, 10_000), "smear": (0, math.inf), "window": (0, math.inf)}
SIZES = "block_size", "vocab_size", "n_head", "n_embd", "ngram_rows"
BOUNDS |= dict.fromkeys(SIZES, (1, math.inf))


def check_config(config):
    """Raises ValueError if a field of a GPTConfig is invalid or does not fit the others."""
    for name, choices in CHOICES.items():
        if (value := getattr(config, name)) not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value}")
    for name, (low, high) in BOUNDS.items():
        value = getattr(config, name)
        if type(value) not in (int, type(low)) or not low <= value <= min(high, LARGEST):
            raise ValueError(f"{name}={value!r} must be {type(low).__name__} in [{low}, {high}]")
    if config.n_embd % config.n_head:
        raise ValueError(f"n_embd={config.n_embd} is not divisible by n_head={config.n_head}")
    size = config.n_embd // config.n_head
    if config.position == "rotary" and size % 2:
        raise ValueError(f"position=rotary needs an even head size n_embd / n_head, not {size}")
    if config.ngrams == 1 or config.ngrams > config.n_embd:
        raise ValueError(f"ngrams must be 0 or 2 to n_embd={config.n_embd}, not {config.ngrams}")
    if config.preceding_tokens >= config.block_size:
        names = f"smear={config.smear} and ngrams={config.ngrams}"
        raise ValueError(f"{names} need more context than block_size={config.block_size}")
