"""Models in the Hugging Face format: a folder with config.json and safetensors files.

Neither transformers nor pickle is used. `architectures` has the tables of fields and names.
"""

import json
from pathlib import Path

import torch

from folio import tensor_file, tokenizer_files
from folio.architectures import HEAD, architecture_for, from_fields, parameters, to_fields
from folio.checkpoint import Checkpoint, Progress
from folio.errors import UserError, cause_of, os_error
from folio.files import is_file, replacing

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING = "transformer.wte.weight"
CONSTANTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # in older files


# Reading


def read_pretrained(folder):
    """Returns the Checkpoint of a folder, at step 0, with contiguous float32 weights on the CPU.

    Raises UserError if the folder is damaged, or its model or tokenizer is not supported.
    """
    folder = Path(folder)
    entries = _entries(folder)
    architecture, config = _read_config(folder / CONFIG, len(entries))
    weights = _read_weights(folder, entries, architecture, config)
    tokenizer = tokenizer_files.read(folder)
    return Checkpoint(
        config=config,
        weights=weights,
        progress=Progress(),
        settings={},
        tokenizer=tokenizer and tokenizer.to_dict(),
        path=folder,
    )


def _entries(folder):
    """Returns {name: Entry} of all tensors in a folder."""
    if is_file(folder / WEIGHTS):
        return tensor_file.entries(folder / WEIGHTS)
    if not is_file(folder / INDEX):
        raise UserError(f"{folder} has no {WEIGHTS}{_pickle_advice(folder)}")
    names = _read_json(folder / INDEX).get("weight_map")
    files = set(names.values()) if isinstance(names, dict) else {None}
    if not all(isinstance(name, str) and name == Path(name).name for name in files):
        raise UserError(f"{folder / INDEX} has no valid weight_map")
    return {k: entry for f in sorted(files) for k, entry in tensor_file.entries(folder / f).items()}


def _pickle_advice(folder):
    if not any(folder.glob("*.bin")):
        return ""
    return (
        ", only pickled weights, which could execute code; if you trust them, convert them in "
        "Python with transformers: AutoModelForCausalLM.from_pretrained(FOLDER)"
        ".save_pretrained(NEW_FOLDER)"
    )


def _read_config(path, tensors):
    """Returns the Architecture and GPTConfig in config.json; the folder has so many tensors."""
    values = _read_json(path)
    try:
        architecture, config = from_fields(values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    if config.n_layer > tensors:
        raise UserError(f"{path} says {config.n_layer:,} layers, but there are {tensors:,} tensors")
    return architecture, config


def _read_json(path):
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise os_error("read", path, error) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({cause_of(error)})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged (not a JSON object)")
    return content


def _read_weights(folder, entries, architecture, config):
    """Returns GPT.state_dict() of the tensors in a folder."""
    entries = {_full_name(k, architecture): e for k, e in entries.items()}
    entries = {k: e for k, e in entries.items() if not k.endswith(CONSTANTS)}
    needed = _parameters(folder, architecture, config)
    _check_names(folder, entries, needed)
    weights = {}
    for parameter in needed:
        tensor = parameter.join([tensor_file.mapped(entries[part]) for part in parameter.parts])
        if config.bias or not parameter.name.endswith(".bias"):
            weights[parameter.name] = tensor
        elif tensor.any():
            key = architecture.settings["bias"]
            raise UserError(f"{folder / CONFIG} says {key}=false, but {parameter.name} is not zero")
    if config.tie_weights:
        head = tensor_file.mapped(entries[HEAD]).float() if HEAD in entries else weights[EMBEDDING]
        if not torch.equal(head, weights[EMBEDDING]):
            raise UserError(f"{folder / CONFIG} says tie_word_embeddings=true, but {HEAD} differs")
        weights[HEAD] = weights[EMBEDDING]
    return weights


def _full_name(name, architecture):
    """Returns the name of a tensor with the prefix that a file without a head leaves out."""
    return name if name.startswith((architecture.base, HEAD)) else architecture.base + name


def _parameters(folder, architecture, config):
    try:
        return list(parameters(architecture, config))
    except (RuntimeError, TypeError, OverflowError) as error:  # no tensor can have such a shape
        raise UserError(
            f"{folder / CONFIG} describes an impossible model ({cause_of(error)})"
        ) from error


def _check_names(folder, entries, needed):
    """Raises UserError unless the tensors have the names and shapes that the config implies."""
    shapes = {part: each.part_shape for each in needed for part in each.parts}
    wrong = [f"{name} is missing" for name in shapes if name not in entries]
    wrong += [f"{k[:100]!r} is unexpected" for k in sorted(entries.keys() - shapes.keys() - {HEAD})]
    wrong += [
        f"{name} has shape {entries[name].shape} instead of {shape}"
        for name, shape in shapes.items()
        if name in entries and entries[name].shape != shape
    ]
    if wrong:
        others = f", and {len(wrong) - 1:,} more tensors do not fit" if len(wrong) > 1 else ""
        raise UserError(f"{folder}: the weights do not fit {CONFIG}: {wrong[0]}{others}")


# Writing


def write_pretrained(folder, checkpoint, tokenizer):
    """Writes a folder that transformers reads; the weights keep their dtype.

    Raises UserError if no architecture of transformers has the model's switches, or if writing
    fails; the model's files then keep their old content.
    """
    folder, architecture = Path(folder), architecture_for(checkpoint.config)
    needed = list(parameters(architecture, checkpoint.config))
    weights = _complete_weights(checkpoint, needed)
    tensors = {k: t for each in needed for k, t in each.split(weights[each.name]).items()}
    texts = _configs(architecture, checkpoint.config, tokenizer, weights[EMBEDDING].dtype)
    texts |= tokenizer_files.contents(tokenizer)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise os_error("write to", folder, error) from error
    with replacing(*(folder / name for name in (WEIGHTS, *texts))) as [file, *others]:
        tensor_file.write(file, tensors)
        for file, text in zip(others, texts.values(), strict=True):
            file.write(text.encode())


def _configs(architecture, config, tokenizer, dtype):
    """Returns {name: text} of the files that describe the model and how to generate with it."""
    ends = {"bos_token_id": tokenizer.end, "eos_token_id": tokenizer.end}
    values = to_fields(architecture, config) | ends | {"dtype": str(dtype).removeprefix("torch.")}
    padding = {"suppress_tokens": list(range(tokenizer.vocab_size, config.vocab_size))}
    generation = {key: value for key, value in (ends | padding).items() if value not in (None, [])}
    return {CONFIG: json.dumps(values, indent=2), GENERATION: json.dumps(generation, indent=2)}


def _complete_weights(checkpoint, needed):
    """Returns the weights, with zeros for biases that transformers has and the model lacks."""
    weights = dict(checkpoint.weights)
    for parameter in needed:
        if parameter.name.endswith(".bias") and not checkpoint.config.bias:
            weights[parameter.name] = weights[EMBEDDING].new_zeros(parameter.shape)
        if getattr(weights.get(parameter.name), "shape", None) != parameter.shape:
            reason = f"the weights do not fit the model: {parameter.name}"
            raise UserError(f"{checkpoint.path}: {reason}")
    return weights
