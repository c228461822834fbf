"""Generate text with a trained model, or score a text.

    python sample.py --out_dir=out-shakespeare-char
    python sample.py --out_dir=out-shakespeare-char --start="ROMEO:" --num_samples=3 --stream
    python sample.py --out_dir=out-shakespeare-char --prompts=prompts.txt --json
    python sample.py --out_dir=out-shakespeare-char --interactive
    python sample.py --out_dir=out-shakespeare-char --score=poem.txt
    python sample.py --init_from=gpt2 --start="The meaning of life is"

Results go to stdout, messages to stderr. The loop over tokens is in folio/inference/generate.py.
"""

import json
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from folio.cli import process
from folio.cli.errors import UserError, as_user_error
from folio.cli.settings import load_settings, setting

EXCLUSIVE_SETTINGS = (  # at most one setting of each group can be given
    ("score", "interactive", "prompts", "start"),
    ("interactive", "stream", "json", "logprobs"),
    ("score", "stream"),
    ("score", "interactive", "copied"),
    ("logprobs", "by_line"),
)


@dataclass(frozen=True)
class SampleConfig:
    """Continue prompts with the best checkpoint of a run, or score a text."""

    out_dir: str = setting("out", "run directory", group="Input", affects="files")
    init_from: str = setting("resume", "resume: out_dir's best; or as in train.py", affects="files")
    start: str | None = setting(None, "prompt: text, FILE:path, or - for standard input")
    prompts: str | None = setting(None, "file with one prompt per line, or - for standard input")
    num_samples: int = setting(10, "texts per prompt", "[1, inf)")
    max_new_tokens: int = setting(500, "maximum number of tokens added to each prompt", "[1, inf)")
    min_new_tokens: int = setting(0, "tokens before which the end token cannot come", "[0, inf)")
    ignore_end: bool = setting(False, "the end token never comes; texts have max_new_tokens")
    stop: str | None = setting(
        None, r"end a text at this string (\n, \t: newline, tab), or any of a JSON list"
    )
    seed: int = setting(1337, "seed of each prompt's first text, then seed + 1", "[0, inf)")
    score: str | None = setting(None, "text file to score, or - for standard input")
    by_line: bool = setting(False, "score each line of that file as a text of its own")
    allow_special: bool = setting(False, "encode <|endoftext|> in a text as the special token")

    temperature: float = setting(0.8, "temperature; 0 is greedy", "[0, inf)", group="Sampling")
    top_k: int | None = setting(200, "sample from the k most likely tokens; None: all", "[1, inf)")
    top_p: float = setting(1.0, "sample from the top tokens whose probabilities sum to p", "(0, 1]")
    min_p: float = setting(0.0, "drop tokens below this fraction of the top probability", "[0, 1]")
    repetition_penalty: float = setting(1.0, "above 1 makes repetition less likely", "[0.01, 100]")
    context_stride: int | None = setting(
        None, "tokens to drop when the context is full; None: half of block_size", "[1, inf)"
    )

    stream: bool = setting(False, "print each token as it is generated", group="Output")
    interactive: bool = setting(False, "read prompts from the terminal until Ctrl-D")
    json: bool = setting(False, "print one JSON object per text")
    copied: bool = setting(False, "report which passages occur in the training text")
    logprobs: bool = setting(False, "print log-probabilities, a line per token, also for --score")

    device: str = setting("auto", "auto, cpu, cuda[:N] or mps", group="Machine")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = setting(
        "auto", "data type of the weights; int8: on a CPU"
    )
    compile: bool = setting(False, "compile the model before the first token")

    def __post_init__(self):
        for names in EXCLUSIVE_SETTINGS:
            given = [name for name in names if getattr(self, name) not in (None, False)]
            if len(given) > 1:
                raise ValueError(f"--{given[0]} and --{given[1]} cannot be combined: give one")
        if self.by_line and self.score is None:
            raise ValueError("--by_line needs --score=FILE")


# Handles --help and reports wrong flags before the slow imports. main() parses again.
# GOMP_SPINCOUNT: waiting threads spin so many times, then sleep. The default is 30 times as many
# and makes sampling several times slower if another process uses the cores.
process.start(__name__, SampleConfig, GOMP_SPINCOUNT="10000")

import numpy as np

from folio.cli.files import read_prompt, read_text, unescape
from folio.data.tokenizer import Tokenizer
from folio.hardware.device import resolve_device
from folio.inference.completion import Completion
from folio.inference.copied import find_copies, load_texts
from folio.inference.generate import complete, max_batch_size
from folio.inference.scoring import score_texts
from folio.inference.trained_model import TrainedModel, load_trained
from folio.pretrained.load import load_best

SEPARATOR = "---------------"


def main(argv=None):
    resolvers = {"device": resolve_device, "stop": parse_stop_texts}
    settings = load_settings(SampleConfig, argv, resolvers)
    prompts = [read_prompt(settings.start)]  # None is the tokenizer's default prompt
    if settings.prompts is not None:
        prompts = read_lines(settings.prompts)
    scored = None
    if settings.score is not None:
        scored = read_lines(settings.score) if settings.by_line else [read_text(settings.score)]
    checkpoint = load_best(settings.init_from, settings.out_dir)
    splits = load_texts(checkpoint) if settings.copied else None
    is_single = settings.stream or settings.interactive
    num_texts = 1 if is_single else len(prompts) * settings.num_samples  # at a time
    trained = load_trained(checkpoint, settings.device, settings.dtype, settings.compile, num_texts)
    print(checkpoint.summary, file=sys.stderr)
    print(f"machine: {trained.machine.summary}", file=sys.stderr)
    if scored:
        print_scores(trained, scored, settings)
    elif settings.interactive:
        converse(trained, settings)
    else:
        texts = print_samples(trained, prompts, settings)
        if splits:
            print_copies(texts, *splits)


# Samples


def print_samples(trained: TrainedModel, prompts, settings):
    """Continues each prompt num_samples times, in batches. Returns the texts without prompts."""
    completions = make_completions(trained.tokenizer, prompts, settings)
    size = 1 if settings.stream else max_batch_size(trained.model.config, settings.device)
    start, first_token_s, tokens, texts = time.monotonic(), None, 0, []
    while batch := list(islice(completions, size)):
        try:
            for _ in complete(trained, batch, settings, settings.stream):  # adds tokens
                first_token_s = first_token_s or time.monotonic() - process.STARTED
                if settings.stream:
                    print(batch[0].new_text(), end="", flush=True)
        except process.Interrupted:
            if not (settings.json or settings.logprobs):
                print(batch[0].new_text())
            raise
        for completion in batch:
            print_completion(completion, settings)
            tokens += len(completion.ids)
            texts.append(completion.text)
    seconds = time.monotonic() - start
    speed = f"{tokens:,} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s"
    print(f"{speed}; first token {first_token_s:.2f} s after the start", file=sys.stderr)
    return texts


def make_completions(tokenizer: Tokenizer, prompts, settings):
    """Yields num_samples empty completions per prompt, with consecutive seeds."""
    prompts = [prompt or tokenizer.start for prompt in prompts]
    encoded = [tokenizer.encode_prompt(prompt, settings.allow_special) for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        for number in range(settings.num_samples):
            yield Completion(prompt, ids, settings.seed + number, tokenizer, settings.stop)


def print_completion(completion: Completion, settings):
    """Prints a finished completion, or the rest of it if its beginning has been printed."""
    if settings.json:
        names = ("prompt", "text", "seed", "ids", "logprobs", "stopped")
        data = {name: getattr(completion, name) for name in names}
        print(json.dumps(data, ensure_ascii=False))
    elif settings.logprobs:
        print_tokens(completion.pieces, completion.logprobs)
        print(SEPARATOR)
    else:
        print(f"{completion.new_text()}\n{SEPARATOR}")
    sys.stdout.flush()


def print_tokens(pieces, logprobs):
    """Prints a line per token: its log-probability, or - for none, and its text."""
    for piece, logprob in zip(pieces, logprobs, strict=True):
        print("-" if logprob is None else f"{logprob:.4f}", repr(piece), sep="\t")


def print_copies(texts, training_text, val_text):
    """Prints what occurs in the training text: of each text, and of as much validation text."""
    ends, excerpts = np.linspace(0, len(val_text), len(texts) + 1).astype(int)[1:], []
    for text, end in zip(texts, ends, strict=True):
        excerpts.append(val_text[max(0, end - len(text)) : end])
    copies, ordinary = find_copies(texts, training_text), find_copies(excerpts, training_text)
    for number, (passage, share) in enumerate(copies):
        other_passage, other_share = ordinary[number]
        shares = f"{share:.0%} copied (validation text: {other_share:.0%})"
        lengths = f"longest passage {len(passage)} characters ({len(other_passage)})"
        print(f"text {number + 1}: {shares}, {lengths}: {passage!r}", file=sys.stderr)


# Other modes


def converse(trained: TrainedModel, settings):
    """Reads prompts and continues each; an empty prompt continues the text. Ctrl-C ends a text."""
    with suppress(ImportError):  # not available on Windows
        import readline  # noqa: F401, gives input() a history
    print("empty line: continue; Ctrl-C: end the text; Ctrl-D: exit", file=sys.stderr)
    tokenizer, seed = trained.tokenizer, settings.seed
    ids = tokenizer.encode_prompt(tokenizer.start)  # of the text that an empty prompt continues
    while True:
        try:
            if prompt := input("> " if sys.stdin.isatty() else "").rstrip("\r"):
                ids = tokenizer.encode_prompt(prompt, settings.allow_special)
            completion = Completion("", ids, seed, tokenizer, settings.stop)  # prints no prompt
            seed += 1
            for _ in complete(trained, [completion], settings, stream=True):
                print(completion.new_text(), end="", flush=True)
                ids = completion.prompt_ids + completion.ids
            print(completion.new_text())
            if completion.stopped != "length":  # ids contain the stop text or the end token
                added = tokenizer.encode(completion.text, settings.allow_special)
                ids = completion.prompt_ids + added.tolist()
        except UserError as error:  # a character that is not in the vocabulary
            print(error, file=sys.stderr)
        except process.Interrupted as interrupt:
            if interrupt.number != signal.SIGINT:
                raise
            print()
        except EOFError:
            print()
            return


def print_scores(trained: TrainedModel, texts, settings):
    """Prints the loss, perplexity and bits per byte of texts, a file or its lines.

    With --by_line or --logprobs, each line's or token's is on stdout, and that of all on stderr.
    """
    tokenizer, end = trained.tokenizer, []
    if settings.by_line:  # each has a line end before and behind it
        with as_user_error("the model has no line break; omit --by_line", UserError):
            end = tokenizer.encode_prompt(tokenizer.start and "\n")
    encoded = [tokenizer.encode(text, settings.allow_special).tolist() for text in texts]
    encoded = [end + ids + end for ids in encoded]
    losses, [*rows, totals] = score_texts(trained, encoded, settings.context_stride)
    if settings.by_line:
        for text, row in zip(texts, rows, strict=True):
            values = json.dumps({"text": text} | row, ensure_ascii=False)
            print(values if settings.json else f"{row['loss']:.4f}\t{text}")
    if settings.logprobs:
        print_tokens(map(tokenizer.decoder(), encoded[0]), [None, *(-losses[0]).tolist()])
    line = f"{settings.score}: loss {totals['loss']:.4f}, perplexity {totals['perplexity']:.5g}, "
    line += f"bits per byte {totals['bits_per_byte']:.4f}, over {totals['tokens']:,} tokens"
    if settings.json:
        line = json.dumps(totals)
    print(line, file=sys.stderr if settings.logprobs or settings.by_line else sys.stdout)


def read_lines(path):
    """Returns the lines of a file that are not empty. Raises UserError if there is none."""
    lines = [line for line in read_text(path).split("\n") if line]
    if not lines:
        raise UserError(f"{'standard input' if path == '-' else path} has no line with text")
    return lines


def parse_stop_texts(stop):
    """Returns the stop texts: `stop`, or the items if it is a JSON list, which begins with [."""
    if stop is None:
        return []
    try:
        stop_texts = json.loads(stop) if stop.startswith("[") else [unescape(stop)]
    except (ValueError, RecursionError):
        stop_texts = [None]
    if not all(isinstance(text, str) and text for text in stop_texts):
        kinds = "a nonempty string; if it begins with [, a JSON list of them"
        raise UserError(f"--stop={stop:.99} must be {kinds}")
    return stop_texts


if __name__ == "__main__":
    process.run(main, "use --device=cpu or a shorter text")
