"""Components of the playground's page, its style, and how it reports errors."""

import html
from contextlib import contextmanager
from functools import partial

import gradio as gr

from folio.errors import UserError
from folio.fields import type_name
from tools.texts import BANDS, Generation, settings_of

# Options of events. They are private because the description of a public API, with the names of
# runs, would be served without a password. Their number is not limited: what computes waits for the
# models' thread.
QUIET = {"show_progress": "hidden", "concurrency_limit": None, "api_visibility": "private"}
WAITING = "waiting for the model"
# Fonts of the system: others would be downloaded.
THEME = gr.themes.Default(
    primary_hue="teal",
    font=["system-ui", "sans-serif"],
    font_mono=["ui-monospace", "monospace"],
)
# gr.HighlightedText breaks lines inside words, so texts are HTML.
TOKENS_CSS = """
.tokens { display: flex; flex-direction: column-reverse; max-height: 60vh; overflow-y: auto }
.tokens p { white-space: pre-wrap; overflow-wrap: anywhere; min-height: 3em; line-height: 1.6 }
.tokens .token { cursor: pointer }
.tokens .token:hover { outline: 2px solid }
.tokens u::before { content: "↵"; opacity: 0.5 }
.tokens u { text-decoration: none; color: inherit }
.legend { margin-bottom: 8px; font-size: 12px; line-height: 2 }
.legend span { padding: 2px 6px; white-space: nowrap }
""" + "".join(
    f".{name} {{ background: {color}; color: black }}\n" for name, (_, _, color) in BANDS.items()
)
SELECT_JS = """
element.addEventListener("click", event => {
    const index = [...element.querySelectorAll(".token")].indexOf(event.target.closest(".token"));
    if (index >= 0) trigger("select", {index: index, value: null});
});
"""


@contextmanager
def reported():
    """Shows a UserError for some seconds."""
    try:
        yield
    except UserError as error:
        raise gr.Error(html.escape(str(error), quote=False), print_exception=False) from error


def streamed(models, function, *args, text=lambda: None):
    """Yields text() until function(stopped, *args) has returned, then its result.

    Before the first text, and after a UserError, it yields a message.
    """
    try:
        for future in models.stream(function, *args):
            yield future.result() if future.done() else text() or WAITING
    except UserError as error:
        yield message(error)


def generated(models, values, function, *args):
    """Yields the text of a Generation with these settings as streamed(); `function` is a method."""
    try:
        generation = Generation(models, settings_of(values))
    except UserError as error:
        yield message(error)
        return
    yield from streamed(models, partial(function, generation), *args, text=generation.text)


def message(error):
    """Returns an error as HTML, in place of a text or its description."""
    return f'<span style="color: var(--error-text-color)">{html.escape(str(error))}</span>'


def tokens_view():
    """Returns the component for the value of tokens_html(); `select` has the index of a token."""
    style = {"css_template": TOKENS_CSS, "js_on_load": SELECT_JS}
    return gr.HTML(tokens_html(()), container=True, padding=True, **style)


def tokens_html(tokens):
    """Returns tokens as HTML: the color shows a token's probability, the tooltip has it."""
    legend = [f'<span class="{name}">{text}</span>' for name, (_, text, _) in BANDS.items()]
    shown = (
        f'<span class="token {token.band}" title="{token.percent}">'
        + html.escape(token.piece).replace("\n", "<u></u>\n")
        + "</span>"
        for token in tokens
    )
    legend = f'<p class="legend">probability {"".join(legend)}</p>'
    return f'{legend}<div class="tokens"><p>{"".join(shown)}</p></div>'


def control(field):
    """Returns the component of a setting of sample.py."""
    kind, bounds = type_name(field), field.metadata["bounds"]
    label = {"label": field.name, "info": field.metadata["explanation"]}
    if bounds:
        label["info"] += f"; in {bounds}"
    if kind.endswith("None"):  # a Number without value becomes 0 as soon as it is visible
        value = None if field.default is None else str(field.default)
        return gr.Textbox(value, placeholder="None", **label)
    return gr.Number(field.default, step=1 if kind == "int" else 0.1, **label)
