"""The playground's page: its components and events. texts.py computes the texts."""

import html
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import wraps

import gradio as gr

from folio.checkpoint.run_dir import RunDir
from folio.cli.errors import UserError
from folio.cli.settings import load_settings
from folio.hardware.memory import explain_out_of_memory
from sample import SampleConfig
from tools.playground import texts
from tools.plot.attention import draw_attention
from tools.plot.losses import AXES, LABELS, draw_losses
from tools.plot.runs import find_nested_runs, group_runs, read_runs
from tools.plot.table import compare_groups

MAIN_SAMPLE_SETTINGS = ("temperature", "max_new_tokens", "seed")
MORE_SETTINGS = ("top_k", "top_p", "min_p", "repetition_penalty", "context_stride", "stop")
LOSSES_INTERVAL_S = 5  # between two updates
MEMORY_ADVICE = "use --device=cpu, or a smaller model or shorter text"
MAX_DRAWN_RUNS = 8  # the first ones
# A thread that calls torch on a CPU has its own OpenMP threads. If several have, there are more of
# them than cores, and generation takes twice as long.
THREAD = ThreadPoolExecutor(1)
MAX_LENGTH = 20_000  # characters of an input, and generated tokens; more make the page slow
ALTERNATIVES_LABEL = "select a token of the text to see which others were likely"
# Events are private because the description of a public API, with the names of runs, would be
# served without a password.
EVENT_OPTIONS = {"show_progress": "hidden", "concurrency_limit": None, "api_visibility": "private"}
# Fonts of the system: others would be downloaded.
THEME = gr.themes.Default(
    primary_hue="teal", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
)
PROBABILITY_BANDS = (  # (lowest probability, its text, color)
    (0.5, "50–100%", "#e3f1ec"),
    (0.2, "20–50%", "#fdf1c0"),
    (0.05, "5–20%", "#fddca6"),
    (0.01, "1–5%", "#fbbd97"),
    (0.0, "below 1%", "#f1998c"),
)
SPANS = [f'<span style="background: {color}">{text}</span>' for _, text, color in PROBABILITY_BANDS]
LEGEND = f'<p class="legend">probability {"".join(SPANS)}</p>'
# gr.HighlightedText breaks lines inside words, so texts are HTML.
TOKENS_CSS = """
.tokens { display: flex; flex-direction: column-reverse; max-height: 60vh; overflow-y: auto }
.tokens p { white-space: pre-wrap; overflow-wrap: anywhere; min-height: 3em; line-height: 1.6 }
.token { cursor: pointer }
.token span::before { content: "↵"; opacity: 0.5 }
.token.selected { outline: 2px solid }
.token[style], .legend span { color: black }
.legend { margin-bottom: 8px; font-size: 12px; line-height: 2 }
.legend span { padding: 2px 6px; white-space: nowrap }
"""
SELECT_JS = """
element.addEventListener("click", event => {
    const tokens = [...element.querySelectorAll(".token")];
    const index = tokens.indexOf(event.target.closest(".token"));
    if (index < 0) return;
    tokens.forEach((token, number) => token.classList.toggle("selected", number === index));
    trigger("select", {index: index, value: null});
});
"""


def build_page(load_model, folder):
    """Returns the page. The model of the run in `folder` is selected.

    `load_model` returns the model of a run; see tools.playground.texts.make_model_loader.
    """
    with gr.Blocks(title="folio", analytics_enabled=False) as page:
        with gr.Tab("Text") as text_tab:
            settings = add_text_tab(page, load_model, folder)
        with gr.Tab("Compare") as compare_tab:
            add_compare_tab(load_model, folder, settings)
        with gr.Tab("Runs") as runs_tab:
            add_runs_tab(runs_tab, [text_tab, compare_tab])
    return page


def in_thread(generator):
    """Decorator: runs a generator function in THREAD, and shows its errors on the page.

    Several generators, such as those of two tabs, alternate.
    """

    @wraps(generator)
    def run(*args):
        items = generator(*args)
        try:
            for value in args:
                if isinstance(value, str) and len(value) > MAX_LENGTH:
                    raise UserError(f"{len(value):,} characters are too many: use sample.py")
            with explain_out_of_memory("the device", MEMORY_ADVICE):
                while (item := THREAD.submit(next, items, None).result()) is not None:
                    yield item
        except (UserError, OSError) as error:
            message = html.escape(str(error), quote=False)
            raise gr.Error(message, print_exception=False) from error
        finally:
            THREAD.submit(items.close)

    return run


def add_text_tab(page, load_model, folder):
    """Generates or scores a text, and explains its tokens. Returns the inputs of the settings."""
    text = gr.State()  # a TokenText
    selection = gr.State()  # a TokenText, and the index of the token to replace
    with gr.Row():
        with gr.Column(scale=2, min_width=320):
            model, summary = add_model_list("model", folder), gr.HTML(padding=False)
            with gr.Tab("Generate"):
                prompt = gr.Textbox(label="prompt", lines=3, placeholder="empty: a line break")
                with gr.Row():
                    start = gr.Button("Generate", variant="primary")
                    stop = gr.Button("Stop")
                with gr.Row():
                    settings = [add_setting(name) for name in MAIN_SAMPLE_SETTINGS]
                with gr.Accordion("more settings", open=False):
                    settings += [add_setting(name) for name in MORE_SETTINGS]
            with gr.Tab("Score"):
                pasted = gr.Textbox(label="text", lines=8)
                start_scoring = gr.Button("Score", variant="primary")
        with gr.Column(scale=3, min_width=320):
            tokens, status = add_tokens(), gr.HTML(padding=False)
            alternatives = gr.Radio([], label=ALTERNATIVES_LABEL)
            with gr.Accordion("Attention", open=False):
                with gr.Row():
                    layer = gr.Number(0, label="layer", precision=0)
                    start_attention = gr.Button("Draw the attention of each head")
                figure = gr.Plot(show_label=False)

    @in_thread
    def describe(folder):
        yield html.escape(load_model(folder).checkpoint.summary)

    @in_thread
    def generate(folder, prompt, *values):
        for text in texts.generate(load_model(folder), prompt, read_settings(values)):
            yield show(text)

    @in_thread
    def branch(selection, token, *values):
        for text in texts.branch(*selection, token, read_settings(values)):
            yield show(text)

    @in_thread
    def score(folder, pasted):
        yield show(texts.score(load_model(folder), pasted))

    def show(text):
        return text, *render_text(text), gr.Radio([], value=None, label=ALTERNATIVES_LABEL)

    @in_thread
    def select(text, event: gr.SelectData):
        label, choices = texts.list_alternatives(text, event.index)
        yield (text, event.index), gr.Radio(choices, value=None, label=label)

    @in_thread
    def explain(text, layer):
        if not text:
            raise UserError("generate or score a text first")
        layer = int(layer or 0)  # None: empty
        yield draw_attention(text.trained, text.ids, f"layer {layer}", layer)

    outputs, starts = [text, tokens, status, alternatives], [start.click, prompt.submit]
    gr.on([page.load, model.change, *starts], describe, model, summary, **EVENT_OPTIONS)
    generating = gr.on(starts, generate, [model, prompt, *settings], outputs, **EVENT_OPTIONS)
    inputs = [selection, alternatives, *settings]
    branching = alternatives.input(branch, inputs, outputs, cancels=[generating], **EVENT_OPTIONS)
    start_scoring.click(score, [model, pasted], outputs, cancels=[generating], **EVENT_OPTIONS)
    tokens.select(select, text, [selection, alternatives], **EVENT_OPTIONS)
    start_attention.click(explain, [text, layer], figure, **EVENT_OPTIONS)
    stop.click(None, cancels=[generating, branching])
    gr.on([*starts, start_scoring.click], None, cancels=[branching])
    return settings


def add_compare_tab(load_model, folder, settings):
    """Continues a prompt with two models, with the same settings."""
    prompt = gr.Textbox(label="prompt", lines=2, placeholder="empty: a line break")
    with gr.Row():
        start = gr.Button("Generate with both", variant="primary")
        stop = gr.Button("Stop")
    gr.Markdown("The seed and the other settings are those of the tab Text.")
    models, outputs = [], []
    with gr.Row():
        for label in ("first model", "second model"):
            with gr.Column(min_width=320):
                models.append(add_model_list(label, folder))
                outputs += [add_tokens(), gr.HTML(padding=False)]

    @in_thread
    def compare(first, second, prompt, *values):
        settings = read_settings(values)
        for text in texts.generate(load_model(first), prompt, settings):
            yield *render_text(text), gr.skip(), gr.skip()
        for text in texts.generate(load_model(second), prompt, settings):
            yield gr.skip(), gr.skip(), *render_text(text)

    comparing = start.click(compare, [*models, prompt, *settings], outputs, **EVENT_OPTIONS)
    stop.click(None, cancels=[comparing])


def add_runs_tab(tab, other_tabs):
    """Compares the losses of runs, also while they are trained, as long as the tab is open."""
    displayed = gr.State()  # sizes of logs, and the axes
    with gr.Row():
        x = gr.Radio(list(AXES), value="steps", label="x axis")
        y = gr.Radio(list(LABELS), value="loss", label="y axis and table")
    plot = gr.Plot(label=f"the first {MAX_DRAWN_RUNS} runs")
    table = gr.Dataframe(label="all runs, the best of each dataset first", interactive=False)
    timer = gr.Timer(LOSSES_INTERVAL_S, active=False)

    @in_thread
    def update(displayed, x, y):
        logs = [RunDir(folder).log for folder in find_nested_runs()]
        sizes = {str(log.parent): log.stat().st_size for log in logs if log.exists()}
        if displayed == (sizes, x, y):
            yield [gr.skip()] * 3
            return
        groups = group_runs(read_runs(sizes), y)
        header, *rows = compare_groups(groups) if groups else [["run"]]
        best_groups = [group for group in groups if group.evaluated_runs][:MAX_DRAWN_RUNS]
        figure = draw_losses(best_groups, x) if best_groups else None
        yield (sizes, x, y), gr.Dataframe(rows, headers=header), figure

    changes = [tab.select, timer.tick, x.input, y.input]
    gr.on(changes, update, [displayed, x, y], [displayed, table, plot], **EVENT_OPTIONS)
    tab.select(lambda: gr.Timer(active=True), None, timer, **EVENT_OPTIONS)
    for other_tab in other_tabs:
        other_tab.select(lambda: gr.Timer(active=False), None, timer, **EVENT_OPTIONS)


# Components


def add_model_list(label, folder):
    """Returns a list of runs with a model, `folder` selected. Opening it reads it again."""

    def list_models(selected):
        folders = {str(path) for path in find_nested_runs() if RunDir(path).exists()}
        folders.add(selected)  # which may be elsewhere, or deleted
        return gr.Dropdown(sorted(folders), value=selected, label=label)

    models = list_models(folder)
    models.focus(list_models, models, models, **EVENT_OPTIONS)
    return models


def add_setting(name):
    """Returns the input for a setting of sample.py, as text."""
    [field] = [field for field in fields(SampleConfig) if field.name == name]
    info = field.metadata["explanation"]
    if bounds := field.metadata["bounds"]:
        info += f"; in {bounds}"
    return gr.Textbox(str(field.default), label=name, info=info)


def read_settings(values):
    """Returns the SampleConfig with the texts of the inputs; an empty one is the default."""
    pairs = zip(MAIN_SAMPLE_SETTINGS + MORE_SETTINGS, values, strict=True)
    flags = [f"--{name}={value}" for name, value in pairs if value]
    settings = load_settings(SampleConfig, [*flags, "--num_samples=1", "--stream=True"])
    if settings.max_new_tokens > MAX_LENGTH:
        raise UserError(f"max_new_tokens must be at most {MAX_LENGTH:,}: use sample.py for more")
    return settings


def add_tokens():
    """Returns the component for the tokens of a text; `select` has the index of a token."""
    style = {"css_template": TOKENS_CSS, "js_on_load": SELECT_JS}
    return gr.HTML(LEGEND, container=True, padding=True, **style)


def render_text(text):
    """Returns the tokens of a TokenText, and its status, as HTML.

    The color of a token shows its probability, and the tooltip has it.
    """
    spans = []
    for piece, logprob in zip(text.pieces, text.logprobs, strict=True):
        attributes = ""
        if logprob is not None:
            probability = math.exp(logprob)
            percent = texts.format_percent(probability)
            color = next(color for lowest, _, color in PROBABILITY_BANDS if probability >= lowest)
            attributes = f' style="background: {color}" title="{percent}"'
        piece = html.escape(piece).replace("\n", "<span></span>\n")
        spans.append(f'<span class="token"{attributes}>{piece}</span>')
    tokens = f'<div class="tokens"><p>{"".join(spans)}</p></div>'
    return LEGEND + tokens, html.escape(text.status)
