"""Activation checkpointing (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost")."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from model import GPT, Block

HEAD_PARTS = 8  # of a micro-batch; the logits of one part exist at a time


class RecomputedBlock(Block):
    """A Block that keeps only its input for the backward pass, which runs the block again."""

    def forward(self, x, rotation=None, attend=None):
        if not torch.is_grad_enabled():
            return super().forward(x, rotation, attend)
        return checkpoint(super().forward, x, rotation, attend, use_reentrant=False)


class RecomputedGPT(GPT):
    """A GPT that computes the logits in parts, and again in the backward pass.

    A compiled model computes all logits at once, because the compiler fuses the loss and then needs
    less memory than for parts.
    """

    def forward(self, idx, targets, temperature=1.0):
        if torch.compiler.is_compiling():
            return super().forward(idx, targets, temperature)
        hidden = (self.trunk(idx) / temperature).flatten(0, 1)
        parts = zip(hidden.chunk(HEAD_PARTS), targets.flatten().chunk(HEAD_PARTS), strict=True)
        options = {"use_reentrant": False, "preserve_rng_state": False}  # it has no dropout
        total = sum(checkpoint(self.summed_loss, *part, **options) for part in parts)
        return total / (targets != -1).sum()

    def summed_loss(self, hidden, targets):
        """hidden: (N, C); targets: (N,). Returns the sum of the losses, a scalar."""
        return F.cross_entropy(self.lm_head(hidden), targets, ignore_index=-1, reduction="sum")


def head_parts(settings):
    """Returns in how many parts a TrainConfig computes the logits. With compile="auto", at most."""
    in_parts = settings.activation_checkpointing and settings.compile in (False, "auto")
    return HEAD_PARTS if in_parts and not settings.teachers else 1


def recompute_activations(model):
    """Makes a GPT save memory in training, in place.

    Losses and gradients change by rounding only: the second run restores the generators' states, so
    that it drops the same elements. FSDP must be applied afterwards, because it also replaces the
    classes of modules.
    """
    model.__class__ = RecomputedGPT
    for block in model.transformer.h:
        block.__class__ = RecomputedBlock  # a wrapper would change the names of the parameters
