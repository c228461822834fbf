"""The weights that a run or a sample starts from: a checkpoint, or a Hugging Face model."""

import os
import re
from pathlib import Path

from folio.checkpoint.format import load_checkpoint
from folio.checkpoint.run_dir import BEST
from folio.cli.errors import UserError, nearest
from folio.cli.files import is_file
from folio.data.dataset import load_tokenizer
from folio.data.downloads import open_hub
from folio.data.tokenizer import from_dict
from folio.pretrained.huggingface import read_pretrained

MODELS = {  # nanoGPT's names: ids on the hub
    name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
}
# never pytorch_model.bin, a pickle that can execute code
FILES = ("*.json", "model.safetensors", "model-*-of-*.safetensors")
ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
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
        return load_checkpoint(init_from, optimizers=False)
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


def checkpoint_tokenizer(checkpoint):
    """Returns a checkpoint's tokenizer; for nanoGPT's, that of its dataset folder."""
    dataset, size = checkpoint.settings.get("dataset", "openwebtext"), checkpoint.config.vocab_size
    try:
        saved = checkpoint.tokenizer
        tokenizer = from_dict(saved) if saved else load_tokenizer(dataset)
    except UserError as error:
        raise UserError(f"{checkpoint.path}: {error}") from error
    if not tokenizer.fits(size):
        meta = f"of {dataset}; copy the meta.pkl that the model was trained with to data/{dataset}"
        raise UserError(
            f"{checkpoint.path}: the model has a vocabulary of {size:,}, but the tokenizer is "
            f"{tokenizer.name}{'' if saved else ', that ' + meta}"
        )
    return tokenizer


# The Hugging Face hub


def is_model_id(name):
    """Whether `name` is one of MODELS or has the form org/name, with or without @revision."""
    model = name.partition("@")[0]
    return model in MODELS or bool(ID.fullmatch(model))


def pretrained_folder(name):
    """Returns the Path of a local folder with a model's files; downloads those not in the cache.

    Args:
        name: one of MODELS or an id such as org/name, with or without @revision.

    Raises UserError if the model cannot be downloaded.
    """
    model, _, revision = name.partition("@")
    with open_hub(name, "huggingface_hub safetensors tokenizers") as huggingface_hub:
        folder = huggingface_hub.snapshot_download(
            MODELS.get(model, model),
            revision=revision or None,
            allow_patterns=list(FILES),
            ignore_patterns=["*/*"],  # variants in subfolders
        )
    return Path(folder)
