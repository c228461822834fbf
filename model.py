"""GPT-2's decoder-only transformer.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". Pure torch: no files, no
settings, no printing. Parameter names, defaults and initialization are nanoGPT's, so that
checkpoints can be exchanged. GPTConfig has switches for later techniques.
Shapes: B batch, T tokens, C = n_embd, H = n_head, D = C / H (head size).
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn


def relu2(x):
    """Squared ReLU (So et al. 2021, "Primer")."""
    return (y := F.relu(x)) * y  # faster backward than square() on a CPU


def swiglu(x):
    """Gated linear unit of two halves (Shazeer 2020, "GLU Variants Improve Transformer")."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": relu2,
    "swiglu": swiglu,
}
NORMS = {"layernorm": F.layer_norm, "rmsnorm": F.rms_norm}
BIGRAM_ROWS, NGRAM_ROWS = 65_537, 12_289  # at most; prime, so that hashing spreads evenly
CHOICES = {"activation": ACTIVATIONS, "norm": NORMS, "position": ("learned", "rotary")}


def ngram_rows(vocab_size, n):
    """Rows of a table of n-grams: one for each if they are few, otherwise shared by hashing."""
    return min(vocab_size**n, BIGRAM_ROWS if n == 2 else NGRAM_ROWS)


@dataclass(frozen=True)
class GPTConfig:
    """The architecture of a GPT. Raises ValueError for an invalid one.

    OpenAI's GPT-2 weights were trained with `gelu_tanh`; nanoGPT uses `gelu`. With `n_layer=0` and
    no `smear` or `ngrams`, logits depend only on the last token and its position.
    """

    block_size: int = 1024  # context length in tokens
    vocab_size: int = 50304  # GPT-2's 50257, padded to a multiple of 64 for faster products
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # in linear layers and layer norms
    activation: str = "gelu"
    tie_weights: bool = True  # the output head shares the token embedding
    position: str = "learned"  # or rotary
    norm: str = "layernorm"  # or rmsnorm
    qk_norm: bool = False  # normalize the queries and keys of each head
    smear: int = 0  # preceding embeddings that are added to each embedding
    ngrams: int = 0  # add embeddings of n-grams for n = 2 to this; 0: none
    window: int = 0  # tokens each token attends to, itself included; 0 means all

    def __post_init__(self):
        least = dict.fromkeys(("block_size", "vocab_size", "n_head", "n_embd"), 1)
        least |= dict.fromkeys(("n_layer", "smear", "ngrams", "window"), 0)
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, not {getattr(self, name)}")
        if self.receptive_field >= self.block_size:
            names = f"smear={self.smear} and ngrams={self.ngrams}"
            raise ValueError(f"{names} need more context than block_size={self.block_size}")
        if self.ngrams == 1:
            raise ValueError("ngrams must be 0 or at least 2, not 1")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}")
        if self.position == "rotary" and (size := self.n_embd // self.n_head) % 2:
            raise ValueError(f"position=rotary needs an even head size n_embd / n_head, not {size}")
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {value}")

    @property
    def receptive_field(self):
        """Preceding tokens that the embedding of a token depends on."""
        return self.smear + max(self.ngrams - 1, 0)


def rotary_tables(config, device):
    """Returns cosines and signed sines for `rotate`, (block_size, D) float32 each.

    Pair i of a head rotates by position / 10000^(2i/D) radians (Su et al. 2021, "RoFormer").
    """
    size = config.n_embd // config.n_head
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(config.block_size), frequencies)
    cos, sin = angles.cos(), angles.sin()
    # moved last, because torch.cat on meta would import torch._dynamo
    return torch.cat((cos, cos), dim=-1).to(device), torch.cat((-sin, sin), dim=-1).to(device)


def rotate(x, cos, sin):
    """Rotates the pairs (i, i + D/2) of each head: (..., T, D) -> the same shape."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos.to(x.dtype), swapped, sin.to(x.dtype))


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention (Vaswani et al. 2017, "Attention Is All You Need").

    `kernel` can be replaced by a faster function with the same arguments.
    """

    def __init__(self, config):
        super().__init__()
        self.n_head, self.window = config.n_head, config.window
        self.dropout = config.dropout
        self.kernel = F.scaled_dot_product_attention
        self.qk_norm = NORMS[config.norm] if config.qk_norm else None
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x, rotation=None, attend=None):
        """x: (B, T, C) -> (B, T, C). See GPT.trunk for `attend`."""
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).unbind(dim=2)
        q, k, v = (each.transpose(1, 2) for each in qkv)  # (B, H, T, D)
        if self.qk_norm or rotation:
            qk = torch.stack((q, k))  # both at once, for fewer operations
            if self.qk_norm:  # Henry et al. 2020, "Query-Key Normalization"
                qk = self.qk_norm(qk, qk.shape[-1:])
            q, k = rotate(qk, *rotation) if rotation else qk
        y = self.attend(q, k, v) if attend is None else attend(q, k, v)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))

    def attend(self, q, k, v):
        """Causal attention over the last `window` tokens (0: all). (B, H, T, D) each -> the same.

        With a window it takes O(T * window) time: the sequence is cut into chunks of `window`
        tokens; each chunk attends to itself and to the chunk before (Child et al. 2019,
        "Generating Long Sequences with Sparse Transformers").
        """
        B, H, T, D = q.shape
        window, dropout = self.window, self.dropout if self.training else 0.0
        if not 0 < window < T:
            return self.kernel(q, k, v, dropout_p=dropout, is_causal=True)
        chunks = math.ceil(T / window)
        padded = (F.pad(x, (0, 0, 0, chunks * window - T)) for x in (q, k, v))
        q, k, v = (x.reshape(B * H, chunks, window, D) for x in padded)
        k, v = (torch.cat((F.pad(x, (0, 0, 0, 0, 1, -1)), x), dim=2) for x in (k, v))
        columns = torch.arange(2 * window, device=q.device)  # of the previous chunk and this one
        distance = columns[window:, None] - columns
        masked = ((distance < 0) | (distance >= window)).repeat(chunks, 1, 1)
        masked[0, :, :window] = True  # the first chunk has no predecessor
        zeros = torch.zeros(masked.shape, dtype=q.dtype, device=q.device)
        y = self.kernel(q, k, v, zeros.masked_fill(masked, -math.inf), dropout)
        return y.reshape(B, H, chunks * window, D)[:, :, :T]


def embedding(rows, size):  # uninitialized; nn.Embedding(…) on meta would import torch._dynamo
    return nn.Embedding.from_pretrained(torch.empty(rows, size), freeze=False)


def make_norm(config):
    C = config.n_embd  # RMSNorm: Zhang and Sennrich 2019
    return nn.RMSNorm(C) if config.norm == "rmsnorm" else nn.LayerNorm(C, bias=config.bias)


def mlp_widths(config):
    """Returns the width of an MLP after its first linear layer, and that before its second."""
    N = 32 * math.ceil(config.n_embd / 12)  # 8 C / 3, rounded up, for as many parameters as 4 C
    return (2 * N, N) if config.activation == "swiglu" else (4 * config.n_embd, 4 * config.n_embd)


class MLP(nn.Module):
    """Two linear layers with an activation in between."""

    def __init__(self, config):
        super().__init__()
        outer, inner = mlp_widths(config)
        self.c_fc = nn.Linear(config.n_embd, outer, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]
        self.c_proj = nn.Linear(inner, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.activation(self.c_fc(x))))


class Block(nn.Module):
    """Pre-norm transformer block: attention and MLP, each added to the residual stream."""

    def __init__(self, config):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x, rotation=None, attend=None):
        x = x + self.attn(self.ln_1(x), rotation, attend)
        return x + self.mlp(self.ln_2(x))


class LocalContext(nn.Module):
    """Adds information about the preceding tokens to each embedding.

    `ngrams` adds embeddings of n-grams, hashed (Pagnoni et al. 2024, "Byte Latent
    Transformer", section 3.2.1). `smear` is a causal depthwise convolution (So et al. 2021,
    "Primer", apply it to queries, keys and values).
    """

    def __init__(self, config):
        super().__init__()
        self.vocab_size = config.vocab_size
        self.smear, self.ngrams = None, nn.ModuleDict()
        for n in range(2, config.ngrams + 1):
            self.ngrams[str(n)] = embedding(ngram_rows(config.vocab_size, n), config.n_embd)
        if config.smear:
            self.smear = nn.ParameterDict({"weight": torch.empty(config.smear, config.n_embd)})

    def forward(self, x, idx, absent=None):
        """x: (B, T, C) embeddings of idx, (B, T). absent: (T,) or (B, T) bool, no token there."""
        for n, table in self.ngrams.items():
            x = x + table(self.ngram_ids(idx, int(n), table.num_embeddings))
        if absent is not None:
            x = x.masked_fill(absent.unsqueeze(-1), 0)
        smeared = x
        for back, weight in enumerate(self.smear["weight"] if self.smear else (), start=1):
            smeared = torch.addcmul(smeared, F.pad(x, (0, 0, back, 0))[:, : x.shape[1]], weight)
        return smeared

    def ngram_ids(self, idx, n, rows):
        """Returns the row of the n-gram that ends at each token: (B, T) -> the same shape."""
        ids = torch.zeros_like(idx)
        for back in reversed(range(n)):
            token = F.pad(idx, (back, 0))[:, : idx.shape[1]]  # id 0 precedes the first token
            ids = (ids * self.vocab_size + token) % rows
        return ids


class GPT(nn.Module):
    """A GPT language model."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        parts = {"wte": embedding(config.vocab_size, config.n_embd)}
        if config.position == "learned":
            parts["wpe"] = embedding(config.block_size, config.n_embd)
        if config.receptive_field:
            parts["context"] = LocalContext(config)
        blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        parts |= {"drop": nn.Dropout(config.dropout), "h": blocks, "ln_f": make_norm(config)}
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if not self.lm_head.weight.is_meta:  # see uninitialized()
            self.tie_and_fill_tables()
            self.init_weights()

    @classmethod
    def uninitialized(cls, config, device="cpu"):
        """Returns a GPT with uninitialized weights."""
        with torch.device("meta"):
            model = cls(config)
        weights = {k: torch.empty(w.shape, device=device) for k, w in model.state_dict().items()}
        model.load_state_dict(weights, assign=True)  # to_empty() imports sympy: 0.4 s
        model.tie_and_fill_tables()
        return model

    def tie_and_fill_tables(self):
        """Shares the embedding with the output head, and computes the rotary tables."""
        if self.config.tie_weights:
            self.lm_head.weight = self.transformer.wte.weight
        if self.config.position == "rotary":
            cos, sin = rotary_tables(self.config, self.lm_head.weight.device)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)

    @torch.no_grad()
    def init_weights(self, assign=torch.Tensor.copy_):
        """Initializes like GPT-2, on the CPU.

        Weights of norms are 1, biases 0, and matrices normal with standard deviation 0.02. Each
        block adds two projections to the residual stream; their standard deviation is divided by
        sqrt(2 n_layer) so that the variance does not grow with depth (Radford et al. 2019, 2.3).
        """
        for name, parameter in self.named_parameters():
            values = torch.full(parameter.shape, 0.0 if name.endswith("bias") else 1.0)
            additions = 2 * self.config.n_layer if name.endswith("c_proj.weight") else 1
            if parameter.dim() > 1:
                values.normal_(std=0.02 / math.sqrt(additions))
            assign(parameter, values)

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
        pairs = math.ceil(T / window) * 2 * window**2 if 0 < window < T else T * T  # query and key
        attention = self.config.n_layer * 2 * self.config.n_embd * pairs / T
        return 3 * 2 * (weights + attention)

    def forward(self, idx, targets, temperature=1.0):
        """Returns the mean cross-entropy in nats per token, a scalar.

        idx, targets: (B, T) int64 with T <= block_size; targets of -1 are ignored. Logits are
        divided by the temperature (Agarwala et al. 2020, "Temperature check").
        """
        logits = self.lm_head(self.trunk(idx) / temperature)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def logits(self, idx):
        """Returns the logits of the token after each position: (B, T) -> (B, T, vocab_size)."""
        return self.lm_head(self.trunk(idx))

    def trunk(self, idx, positions=None, attend=None):
        """Returns the hidden states after the final norm, (B, T', C).

        Args:
            idx: (B, T) int64, T <= block_size. Raises ValueError otherwise.
            positions: (T',) or (B, T') int64, the positions of the last T' tokens of idx. Tokens
                before those only contribute to embeddings. Default: 0 to T - 1.
            attend: replaces causal attention, for a KV cache: attend(layer, q, k, v) takes and
                returns (B, H, T', D).
        """
        T, size = idx.shape[1], self.config.block_size
        if not 1 <= T <= size:
            raise ValueError(f"{T} tokens do not fit block_size={size}")
        if positions is None:
            positions = torch.arange(T, device=idx.device)
        x, rotation = self.embed(idx, positions), None
        if self.config.position == "rotary":
            rotation = self.cos[positions].unsqueeze(-3), self.sin[positions].unsqueeze(-3)
        for layer, block in enumerate(self.transformer.h):
            # "attend and partial(…)" cannot be compiled by torch 2.11.
            x = block(x, rotation, partial(attend, layer) if attend is not None else None)
        return self.transformer.ln_f(x)

    def embed(self, idx, positions):
        """Returns the embeddings of the last T' tokens, (B, T', C). See trunk."""
        parts, earlier, absent = self.transformer, idx.shape[1] - positions.shape[-1], None
        if earlier:
            steps = torch.arange(-earlier, 0, device=idx.device)
            positions = torch.cat((positions[..., :1] + steps, positions), dim=-1)
            absent = positions < 0  # before the start of the text
            positions, idx = positions.clamp(min=0), idx.masked_fill(absent, 0)
        x = parts.wte(idx)
        if self.config.position == "learned":
            x = x + parts.wpe(positions)
        if self.config.receptive_field:
            x = parts.context(x, idx, absent)
        return parts.drop(x[:, earlier:])
