"""Write with a trained model: the checkpoint in out_dir continues a prompt.

    python sample.py --out_dir=out-shakespeare-char
    python sample.py --out_dir=out-shakespeare-char --start="ROMEO:" --num_samples=3
    python sample.py --out_dir=out-shakespeare-char --start=FILE:prompt.txt --temperature=0

The text goes to stdout, and what is said about it to stderr.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from config import UserError, answer_early, load, setting
from safety import run


@dataclass(frozen=True)
class SampleConfig:
    """Continue a prompt with the best checkpoint of a run."""

    out_dir: str = setting("out", "the folder that train.py wrote", group="What to write")
    start: str | None = setting(
        None, "the prompt: text, FILE:path, or - for standard input; a new line if not set"
    )
    num_samples: int = setting(10, "texts to write", bounds="[1, inf)")
    max_new_tokens: int = setting(500, "length of each, beyond the prompt", bounds="[1, inf)")
    temperature: float = setting(
        0.8, "below 1 safer, above 1 bolder, 0 always the likeliest token", bounds="[0, inf)"
    )
    top_k: int | None = setting(
        200, "draw from the k likeliest tokens; None is from all", bounds="[1, inf)"
    )
    seed: int = setting(1337, "the same seed writes the same text", bounds="[0, inf)")

    device: str = setting("auto", "auto, cpu, cuda, cuda:N or mps", group="Machine")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "number format of the products"
    )
    compile: bool = setting(False, "compile the model first; pays for many long texts only")


if __name__ == "__main__":
    run(answer_early, SampleConfig)  # --help and misspelt flags should not wait for torch

import numpy as np
import torch

import checkpoint as ckpt
from device import (
    choose_machine,
    compile_or_fall_back,
    explained_lack_of_memory,
    resolve_device,
)
from model import generate
from prepare import decode_text, load_tokenizer, read_text
from tokenizer import from_dict


def main(argv=None):
    config = load(SampleConfig, sys.argv[1:] if argv is None else argv, {"device": resolve_device})
    checkpoint = ckpt.load(Path(config.out_dir, ckpt.BEST))
    tokenizer = tokenizer_of(checkpoint)
    ids = tokenizer.encode(read_prompt(config.start, tokenizer))
    machine = choose_machine(config.device, config.dtype, config.compile)
    loss = checkpoint.best_val_loss
    print(f"{checkpoint.path}: step {checkpoint.step}, best val loss {loss:.4f}", file=sys.stderr)
    print(f"machine: {machine.summary}", file=sys.stderr)
    with explained_lack_of_memory(config.device, "try --device=cpu, or a shorter --start"):
        try:
            for text in write(checkpoint, tokenizer, ids, config, machine):
                print(text)
                print("---------------", flush=True)
        except RuntimeError as error:
            if "probability tensor" not in str(error):
                raise
            raise UserError(
                f"{checkpoint.path} gives no finite numbers in {machine.dtype}: "
                "try --dtype=float32, or train again at a lower rate"
            ) from error


def tokenizer_of(checkpoint):
    """The tokenizer that travels in the checkpoint; for nanoGPT's, that of its dataset's folder."""
    dataset = checkpoint.config.get("dataset", "openwebtext")
    try:
        if checkpoint.tokenizer:
            tokenizer = from_dict(checkpoint.tokenizer)
        else:
            tokenizer = load_tokenizer(dataset)
    except UserError as error:
        raise UserError(f"{checkpoint.path}: {error}") from error
    if not checkpoint.fits(tokenizer):
        way_on = (
            "" if checkpoint.tokenizer else f"; put the meta.pkl it began with into data/{dataset}"
        )
        raise UserError(
            f"{checkpoint.path} has {checkpoint.model_config.vocab_size:,} tokens, but its "
            f"tokenizer {tokenizer.vocab_size:,}{way_on}"
        )
    return tokenizer


def read_prompt(start, tokenizer):
    """The prompt that `start` asks for. Raises UserError where it is empty or cannot be read."""
    if start is None:
        return tokenizer.start
    if start == "-":
        prompt = decode_text(sys.stdin.buffer.read(), "standard input").text
    elif start.startswith("FILE:"):
        if not (name := start.removeprefix("FILE:")):
            raise UserError("--start=FILE: lacks the name of the file")
        prompt = read_text(Path(name)).text
    else:
        prompt = start
    if not prompt:
        raise UserError("the prompt is empty; without --start the text begins on a new line")
    return prompt


def write(checkpoint, tokenizer, ids, config, machine):
    """Yield num_samples texts that begin with `ids`, each drawn by a generator of its own."""
    ids = torch.from_numpy(ids.astype(np.int64))[None].to(machine.device)
    model = ckpt.build_model(checkpoint).eval().to(machine.device)

    def draw(model, index, length):
        seed = int(np.random.SeedSequence([config.seed, index]).generate_state(1, np.uint64)[0])
        with machine.autocast():
            return generate(
                model,
                ids,
                length,
                temperature=config.temperature,
                top_k=config.top_k,
                limit=tokenizer.vocab_size,
                generator=torch.Generator(machine.device).manual_seed(seed),
            )

    if machine.compile:
        model = compile_or_fall_back(model, lambda compiled: draw(compiled, 0, length=1))
    for index in range(config.num_samples):
        yield tokenizer.decode(draw(model, index, config.max_new_tokens)[0].tolist())


if __name__ == "__main__":
    run(main)
