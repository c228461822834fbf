"""Write a trained model as a Hugging Face folder, for transformers and llama.cpp.

    python -m tools.export --out_dir=out-shakespeare-char --to=shakespeare-hf

The folder has the best checkpoint of the run, and its tokenizer.
"""

import json
from dataclasses import dataclass
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

from folio import hf, tokenizer_files
from folio.completion import checkpoint_tokenizer
from folio.device import DTYPES
from folio.run_dir import RunDir
from folio.size import num_params

EXPORTED = {"config.json", "generation_config.json", "model.safetensors", *tokenizer_files.FILES}


def main(argv=None):
    settings = load(ExportConfig, argv)
    folder = Path(settings.to)
    check_content(folder)
    checkpoint = RunDir(settings.out_dir).load_best()
    tokenizer = checkpoint_tokenizer(checkpoint)
    checkpoint.weights = converted(checkpoint, settings.dtype)
    hf.write_pretrained(folder, checkpoint, tokenizer)
    print(summary(folder, checkpoint.config))


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


def converted(checkpoint, dtype):
    """Returns the weights in a dtype. Raises UserError if some are not finite in it."""
    weights = {name: weight.to(DTYPES[dtype]) for name, weight in checkpoint.weights.items()}
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise UserError(
                f"{checkpoint.path}: {name} is not finite in {dtype}: the run diverged, or "
                "needs --dtype=float32 or bfloat16"
            )
    return weights


def summary(folder, config):
    """Returns a line about the export of a model with this GPTConfig."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    size = sum(path.stat().st_size for path in folder.iterdir())
    return (
        f"wrote {folder}: {architecture}, {num_params(config):,} parameters, {size / 1e6:.1f} MB; "
        f"AutoModelForCausalLM.from_pretrained({str(folder)!r}) loads it"
    )


if __name__ == "__main__":
    process.run(main)
