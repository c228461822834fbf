"""What the playground does with a text: generate, continue from another token, score, explain.

A text is a list of tokens with the probabilities that a model gave them. What computes with a model
is called in the thread of tools.models.Models.
"""

import math
import time
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from folio.completion import Completion, stop_texts
from folio.errors import UserError
from folio.fields import check_value, parse_value
from folio.generate import context_start, scoring_starts, stride_of
from folio.scoring import likely_next, score_text
from sample import SampleConfig, completions_of, continued
from tools.attention import draw, label_of

CONTROLS = (  # settings of sample.py that the page has
    "temperature",
    "max_new_tokens",
    "seed",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "context_stride",
    "stop",
)
BANDS = {  # name: lowest probability, text, color
    "likely": (0.5, "50–100%", "#e3f1ec"),
    "fair": (0.2, "20–50%", "#fdf1c0"),
    "unlikely": (0.05, "5–20%", "#fddca6"),
    "rare": (0.01, "1–5%", "#fbbd97"),
    "surprising": (0.0, "below 1%", "#f1998c"),
}
ALTERNATIVES = 10
CHANGED = "the text has changed since this token was selected: select it again"
MOST_TOKENS = 5000  # of a text that is scored; a page with more becomes slow


class Token(NamedTuple):
    """A token of a text. `start` is the first token that the model saw when it predicted this."""

    id: int
    piece: str
    start: int
    logprob: float | None = None  # nats; None: not computed

    @property
    def band(self):
        """The name of its probability's band in BANDS; empty if it has none."""
        if self.logprob is None:
            return ""
        probability = math.exp(self.logprob)
        return next(name for name, (least, *_) in BANDS.items() if probability >= least)

    @property
    def percent(self):
        return "" if self.logprob is None else percent(math.exp(self.logprob))


def percent(probability):
    return f"{probability:.1%}" if probability >= 0.001 else "<0.1%"


@dataclass
class Annotated:
    """Tokens and the version of the model that they belong to."""

    version: tuple  # tools.models.Version
    model: str  # its description
    tokens: list
    status: str = ""

    @property
    def ids(self):
        return [token.id for token in self.tokens]

    @property
    def text(self):
        return "".join(token.piece for token in self.tokens)


def controls():
    """Returns the fields of the settings CONTROLS."""
    by_name = {each.name: each for each in fields(SampleConfig)}
    return [by_name[name] for name in CONTROLS]


def settings_of(values):
    """Returns the SampleConfig with these values of CONTROLS, as text or numbers.

    An empty one is None. Raises UserError like sample.py.
    """
    checked = {}
    for each, value in zip(controls(), values, strict=True):
        if value in ("", None):
            checked[each.name] = check_value(each, None, each.name)
        else:
            checked[each.name] = parse_value(each, str(value), each.name)
    stop_texts(checked["stop"])
    return SampleConfig(**checked, num_samples=1, stream=True)


# Generation


class Generation:
    """The continuation of a prompt, or of a text up to another token."""

    def __init__(self, models, settings):
        self.models, self.settings = models, settings
        self.seconds = 0.0  # since the start, without loading the model
        self._completion = None

    def continue_prompt(self, stopped, path, prompt):
        """Continues a prompt with a checkpoint as it is now. Default: the tokenizer's prompt."""
        trained, version = self.models.newest(path)
        [completion] = completions_of([prompt or None], self.settings, trained.tokenizer)
        before = prompt_tokens(trained, completion.prompt_ids)
        before = Annotated(version, trained.checkpoint.summary, before)
        return self._run(stopped, trained, before, completion)

    def branch(self, stopped, text, index, choice):
        """Continues a text whose token `index` is replaced by `choice`, one of alternatives()."""
        trained = self.models.same(text.version)
        before, start = text.tokens[:index], token_at(text, index).start
        ids = [token.id for token in before]
        likely = dict(likely_next(trained, ids[start:], ALTERNATIVES))
        if choice not in likely:
            raise UserError(CHANGED)
        ids.append(choice)
        piece = last_piece(trained.tokenizer, ids)
        token = Token(choice, piece, start, math.log(likely[choice]))
        before = replace(text, tokens=[*before, token])
        stops = stop_texts(self.settings.stop)
        completion = Completion(before.text, ids, self.settings.seed, trained.tokenizer, stops)
        return self._run(stopped, trained, before, completion)

    def _run(self, stopped, trained, before, completion):
        self._before, self._config = before, trained.model.config
        self._stride = stride_of(trained.model, self.settings.context_stride)
        self._completion, started = completion, time.monotonic()
        for _ in continued(trained, self.settings, [completion]):
            self.seconds = time.monotonic() - started
            if stopped.is_set():
                break
        return self.text()

    def text(self):
        """Returns the text so far as Annotated, or None. Any thread may call it."""
        if not self._completion:
            return None
        tokens, filled = list(self._before.tokens), len(self._before.tokens)
        completion, size = self._completion, self._config.block_size
        done = list(zip(completion.ids, completion.pieces, completion.logprobs, strict=False))
        rest = completion.confirmed()[len(completion.prompt) :]
        for number, (token, piece, logprob) in enumerate(done):
            # What may be a stop text is not shown. Bytes that are no character are only in `text`.
            piece = rest if number == len(done) - 1 else rest[: len(piece)]
            rest = rest[len(piece) :]
            start = context_start(filled + number, size, self._stride, filled)
            tokens.append(Token(token, piece, start, logprob))
        return replace(self._before, tokens=tokens, status=self._status(len(done)))

    def _status(self, count):
        speed = f", {count / self.seconds:,.0f} tokens/s" if self.seconds else ""
        reason = self._completion.stopped or "length"
        ended = f"; ended by {reason!r}" if reason != "length" else ""
        return f"{count:,} token{'s' * (count != 1)}{speed}{ended}"


def prompt_tokens(trained, ids):
    """Returns the Tokens of a prompt."""
    pieces = pieces_of(trained.tokenizer, ids)
    starts = (max(0, index - trained.model.config.block_size) for index in range(len(ids)))
    return list(map(Token, ids, pieces, starts))


def pieces_of(tokenizer, ids):
    """Returns the text that each token adds; a character is added with its last token."""
    decode = tokenizer.decoder()
    pieces = [decode(token) for token in ids]
    return [*pieces[:-1], pieces[-1] + decode(None)] if pieces else []


def last_piece(tokenizer, ids):
    """Returns the text that the last token adds; a character that it only begins is added later."""
    decode = tokenizer.decoder()
    return [decode(token) for token in ids][-1]


# Explanation


def score(models, path, string):
    """Returns a text, scored by a checkpoint as it is now."""
    trained, version = models.newest(path)
    ids = trained.tokenizer.encode(string).tolist()
    if len(ids) > MOST_TOKENS:
        raise UserError(
            f"the text has {len(ids):,} tokens, and the page shows at most {MOST_TOKENS:,}: "
            f"use python sample.py --init_from={path} --score=FILE"
        )
    scored = score_text(trained, string)
    starts = [0, *scoring_starts(trained.model, len(ids))]
    tokens = list(map(Token, ids, pieces_of(trained.tokenizer, ids), starts, scored.logprobs))
    return Annotated(version, trained.checkpoint.summary, tokens, scored.summary)


def alternatives(models, text, index):
    """Returns (title, [(label, id), ...]): the most likely tokens in place of token `index`.

    The label has the model's probability, which ignores the settings.
    """
    trained = models.same(text.version)
    token = token_at(text, index)
    if not index:
        return "the model does not predict the first token", []
    likely = likely_next(trained, text.ids[token.start : index], ALTERNATIVES)
    labels = {each: label_of(trained.tokenizer, each) for each, _ in [*likely, (token.id, 1)]}
    title = f"likely tokens in place of {labels[token.id]}; select one to continue from there"
    return title, [(f"{labels[each]}  {percent(share)}", each) for each, share in likely]


def token_at(text, index):
    """Returns a token. Raises UserError if the text no longer has it."""
    if index >= len(text.tokens):
        raise UserError(CHANGED)
    return text.tokens[index]


def attention(models, text, layer):
    """Returns a figure of the attention weights in a layer over the newest tokens of a text."""
    if layer is None or layer != int(layer):
        raise UserError("enter the number of a layer; the first is 0")
    trained = models.same(text.version)
    return draw(trained, text.ids, f"{text.version.path}, layer {layer:.0f}", [int(layer)])


def vocabulary_problem(trained, prompt):
    """Returns why a model's tokenizer cannot encode a prompt, or an empty string."""
    try:
        trained.tokenizer.encode(prompt)
    except UserError as error:
        return str(error)
    return ""
