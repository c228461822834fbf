"""Scaled dot-product attention, softmax(q k^T / sqrt(D) + mask) v, by the fastest correct kernel.

Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1.
Shapes: B batch, H heads, T queries, S keys, D head size.
"""

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from folio.dropout import apply_dropout

OTHER_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def without_cudnn(device):
    """Returns a context without cuDNN's attention, which torch 2.11 prefers on recent GPUs.

    With a mask, its results can be wrong there (https://github.com/pytorch/pytorch/issues/196678
    and 193893). It also prepares a kernel for each shape, which is slow if every call has another
    length.
    """
    return sdpa_kernel(OTHER_BACKENDS) if device.type == "cuda" else nullcontext()


def attention(q, k, v, mask=None, dropout=0.0):
    """Returns (B, H, T, D), from queries of this shape, and keys and values of (B, H, S, D).

    mask: (H, T, S), added to the scores, of q's dtype. Default: causal attention, for T = S.
    """
    if not prefers_explicit_attention(q, k.shape[2]):
        if mask is None:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        with without_cudnn(q.device):
            return F.scaled_dot_product_attention(q, k, v, mask, dropout)
    if mask is None:
        T = q.shape[2]
        mask = torch.full((1, T, T), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    else:
        mask = mask.repeat(len(q), 1, 1)
    return explicit_attention(q, k, v, mask, dropout)


def prefers_explicit_attention(q, keys):
    """Whether matrix products are faster than torch's fused kernel, forward and backward.

    In bfloat16 on two AMD cores they took 1/4 of its time for 128 keys and 1/2 for 512.
    """
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and keys <= 512


def explicit_attention(q, k, v, mask, dropout):
    """Attention as matrix products. mask: (B * H or 1, T, S)."""
    flat_q, flat_k, flat_v = (each.flatten(0, 1) for each in (q, k, v))
    scores = torch.baddbmm(mask, flat_q, flat_k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
    weights = apply_dropout(scores.softmax(dim=-1), dropout)
    return (weights @ flat_v).unflatten(0, q.shape[:2])
