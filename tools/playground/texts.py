"""The playground's models, and what they do with a text: generate, continue, score, explain."""

import time
from functools import lru_cache
from typing import Any, NamedTuple

from folio.checkpoint.run_dir import RunDir
from folio.cli.errors import UserError
from folio.inference.completion import Completion, complete
from folio.inference.generate import context_start, stride_of
from folio.inference.sampling import Controls
from folio.inference.scoring import likely_next, score_text, scoring_starts
from folio.inference.trained_model import load_trained
from folio.pretrained.load import load_initial
from sample import parse_stop_texts
from tools.plot.attention import label_of

ALTERNATIVES = 10
MOST_CHARACTERS = 20_000  # of a text to score; a page with more becomes slow
SECONDS = 0.2  # between two updates of a text that is generated


class TokenText(NamedTuple):
    """The tokens of a text, in lists of equal length, and the TrainedModel that they are from."""

    trained: Any
    ids: list
    pieces: list  # the text that each token adds; a character is added with its last token
    starts: list  # the first token that the model saw when it predicted the token
    logprobs: list  # nats; None: not computed
    status: str


def model_loader(device, dtype):
    """Returns a function that returns the TrainedModel of a run as it is now.

    It is the best model, or the newest if there is no best. The last two stay in memory.
    """

    @lru_cache(maxsize=2)
    def load(path, changed):
        return load_trained(load_initial(path), device, dtype)

    def newest(folder):
        run = RunDir(folder)
        path = run.best if run.best.is_file() else run.last
        return load(str(path), path.stat().st_mtime_ns)

    return newest


# Generation


def generate(trained, prompt, settings):
    """Yields the continuation of a prompt as it grows. An empty one is the tokenizer's default."""
    ids = trained.tokenizer.encode(prompt or trained.tokenizer.start).tolist()
    starts = [max(0, index - trained.model.config.block_size) for index in range(len(ids))]
    pieces = list(map(trained.tokenizer.decoder(), ids))
    yield from growing(TokenText(trained, ids, pieces, starts, [None] * len(ids), ""), settings)


def branch(text, index, choice, settings):
    """Yields a text whose token `index` is replaced by `choice`, one of alternatives()."""
    ids = [*text.ids[:index], choice]
    pieces = list(map(text.trained.tokenizer.decoder(), ids))
    starts, logprobs = text.starts[: index + 1], [*text.logprobs[:index], None]
    yield from growing(TokenText(text.trained, ids, pieces, starts, logprobs, ""), settings)


def growing(text, settings):
    """Yields a TokenText with the tokens of its continuation, while they are generated."""
    tokenizer, stops = text.trained.tokenizer, parse_stop_texts(settings.stop)
    completion = Completion("".join(text.pieces), text.ids, settings.seed, tokenizer, stops)
    started = shown = time.monotonic()
    controls = Controls.from_settings(settings)
    for _ in complete(text.trained, [completion], controls, settings.stream):
        now, count = time.monotonic(), len(completion.ids)
        status = f"{count:,} tokens, {count / (now - started):,.0f} tokens/s"
        if count == 1 or now > shown + SECONDS:
            shown = now
            yield extended(text, completion, settings, status)
    if completion.stopped != "length":
        status += f"; ended by {completion.stopped!r}"
    yield extended(text, completion, settings, status)


def extended(text, completion, settings, status):
    """Returns a text with the tokens of a completion.

    The new pieces are without what may be the start of a stop text.
    """
    model, filled = text.trained.model, len(text.ids)
    size, stride = model.config.block_size, stride_of(model, settings.context_stride)
    rest, pieces = completion.stable_text()[len(completion.prompt) :], []
    for piece in completion.pieces:
        pieces.append(rest[: len(piece)])
        rest = rest[len(piece) :]
    pieces[-1] += rest  # an incomplete character
    indices = range(filled, filled + len(pieces))
    return TokenText(
        text.trained,
        text.ids + completion.ids,
        text.pieces + pieces,
        text.starts + [context_start(index, size, stride, filled) for index in indices],
        text.logprobs + completion.logprobs,
        status,
    )


# Explanation


def score(trained, string):
    """Returns a text with the probabilities of its tokens."""
    if len(string) > MOST_CHARACTERS:
        raise UserError(f"the text has {len(string):,} characters: use sample.py --score=FILE")
    scored = score_text(trained, string)
    pieces = list(map(trained.tokenizer.decoder(), scored.ids))
    starts = [0, *scoring_starts(trained.model, len(scored.ids))]
    return TokenText(trained, scored.ids, pieces, starts, scored.logprobs, scored.summary)


def alternatives(text, index):
    """Returns (title, [(label, id), ...]): the most likely tokens in place of token `index`.

    The label has the model's probability, which ignores the settings.
    """
    if not index:
        return "the model does not predict the first token", []
    tokenizer = text.trained.tokenizer
    likely = likely_next(text.trained, text.ids[text.starts[index] : index], ALTERNATIVES)
    choices = [(f"{label_of(tokenizer, each)}  {percent(share)}", each) for each, share in likely]
    label = label_of(tokenizer, text.ids[index])
    return f"likely tokens in place of {label}; select one to continue from there", choices


def percent(probability):
    return f"{probability:.1%}" if probability >= 0.001 else "<0.1%"
