"""The playground's page: its components and events. tools/texts.py computes the texts."""

import html
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import wraps

import gradio as gr

from folio.errors import UserError
from folio.memory import explained_out_of_memory
from folio.run_dir import RunDir
from folio.settings import load
from sample import SampleConfig
from tools import texts
from tools.attention import draw
from tools.plot import AXES, LABELS, draw_losses
from tools.runs import grouped, nested, read_all
from tools.table import compared

CONTROLS = ("temperature", "max_new_tokens", "seed")  # settings of sample.py
MORE_CONTROLS = ("top_k", "top_p", "min_p", "repetition_penalty", "context_stride", "stop")
SECONDS = 5  # between looks for new losses
ADVICE = "use --device=cpu, or a smaller model or shorter text"
MOST_CURVES = 8  # that are drawn if no runs are selected
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
    f".band{number} {{ background: {color}; color: black }}\n"
    for number, (_, color) in enumerate(BANDS.values())
)
SELECT_JS = """
element.addEventListener("click", event => {
    const index = [...element.querySelectorAll(".token")].indexOf(event.target.closest(".token"));
    if (index >= 0) trigger("select", {index: index, value: null});
});
"""


def build(models, path):
    """Returns the page, with a checkpoint selected, after loading it."""
    # A thread that calls torch on a CPU has its own OpenMP threads. If several have, there are more
    # of them than cores, and generation takes twice as long.
    thread = ThreadPoolExecutor(1)

    def step(items):
        with explained_out_of_memory(models.device, ADVICE):
            return next(items, None)

    def computed(generator):
        """Runs a generator function in the thread, and shows a UserError on the page.

        Several generators, such as those of two tabs, alternate.
        """

        @wraps(generator)
        def run(*args):
            items = generator(*args)
            try:
                while (item := thread.submit(step, items).result()) is not None:
                    yield item
            except UserError as error:
                message = html.escape(str(error), quote=False)
                raise gr.Error(message, print_exception=False) from error
            finally:
                thread.submit(items.close)

        return run

    thread.submit(step, map(models.newest, [path])).result()
    with gr.Blocks(title="folio", analytics_enabled=False) as page:
        with gr.Tab("Text") as text:
            settings = text_tab(page, computed, models, path)
        with gr.Tab("Compare") as compare:
            compare_tab(computed, models, path, settings)
        with gr.Tab("Runs") as runs:
            runs_tab(computed, runs, [text, compare])
    return page


def text_tab(page, computed, models, path):
    """Generates or scores a text, and explains its tokens. Returns the inputs of the settings."""
    text, picked = gr.State(), gr.State()  # a TokenText, and one with the index of a token
    with gr.Row():
        with gr.Column(scale=2, min_width=320):
            model, summary = model_list("model", path), gr.HTML(padding=False)
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
    def describe(path):
        yield html.escape(models.newest(path).checkpoint.summary)

    @computed
    def generate(path, prompt, *values):
        yield from map(shown, texts.generate(models, path, prompt, settings_of(values)))

    @computed
    def branch(picked, choice, *values):
        yield from map(shown, texts.branch(*picked, choice, settings_of(values)))

    @computed
    def score(path, pasted):
        yield shown(texts.score(models, path, pasted))

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
        layer = int(layer or 0)
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


def compare_tab(computed, models, path, settings):
    """Continues a prompt with two models, with the same settings."""
    prompt = gr.Textbox(label="prompt", lines=2, placeholder="empty: a line break")
    with gr.Row():
        start = gr.Button("Generate with both", variant="primary")
        stop = gr.Button("Stop")
    gr.Markdown("The seed and the other settings are those of the tab Text.")
    folder = os.path.dirname(path)
    others = [each for each in checkpoints() if os.path.dirname(each) != folder]
    lists, sides = [], []
    with gr.Row():
        for label, value in (("first model", path), ("second model", [*others, path][0])):
            with gr.Column(min_width=320):
                lists.append(model_list(label, value))
                sides += [tokens_view(), gr.HTML(padding=False)]

    @computed
    def compare(first, second, prompt, *values):
        settings = settings_of(values)
        for text in texts.generate(models, first, prompt, settings):
            yield *text_html(text), gr.skip(), gr.skip()
        for text in texts.generate(models, second, prompt, settings):
            yield gr.skip(), gr.skip(), *text_html(text)

    running = start.click(compare, [*lists, prompt, *settings], sides, **EVENT)
    stop.click(None, cancels=[running])


def runs_tab(computed, tab, other_tabs):
    """Compares the losses of runs, also while they are trained, as long as the tab is open."""
    known = gr.State()  # what is shown: sizes of logs, selected runs, axes
    label = f"runs in the plot (none selected: the best {MOST_CURVES})"
    selected = gr.Dropdown([], label=label, multiselect=True)
    with gr.Row():
        x = gr.Radio(list(AXES), value="steps", label="x axis")
        y = gr.Radio(list(LABELS), value="loss", label="y axis and table")
    plot = gr.Plot(show_label=False)
    table = gr.Dataframe(label="all runs, the best first", interactive=False)
    timer = gr.Timer(SECONDS, active=False)

    @computed
    def refresh(known, selected, x, y):
        logs = [RunDir(folder).log for folder in nested()]
        sizes = {str(log.parent): log.stat().st_size for log in logs if log.exists()}
        selected = [folder for folder in selected if folder in sizes]
        if known == (sizes, selected, x, y):
            yield [gr.skip()] * 4
            return
        runs = read_all(sizes)
        groups = grouped(runs, y)
        header, *rows = compared(groups) if groups else [["run"]]
        if selected:
            groups = grouped([run for run in runs if run.folder in selected], y)
        drawn = [group for group in groups if group.evaluated][:MOST_CURVES]
        yield (
            (sizes, selected, x, y),
            gr.Dropdown(choices=list(sizes), value=selected, multiselect=True),
            gr.Dataframe(rows, headers=header),
            draw_losses(drawn, x) if drawn else None,
        )

    inputs, outputs = [known, selected, x, y], [known, selected, table, plot]
    changes = [tab.select, timer.tick, selected.input, x.input, y.input]
    gr.on(changes, refresh, inputs, outputs, **EVENT)
    tab.select(lambda: gr.Timer(active=True), None, timer, **EVENT)
    for other in other_tabs:
        other.select(lambda: gr.Timer(active=False), None, timer, **EVENT)


# Components


def model_list(label, path):
    """Returns a list of checkpoints, `path` selected, that is read again when it is opened."""

    def choices(selected):
        labels = {selected: selected} | checkpoints()  # the selected one may have been deleted
        return [(label, path) for path, label in labels.items()]

    models = gr.Dropdown(choices(path), value=path, label=label)
    models.focus(lambda selected: gr.Dropdown(choices=choices(selected)), models, models, **EVENT)
    return models


def checkpoints():
    """Returns {path: label} of the checkpoints in the working directory and in its sweeps."""
    labels = {}
    for run in map(RunDir, nested()):
        labels |= {run.best: str(run.folder), run.last: f"{run.folder}, newest state"}
    return {str(path): label for path, label in labels.items() if path.is_file()}


def control(name):
    """Returns the input for a setting of sample.py, as text."""
    [field] = [field for field in fields(SampleConfig) if field.name == name]
    info, bounds, default = *map(field.metadata.get, ("explanation", "bounds")), str(field.default)
    info += f"; in {bounds}" if bounds else ""
    return gr.Textbox(default, label=name, info=info, placeholder=default)


def settings_of(values):
    """Returns the SampleConfig with the texts of the inputs; an empty one is the default."""
    pairs = zip(CONTROLS + MORE_CONTROLS, values, strict=True)
    flags = [f"--{name}={value}" for name, value in pairs if value]
    return load(SampleConfig, [*flags, "--num_samples=1", "--stream=True"])


def tokens_view():
    """Returns the component for the tokens of a text; `select` has the index of a token."""
    style = {"css_template": TOKENS_CSS, "js_on_load": SELECT_JS}
    return gr.HTML(tokens_html([]), container=True, padding=True, **style)


def text_html(text):
    """Returns the tokens of a TokenText, and its status, as HTML."""
    return tokens_html(text.tokens), html.escape(text.status)


def tokens_html(tokens):
    """Returns tokens as HTML: the color shows a token's probability, the tooltip has it."""
    legend = [f'<span class="band{n}">{text}</span>' for n, (text, _) in enumerate(BANDS.values())]
    shown = []
    for token in tokens:
        band = title = ""
        if token.logprob is not None:
            probability = math.exp(token.logprob)
            band = next(n for n, least in enumerate(BANDS) if probability >= least)
            title = texts.percent(probability)
        piece = html.escape(token.piece).replace("\n", "<u></u>\n")
        shown.append(f'<span class="token band{band}" title="{title}">{piece}</span>')
    legend = f'<p class="legend">probability {"".join(legend)}</p>'
    return f'{legend}<div class="tokens"><p>{"".join(shown)}</p></div>'
