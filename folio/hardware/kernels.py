"""Attention, dropout and linear layers that are faster than torch's in model.py.

folio/hardware/optimize.py makes a model use them.

Shapes: B batch, H heads, T queries, S keys, D head size.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import causal_mask

NON_CUDNN_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
DROPOUT_LEVELS = 2**16
MAX_FEW_ROWS = 3
PACKED_BATCH_SIZE = 16  # a hint for oneDNN; no other value is faster for 10 or more rows
MIN_PACKED_WEIGHTS = 140_000  # in float32: a call takes 15 us more, which smaller layers lose


# Attention


def disable_cudnn_attention(device):
    """Returns a context without cuDNN's attention, which torch 2.11 prefers on recent GPUs.

    With a mask, its results can be wrong there (https://github.com/pytorch/pytorch/issues/196678
    and 193893). It also prepares a kernel for each shape, which is slow if lengths change.
    """
    return sdpa_kernel(NON_CUDNN_BACKENDS) if device.type == "cuda" else nullcontext()


def fast_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False):
    """F.scaled_dot_product_attention for the arguments that model.py passes: a mask or is_causal.

    q: (B, H, T, D). k, v: (B, H, S, D). attn_mask: (H, T, S) of q's dtype, added to the scores.
    """
    # In bfloat16 on two AMD cores, matrix products took 1/4 of the time of torch's fused kernel for
    # 128 keys and 1/2 for 512, forward and backward.
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and k.shape[2] <= 512:
        return explicit_attention(q, k, v, attn_mask, dropout_p, is_causal)
    with nullcontext() if is_causal else disable_cudnn_attention(q.device):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal)


def explicit_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False):
    """fast_attention as matrix products."""
    if is_causal:
        positions = torch.arange(q.shape[2], device=q.device)
        mask = causal_mask(positions, positions, 0, q.dtype)
    else:
        mask = attn_mask.repeat(len(q), 1, 1)
    return apply_dropout(attention_weights(q, k, mask), dropout_p) @ v


def attention_weights(q, k, mask):
    """Returns the weight of each value: (B, H, T, D) and (B, H, S, D) -> (B, H, T, S).

    mask: (T, S) or (B * H, T, S), of q's dtype; see causal_mask.
    """
    scale = q.shape[-1] ** -0.5  # Vaswani et al. 2017, 3.2.1
    scores = torch.baddbmm(mask, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=scale)
    return scores.softmax(dim=-1).unflatten(0, q.shape[:2])


# Dropout (Srivastava et al. 2014)


class Dropout(nn.Dropout):
    """nn.Dropout with `apply_dropout`."""

    def forward(self, x):
        return apply_dropout(x, self.p if self.training else 0.0)


def apply_dropout(x, rate):
    """Returns x with a fraction `rate` of its elements set to zero and the others scaled up.

    torch draws 64 random bits for each element on a CPU; 16 are enough. The rate is rounded to a
    multiple of 1 / DROPOUT_LEVELS, and the scale is that of the rounded rate.
    """
    if not rate:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, rate)
    dropped = min(round(rate * DROPOUT_LEVELS), DROPOUT_LEVELS - 1)
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    numbers = bits.view(torch.int16)[: x.numel()].view(x.shape)  # uniform in -2^15 … 2^15 - 1
    mask = (numbers >= dropped - DROPOUT_LEVELS // 2).to(x.dtype)
    return x * mask.mul_(DROPOUT_LEVELS / (DROPOUT_LEVELS - dropped))


# Linear layers for inference on a CPU


def fast_linear(linear, dtype, rows):
    """Returns the fastest layer for the weights of a linear layer on a CPU, or the layer itself."""
    is_large = linear.weight.numel() >= MIN_PACKED_WEIGHTS
    if dtype == "int8":  # with other widths, torch 2.13 reads beyond the weights
        return linear if linear.in_features % 16 else Int8Linear(linear)
    if not torch.backends.mkl.is_available():  # nor, as on Arm, packed products
        return linear
    if dtype == "float32" and rows and rows <= MAX_FEW_ROWS:
        return FewRowsLinear(linear)
    has_bfloat16 = dtype == "bfloat16" and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return PackedLinear(linear) if has_bfloat16 or (dtype == "float32" and is_large) else linear


class PackedLinear(nn.Module):
    """A linear layer with weights in oneDNN's blocked layout.

    On two AMD cores, 10 rows took 1/2 of nn.Linear's time in float32 and 2/3 in bfloat16.
    """

    def __init__(self, linear):
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight, PACKED_BATCH_SIZE)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        self.product = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x):
        return self.product(x, self.weight, self.bias, "none", [], "none")


class FewRowsLinear(nn.Module):
    """A linear layer in float32 that is fast for up to MAX_FEW_ROWS rows.

    MKL multiplies the halves of the weights, as a batch, by the rows as columns. On two AMD cores,
    products with one row took 2/3 of PackedLinear's time.
    """

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        N, K = linear.weight.shape
        self.halves = linear.weight.view(2 - N % 2, -1, K)

    def forward(self, x):
        rows = x.numel() // x.shape[-1]
        if rows > MAX_FEW_ROWS:
            return F.linear(x, self.weight, self.bias)
        columns = x.reshape(rows, -1).t().expand(len(self.halves), -1, -1)
        y = torch.bmm(self.halves, columns).view(-1, rows).t().reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


class Int8Linear(nn.Module):
    """A linear layer with weights in int8 and a scale for each row of them, for x in bfloat16."""

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.float()
        scales = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
        self.weight, self.scales = (weight / scales).round().to(torch.int8), scales[:, 0].bfloat16()
        self.bias = linear.bias

    def forward(self, x):
        y = torch._weight_int8pack_mm(x.flatten(0, -2), self.weight, self.scales)
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias
