"""Knowledge distillation: training on the predictions of other models as well.

Hinton et al. 2015, "Distilling the Knowledge in a Neural Network". A model of a small text
generalizes better if it also learns the mean prediction of other models of that text (Timiryasov
and Tastet 2023, "Baby Llama").
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from folio.checkpoint import build_model
from folio.errors import UserError
from folio.run_dir import RunDir

TEMPERATURE = 2.0  # of both predictions
WEIGHT = 0.5  # of the teachers' predictions in the loss


class Distillation(nn.Module):
    """A GPT with the loss of distillation in training mode, and its own in eval mode."""

    def __init__(self, model, teachers):
        super().__init__()
        self.model = model
        self.teachers = nn.ModuleList(teachers).requires_grad_(False)

    def forward(self, idx, targets, temperature=1.0):
        """See GPT.forward. No target may be -1 in training mode."""
        if not self.model.training:
            return self.model(idx, targets, temperature)
        logits = self.model.logits(idx).flatten(0, 1) / temperature
        hard = F.cross_entropy(logits, targets.flatten())
        return (1 - WEIGHT) * hard + WEIGHT * self.divergence(logits, idx)

    def divergence(self, logits, idx):
        """Returns the mean divergence of the prediction from that of the teachers, in nats.

        The square of the temperature keeps the gradient as large as without it.
        """
        with torch.no_grad():
            parts = [teacher.logits(idx).flatten(0, 1) for teacher in self.teachers]
            soft_targets = sum(map(probabilities, parts)) / len(parts)
        prediction = F.log_softmax(logits / TEMPERATURE, dim=-1, dtype=torch.float32)
        return TEMPERATURE**2 * F.kl_div(prediction, soft_targets, reduction="batchmean")


def probabilities(logits):
    return F.softmax(logits / TEMPERATURE, dim=-1, dtype=torch.float32)


def load_teachers(folders, config, tokenizer):
    """Returns the best models of the runs in `folders`, GPTs on the CPU, without dropout.

    Args:
        folders: separated by commas; "" for none.
        config: the GPTConfig of the model that learns from them.
        tokenizer: that of the dataset.

    Raises UserError if a run is missing, or if its context or tokenizer does not fit.
    """
    teachers = []
    for folder in filter(None, folders.split(",")):
        checkpoint = RunDir(folder.strip()).load_best()
        size, known = checkpoint.config.block_size, (None, tokenizer.to_dict())
        if size < config.block_size:
            sizes = f"block_size={size}, less than block_size={config.block_size}"
            raise UserError(f"the teacher {checkpoint.path} has {sizes}")
        if checkpoint.tokenizer not in known or checkpoint.config.vocab_size != config.vocab_size:
            reason = "was trained with another tokenizer than that of the dataset"
            raise UserError(f"the teacher {checkpoint.path} {reason}")
        checkpoint.config = replace(checkpoint.config, dropout=0.0)
        teachers.append(build_model(checkpoint))
    return teachers
