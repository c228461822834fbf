"""Models in the Hugging Face format: a folder with config.json, safetensors and tokenizer files.

There are two kinds, by the model_type in config.json:
- gpt2: GPT2LMHeadModel of transformers, which computes the same function as some GPTs here;
- folio: any GPT, with the fields of GPTConfig, the parameter names here after PREFIX, and its code.
  transformers executes the code; read_pretrained does not.
"""

import json
from dataclasses import asdict
from pathlib import Path

import torch

import model
from folio.checkpoint.format import Checkpoint, Progress, build_model
from folio.cli.errors import UserError, cause_of, os_error
from folio.cli.files import is_file, read_text, write_atomically
from folio.pretrained import tokenizer_files
from model import GPTConfig

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"
PREFIX = "gpt."  # of the names of parameters in folders of type folio
CODE = Path(model.__file__), Path(__file__).with_name("modeling_folio.py")

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
GPT2_CONSTANTS = {  # fields of GPT2Config that have these values if they are there
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}
GPT2_TANH = ("gelu_new", "gelu_pytorch_tanh")  # gelu_tanh; other activations have the same names
GPT2_TRANSPOSED = ("c_attn.weight", "c_fc.weight", "c_proj.weight")
GPT2_MASKS = (".attn.bias", ".attn.masked_bias")  # constants in older files


# Reading


def read_pretrained(folder):
    """Returns the Checkpoint of a folder, at step 0, with contiguous float32 weights on the CPU.

    Raises UserError if the folder is damaged, or its model or tokenizer is not supported. Whether
    the weights fit the config is not checked: see folio.checkpoint.format.load_weights.
    """
    folder = Path(folder)
    config, is_gpt2 = _read_config(folder / CONFIG)
    tensors = _read_tensors(folder)
    if config.n_layer > len(tensors):  # building such a model could take forever
        raise UserError(f"{folder / CONFIG} says {config.n_layer:,} layers, more than its weights")
    if is_gpt2:
        weights = _from_gpt2(tensors, config)
    else:
        weights = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    weights = {name: weight.float().contiguous() for name, weight in weights.items()}
    if config.tie_weights and EMBEDDING in weights:
        weights[HEAD] = weights[EMBEDDING]
    tokenizer = tokenizer_files.read(folder)
    return Checkpoint(config, weights, Progress(), {}, tokenizer=tokenizer.to_dict(), path=folder)


def _read_config(path):
    """Returns the GPTConfig in a config.json, and whether the model is of type gpt2."""
    values = _read_json(path)
    kind = values.get("model_type")
    try:
        if kind == "gpt2":
            return _gpt2_config(values), True
        if kind == "folio":
            names = asdict(GPTConfig()).keys() & values.keys()
            return GPTConfig(**{name: values[name] for name in names}), False
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} describes no supported model ({cause_of(error)})") from error
    raise UserError(f"{path}: model_type is {kind!r}; folio reads gpt2 and folio")


def _gpt2_config(values):
    """Returns the GPTConfig. Raises ValueError if the model would compute another function."""
    for name, value in GPT2_CONSTANTS.items():
        if values.get(name, value) != value:
            raise ValueError(f"{name}={values[name]!r}, not {value!r}")
    values = GPT2_DEFAULTS | values
    if values["activation_function"] in GPT2_TANH:
        values["activation_function"] = "gelu_tanh"
    return GPTConfig(**{name: values[key] for name, key in GPT2_FIELDS.items()})


def _from_gpt2(tensors, config):
    """Returns the weights in the tensors of a GPT2LMHeadModel."""
    weights = {}
    for name, tensor in tensors.items():
        if not name.startswith(("transformer.", HEAD)):  # in files without a head
            name = f"transformer.{name}"
        is_zero_bias = not config.bias and name.endswith(".bias") and not tensor.any()
        if not is_zero_bias and not name.endswith(GPT2_MASKS):
            weights[name] = tensor.t() if name.endswith(GPT2_TRANSPOSED) else tensor
    return weights


def _read_json(path):
    try:
        return dict(json.loads(read_text(path)))
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({cause_of(error)})") from error


def _read_tensors(folder):
    """Returns {name: tensor} of all safetensors files of a folder, mapped from the files."""
    if is_file(folder / WEIGHTS):
        files = [WEIGHTS]
    elif is_file(folder / INDEX):
        files = set(dict(_read_json(folder / INDEX).get("weight_map", {})).values())
    else:
        raise UserError(
            f"{folder} has no {WEIGHTS}; if it has other weights that you trust (pickled ones "
            "could execute code), convert them in Python with transformers: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    safetensors, tensors = _load_library(), {}
    try:
        for name in files:
            tensors |= safetensors.torch.load_file(folder / name)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"cannot read the weights in {folder}: {cause_of(error)}") from error
    return tensors


def _load_library():
    """Returns the module safetensors. Raises UserError if it is not installed."""
    try:
        import safetensors.torch  # imported here because it is optional
    except ImportError as error:
        raise UserError("Hugging Face folders need: pip install safetensors") from error
    return safetensors


# Writing


def write_pretrained(folder, checkpoint, tokenizer):
    """Writes a checkpoint and its tokenizer to a new or empty folder.

    Returns the name of the class that transformers loads. Raises UserError if the folder is not
    empty, if the weights do not fit the model, or if writing fails; no file is written then.
    """
    config, weights = checkpoint.config, build_model(checkpoint).state_dict()
    if config.tie_weights:
        del weights[HEAD]
    if _fits_gpt2(config):
        fields, tensors, code = _gpt2_fields(config), _to_gpt2(weights), ()
    else:
        tensors = {PREFIX + name: weight for name, weight in weights.items()}
        fields, code = _own_fields(config), CODE
    fields |= {"bos_token_id": tokenizer.end, "eos_token_id": tokenizer.end}
    texts = tokenizer_files.contents(tokenizer) | {CONFIG: json.dumps(fields, indent=2)}
    texts |= {path.name: path.read_text(encoding="utf-8") for path in code}
    contents = {name: text.encode() for name, text in texts.items()}
    contents[WEIGHTS] = _load_library().torch.save(tensors, metadata={"format": "pt"})
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"{folder} is not empty: choose a new folder")
    except OSError as error:
        raise os_error("write to", folder, error) from error
    with write_atomically(*(folder / name for name in contents)) as files:
        for file, content in zip(files, contents.values(), strict=True):
            file.write(content)
    return fields["architectures"][0]


def _fits_gpt2(config):
    """Whether GPT2LMHeadModel computes the same function as a GPT."""
    known = {name: getattr(config, name) for name in (*GPT2_FIELDS, "dropout")}
    return config == GPTConfig(**known) and config.activation != "swiglu"


def _gpt2_fields(config):
    """Returns the fields of config.json for GPT2LMHeadModel."""
    values = {key: getattr(config, name) for name, key in GPT2_FIELDS.items()}
    if config.activation == "gelu_tanh":
        values["activation_function"] = "gelu_new"
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **values,
        **GPT2_CONSTANTS,
        "n_ctx": config.block_size,  # llama.cpp's name
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),  # 0.1 by default
    }


def _to_gpt2(weights):
    """Returns the tensors of GPT2LMHeadModel, with zeros for biases that the model lacks."""
    tensors = dict(weights)
    for name, weight in weights.items():
        if name.startswith(("transformer.h.", "transformer.ln_f.")):
            tensors.setdefault(name.replace(".weight", ".bias"), torch.zeros(len(weight)))
        if name.endswith(GPT2_TRANSPOSED):
            tensors[name] = weight.T.contiguous()
    return tensors


def _own_fields(config):
    """Returns the fields of config.json for a model with its own code."""
    return {
        "architectures": ["FolioForCausalLM"],
        "model_type": "folio",
        "auto_map": {
            "AutoConfig": "modeling_folio.FolioConfig",
            "AutoModelForCausalLM": "modeling_folio.FolioForCausalLM",
        },
        **asdict(config),
    }
