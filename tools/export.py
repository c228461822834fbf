"""Write a trained model as a Hugging Face folder, for transformers and llama.cpp.

    python -m tools.export --out_dir=out-shakespeare-char --to=shakespeare-hf

The folder has the best checkpoint of the run, and its tokenizer. folio/hf.py reads it, and
describes its two kinds: GPT2LMHeadModel, or a model with its own code.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from folio import process
from folio.errors import UserError, os_error
from folio.fields import setting
from folio.settings import load, parse_arguments


@dataclass(frozen=True)
class ExportConfig:
    """Write a trained model as a Hugging Face folder, for transformers and llama.cpp."""

    out_dir: str = setting("out", "folder of the run")
    to: str | None = setting(None, "folder to write; an earlier export in it is replaced")
    dtype: Literal["float32", "float16", "bfloat16"] = setting("float32", "type of the weights")

    def __post_init__(self):
        if not self.to:
            raise UserError("specify the folder to write: --to=FOLDER")


if __name__ == "__main__":
    process.start(parse_arguments, ExportConfig)  # --help must not wait for torch

import torch

import model
from folio import hf, tokenizer_files
from folio.checkpoint import build_model
from folio.completion import checkpoint_tokenizer
from folio.device import DTYPES
from folio.files import replacing
from folio.run_dir import RunDir
from model import GPT, GPTConfig

GENERATION = "generation_config.json"
CODE = (Path(model.__file__), Path(__file__).with_name("modeling_folio.py"))
EXPORTED = {hf.CONFIG, GENERATION, hf.WEIGHTS, *tokenizer_files.FILES, *(c.name for c in CODE)}


def main(argv=None):
    settings = load(ExportConfig, argv)
    check_content(Path(settings.to))
    checkpoint = RunDir(settings.out_dir).load_best()
    count = export(checkpoint, settings.to, settings.dtype)
    print(summary(settings.to, checkpoint.config, count))


def check_content(folder):
    """Raises UserError if a folder contains more than an earlier export."""
    try:
        names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    except OSError as error:  # also if it is a file
        raise os_error("read", folder, error) from error
    if other := [name for name in names if name.removesuffix(".tmp") not in EXPORTED]:
        raise UserError(
            f"{folder} contains {other[0]}, which is not part of an export; choose a new folder"
        )


def export(checkpoint, folder, dtype="float32"):
    """Writes a checkpoint to a folder in the Hugging Face format. Returns its number of parameters.

    Raises UserError if the weights do not fit the model, or if writing fails; an earlier export
    then remains.
    """
    tokenizer = checkpoint_tokenizer(checkpoint)
    weights, config = converted(checkpoint, dtype), checkpoint.config
    if config.tie_weights:
        del weights[hf.HEAD]
    if is_gpt2(config):
        tensors, fields, code = gpt2_tensors(config, weights), gpt2_fields(config), ()
    else:
        tensors = {hf.PREFIX + name: weight for name, weight in weights.items()}
        fields, code = own_fields(config), CODE
    ends = {"bos_token_id": tokenizer.end, "eos_token_id": tokenizer.end}
    padding = {"suppress_tokens": list(range(tokenizer.vocab_size, config.vocab_size))}
    generation = {key: value for key, value in (ends | padding).items() if value not in (None, [])}
    texts = {
        GENERATION: json.dumps(generation, indent=2),
        **tokenizer_files.contents(tokenizer),
        **{path.name: path.read_text(encoding="utf-8") for path in code},
        hf.CONFIG: json.dumps(fields | ends | {"dtype": dtype}, indent=2),
    }
    write(Path(folder), tensors, texts)
    return sum(weight.numel() for weight in weights.values())


def write(folder, tensors, texts):
    """Writes all files, config.json last, or none if one fails. Raises UserError."""
    try:
        from safetensors.torch import save  # imported here because it is optional
    except ImportError as error:
        raise UserError("an export needs: pip install safetensors") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise os_error("write to", folder, error) from error
    contents = {hf.WEIGHTS: save(tensors, metadata={"format": "pt"})}
    contents |= {name: text.encode() for name, text in texts.items()}
    with replacing(*(folder / name for name in contents)) as files:
        for file, content in zip(files, contents.values(), strict=True):
            file.write(content)
    for name in EXPORTED - contents.keys():  # of an earlier export
        (folder / name).unlink(missing_ok=True)


def converted(checkpoint, dtype):
    """Returns the weights in a dtype. Raises UserError if some are not finite in it."""
    weights = build_model(checkpoint).to(DTYPES[dtype]).state_dict()
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise UserError(
                f"{checkpoint.path}: {name} is not finite in {dtype}: use --dtype=float32 or "
                "bfloat16"
            )
    return weights


def summary(folder, config, count):
    """Returns a line about the export of a model with this GPTConfig and number of parameters."""
    kind, option = "GPT2LMHeadModel", ""
    if not is_gpt2(config):
        kind, option = "a model with its own code", ", trust_remote_code=True"
    size = sum(path.stat().st_size for path in Path(folder).iterdir())
    return (
        f"wrote {folder}: {kind}, {count:,} parameters, {size / 1e6:.1f} MB; "
        f"AutoModelForCausalLM.from_pretrained({folder!r}{option}) loads it"
    )


# The two kinds


def is_gpt2(config):
    """Whether GPT2LMHeadModel computes the same function as a GPT."""
    known = {name: getattr(config, name) for name in (*hf.GPT2_FIELDS, "dropout")}
    has_activation = config.activation in hf.GPT2_ACTIVATIONS.values()
    return config == GPTConfig(**known) and has_activation and config.n_layer > 0


def gpt2_fields(config):
    """Returns the fields of config.json for GPT2LMHeadModel."""
    activations = {ours: theirs for theirs, ours in reversed(hf.GPT2_ACTIVATIONS.items())}
    values = {key: getattr(config, name) for name, key in hf.GPT2_FIELDS.items()}
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **values,
        "activation_function": activations[config.activation],
        **hf.gpt2_constants(config),
        "n_ctx": config.block_size,  # llama.cpp's name
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),  # 0.1 by default
    }


def gpt2_tensors(config, weights):
    """Returns the tensors of GPT2LMHeadModel, with zeros for biases that the model lacks."""
    with torch.device("meta"):
        expected = GPT(replace(config, bias=True)).state_dict()
    biases = {name: each.shape for name, each in expected.items() if name.endswith(".bias")}
    dtype = weights[hf.EMBEDDING].dtype
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, shape in biases.items()} | weights
    transposed = {k: t.T.contiguous() for k, t in tensors.items() if k.endswith(hf.GPT2_TRANSPOSED)}
    return tensors | transposed


def own_fields(config):
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


if __name__ == "__main__":
    process.run(main)
