"""The models of the playground: loading, generating, branching, scoring and explaining a text."""

import time
from functools import lru_cache
from typing import Any, NamedTuple

from folio.checkpoint.run_dir import RunDir
from folio.inference.completion import Completion, complete
from folio.inference.generate import context_start, stride_of
from folio.inference.scoring import likely_next, score_text, scoring_starts
from folio.inference.trained_model import load_trained
from folio.pretrained.load import load_initial
from sample import parse_stop_texts
from tools.plot.attention import format_token

MAX_ALTERNATIVES = 10
UPDATE_INTERVAL_S = 0.2


class TokenText(NamedTuple):
    """A text of a TrainedModel. The lists have an item for each token."""

    trained: Any
    ids: list
    pieces: list  # the text that the token adds; a character is added with its last token
    starts: list  # index of the first token that the model saw when it predicted the token
    logprobs: list  # nats; None: not computed
    status: str


def make_model_loader(device, dtype):
    """Returns a function that returns the TrainedModel of a run directory as it is now.

    It is the best model, or the newest if there is no best. The last two stay in memory.
    """

    @lru_cache(maxsize=2)
    def load(path, modified_ns):
        return load_trained(load_initial(path), device, dtype)

    def load_model(folder):
        run_dir = RunDir(folder)
        path = run_dir.best if run_dir.best.is_file() else run_dir.last
        return load(str(path), path.stat().st_mtime_ns)

    return load_model


def generate(trained, prompt, settings):
    """Yields the continuation of a prompt as it grows. An empty one is the tokenizer's default."""
    ids = trained.tokenizer.encode(prompt or trained.tokenizer.start).tolist()
    starts = [max(0, index - trained.model.config.block_size) for index in range(len(ids))]
    return continue_text(trained, ids, starts, [None] * len(ids), settings)


def branch(text, index, token, settings):
    """Yields the continuation of the text before token `index`, which is replaced by `token`."""
    ids, logprobs = [*text.ids[:index], token], [*text.logprobs[:index], None]
    return continue_text(text.trained, ids, text.starts[: index + 1], logprobs, settings)


def continue_text(trained, ids, starts, logprobs, settings):
    """Yields a TokenText that starts with these tokens, while its continuation is generated."""
    pieces = list(map(trained.tokenizer.decoder(), ids))
    text = TokenText(trained, ids, pieces, starts, logprobs, "")
    stops = parse_stop_texts(settings.stop)
    completion = Completion("".join(pieces), ids, settings.seed, trained.tokenizer, stops)
    start_time = update_time = time.monotonic()
    for _ in complete(trained, [completion], settings, settings.stream):
        now, count = time.monotonic(), len(completion.ids)
        status = f"{count:,} tokens, {count / (now - start_time):,.0f} tokens/s"
        if count == 1 or now > update_time + UPDATE_INTERVAL_S:
            update_time = now
            yield append_completion(text, completion, settings, status)
    if completion.stopped != "length":
        status += f"; ended by {completion.stopped!r}"
    yield append_completion(text, completion, settings, status)


def append_completion(text, completion, settings, status):
    """Returns a text with the tokens of a completion.

    The new pieces are without what may be the start of a stop text.
    """
    model, prompt_length = text.trained.model, len(text.ids)
    block_size, stride = model.config.block_size, stride_of(model, settings.context_stride)
    ids, logprobs = text.ids + completion.ids, text.logprobs + completion.logprobs
    starts, pieces = list(text.starts), list(text.pieces)
    for index in range(prompt_length, len(ids)):
        starts.append(context_start(index, block_size, stride, prompt_length))
    end = len(completion.prompt)
    stable_text = completion.stable_text()
    for piece in completion.pieces:
        pieces.append(stable_text[end : end + len(piece)])
        end += len(piece)
    pieces[-1] += stable_text[end:]  # an incomplete character
    return TokenText(text.trained, ids, pieces, starts, logprobs, status)


def score(trained, string):
    """Returns the TokenText of a string, with the probabilities of its tokens."""
    scored = score_text(trained, string)
    pieces = list(map(trained.tokenizer.decoder(), scored.ids))
    starts = [0, *scoring_starts(trained.model, len(scored.ids))]
    return TokenText(trained, scored.ids, pieces, starts, scored.logprobs, scored.summary)


def list_alternatives(text, index):
    """Returns (title, [(label, id), ...]): the most likely tokens in place of token `index`.

    The label has the model's probability before temperature, top_k and so on.
    """
    if not index:
        return "the model does not predict the first token", []
    tokenizer = text.trained.tokenizer
    context = text.ids[text.starts[index] : index]
    choices = []
    for token, probability in likely_next(text.trained, context, MAX_ALTERNATIVES):
        label = f"{format_token(tokenizer, token)}  {format_percent(probability)}"
        choices.append((label, token))
    replaced = format_token(tokenizer, text.ids[index])
    return f"likely tokens in place of {replaced}; select one to continue from there", choices


def format_percent(probability):
    return f"{probability:.1%}" if probability >= 0.001 else "<0.1%"
