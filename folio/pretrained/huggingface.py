"""Models in the Hugging Face format: a folder with config.json, safetensors and tokenizer files.

There are two kinds, by the model_type in config.json:
- gpt2: GPT2LMHeadModel of transformers, which computes the same function as some GPTs here;
- folio: any GPT. config.json has the fields of GPTConfig. Names of parameters have NAME_PREFIX. The
  folder has the model's code, which transformers executes and read_pretrained does not.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path

import torch

import model
from folio.checkpoint.format import (
    EMBEDDING_WEIGHT,
    HEAD_WEIGHT,
    Checkpoint,
    Progress,
    build_model,
    match_head,
)
from folio.cli.errors import UserError, as_user_error, import_optional, os_errors
from folio.cli.files import check_lfs, read_text, write_atomically
from folio.data.tokenizer import Tokenizer
from folio.pretrained.tokenizer_files import TOKENIZER_FILE, make_tokenizer_files, read_tokenizer
from model import GPTConfig

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
NAME_PREFIX = "gpt."
CODE_FILES = Path(model.__file__), Path(__file__).with_name("modeling_folio.py")

FOLIO_FIELDS = {  # of config.json, beside those of GPTConfig
    "architectures": ["FolioForCausalLM"],
    "model_type": "folio",
    "auto_map": {
        "AutoConfig": "modeling_folio.FolioConfig",
        "AutoModelForCausalLM": "modeling_folio.FolioForCausalLM",
    },
}
GPT2_FIELDS = {  # {field of GPTConfig: its name in GPT2Config}
    "block_size": "n_positions",
    "vocab_size": "vocab_size",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
    "bias": "bias",  # not in GPT2Config, which keeps it; GPT2LMHeadModel always has biases
    "activation": "activation_function",
    "tie_weights": "tie_word_embeddings",
}
GPT2_REQUIRED = {  # values that a GPT2Config must have, which are its defaults
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}
GPT2_ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "relu2")  # with which an MLP is the same there
GPT2_TANH_NAMES = ("gelu_new", "gelu_pytorch_tanh")  # here gelu_tanh; other names are the same
TRANSPOSED_SUFFIXES = ("c_attn.weight", "c_fc.weight", "c_proj.weight")
MASK_SUFFIXES = (".attn.bias", ".attn.masked_bias")  # constant tensors in older files


# Reading


def read_pretrained(folder) -> Checkpoint:
    """Returns the model of a folder as a Checkpoint at step 0, in contiguous float32 on the CPU.

    Raises UserError if the folder is damaged, or its model or tokenizer is not supported. Whether
    the weights fit the config is not checked: see Checkpoint.load_into.
    """
    folder = Path(folder)
    config, is_gpt2 = _read_config(folder / CONFIG_FILE)
    tensors = _read_tensors(folder / WEIGHTS_FILE)
    if is_gpt2:
        weights = _from_gpt2(tensors, config)
    else:
        weights = {name.removeprefix(NAME_PREFIX): tensor for name, tensor in tensors.items()}
    tokenizer = read_tokenizer(folder / TOKENIZER_FILE).to_dict()
    for name, tensor in weights.items():
        weights[name] = tensor.float().contiguous()
    config = match_head(config, weights)
    if config.tie_weights and EMBEDDING_WEIGHT in weights:
        weights[HEAD_WEIGHT] = weights[EMBEDDING_WEIGHT]
    return Checkpoint(config, weights, Progress(), {}, tokenizer=tokenizer, path=folder)


def _read_config(path):
    """Returns the GPTConfig in a config.json, and whether the model is of type gpt2."""
    content_errors = ArithmeticError, AttributeError, KeyError, TypeError, ValueError
    with as_user_error(f"{path} describes no supported model", *content_errors):
        values = json.loads(read_text(path))
        kind, names = values.get("model_type"), {name: name for name in asdict(GPTConfig())}
        if kind == "gpt2":
            names = GPT2_FIELDS
            for name, value in GPT2_REQUIRED.items():
                if values.get(name, value) != value:
                    raise ValueError(f"{name}={values[name]!r}, not {value!r}")
            if values.get("activation_function", "gelu_new") in GPT2_TANH_NAMES:
                values["activation_function"] = "gelu_tanh"
        elif kind != "folio":
            raise ValueError(f"model_type is {kind!r}; folio reads gpt2 and folio")
        # GPT-2's defaults are also those of GPTConfig.
        fields = {name: values[key] for name, key in names.items() if key in values}
        return GPTConfig(**fields), kind == "gpt2"


def _from_gpt2(tensors, config):
    """Returns a GPT's state dict from that of a GPT2LMHeadModel."""
    weights = {}
    for name, tensor in tensors.items():
        if not name.startswith(("transformer.", HEAD_WEIGHT)):  # in files without a head
            name = f"transformer.{name}"
        is_zero_bias = not config.bias and name.endswith(".bias") and not tensor.float().any()
        if is_zero_bias or name.endswith(MASK_SUFFIXES):
            continue
        weights[name] = tensor.mT if name.endswith(TRANSPOSED_SUFFIXES) else tensor
    return weights


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


def write_pretrained(folder, checkpoint: Checkpoint, tokenizer: Tokenizer):
    """Writes a checkpoint and its tokenizer to a new or empty folder.

    Returns the name of the class that transformers loads. Raises UserError if the folder is not
    empty, the weights do not fit the model, or writing fails; no file is written then.
    """
    config, weights = checkpoint.config, build_model(checkpoint).state_dict()
    if config.tie_weights:
        del weights[HEAD_WEIGHT]
    code_files: tuple[Path, ...] = ()
    if _fits_gpt2(config):
        fields, tensors = _gpt2_fields(config), _to_gpt2(weights)
    else:
        tensors = {NAME_PREFIX + name: weight for name, weight in weights.items()}
        fields, code_files = FOLIO_FIELDS | asdict(config), CODE_FILES
    fields |= {"bos_token_id": tokenizer.end, "eos_token_id": tokenizer.end}
    texts = make_tokenizer_files(tokenizer) | {CONFIG_FILE: json.dumps(fields, indent=2)}
    for path in code_files:
        texts[path.name] = path.read_text(encoding="utf-8")
    contents = {name: text.encode() for name, text in texts.items()}
    import_optional("safetensors", "an export")
    from safetensors.torch import save

    contents[WEIGHTS_FILE] = save(tensors, metadata={"format": "pt"})
    folder = Path(folder)
    with os_errors("write to", folder):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"{folder} is not empty: choose a new folder")
    with write_atomically(*(folder / name for name in contents)) as files:
        for file, content in zip(files, contents.values(), strict=True):
            file.write(content)
    return fields["architectures"][0]


def _fits_gpt2(config):
    """Whether GPT2LMHeadModel computes the same function as a GPT."""
    shared = {name: getattr(config, name) for name in (*GPT2_FIELDS, "dropout")}
    return config == GPTConfig(**shared) and config.activation in GPT2_ACTIVATIONS


def _gpt2_fields(config):
    """Returns the fields of config.json for GPT2LMHeadModel."""
    values = {gpt2_name: getattr(config, name) for name, gpt2_name in GPT2_FIELDS.items()}
    if config.activation == "gelu_tanh":
        values["activation_function"] = "gelu_new"
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **values,
        **GPT2_REQUIRED,
        "n_ctx": config.block_size,  # llama.cpp's name
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),  # 0.1 by default
    }


def _to_gpt2(weights):
    """Returns GPT2LMHeadModel's state dict, with zeros for biases that the model lacks."""
    tensors = dict(weights)
    for name, weight in weights.items():
        if name.startswith(("transformer.h.", "transformer.ln_f.")):
            tensors.setdefault(name.replace(".weight", ".bias"), torch.zeros(len(weight)))
        if name.endswith(TRANSPOSED_SUFFIXES):
            tensors[name] = weight.T.contiguous()
    return tensors
