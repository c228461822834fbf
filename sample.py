"""Write with a trained model: the checkpoint in out_dir continues a prompt.

    python sample.py --out_dir=out-shakespeare-char
    python sample.py --out_dir=out-shakespeare-char --start="ROMEO:" --num_samples=3 --stream
    python sample.py --out_dir=out-shakespeare-char --prompts=prompts.txt --json
    python sample.py --out_dir=out-shakespeare-char --interactive
    python sample.py --out_dir=out-shakespeare-char --score=poem.txt

The text goes to stdout, and what is said about it to stderr.
"""

import gc
import json
import math
import signal
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

from config import STARTED, UserError, answer_early, load, setting
from safety import Interrupted, run

APART = (  # settings of which one at most makes sense
    ("score", "interactive", "prompts", "start"),
    ("stream", "json"),
    ("stream", "logprobs"),
    ("interactive", "json"),
    ("interactive", "logprobs"),
    ("score", "stream"),
    ("score", "logprobs"),
    ("score", "compile"),  # which is for one token after the other
)


@dataclass(frozen=True)
class SampleConfig:
    """Continue a prompt with the best checkpoint of a run."""

    out_dir: str = setting("out", "the folder that train.py wrote", group="What to write")
    start: str | None = setting(
        None, "the prompt: text, FILE:path, or - for standard input; a new line if not set"
    )
    prompts: str | None = setting(
        None, "a file with a prompt on each line, or - for standard input"
    )
    num_samples: int = setting(10, "texts to write for each prompt", bounds="[1, inf)")
    max_new_tokens: int = setting(500, "length of each, beyond the prompt", bounds="[1, inf)")
    stop: str | None = setting(
        None, "end a text where this comes: a text, or several as a JSON list"
    )
    seed: int = setting(1337, "of the first text, the next has the next", bounds="[0, inf)")
    score: str | None = setting(
        None, "do not write, but tell how well the model foretells this file, or - as above"
    )

    temperature: float = setting(
        0.8,
        "below 1 safer, above 1 bolder, 0 always the likeliest token",
        bounds="[0, inf)",
        group="How to draw",
    )
    top_k: int | None = setting(
        200, "draw from the k likeliest tokens; None is from all", bounds="[1, inf)"
    )
    top_p: float = setting(
        1.0, "draw from the likeliest that together reach this probability", bounds="(0, 1]"
    )
    min_p: float = setting(
        0.0, "draw from those with this share of the likeliest's probability", bounds="[0, 1]"
    )
    repetition_penalty: float = setting(
        1.0, "above 1 makes what the text has already less likely", bounds="[0.01, 100]"
    )
    context_stride: int | None = setting(
        None,
        "tokens that a full context forgets at once; 1 is nanoGPT's way, None half of it",
        bounds="[1, inf)",
    )

    stream: bool = setting(False, "print each text while it is drawn", group="How to show it")
    interactive: bool = setting(False, "ask for prompts and continue each, until Ctrl-D")
    json: bool = setting(False, "a line of JSON for each text, for programs")
    logprobs: bool = setting(False, "a line for each token with its log-probability")

    device: str = setting("auto", "auto, cpu, cuda, cuda:N or mps", group="Machine")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "number format of weights and products"
    )
    compile: bool = setting(False, "compile the model first; pays for many long texts only")

    def __post_init__(self):
        for names in APART:
            given = [name for name in names if getattr(self, name) not in (None, False)]
            if len(given) > 1:
                raise UserError(f"--{given[0]} and --{given[1]} do not go together: give one")


if __name__ == "__main__":
    run(answer_early, SampleConfig)  # --help and misspelt flags should not wait for torch
    gc.disable()  # till run(main): imports leave nothing to collect, but collecting takes a third

import torch

import checkpoint as ckpt
from device import (
    DTYPES,
    accelerator,
    choose_machine,
    explained_lack_of_memory,
    memory_bytes,
    resolve_device,
)
from generation import Controls, continuations, prepare_to_write, surprisals
from prepare import decode_text, load_tokenizer, read_text
from tokenizer import from_dict

BREAK = "---------------"
TOGETHER = 16  # tokens drawn between looks at them, each of which waits for the device
SHARE_OF_MEMORY = 1 / 4  # for a batch; texts that need more are written one batch after the other


def main(argv=None):
    config = load(SampleConfig, sys.argv[1:] if argv is None else argv, {"device": resolve_device})
    stops = stop_texts(config.stop)
    checkpoint, tokenizer = opened(config)
    others = config.score is not None or config.interactive
    texts = None if others else texts_to_write(config, tokenizer, stops)
    with explained_lack_of_memory(config.device, "try --device=cpu, or a shorter --start"):
        model, machine = ready(checkpoint, config)
        draw = partial(drawn, model, tokenizer, config, accelerator(machine))
        if config.score is not None:
            print_score(model, tokenizer, config)
        elif config.interactive:
            converse(draw, tokenizer, config, stops)
        else:
            write(draw, texts, config, 1 if config.stream else rows_at_once(model))


def opened(config):
    """The checkpoint in out_dir, and its tokenizer."""
    checkpoint = ckpt.load(Path(config.out_dir, ckpt.BEST), optimizers=False)
    return checkpoint, tokenizer_of(checkpoint)


def ready(checkpoint, config):
    """The model of a checkpoint, ready to write, and the machine it is on; both are told."""
    machine = choose_machine(config.device, config.dtype, config.compile)
    loss = checkpoint.best_val_loss
    print(f"{checkpoint.path}: step {checkpoint.step}, best val loss {loss:.4f}", file=sys.stderr)
    print(f"machine: {machine.summary}", file=sys.stderr)
    model = ckpt.build_model(checkpoint).to(machine.device, DTYPES[machine.dtype])
    checkpoint.weights = {}  # the model has its own
    return prepare_to_write(model, machine.compile), machine


# Texts


class Text:
    """A text as it is written: what continues a prompt, one token after the other."""

    def __init__(self, prompt, prompt_ids, seed, tokenizer, stops):
        self.prompt, self.prompt_ids, self.seed, self.stops = prompt, prompt_ids, seed, stops
        self.ids, self.logprobs, self.pieces = [], [], []  # what was drawn
        self.text = ""  # of it, up to a stop text or the end-of-text token
        self.stopped = None  # "length", "end of text", or the stop text that came
        self.shown = 0  # characters that are printed already
        self.end, self.decode = tokenizer.end, tokenizer.decoder()

    def add(self, token, logprob):
        """Take a token more, unless the text is at its end."""
        if self.stopped:
            return
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.pieces.append("" if token == self.end else self.decode(token))
        self._extend(self.pieces[-1])
        if token == self.end:
            self.finish("end of text")

    def finish(self, why):
        """End the text here, unless it is at its end."""
        if not self.stopped:
            self._extend(self.decode(None))
            self.stopped = self.stopped or why

    def _extend(self, more):
        first = max(0, len(self.text) - max(map(len, self.stops), default=0))
        self.text += more
        found = [(at, stop) for stop in self.stops if (at := self.text.find(stop, first)) >= 0]
        if found:
            at, self.stopped = min(found)
            self.text = self.text[:at]

    def certain(self):
        """Prompt and text without what may turn out to be the beginning of a stop text."""
        text = self.prompt + self.text
        if self.stopped:
            return text
        begun = (stop[:n] for stop in self.stops for n in range(1, len(stop)))
        return text[: len(text) - max((len(b) for b in begun if self.text.endswith(b)), default=0)]


def texts_to_write(config, tokenizer, stops):
    """An iterator of num_samples for each prompt, nothing written yet, each with its own seed."""
    if config.prompts is not None:
        lines = (line.rstrip("\r") for line in read(config.prompts).split("\n"))
        prompts = [line for line in lines if line]
        if not prompts:
            raise UserError(f"{config.prompts} has no prompt in it")
    else:
        prompts = [read_prompt(config.start, tokenizer)]
    pairs = [(prompt, tokenizer.encode(prompt).tolist()) for prompt in prompts]
    seeds = range(config.seed, config.seed + config.num_samples)
    return (Text(*pair, seed, tokenizer, stops) for pair in pairs for seed in seeds)


def drawn(model, tokenizer, config, accelerate, texts):
    """Write texts beside each other until all are at their end; yield after each look at them."""
    controls = Controls(**{f.name: getattr(config, f.name) for f in fields(Controls)})
    tokens = continuations(
        model,
        [text.prompt_ids for text in texts],
        [text.seed for text in texts],
        controls,
        config.max_new_tokens,
        stride_of(config, model),
        limit=tokenizer.vocab_size,
        accelerate=accelerate,
    )
    left = config.max_new_tokens
    while left and not all(text.stopped for text in texts):
        first = left == config.max_new_tokens
        count = min(left, 1 if first or config.stream or config.interactive else TOGETHER)
        ids, logprobs = (torch.stack(each) for each in zip(*islice(tokens, count), strict=True))
        check_finite(logprobs)
        for text, *drawn_now in zip(texts, ids.T.tolist(), logprobs.T.tolist(), strict=True):
            for token, logprob in zip(*drawn_now, strict=True):
                text.add(token, logprob)
        left -= count
        yield
    for text in texts:
        text.finish("length")


def check_finite(numbers):
    if not numbers.isfinite().all():
        raise UserError(
            "the model gives no finite numbers: try --dtype=float32, or train again at a lower rate"
        )


def stride_of(config, model):
    size = model.config.block_size
    return min(config.context_stride or max(1, size // 2), size)


def rows_at_once(model):
    """How many texts a share of the device's memory has room for."""
    config, weight = model.config, model.transformer.wte.weight
    cache = 2 * config.n_layer * config.block_size * config.n_embd
    logits = 8 * config.vocab_size  # and what is made of them while a token is drawn
    there = memory_bytes(weight.device) or 2**33
    return max(1, int(SHARE_OF_MEMORY * there) // (4 * (cache + logits)))


# What is printed


def write(draw, texts, config, rows):
    """Draw texts, so many at once, and print each."""
    start, first, tokens = time.monotonic(), None, 0
    while batch := list(islice(texts, rows)):
        for _ in draw(batch):
            first = first or time.monotonic() - STARTED
            if config.stream:
                print_more(batch[0])
        for text in batch:
            show(text, config)
        tokens += sum(len(text.ids) for text in batch)
    seconds = time.monotonic() - start
    print(
        f"{tokens:,} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s; the first after "
        f"{first:.2f} s",
        file=sys.stderr,
    )


def show(text, config):
    """Print a text that is at its end, as it was asked for."""
    if config.json:
        told = {name: getattr(text, name) for name in ("prompt", "text", "seed", "ids")}
        told |= {"logprobs": [round(each, 6) for each in text.logprobs], "stopped": text.stopped}
        print(json.dumps(told, ensure_ascii=False))
    elif config.logprobs:
        for piece, logprob in zip(text.pieces, text.logprobs, strict=True):
            print(f"{logprob:.4f}\t{piece!r}")
        print(BREAK)
    else:
        print_more(text)
        print(f"\n{BREAK}")
    sys.stdout.flush()


def print_more(text):
    """Print what has become certain since last time."""
    certain = text.certain()
    print(certain[text.shown :], end="", flush=True)
    text.shown = len(certain)


def converse(draw, tokenizer, config, stops):
    """Ask for prompts and continue each, until the input ends; an empty one goes on with the text.

    Ctrl-C stops a text, and not the program.
    """
    with suppress(ImportError):  # Windows has none
        import readline  # noqa: F401  gives input() a history

    print("an empty line goes on; Ctrl-C stops a text; Ctrl-D ends", file=sys.stderr)
    before, seed = tokenizer.start, config.seed
    while True:
        with stoppable():
            try:
                prompt = input("> " if sys.stdin.isatty() else "") or before
            except EOFError:
                print()
                return
            try:
                text = Text(prompt, tokenizer.encode(prompt).tolist(), seed, tokenizer, stops)
            except UserError as error:  # a character that the model does not know
                print(error, file=sys.stderr)
                continue
            text.shown, seed, before = len(prompt), seed + 1, prompt
            for _ in draw([text]):
                print_more(text)
                before = prompt + text.text
            print_more(text)
        print()


@contextmanager
def stoppable():
    """A context that Ctrl-C leaves, each time it comes; other signals end the program as ever."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, before)


def print_score(model, tokenizer, config):
    """Print how well the model foretells a text: loss, perplexity and bits per byte."""
    text = read(config.score)
    ids = tokenizer.encode(text)
    if len(ids) < 2:
        raise UserError(f"{config.score} has {len(ids)} tokens; to foretell one takes two")
    ids = torch.from_numpy(ids.astype("int64"))
    nats = surprisals(model, ids, stride_of(config, model))
    check_finite(nats)
    loss, count = nats.double().mean().item(), len(nats)
    size = len(text.encode()) - len(tokenizer.bytes_of(ids[0].item()))
    scores = {
        "tokens": count,
        "loss": loss,
        "perplexity": math.exp(min(loss, 700)),
        "bits_per_byte": loss * count / math.log(2) / size,
    }
    if config.json:
        print(json.dumps(scores))
    else:
        print(
            f"{config.score}: loss {loss:.4f}, perplexity {scores['perplexity']:.2f}, "
            f"bits per byte {scores['bits_per_byte']:.4f}, over {count:,} tokens"
        )


# What is read


def read(name):
    """The text of a file, or, for -, of standard input."""
    if not name:
        raise UserError("the name of the file to read is empty")
    if name == "-":
        return decode_text(sys.stdin.buffer.read(), "standard input").text
    return read_text(Path(name)).text


def stop_texts(stop):
    """The texts that end a sample: `stop` itself, or those of the JSON list that it is."""
    if stop is None:
        return []
    texts = [stop]
    with suppress(ValueError, RecursionError):  # not JSON, so a text
        if isinstance(found := json.loads(stop), list):
            texts = found
    if not all(isinstance(each, str) and each for each in texts):
        raise UserError(f"--stop={stop}: it takes a text, or a JSON list of texts, none empty")
    return texts


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
    if start.startswith("FILE:"):
        if not (name := start.removeprefix("FILE:")):
            raise UserError("--start=FILE: lacks the name of the file")
        prompt = read_text(Path(name)).text
    else:
        prompt = read(start) if start == "-" else start
    if not prompt:
        raise UserError("the prompt is empty; without --start the text begins on a new line")
    return prompt


if __name__ == "__main__":
    run(main)
