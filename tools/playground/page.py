"""The playground's page: its components and events. tools/texts.py computes the texts."""

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
from tools.plot.__main__ import AXES, LABELS, draw_losses
from tools.plot.attention import draw
from tools.plot.runs import grouped, nested, read_all
from tools.plot.table import compared

CONTROLS = ("temperature", "max_new_tokens", "seed")  # settings of sample.py
MORE_CONTROLS = ("top_k", "top_p", "min_p", "repetition_penalty", "context_stride", "stop")
SECONDS = 5  # between two updates of the losses
ADVICE = "use --device=cpu, or a smaller model or shorter text"
MOST_CURVES = 8  # of the best runs
OTHERS = "select a token of the text to see which others were likely"
# Options of events. They are private because the description of a public API, with the names of
# runs, would be served without a password.
EVENT = {"show_progress": "hidden", "concurrency_limit": None, "api_visibility": "private"}
# Fonts of the system: others would be downloaded.
THEME = gr.themes.Default(
    primary_hue="teal", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
)
BANDS = {  # lowest probability: text, color
    0.5: ("50–100%", "#e3f1ec"),
    0.2: ("20–50%", "#fdf1c0"),
    0.05: ("5–20%", "#fddca6"),
    0.01: ("1–5%", "#fbbd97"),
    0.0: ("below 1%", "#f1998c"),
}
SPANS = [f'<span style="background: {color}">{text}</span>' for text, color in BANDS.values()]
LEGEND = f'<p class="legend">probability {"".join(SPANS)}</p>'
# gr.HighlightedText breaks lines inside words, so texts are HTML.
TOKENS_CSS = """
.tokens { display: flex; flex-direction: column-reverse; max-height: 60vh; overflow-y: auto }
.tokens p { white-space: pre-wrap; overflow-wrap: anywhere; min-height: 3em; line-height: 1.6 }
.token { cursor: pointer }
.token span::before { content: "↵"; opacity: 0.5 }
.token[style], .legend span { color: black }
.legend { margin-bottom: 8px; font-size: 12px; line-height: 2 }
.legend span { padding: 2px 6px; white-space: nowrap }
"""
SELECT_JS = """
element.addEventListener("click", event => {
    const index = [...element.querySelectorAll(".token")].indexOf(event.target.closest(".token"));
    if (index >= 0) trigger("select", {index: index, value: null});
});
"""


def build(newest, device, folder):
    """Returns the page. The model of the run in `folder` is selected.

    `newest` returns the model of a run; see tools.texts.model_loader.
    """
    # A thread that calls torch on a CPU has its own OpenMP threads. If several have, there are more
    # of them than cores, and generation takes twice as long.
    thread = ThreadPoolExecutor(1)

    def step(items):
        with explain_out_of_memory(device, ADVICE):
            return next(items, None)

    def computed(generator):
        """Runs a generator function in the thread, and shows an error on the page.

        Several generators, such as those of two tabs, alternate.
        """

        @wraps(generator)
        def run(*args):
            items = generator(*args)
            try:
                while (item := thread.submit(step, items).result()) is not None:
                    yield item
            except (UserError, OSError) as error:
                message = html.escape(str(error), quote=False)
                raise gr.Error(message, print_exception=False) from error
            finally:
                thread.submit(items.close)

        return run

    with gr.Blocks(title="folio", analytics_enabled=False) as page:
        with gr.Tab("Text") as text:
            settings = text_tab(page, computed, newest, folder)
        with gr.Tab("Compare") as compare:
            compare_tab(computed, newest, folder, settings)
        with gr.Tab("Runs") as runs:
            runs_tab(computed, runs, [text, compare])
    return page


def text_tab(page, computed, newest, folder):
    """Generates or scores a text, and explains its tokens. Returns the inputs of the settings."""
    text, picked = gr.State(), gr.State()  # a TokenText, and one with the index of a token
    with gr.Row():
        with gr.Column(scale=2, min_width=320):
            model, summary = model_list("model", folder), gr.HTML(padding=False)
            with gr.Tab("Generate"):
                prompt = gr.Textbox(label="prompt", lines=3, placeholder="empty: a line break")
                with gr.Row():
                    start = gr.Button("Generate", variant="primary")
                    stop = gr.Button("Stop")
                with gr.Row():
                    settings = list(map(control, CONTROLS))
                with gr.Accordion("more settings", open=False):
                    settings += map(control, MORE_CONTROLS)
            with gr.Tab("Score"):
                pasted = gr.Textbox(label="text", lines=8)
                start_score = gr.Button("Score", variant="primary")
        with gr.Column(scale=3, min_width=320):
            view, status = tokens_view(), gr.HTML(padding=False)
            others = gr.Radio([], label=OTHERS)
            with gr.Accordion("Attention", open=False):
                with gr.Row():
                    layer = gr.Number(0, label="layer", precision=0)
                    start_attention = gr.Button("Draw the attention of each head")
                figure = gr.Plot(show_label=False)

    @computed
    def describe(folder):
        yield html.escape(newest(folder).checkpoint.summary)

    @computed
    def generate(folder, prompt, *values):
        yield from map(shown, texts.generate(newest(folder), prompt, settings_of(values)))

    @computed
    def branch(picked, choice, *values):
        yield from map(shown, texts.branch(*picked, choice, settings_of(values)))

    @computed
    def score(folder, pasted):
        yield shown(texts.score(newest(folder), pasted))

    def shown(text):
        return text, *text_html(text), gr.Radio([], value=None, label=OTHERS)

    @computed
    def pick(text, event: gr.SelectData):
        label, found = texts.alternatives(text, event.index)
        yield (text, event.index), gr.Radio(found, value=None, label=label)

    @computed
    def attention(text, layer):
        if not text:
            raise UserError("generate or score a text first")
        layer = int(layer or 0)  # None: empty
        yield draw(text.trained, text.ids, f"layer {layer}", [layer])

    outputs, starts = [text, view, status, others], [start.click, prompt.submit]
    gr.on([page.load, model.change, *starts], describe, model, summary, **EVENT)
    generating = gr.on(starts, generate, [model, prompt, *settings], outputs, **EVENT)
    choice = [picked, others, *settings]
    branching = others.input(branch, choice, outputs, cancels=[generating], **EVENT)
    start_score.click(score, [model, pasted], outputs, cancels=[generating], **EVENT)
    view.select(pick, text, [picked, others], **EVENT)
    start_attention.click(attention, [text, layer], figure, **EVENT)
    stop.click(None, cancels=[generating, branching])
    gr.on([*starts, start_score.click], None, cancels=[branching])
    return settings


def compare_tab(computed, newest, folder, settings):
    """Continues a prompt with two models, with the same settings."""
    prompt = gr.Textbox(label="prompt", lines=2, placeholder="empty: a line break")
    with gr.Row():
        start = gr.Button("Generate with both", variant="primary")
        stop = gr.Button("Stop")
    gr.Markdown("The seed and the other settings are those of the tab Text.")
    lists, sides = [], []
    with gr.Row():
        for label in ("first model", "second model"):
            with gr.Column(min_width=320):
                lists.append(model_list(label, folder))
                sides += [tokens_view(), gr.HTML(padding=False)]

    @computed
    def compare(first, second, prompt, *values):
        settings = settings_of(values)
        for text in texts.generate(newest(first), prompt, settings):
            yield *text_html(text), gr.skip(), gr.skip()
        for text in texts.generate(newest(second), prompt, settings):
            yield gr.skip(), gr.skip(), *text_html(text)

    running = start.click(compare, [*lists, prompt, *settings], sides, **EVENT)
    stop.click(None, cancels=[running])


def runs_tab(computed, tab, other_tabs):
    """Compares the losses of runs, also while they are trained, as long as the tab is open."""
    known = gr.State()  # what is shown: sizes of logs, axes
    with gr.Row():
        x = gr.Radio(list(AXES), value="steps", label="x axis")
        y = gr.Radio(list(LABELS), value="loss", label="y axis and table")
    plot = gr.Plot(label=f"the best {MOST_CURVES} runs")
    table = gr.Dataframe(label="all runs, the best first", interactive=False)
    timer = gr.Timer(SECONDS, active=False)

    @computed
    def refresh(known, x, y):
        logs = [RunDir(folder).log for folder in nested()]
        sizes = {str(log.parent): log.stat().st_size for log in logs if log.exists()}
        if known == (sizes, x, y):
            yield [gr.skip()] * 3
            return
        groups = grouped(read_all(sizes), y)
        header, *rows = compared(groups) if groups else [["run"]]
        drawn = [group for group in groups if group.evaluated][:MOST_CURVES]
        figure = draw_losses(drawn, x) if drawn else None
        yield (sizes, x, y), gr.Dataframe(rows, headers=header), figure

    changes = [tab.select, timer.tick, x.input, y.input]
    gr.on(changes, refresh, [known, x, y], [known, table, plot], **EVENT)
    tab.select(lambda: gr.Timer(active=True), None, timer, **EVENT)
    for other in other_tabs:
        other.select(lambda: gr.Timer(active=False), None, timer, **EVENT)


# Components


def model_list(label, folder):
    """Returns a list of runs with a model, `folder` selected. Opening it reads it again."""

    def choices(selected):
        trained = {str(each) for each in nested() if RunDir(each).exists()}
        return sorted(trained | {selected})  # which may be elsewhere, or deleted

    runs = gr.Dropdown(choices(folder), value=folder, label=label)
    runs.focus(lambda selected: gr.Dropdown(choices(selected)), runs, runs, **EVENT)
    return runs


def control(name):
    """Returns the input for a setting of sample.py, as text."""
    [field] = [field for field in fields(SampleConfig) if field.name == name]
    info, bounds = field.metadata["explanation"], field.metadata["bounds"]
    info += f"; in {bounds}" if bounds else ""
    return gr.Textbox(str(field.default), label=name, info=info)


def settings_of(values):
    """Returns the SampleConfig with the texts of the inputs; an empty one is the default."""
    pairs = zip(CONTROLS + MORE_CONTROLS, values, strict=True)
    flags = [f"--{name}={value}" for name, value in pairs if value]
    return load_settings(SampleConfig, [*flags, "--num_samples=1", "--stream=True"])


def tokens_view():
    """Returns the component for the tokens of a text; `select` has the index of a token."""
    style = {"css_template": TOKENS_CSS, "js_on_load": SELECT_JS}
    return gr.HTML(LEGEND, container=True, padding=True, **style)


def text_html(text):
    """Returns the tokens of a TokenText, and its status, as HTML.

    The color of a token shows its probability, and the tooltip has it.
    """
    shown = []
    for piece, logprob in zip(text.pieces, text.logprobs, strict=True):
        look = ""
        if logprob is not None:
            probability = math.exp(logprob)
            color = next(color for least, (_, color) in BANDS.items() if probability >= least)
            look = f' style="background: {color}" title="{texts.percent(probability)}"'
        piece = html.escape(piece).replace("\n", "<span></span>\n")
        shown.append(f'<span class="token"{look}>{piece}</span>')
    tokens = f'<div class="tokens"><p>{"".join(shown)}</p></div>'
    return LEGEND + tokens, html.escape(text.status)
