"""Activation checkpointing (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost")."""

import torch
from torch.utils.checkpoint import checkpoint

from model import Block


class RecomputedBlock(Block):
    """A Block that keeps only its input for the backward pass, which runs the block again."""

    def forward(self, x, rotation=None, attend=None):
        if not torch.is_grad_enabled():
            return super().forward(x, rotation, attend)
        return checkpoint(super().forward, x, rotation, attend, use_reentrant=False)


def recompute_blocks(model):
    """Makes the blocks of a GPT save memory in training, in place.

    Losses, gradients and dropout do not change: the second run restores the generators' states.
    FSDP must be applied afterwards, because it also replaces the classes of modules.
    """
    for block in model.transformer.h:
        block.__class__ = RecomputedBlock  # a wrapper would change the names of the parameters
