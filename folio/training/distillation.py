"""Knowledge distillation: training on the text and on the predictions of other models.

Hinton et al. 2015, "Distilling the Knowledge in a Neural Network". A model of a small text
generalizes better if it also learns the mean prediction of other models of that text (Timiryasov
and Tastet 2023, "Baby Llama").
"""

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from folio.checkpoint.format import build_model
from folio.checkpoint.run_dir import RunDir
from folio.cli.errors import UserError
from folio.data.tokenizer import Tokenizer
from folio.distributed.world import is_sharded
from model import GPT

TEACHERS_WEIGHT = 0.7


class Distillation(nn.Module):
    """A GPT with the loss of distillation in training mode, and cross-entropy in eval mode."""

    compiled_methods = ("loss",)

    def __init__(self, model: GPT, teachers):
        super().__init__()
        self.model = model
        self.teachers = nn.ModuleList(teachers).requires_grad_(False)

    def forward(self, idx, targets, temperature=1.0):
        """Returns a loss; see GPT.forward. In training mode, no target may be -1."""
        if not self.model.training:
            return self.model(idx, targets)
        # without the temperature, because the teachers prevent overconfidence, too
        return self.loss(self.model.logits(idx).flatten(0, 1), targets.flatten(), self.predict(idx))

    def loss(self, logits, targets, predictions):
        """Returns the loss. logits, predictions: (B * T, vocab_size). targets: (B * T,) int64."""
        teachers_loss = F.cross_entropy(logits.float(), predictions)
        text_loss = F.cross_entropy(logits.float(), targets)
        return TEACHERS_WEIGHT * teachers_loss + (1 - TEACHERS_WEIGHT) * text_loss

    @torch.no_grad()
    def predict(self, idx):
        """Returns the mean probabilities of the teachers: (B, T) -> (B * T, vocab_size) float32."""
        total = torch.zeros((), device=idx.device)
        for teacher in self.teachers:  # one at a time, to save memory
            total = total + F.softmax(teacher.logits(idx).flatten(0, 1).float(), dim=-1)
        return total / len(self.teachers)


def add_teachers(model: GPT, settings, tokenizer: Tokenizer):
    """Returns the Distillation of a GPT, or the GPT itself without settings.teachers.

    The teachers are the best models of these runs, on the GPT's device and in its dtype. Raises
    UserError if a run is missing, or if its context or tokenizer does not fit.
    """
    if settings.eval_only or not settings.teachers:
        return model
    if is_sharded(model):
        raise UserError("parallel=fsdp does not support teachers: use --parallel=ddp")
    teachers, out_dir = [], Path(settings.out_dir).resolve()
    for run_dir in RunDir.parse_list(settings.teachers):
        if run_dir.folder.resolve() == out_dir:
            raise UserError(f"teachers={settings.teachers} contains out_dir: use another --out_dir")
        checkpoint = run_dir.load_best()
        size, vocab_size = checkpoint.config.block_size, checkpoint.config.vocab_size
        if size < model.config.block_size:
            raise UserError(f"teachers: {checkpoint.path} has only block_size={size}")
        is_same = checkpoint.tokenizer in (None, tokenizer.to_dict())
        if not is_same or vocab_size != model.config.vocab_size:
            raise UserError(f"teachers: the vocabulary of {checkpoint.path} is not the dataset's")
        checkpoint.config = replace(checkpoint.config, dropout=0.0)
        teachers.append(build_model(checkpoint).to(model.lm_head.weight.device, model.dtype))
    return Distillation(model, teachers)
