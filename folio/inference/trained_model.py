"""A trained model with its tokenizer, loaded for inference."""

from dataclasses import dataclass

import torch

from folio.checkpoint.format import Checkpoint, build_model
from folio.cli.errors import UserError
from folio.data.tokenizer import Tokenizer
from folio.hardware.device import DTYPES, Machine, ThreadTuner, set_up_machine
from folio.hardware.optimize import optimize_for_inference
from folio.pretrained.load import checkpoint_tokenizer
from model import GPT


@dataclass
class TrainedModel:
    """A model with its tokenizer, ready for inference."""

    model: GPT
    tokenizer: Tokenizer
    machine: Machine

    def __post_init__(self):
        self.cores = ThreadTuner(self.machine)


def load_trained(
    checkpoint: Checkpoint, device="cpu", dtype="float32", compile=False, texts=None
) -> TrainedModel:
    """Returns the TrainedModel of a Checkpoint. Raises UserError if it cannot be loaded.

    `texts` is the number of texts that will be generated at a time; None: many.
    """
    tokenizer = checkpoint_tokenizer(checkpoint)
    machine = set_up_machine(device, dtype, compile)
    if dtype == "int8" and (compile or machine.kind != "cpu"):
        raise UserError("dtype=int8 needs a CPU without compilation: use --dtype=auto")
    model = build_model(checkpoint).to(machine.device, DTYPES[machine.dtype])
    model = optimize_for_inference(model, machine, texts)
    torch.backends.cuda.enable_cudnn_sdp(False)  # see disable_cudnn_attention
    return TrainedModel(model, tokenizer, machine)
