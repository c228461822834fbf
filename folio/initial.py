"""The weights that a run or a sample starts from: a checkpoint, or a Hugging Face model."""

import os
from pathlib import Path

from folio import checkpoint as checkpoints
from folio.errors import UserError, nearest
from folio.files import is_file
from folio.hf import read_pretrained
from folio.hub import MODELS, is_model_id, pretrained_folder
from folio.run_dir import BEST

RESUMING = ("resume", "auto")
POSITIONS = "transformer.wpe.weight"


def load_start(init_from, run_dir):
    """Returns (resumed, initial), Checkpoints or None: what a run continues or starts from."""
    if init_from in RESUMING:
        return run_dir.load_newest(required=init_from == "resume"), None
    return None, None if init_from == "scratch" else load_initial(init_from)


def load_best(init_from, run_dir):
    """Returns the Checkpoint to sample from: a run's best for "resume", or as load_initial."""
    if init_from in ("scratch", "auto"):
        raise UserError(f"init_from={init_from} has no trained weights: use resume or a model")
    return run_dir.load_best() if init_from == "resume" else load_initial(init_from)


def load_initial(init_from):
    """Returns the Checkpoint, without optimizer state, that `init_from` names.

    It is the path of a checkpoint or of a folder in Hugging Face's format, or else a model on the
    hub. Raises UserError if there is none, or if it cannot be read.
    """
    if os.path.isdir(init_from):
        checkpoint = os.path.join(init_from, BEST)
        if is_file(checkpoint):
            raise UserError(f"{init_from} is the folder of a run: use {checkpoint}")
        return read_pretrained(init_from)
    if is_file(init_from):
        return checkpoints.load(init_from, optimizers=False)
    if init_from.endswith(".pt") or not is_model_id(init_from):
        hint = nearest(init_from, ("scratch", *RESUMING, *MODELS))
        raise UserError(f"init_from={init_from} is not a file, a folder or a hub id{hint}")
    checkpoint = read_pretrained(pretrained_folder(init_from))
    checkpoint.path = Path(init_from)  # shorter in messages than a folder of the cache
    return checkpoint


def crop(checkpoint, block_size):
    """Removes the learned positions from `block_size` on, if there are any."""
    if POSITIONS in checkpoint.weights:
        positions = checkpoint.weights[POSITIONS][:block_size]
        checkpoint.weights[POSITIONS] = positions.clone()  # the whole tensor of a view is saved
