"""The weights that a run or a sample starts from: a checkpoint, or a Hugging Face model."""

import os
import re
from pathlib import Path

from folio.checkpoint.format import Checkpoint, load_checkpoint
from folio.checkpoint.run_dir import BEST, RunDir
from folio.cli.errors import UserError, suggest
from folio.data.dataset import load_tokenizer
from folio.data.downloads import find_commit, open_hub
from folio.data.tokenizer import Tokenizer, from_dict
from folio.pretrained.huggingface import read_pretrained

HUB_MODELS = {  # {nanoGPT's name: id on the hub}
    name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
}
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
RESUME_NAMES = ("resume", "auto")


def load_best(init_from, out_dir) -> Checkpoint:
    """Returns the Checkpoint to sample from: a run's best for "resume", or as load_initial."""
    if init_from in ("scratch", "auto"):
        raise UserError(f"init_from={init_from} has no trained weights: use resume or a model")
    return RunDir(out_dir).load_best() if init_from == "resume" else load_initial(init_from)


def load_initial(init_from) -> Checkpoint:
    """Returns the Checkpoint, without optimizer state, in a file or a Hugging Face folder.

    Other names are those of models on the hub. Raises UserError if there is none.
    """
    if os.path.isdir(init_from):
        best = os.path.join(init_from, BEST)
        if os.path.isfile(best):
            raise UserError(f"{init_from} is a run directory: use {best}")
        return read_pretrained(init_from)
    if os.path.isfile(init_from):
        return load_checkpoint(init_from, optimizers=False)
    model = init_from.partition("@")[0]
    if init_from.endswith(".pt") or not (model in HUB_MODELS or HUB_ID.fullmatch(model)):
        hint = suggest(init_from, ("scratch", *RESUME_NAMES, *HUB_MODELS))
        raise UserError(f"init_from={init_from} is not a file, a folder or a hub id{hint}")
    checkpoint = read_pretrained(pretrained_folder(init_from))
    checkpoint.path = Path(init_from)  # shorter in messages than a folder of the cache
    return checkpoint


def checkpoint_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Returns the tokenizer of a checkpoint. nanoGPT's have none: theirs is that of the dataset."""
    dataset, size = checkpoint.settings.get("dataset", "openwebtext"), checkpoint.config.vocab_size
    saved = checkpoint.tokenizer
    try:
        tokenizer = from_dict(saved) if saved else load_tokenizer(dataset)
    except UserError as error:
        raise UserError(f"{checkpoint.path}: {error}") from error
    tokenizer.start = checkpoint.start or tokenizer.start
    if tokenizer.fits(size):
        return tokenizer
    name, meta = tokenizer.name, "the meta.pkl that the model was trained with"
    hint = "" if saved else f", that of {dataset}; copy {meta} to data/{dataset}"
    sizes = f"the model has a vocabulary of {size:,}, but the tokenizer is {name}"
    raise UserError(f"{checkpoint.path}: {sizes}{hint}")


def pretrained_folder(name):
    """Returns a local folder with the files of a model on the hub: NAME or NAME@REVISION.

    Those that are not in the cache are downloaded. Raises UserError if that fails.
    """
    model, _, revision = name.partition("@")
    repository = HUB_MODELS.get(model, model)
    with open_hub(name, "safetensors") as huggingface_hub:
        commit = find_commit(huggingface_hub.HfApi(), repository, revision, "model")
        return huggingface_hub.snapshot_download(
            repository,
            revision=commit,
            # never pytorch_model.bin, a pickle that can execute code
            allow_patterns=["*.json", "model.safetensors"],
            ignore_patterns=["*/*"],  # variants in subfolders
        )
