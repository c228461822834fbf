"""Write a trained model for other programs.

    python -m tools.export --out_dir=out-shakespeare-char --to=shakespeare-hf
    python -m tools.export --out_dir=out-shakespeare-char --to=shakespeare.gguf

The first is a folder for transformers (folio/pretrained/huggingface.py), the second a file for
llama.cpp, Ollama and LM Studio (folio/pretrained/gguf.py).
"""

import re
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
    dtype: Literal["float32", "float16", "q8_0"] = setting("float32", "of matrices in NAME.gguf")
    own_code: bool = setting(False, "write a folder with this model.py, as for a changed one")

    def __post_init__(self):
        if not self.to:
            raise ValueError("--to is empty: name a new folder or file")
        if self.is_gguf and self.own_code:
            raise ValueError("a GGUF file cannot have code: omit --own_code")
        if not self.is_gguf and self.dtype != "float32":
            raise ValueError(f"--dtype={self.dtype} needs a file: --to=NAME.gguf")

    @property
    def is_gguf(self):
        return Path(self.to).name.lower().endswith(".gguf")


# --help must not wait for torch. transformers would show bars for steps of milliseconds.
process.start(__name__, ExportConfig, TQDM_DISABLE="1")

import numpy as np

from folio.checkpoint.format import build_model
from folio.checkpoint.run_dir import RunDir
from folio.cli.errors import UserError, as_user_error, os_errors
from folio.cli.files import write_atomically
from folio.data.dataset import MAX_CHECKED_TOKENS, load_dataset
from folio.pretrained.architectures import Folio, find_architecture
from folio.pretrained.gguf import choose_architecture, write_gguf
from folio.pretrained.huggingface import drop_padding, write_pretrained
from folio.pretrained.load import checkpoint_tokenizer
from sample import SampleConfig

# For Ollama, with the defaults of sample.py.
MODELFILE = """FROM ./{name}
TEMPLATE \"""{{{{ .Prompt }}}}\"""
PARAMETER temperature {temperature}
PARAMETER top_k {top_k}
PARAMETER top_p {top_p}
PARAMETER min_p {min_p}
PARAMETER repeat_penalty {repetition_penalty}
PARAMETER num_predict {length}
PARAMETER num_ctx {block_size}
"""


def main(argv=None):
    settings = load_settings(ExportConfig, argv)
    checkpoint = RunDir(settings.out_dir).load_best()
    tokenizer = checkpoint_tokenizer(checkpoint)
    checkpoint = drop_padding(checkpoint, tokenizer.vocab_size)
    if settings.is_gguf:
        export_file(Path(settings.to), checkpoint, tokenizer, settings.dtype)
        return
    architecture = Folio() if settings.own_code else find_architecture(checkpoint.config)
    write_pretrained(settings.to, build_model(checkpoint), tokenizer, architecture)
    print(f"wrote {settings.to}: {architecture.class_name} of {checkpoint.summary}")


def export_file(path, checkpoint, tokenizer, dtype):
    """Writes a GGUF file, and a Modelfile of Ollama beside it. Prints how to use them."""
    modelfile_path = path.with_suffix(".Modelfile")
    for file in (path, modelfile_path):
        if file.exists():
            raise UserError(f"{file} exists: choose a new name")
    config, end, end_text = checkpoint.config, tokenizer.end, tokenizer.end_text
    choose_architecture(config)  # raises UserError before the text is read
    if end is None:
        end, end_text = find_rarest(checkpoint, tokenizer)
    shift, length = " --context-shift", SampleConfig.max_new_tokens
    if config.position == "learned":  # a full context cannot be shifted
        shift, length = "", min(length, config.block_size // 2)
    values = {"name": path.name, "length": length, "block_size": config.block_size}
    modelfile = MODELFILE.format_map(vars(SampleConfig) | values)
    if tokenizer.end is not None:
        modelfile += f'PARAMETER stop "{end_text}"\n'
    with os_errors("write to", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path, modelfile_path) as [model_file, text_file]:
        write_gguf(model_file.name, checkpoint, tokenizer, end, dtype)
        text_file.write(modelfile.encode())
    print(f"wrote {path} and {modelfile_path}: {checkpoint.summary}")
    print(f"other programs end a text at {end_text}")
    name = re.sub(r"[^\w.-]", "-", path.stem, flags=re.ASCII)  # what Ollama allows
    name = name.lstrip("-.") or "folio"
    source = shlex.quote(str(modelfile_path))
    print(f"Ollama: ollama create {name} -f {source} && ollama run {name}")
    flags = "--temp {temperature} --top-k {top_k} --top-p {top_p} --min-p {min_p}"
    flags = flags.format_map(vars(SampleConfig)) + f" -n {length}{shift}"  # defaults of sample.py
    print(f"llama.cpp: llama-completion -no-cnv -m {shlex.quote(str(path))} {flags} -p PROMPT")


def find_rarest(checkpoint, tokenizer):
    """Returns the token that the training text has least, and a description.

    It serves as end token for tokenizers that have none, because llama.cpp requires one. Raises
    UserError if the dataset is missing, or is not that of the model.
    """
    with as_user_error("the end token is the rarest of the training text", UserError):
        data = load_dataset(checkpoint.settings.get("dataset", "openwebtext"))
    is_same_text = checkpoint.data in (None, data.fingerprint)
    if not is_same_text or data.tokenizer.to_dict() != tokenizer.to_dict():
        advice = "prepare the model's dataset again"
        raise UserError(f"data/{data.name} is not the text that the model was trained on: {advice}")
    ids = data.train[:MAX_CHECKED_TOKENS]
    counts = np.bincount(ids, minlength=tokenizer.vocab_size)
    token = len(counts) - 1 - int(counts[::-1].argmin())  # the last of several: byte 255
    name = f"byte {token}" if tokenizer.kind == "byte" else repr(tokenizer.decode([token]))
    return token, f"{name}, {counts[token]:,} of {len(ids):,} training tokens"


if __name__ == "__main__":
    process.run(main)
