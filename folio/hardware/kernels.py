"""Attention, dropout, norms and a loss that are faster than torch's, which model.py uses.

Shapes: B batch, H heads, T queries, S keys, D head size.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import NORMS, CausalSelfAttention, Linear, cast, causal_mask

NON_CUDNN_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
DROPOUT_LEVELS = 2**16


def use_fast_kernels(model, trains_on_gpu=False):
    """Makes a GPT use the functions of this file, in place.

    The loss and the norms are not faster on a CPU, so they are used only for training on a GPU.
    """
    if trains_on_gpu:
        model.cross_entropy = fast_cross_entropy
        for block in model.transformer.h:
            fold_norm(block.ln_1, block.attn.c_attn, NORMS[model.config.norm])
            fold_norm(block.ln_2, block.mlp.c_fc, NORMS[model.config.norm])
    for module in list(model.modules()):
        if isinstance(module, CausalSelfAttention):
            module.kernel = fast_attention
        for name, child in list(module.named_children()):
            if type(child) is nn.Dropout:
                setattr(module, name, Dropout(child.p).train(child.training))


# Attention


def disable_cudnn_attention(device):
    """Returns a context without cuDNN's attention, which torch 2.11 prefers on recent GPUs.

    With a mask, its results can be wrong there (https://github.com/pytorch/pytorch/issues/196678
    and 193893). It also prepares a kernel for each shape, which is slow if every call has another
    length.
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


# Norms


def fold_norm(norm, linear, function):
    """Makes a linear layer multiply by the weights of the norm before it, in place.

    The result is the same, and parameters stay where they are. The gradient of the norm's weights
    becomes a sum over the rows of a matrix, instead of one over all tokens, which takes longer and
    rounds more. `function` is the norm, one of model.NORMS. A norm with a bias stays as it is.
    """
    if getattr(norm, "bias", None) is None:
        norm.__class__, norm.function = UnweightedNorm, function
        linear.__class__, linear.norm = FoldedLinear, [norm]  # a list, so that it is no submodule


class UnweightedNorm(nn.Module):
    """A norm whose weights are used by a FoldedLinear."""

    def forward(self, x):
        return self.function(x, self.normalized_shape, eps=self.eps)


class FoldedLinear(Linear):
    """A linear layer that multiplies by the weights of the norm before it."""

    def forward(self, x):
        weight = self.weight * self.norm[0].weight
        return F.linear(x, weight.to(x.dtype), cast(self.bias, x.dtype))


# Loss


def fast_cross_entropy(x, weight, targets):
    """model.linear_cross_entropy, which computes the gradient of the logits together with the loss.

    Compiled for a GPU, one kernel can read the logits and write their gradient, so that the
    backward pass does not read them again.
    """
    return LinearCrossEntropy.apply(x, weight, targets)  # torch 2.11 cannot compile `apply` alone


class LinearCrossEntropy(torch.autograd.Function):
    """The forward and backward pass of fast_cross_entropy."""

    @staticmethod
    def forward(ctx, x, weight, targets):
        ops, reduction = torch.ops.aten, 2  # a sum
        logprobs = F.linear(x, weight).float().log_softmax(dim=-1)  # (N, V)
        total, weight_sum = ops.nll_loss_forward(logprobs, targets, None, reduction, -1)
        count = (targets != -1).sum()
        if ctx.needs_input_grad[0]:
            one = torch.ones_like(total)
            grad = ops.nll_loss_backward(one, logprobs, targets, None, reduction, -1, weight_sum)
            grad = ops._log_softmax_backward_data(grad, logprobs, -1, torch.float32)
            ctx.save_for_backward(grad.to(x.dtype), x, weight, count)
        return total / count

    @staticmethod
    def backward(ctx, grad_output):
        grad, x, weight, count = ctx.saved_tensors  # elements of grad are at most 1, for float16
        scale = grad_output / count
        return grad @ weight * scale, grad.t() @ (x * scale), None
