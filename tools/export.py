"""Write a trained model as a Hugging Face folder, for transformers and llama.cpp.

    python -m tools.export --out_dir=out-shakespeare-char --to=shakespeare-hf

folio/pretrained/huggingface.py describes the format.
"""

from dataclasses import dataclass

from folio.cli import process
from folio.cli.settings import load_settings, setting


@dataclass(frozen=True)
class ExportConfig:
    """Write a trained model as a Hugging Face folder, for transformers and llama.cpp."""

    out_dir: str = setting("out", "run directory")
    to: str = setting("exported", "new folder to write")


process.start(__name__, ExportConfig)  # --help must not wait for torch

from folio.checkpoint.run_dir import RunDir
from folio.pretrained.huggingface import write_pretrained
from folio.pretrained.load import checkpoint_tokenizer


def main(argv=None):
    settings = load_settings(ExportConfig, argv)
    checkpoint = RunDir(settings.out_dir).load_best()
    kind = write_pretrained(settings.to, checkpoint, checkpoint_tokenizer(checkpoint))
    print(f"wrote {settings.to}: {kind} of {checkpoint.summary}")


if __name__ == "__main__":
    process.run(main)
