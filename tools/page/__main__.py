"""Write trained models as a web page: one HTML file that generates and scores texts by itself.

    python -m tools.page --out_dir=out-shakespeare-char-fast --to=shakespeare.html

page.html is the frame of the page, gpt.js the model, text.js its tokenizers, sampling and scores,
and app.js what the page does. There is no build step.
"""

import json
import math
import re
from base64 import b64encode
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from string import Template

from folio.cli import process
from folio.cli.settings import load_settings, setting

SCRIPTS = ("gpt.js", "text.js", "app.js")


@dataclass(frozen=True)
class PageConfig:
    """Write trained models as a web page that needs no server and no network."""

    out_dir: str = setting("out", "run directory, or several: RUN,RUN")
    to: str = setting("page.html", "HTML file to write")


process.start(__name__, PageConfig)  # --help must not wait for torch

import numpy as np

from folio.checkpoint.format import build_model
from folio.checkpoint.run_dir import RunDir
from folio.cli.errors import UserError
from folio.cli.files import write_atomically
from folio.data.bpe import byte_characters
from folio.pretrained.load import checkpoint_tokenizer


def main(argv=None):
    settings = load_settings(PageConfig, argv)
    run_dirs = RunDir.parse_list(settings.out_dir)
    page = make_page([describe_run(run_dir) for run_dir in run_dirs]).encode()
    with write_atomically(settings.to) as [file]:
        file.write(page)
    print(f"wrote {settings.to}: {len(page) / 1e6:.1f} MB; open it in a browser")


def describe_run(run_dir):
    """Returns what the page knows of a run, for JSON. Its weights are those of the best model."""
    checkpoint = run_dir.load_best()
    tokenizer, model = checkpoint_tokenizer(checkpoint), build_model(checkpoint)
    unit = {"char": "character", "byte": "byte"}.get(tokenizer.kind, "token")
    weights = []
    for name, parameter in model.named_parameters():
        matrix = parameter.detach().float().numpy().reshape(len(parameter), -1)
        weights.append([name, len(matrix), b64encode(encode(matrix)).decode()])
    return {
        "name": run_dir.folder.resolve().name,
        "facts": describe_training(run_dir, checkpoint, model.num_params(), unit),
        "config": asdict(checkpoint.config),
        "tokenizer": describe_tokenizer(tokenizer),
        "weights": weights,
    }


def describe_training(run_dir, checkpoint, parameters, unit):
    """Returns a line. The loss is that of the final evaluation if there is one."""
    progress, events = checkpoint.progress, run_dir.read_events()
    last = events[-1] if events else {}
    is_of_model = last.get("best_step", progress.step) == progress.step
    is_final = last.get("event") == "final" and is_of_model
    loss = last["loss"] if is_final else progress.best_val_loss
    facts = [f"{parameters:,} parameters"]
    if dataset := checkpoint.settings.get("dataset"):
        facts.append(f"trained on {dataset}")
    facts.append(f"step {progress.step:,}")
    if math.isfinite(loss) and progress.best_step == progress.step:
        facts.append(f"validation loss {loss:.4f} per {unit}")
    return ", ".join(facts)


def encode(matrix):
    """Returns the bytes of a matrix: the float32 scale of each row, and then the rows in int8."""
    if not np.isfinite(matrix).all():
        raise UserError("the weights are not finite: train with a lower learning rate")
    scales = np.maximum(np.abs(matrix).max(axis=1, keepdims=True) / 127, 1e-30)
    return scales.astype("<f4").tobytes() + np.round(matrix / scales).astype(np.int8).tobytes()


def describe_tokenizer(tokenizer):
    """Returns the tokens, and how text.js finds those of a text."""
    data = {"start": tokenizer.encode_prompt(tokenizer.start), "end": tokenizer.end}
    tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    if tokenizer.kind in ("char", "list"):
        return data | {"tokens": [token.decode(errors="surrogatepass") for token in tokens]}
    if tokenizer.kind not in ("byte", "bpe", "gpt2"):
        raise UserError(f"the page cannot use a tokenizer of kind {tokenizer.kind}")
    characters = byte_characters()
    data["tokens"] = ["".join(characters[byte] for byte in token) for token in tokens]
    data |= {"byte_characters": characters, "is_split": True}
    if tokenizer.kind == "bpe":
        definition = json.loads(tokenizer.definition)
        is_simple = all(token["special"] for token in definition["added_tokens"])
        names = set(data["tokens"])
        if not is_simple or len(names) < len(tokens) or not names.issuperset(characters):
            raise UserError("the page cannot use a tokenizer with added tokens or missing bytes")
        model, split = definition["model"], definition["pre_tokenizer"] or {}
        data |= {"merges": model["merges"], "ignore_merges": model.get("ignore_merges", False)}
        data["is_split"] = split.get("use_regex", False)
    return data


def make_page(runs):
    """Returns the HTML. Its policy allows only its own script and style, and no requests."""
    folder = Path(__file__).parent
    script = "".join((folder / name).read_text("utf-8") for name in SCRIPTS)
    for run in runs:
        activation = run["config"]["activation"]
        if not re.search(rf"^  {activation}[:,]", script, re.MULTILINE):
            raise UserError(f"the page has no activation {activation}: add it to tools/page/gpt.js")
    parts = {"style": (folder / "style.css").read_text("utf-8"), "script": script}
    for name, text in list(parts.items()):
        parts[f"{name}_hash"] = "sha256-" + b64encode(sha256(text.encode()).digest()).decode()
    parts["runs"] = json.dumps(runs).replace("<", "\\u003c")
    return Template((folder / "page.html").read_text("utf-8")).substitute(parts)


if __name__ == "__main__":
    process.run(main)
