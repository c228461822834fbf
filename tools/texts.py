"""The playground's models, and what they do with a text: generate, continue, score, explain."""

import math
import os
import time
import weakref
from typing import NamedTuple

from folio.completion import Completion, load_trained, stop_texts
from folio.errors import UserError
from folio.generate import context_start, scoring_starts, stride_of
from folio.initial import load_initial
from folio.scoring import likely_next, score_text
from sample import completions_of, continued
from tools.attention import label_of

MOST_MODELS = 2  # in memory
MOST_TOKENS = 5000  # of a prompt or of a text to score; a page with more becomes slow
ALTERNATIVES = 10
SECONDS = 0.2  # between two updates of a text that is generated


class Models:
    """Loads models, and keeps the last MOST_MODELS in memory."""

    def __init__(self, device, dtype):
        self.device, self.dtype = device, dtype
        self._loaded = {}  # {(path, time of its change): TrainedModel}, the last used at the end

    def newest(self, path):
        """Returns the TrainedModel of a checkpoint file as it is now."""
        try:
            version = path, os.stat(path).st_mtime_ns
        except OSError as error:
            raise UserError(f"there is no checkpoint {path}: choose another model") from error
        if version not in self._loaded:
            while len(self._loaded) >= MOST_MODELS:  # before loading, for its memory
                del self._loaded[next(iter(self._loaded))]
            self._loaded[version] = load_trained(load_initial(path), self.device, self.dtype)
        self._loaded[version] = self._loaded.pop(version)
        return self._loaded[version]


class Token(NamedTuple):
    """A token of a text. `start` is the first token that the model saw when it predicted this."""

    id: int
    piece: str  # the text that it adds
    start: int
    logprob: float | None = None  # nats; None: not computed


class TokenText:
    """The tokens of a text, and the model that they are from, as long as it is in memory."""

    def __init__(self, trained, tokens, status):
        self._trained = weakref.ref(trained)
        self.tokens, self.status = tokens, f"{status}; {trained.checkpoint.summary}"
        self.ids = [token.id for token in tokens]

    @property
    def trained(self):
        if not (trained := self._trained()):
            raise UserError("the model of this text is no longer in memory: make the text again")
        return trained


# Generation


def generate(models, path, prompt, settings):
    """Yields the continuation of a prompt as it grows. An empty one is the tokenizer's default."""
    trained = models.newest(path)
    [completion] = completions_of([prompt or None], settings, trained.tokenizer)
    ids, size = completion.prompt_ids, trained.model.config.block_size
    check_length(ids)
    starts = (max(0, index - size) for index in range(len(ids)))
    tokens = list(map(Token, ids, pieces_of(trained.tokenizer, ids), starts))
    yield from growing(trained, tokens, completion, settings)


def branch(text, index, choice, settings):
    """Yields a text whose token `index` is replaced by `choice`, one of alternatives()."""
    trained, start = text.trained, text.tokens[index].start
    ids = [*text.ids[:index], choice]
    probability = dict(likely_next(trained, ids[start:-1], ALTERNATIVES))[choice]
    piece = pieces_of(trained.tokenizer, ids)[-1]
    tokens = [*text.tokens[:index], Token(choice, piece, start, math.log(probability))]
    prompt, stops = "".join(token.piece for token in tokens), stop_texts(settings.stop)
    completion = Completion(prompt, ids, settings.seed, trained.tokenizer, stops)
    yield from growing(trained, tokens, completion, settings)


def growing(trained, tokens, completion, settings):
    """Yields a text, `tokens` and those of its completion, while they are generated."""
    started = shown = time.monotonic()
    for _ in continued(trained, settings, [completion]):
        now, count = time.monotonic(), len(completion.ids)
        status = f"{count:,} token{'s' * (count != 1)}, {count / (now - started):,.0f} tokens/s"
        if count == 1 or now > shown + SECONDS:
            shown = now
            new = new_tokens(trained.model, len(tokens), completion, settings)
            yield TokenText(trained, tokens + new, status)
    if completion.stopped != "length":
        status += f"; ended by {completion.stopped!r}"
    new = new_tokens(trained.model, len(tokens), completion, settings)
    yield TokenText(trained, tokens + new, status)


def new_tokens(model, filled, completion, settings):
    """Returns the tokens of a completion, whose prompt has `filled`.

    Their pieces are without what may be the start of a stop text.
    """
    size, stride = model.config.block_size, stride_of(model, settings.context_stride)
    rest, tokens = completion.confirmed()[len(completion.prompt) :], []
    done = zip(completion.ids, completion.pieces, completion.logprobs, strict=True)
    for index, (token, piece, logprob) in enumerate(done, filled):
        start = context_start(index, size, stride, filled)
        tokens.append(Token(token, rest[: len(piece)], start, logprob))
        rest = rest[len(piece) :]
    tokens[-1] = tokens[-1]._replace(piece=tokens[-1].piece + rest)  # an incomplete character
    return tokens


def pieces_of(tokenizer, ids):
    """Returns the text that each token adds; a character is added with its last token."""
    decode = tokenizer.decoder()
    return [decode(token) for token in ids]


def check_length(ids):
    if len(ids) > MOST_TOKENS:
        raise UserError(
            f"the text has {len(ids):,} tokens, more than the {MOST_TOKENS:,} of the page: "
            "use sample.py"
        )


# Explanation


def score(models, path, string):
    """Returns a text, scored by a checkpoint as it is now."""
    trained = models.newest(path)
    ids = trained.tokenizer.encode(string).tolist()
    check_length(ids)
    scored = score_text(trained, string)
    starts = [0, *scoring_starts(trained.model, len(ids))]
    tokens = map(Token, ids, pieces_of(trained.tokenizer, ids), starts, scored.logprobs)
    return TokenText(trained, list(tokens), scored.summary)


def alternatives(text, index):
    """Returns (title, [(label, id), ...]): the most likely tokens in place of token `index`.

    The label has the model's probability, which ignores the settings.
    """
    if index >= len(text.tokens):
        raise UserError("the text has changed since this token was selected: select it again")
    if not index:
        return "the model does not predict the first token", []
    token, tokenizer = text.tokens[index], text.trained.tokenizer
    likely = likely_next(text.trained, text.ids[token.start : index], ALTERNATIVES)
    choices = [(f"{label_of(tokenizer, each)}  {percent(share)}", each) for each, share in likely]
    label = label_of(tokenizer, token.id)
    return f"likely tokens in place of {label}; select one to continue from there", choices


def percent(probability):
    return f"{probability:.1%}" if probability >= 0.001 else "<0.1%"
