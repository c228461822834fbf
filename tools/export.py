"""Write a trained model for other programs.

    python -m tools.export --out_dir=out-shakespeare-char --to=shakespeare-hf
    python -m tools.export --out_dir=out-shakespeare-char --to=shakespeare.gguf

The first is a folder for transformers (folio/pretrained/huggingface.py), the second a file for
llama.cpp, Ollama and LM Studio (folio/pretrained/gguf.py).
"""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from folio.cli import process
from folio.cli.settings import load_settings, setting


@dataclass(frozen=True)
class ExportConfig:
    """Write a trained model as a Hugging Face folder or as a GGUF file."""

    out_dir: str = setting("out", "run directory")
    to: str = setting("exported", "new folder for transformers, or new NAME.gguf for llama.cpp")
    dtype: Literal["float32", "float16", "q8_0"] = setting(
        "float32", "of the matrices in NAME.gguf"
    )
    own_code: bool = setting(False, "write a folder with this model.py, as for a changed one")

    def __post_init__(self):
        if self.is_gguf and self.own_code:
            raise ValueError("a GGUF file cannot have code: omit --own_code")
        if not self.is_gguf and self.dtype != "float32":
            raise ValueError(f"--dtype={self.dtype} needs a file: --to=NAME.gguf")

    @property
    def is_gguf(self):
        return self.to.endswith(".gguf")


# --help must not wait for torch. transformers would show bars for steps of milliseconds.
process.start(__name__, ExportConfig, TQDM_DISABLE="1")

import numpy as np

from folio.checkpoint.format import build_model
from folio.checkpoint.run_dir import RunDir
from folio.cli.errors import UserError
from folio.cli.files import write_atomically
from folio.data.dataset import load_dataset
from folio.pretrained.architectures import Folio, find_architecture
from folio.pretrained.gguf import write_gguf
from folio.pretrained.huggingface import write_pretrained
from folio.pretrained.load import checkpoint_tokenizer
from sample import SampleConfig


def main(argv=None):
    settings = load_settings(ExportConfig, argv)
    checkpoint = RunDir(settings.out_dir).load_best()
    tokenizer = checkpoint_tokenizer(checkpoint)
    if settings.is_gguf:
        export_file(Path(settings.to), checkpoint, tokenizer, settings.dtype)
        return
    architecture = Folio() if settings.own_code else find_architecture(checkpoint.config)
    write_pretrained(settings.to, build_model(checkpoint), tokenizer, architecture)
    print(f"wrote {settings.to}: {architecture.class_name} of {checkpoint.summary}")


def export_file(path, checkpoint, tokenizer, dtype):
    """Writes a GGUF file, and a Modelfile of Ollama beside it. Prints how to use them."""
    modelfile = path.with_suffix(".Modelfile")
    for file in (path, modelfile):
        if file.exists():
            raise UserError(f"{file} exists: choose a new name")
    end, end_text = tokenizer.end, tokenizer.end_text
    if end is None:
        end, end_text = find_rarest(load_dataset(checkpoint.settings.get("dataset", "openwebtext")))
    write_gguf(path, checkpoint, tokenizer, end, dtype)
    with write_atomically(modelfile) as [file]:
        file.write(make_modelfile(path.name, tokenizer, checkpoint.config.block_size).encode())
    print(f"wrote {path} and {modelfile}: {checkpoint.summary}")
    print(f"other programs end a text at {end_text}")
    name, modelfile_name = shlex.quote(path.stem), shlex.quote(str(modelfile))
    print(f"Ollama: ollama create {name} -f {modelfile_name} && ollama run {name}")
    flags = (
        "--temp {temperature} --top-k {top_k} --top-p {top_p} --min-p {min_p} -n {max_new_tokens}"
    )
    flags = flags.format_map(vars(SampleConfig))  # defaults
    print(f"llama.cpp: llama-completion -no-cnv -m {shlex.quote(str(path))} {flags} -p PROMPT")


def find_rarest(data):
    """Returns the token that a Dataset's training text has least, and a description.

    It serves as end token for tokenizers that have none, because llama.cpp requires one.
    """
    counts = np.bincount(data.train, minlength=data.tokenizer.vocab_size)
    token = len(counts) - 1 - int(counts[::-1].argmin())  # the last of several: byte 255
    is_byte = data.tokenizer.kind == "byte"
    name = f"byte {token}" if is_byte else repr(data.tokenizer.decode([token]))
    return token, f"{name}, {counts[token]:,} of the {len(data.train):,} training tokens"


def make_modelfile(name, tokenizer, block_size):
    """Returns the text of a Modelfile for Ollama, with the defaults of sample.py."""
    parameters = {
        "temperature": SampleConfig.temperature,
        "top_k": SampleConfig.top_k,
        "top_p": SampleConfig.top_p,
        "min_p": SampleConfig.min_p,
        "repeat_penalty": SampleConfig.repetition_penalty,
        "num_predict": SampleConfig.max_new_tokens,
        "num_ctx": block_size,
    }
    if tokenizer.end is not None:
        parameters["stop"] = json.dumps(tokenizer.end_text)
    lines = [f"FROM ./{name}", 'TEMPLATE """{{ .Prompt }}"""']
    lines += [f"PARAMETER {key} {value}" for key, value in parameters.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    process.run(main)
