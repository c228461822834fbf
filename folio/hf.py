"""Models in the Hugging Face format: a folder with config.json and safetensors files.

There are two kinds, by the model_type in config.json:
- gpt2: GPT2LMHeadModel of transformers, which computes the same function as some GPTs here;
- folio: any GPT, with the fields of GPTConfig and the parameter names here after PREFIX. Its code,
  which transformers needs, is not executed here.
tools/export.py writes both kinds.
"""

import json
from dataclasses import asdict
from pathlib import Path

import torch

from folio import tokenizer_files
from folio.checkpoint import Checkpoint, Progress
from folio.errors import UserError, cause_of, os_error
from folio.files import is_file
from model import GPT, GPTConfig

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"
PREFIX = "gpt."  # of the names of parameters in folders of type folio

GPT2_FIELDS = {  # fields of GPTConfig: their names in GPT2Config
    "block_size": "n_positions",
    "vocab_size": "vocab_size",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
    "bias": "bias",  # not in GPT2Config, which keeps it; GPT2LMHeadModel always has biases
    "activation": "activation_function",
    "tie_weights": "tie_word_embeddings",
}
GPT2_DEFAULTS = {"bias": True, "activation_function": "gelu_new", "tie_word_embeddings": True}
GPT2_ACTIVATIONS = {  # transformers' names: names here
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
GPT2_TRANSPOSED = ("c_attn.weight", "c_fc.weight", "c_proj.weight")
GPT2_MASKS = (".attn.bias", ".attn.masked_bias")  # constants in older files


def gpt2_constants(config):
    """Returns the fields of GPT2Config that must have these values, if it has them."""
    return {
        "n_inner": 4 * config.n_embd,
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }


def read_pretrained(folder):
    """Returns the Checkpoint of a folder, at step 0, with contiguous float32 weights on the CPU.

    Raises UserError if the folder is damaged, or its model or tokenizer is not supported.
    """
    folder = Path(folder)
    tensors, values = _read_tensors(folder), _read_json(folder / CONFIG)
    readers = {"gpt2": (_gpt2_config, _gpt2_weights), "folio": (_own_config, _own_weights)}
    kind = values.get("model_type")
    if str(kind) not in readers:
        raise UserError(
            f"{folder / CONFIG}: model_type is {kind!r:.100}; folio reads {' and '.join(readers)}"
        )
    read_config, read_weights = readers[kind]
    try:
        config = read_config({key: value for key, value in values.items() if value is not None})
    except ValueError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from error
    weights = read_weights(tensors, config)
    head = weights.pop(HEAD, None) if config.tie_weights else None
    _check_weights(folder, config, weights)
    weights = {name: weight.float().contiguous() for name, weight in weights.items()}
    if config.tie_weights:
        weights[HEAD] = weights[EMBEDDING]
        if head is not None and not torch.equal(head.float(), weights[HEAD]):
            raise UserError(f"{folder / CONFIG} says that {HEAD} is tied, but it differs")
    tokenizer = tokenizer_files.read(folder)
    return Checkpoint(
        config=config,
        weights=weights,
        progress=Progress(),
        settings={},
        tokenizer=tokenizer and tokenizer.to_dict(),
        path=folder,
    )


# Files


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


def _read_tensors(folder):
    """Returns {name: tensor} of all safetensors files of a folder, mapped from the files."""
    if is_file(folder / WEIGHTS):
        return _read_file(folder / WEIGHTS)
    if not is_file(folder / INDEX):
        raise UserError(f"{folder} has no {WEIGHTS}{_pickle_advice(folder)}")
    names = _read_json(folder / INDEX).get("weight_map")
    files = set(names.values()) if isinstance(names, dict) else {None}
    if not all(isinstance(name, str) and name == Path(name).name for name in files):
        raise UserError(f"{folder / INDEX} has no valid weight_map")
    return {k: tensor for f in sorted(files) for k, tensor in _read_file(folder / f).items()}


def _pickle_advice(folder):
    if not any(folder.glob("*.bin")):
        return ""
    return (
        ", only pickled weights, which could execute code; if you trust them, convert them in "
        "Python with transformers: AutoModelForCausalLM.from_pretrained(FOLDER)"
        ".save_pretrained(NEW_FOLDER)"
    )


def _read_file(path):
    try:
        from safetensors import SafetensorError, safe_open  # imported here: they are optional
    except ImportError as error:
        raise UserError("reading Hugging Face folders needs: pip install safetensors") from error
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise os_error("read", path, error) from error
    except SafetensorError as error:
        raise UserError(f"{path} is damaged or no safetensors file ({cause_of(error)})") from error
    for tensor in tensors.values():
        if not tensor.is_floating_point():
            raise UserError(f"{path} has weights of type {tensor.dtype}, not floating point")
    return tensors


# Content


def _own_config(values):
    return _typed_config(asdict(GPTConfig()) | values, {name: name for name in asdict(GPTConfig())})


def _own_weights(tensors, config):
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def _gpt2_config(values):
    """Returns the GPTConfig. Raises ValueError if the model would compute another function."""
    values = GPT2_DEFAULTS | values
    activation = GPT2_ACTIVATIONS.get(str(values["activation_function"]))
    if not activation:
        raise ValueError(f"activation_function={values['activation_function']!r:.100} is unknown")
    config = _typed_config(values | {"activation_function": activation}, GPT2_FIELDS)
    for key, value in gpt2_constants(config).items():
        if values.get(key, value) != value:
            raise ValueError(f"{key}={values[key]!r:.100} is not supported, only {value!r}")
    return config


def _gpt2_weights(tensors, config):
    weights = {}
    for name, tensor in tensors.items():
        if not name.startswith(("transformer.", HEAD)):  # in files without a head
            name = f"transformer.{name}"
        is_zero_bias = not config.bias and name.endswith(".bias") and not tensor.any()
        if not is_zero_bias and not name.endswith(GPT2_MASKS):
            weights[name] = tensor.mT if name.endswith(GPT2_TRANSPOSED) else tensor
    return weights


def _typed_config(values, names):
    """Returns the GPTConfig, given {field: its name in values}. Raises ValueError."""
    for field, name in names.items():
        if type(values.get(name)) is not type(getattr(GPTConfig(), field)):
            raise ValueError(f"{name}={values.get(name)!r:.100} is missing or not supported")
    return GPTConfig(**{field: values[name] for field, name in names.items()})


def _check_weights(folder, config, weights):
    """Raises UserError unless the weights have the names and shapes that the config implies."""
    if config.n_layer > len(weights):  # building such a model could take forever
        layers, found = f"{config.n_layer:,} layers", f"{len(weights):,} tensors"
        raise UserError(f"{folder / CONFIG} says {layers}, but there are {found}")
    try:
        with torch.device("meta"):
            expected = {name: each.shape for name, each in GPT(config).state_dict().items()}
    except (RuntimeError, TypeError, OverflowError) as error:  # no tensor can have such a shape
        raise UserError(
            f"{folder / CONFIG} describes an impossible model ({cause_of(error)})"
        ) from error
    if config.tie_weights:
        del expected[HEAD]
    found = {name: weight.shape for name, weight in weights.items()}
    if wrong := sorted({name for name, _ in expected.items() ^ found.items()}):
        example = f"{wrong[0][:100]!r}" + ("" if wrong[0] in found else ", which is missing")
        raise UserError(f"{folder}: {len(wrong):,} weights do not fit {CONFIG}, such as {example}")
