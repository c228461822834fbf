"""A trained model with its tokenizer, loaded for inference."""

from dataclasses import dataclass
from typing import Any

import torch

from folio.checkpoint.format import build_model
from folio.hardware.compile import optimize_for_inference
from folio.hardware.device import DTYPES, Machine, SharedCores, choose_machine
from folio.hardware.memory import keep_freed_memory
from folio.pretrained.load import checkpoint_tokenizer


@dataclass
class TrainedModel:
    """A model with its tokenizer, ready for inference."""

    model: Any  # GPT
    tokenizer: Any
    machine: Machine
    checkpoint: Any  # Checkpoint, without weights

    def __post_init__(self):
        self.cores = SharedCores(self.machine)


def load_trained(checkpoint, device="cpu", dtype="float32", compile=False):
    """Returns the TrainedModel of a Checkpoint. Raises UserError if it cannot be loaded."""
    tokenizer = checkpoint_tokenizer(checkpoint)
    keep_freed_memory()
    machine = choose_machine(device, dtype, compile)
    model = build_model(checkpoint).to(machine.device, DTYPES[machine.dtype])
    checkpoint.weights = {}  # the model has them
    model = optimize_for_inference(model, can_pack=not machine.compile)
    torch.backends.cuda.enable_cudnn_sdp(False)  # see disable_cudnn_attention
    return TrainedModel(model, tokenizer, machine, checkpoint)
