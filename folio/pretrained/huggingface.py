"""Models in the Hugging Face format: a folder with config.json, safetensors and tokenizer files.

architectures.py has the classes of transformers that a folder can hold.
"""

import json
import os
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from folio.checkpoint.format import EMBEDDING_WEIGHT, HEAD_WEIGHT, Checkpoint, match_weights
from folio.cli.errors import UserError, as_user_error, import_optional, os_errors
from folio.cli.files import check_lfs, read_text
from folio.data.tokenizer import Tokenizer
from folio.pretrained.architectures import ARCHITECTURES, Architecture, Folio
from folio.pretrained.tokenizer_files import TOKENIZER_FILE, make_tokenizer_files, read_tokenizer
from model import GPT

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
TOLERANCE = 1e-3  # of logits that are computed by different operations, relative to the largest


# Reading


def read_pretrained(folder) -> Checkpoint:
    """Returns the model of a folder as a Checkpoint at step 0, in contiguous float32 on the CPU.

    Raises UserError if the folder is damaged, or its model or tokenizer is not supported.
    """
    folder = Path(folder)
    architecture, config, has_bos = _read_config(folder / CONFIG_FILE)
    weights = architecture.from_tensors(_read_tensors(folder / WEIGHTS_FILE), config)
    tokenizer = read_tokenizer(folder / TOKENIZER_FILE)
    for name, tensor in weights.items():
        weights[name] = tensor.float().contiguous()
    shared = weights.get(EMBEDDING_WEIGHT, weights.get(HEAD_WEIGHT))
    if config.tie_weights and shared is not None:  # files may have either
        weights = {EMBEDDING_WEIGHT: shared, HEAD_WEIGHT: shared} | weights
    config = match_weights(config, weights, folder)
    start = tokenizer.start or (None if has_bos else "\n")
    return Checkpoint(config, weights, tokenizer=tokenizer.to_dict(), start=start, path=folder)


def _read_config(path):
    """Returns what a config.json describes: Architecture, GPTConfig, whether texts have a BOS."""
    errors = ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError
    with as_user_error(f"{path} describes no supported model", *errors):
        values = json.loads(read_text(path))
        kind = values.get("model_type")
        if kind not in ARCHITECTURES:
            raise ValueError(f"model_type is {kind!r}; folio reads {', '.join(ARCHITECTURES)}")
        has_bos = values.get("bos_token_id", "GPT-2's") is not None
        return ARCHITECTURES[kind], ARCHITECTURES[kind].from_fields(values), has_bos


def _read_tensors(path):
    """Returns {name: tensor} of a safetensors file, memory-mapped."""
    if not os.path.isfile(path):
        raise UserError(
            f"there is no {path}; if the folder has other weights that you trust (pickled ones "
            "could execute code), convert them in Python with transformers: "
            "AutoModelForCausalLM.from_pretrained(FOLDER)"
            ".save_pretrained(NEW_FOLDER, max_shard_size='50GB')"
        )
    check_lfs(path)
    library = import_optional("safetensors", path)
    from safetensors.torch import load_file

    with as_user_error(f"cannot read {path}", OSError, library.SafetensorError):
        return load_file(path)


# Writing


def write_pretrained(folder, model: GPT, tokenizer: Tokenizer, architecture: Architecture):
    """Writes a model and its tokenizer to a new or empty folder, for transformers.

    The model gets into eval mode. Raises UserError if the folder is not empty, writing fails, or
    transformers computes other logits with the files. The folder is as before then.
    """
    transformers = import_optional("transformers", "an export")  # which requires safetensors
    from safetensors.torch import save

    # The end token begins a text only if it separated those that the model was trained on.
    bos = None if tokenizer.start else tokenizer.end
    ends = {"bos_token_id": bos, "eos_token_id": tokenizer.end}
    fields = architecture.to_fields(model.config) | ends
    texts = make_tokenizer_files(tokenizer) | {CONFIG_FILE: json.dumps(fields, indent=2)}
    is_own = isinstance(architecture, Folio)
    for path in Folio.code_files if is_own else ():
        texts[path.name] = path.read_text(encoding="utf-8")
    contents = {name: text.encode() for name, text in texts.items()}
    contents[WEIGHTS_FILE] = save(make_tensors(model, architecture), metadata={"format": "pt"})
    with _new_folder(folder) as new_folder:
        for name, content in contents.items():
            (new_folder / name).write_bytes(content)
        with refuse_misfits(architecture):
            load = transformers.AutoModelForCausalLM.from_pretrained
            theirs = load(new_folder, trust_remote_code=is_own, dtype=torch.float32)
        hint = "" if is_own else "; if model.py was changed, use --own_code=True"
        check_logits(model, theirs, TOLERANCE, hint)


def drop_padding(checkpoint: Checkpoint, vocab_size) -> Checkpoint:
    """Returns a Checkpoint without the ids that are not tokens, which other programs could draw."""
    if checkpoint.config.ngrams:  # their tables depend on the size of the vocabulary
        return checkpoint
    weights = dict(checkpoint.weights)
    for name in weights.keys() & {EMBEDDING_WEIGHT, HEAD_WEIGHT}:
        weights[name] = weights[name][:vocab_size]
    config = replace(checkpoint.config, vocab_size=vocab_size)
    return replace(checkpoint, config=config, weights=weights)


def make_tensors(model: GPT, architecture: Architecture):
    """Returns {name: tensor} of a file, in which tied weights are once."""
    weights = model.state_dict()
    if model.config.tie_weights:
        del weights[HEAD_WEIGHT]
    return architecture.to_tensors(weights, model.config)


@contextmanager
def _new_folder(folder):
    """Yields a temporary folder, which becomes `folder` when the context ends without an error."""
    target = Path(folder).resolve()
    with os_errors("write to", folder):
        if target.is_file() or target.is_dir() and any(target.iterdir()):
            raise UserError(f"{folder} exists and is not empty: choose a new folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{target.name}-", dir=target.parent) as parent:
            new_folder = Path(parent, target.name)
            new_folder.mkdir()
            yield new_folder
            if target.is_dir():
                target.rmdir()
            os.replace(new_folder, target)


# Checking


def refuse_misfits(architecture: Architecture):
    """A context that reports tensors that do not fit a class of transformers as a UserError."""
    message = f"the weights do not fit {architecture.class_name}; was model.py changed?"
    return as_user_error(message, RuntimeError)


@torch.no_grad()
def check_logits(model: GPT, theirs, tolerance, hint=""):
    """Raises UserError unless a model of transformers computes the logits of a GPT.

    The tolerance is relative to the largest logit. The mean of a position's logits has no effect
    on probabilities and is not compared. `hint` ends the message.
    """
    shape, generator = (1, model.config.block_size), torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, shape, generator=generator)
    expected, found = model.eval().logits(ids), theirs.eval()(ids).logits
    expected = expected - expected.mean(-1, keepdim=True)
    found = found - found.mean(-1, keepdim=True)
    difference = ((found - expected).abs().max() / expected.abs().max()).item()
    if not difference <= tolerance:
        cause = f"{type(theirs).__name__} computes other logits than model.py"
        raise UserError(f"{cause}, with a relative difference of {difference:.1g}{hint}")
