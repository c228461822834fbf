"""The playground's page: its components and events.

What it shows is computed in tools.texts and tools.overview.
"""

import os
from html import escape

import gradio as gr

from folio.errors import UserError
from tools import overview
from tools.components import (
    QUIET,
    control,
    generated,
    message,
    reported,
    streamed,
    tokens_html,
    tokens_view,
)
from tools.models import checkpoints
from tools.plot import AXES, LABELS
from tools.texts import (
    Generation,
    alternatives,
    attention,
    controls,
    score,
    vocabulary_problem,
)

FIRST_CONTROLS = 3  # that are always visible
SECONDS = 5  # between looks for new files
OTHERS = "select a token of the text to see which others were likely"
DEFAULT_PROMPT = "empty: a line break"


def build(models, path):
    """Returns the page, with a checkpoint selected."""

    def choices():
        found = checkpoints()
        is_found = path in [each for _, each in found]
        return found if is_found else [*found, (path, path)]

    def look(known, *selected):
        new = choices()
        deleted = set(selected) - {each for _, each in new}
        new += [(each, each) for each in sorted(deleted)]
        return [new, *[gr.Dropdown(choices=new)] * 3] if new != known else [gr.skip()] * 4

    with gr.Blocks(title="folio", analytics_enabled=False) as page:
        known = gr.State(choices())
        with gr.Tab("Text") as first:
            text = TextTab(page, models, known.value, path)
        with gr.Tab("Compare") as second:
            pair = compare_tab(models, known.value, path, text.values)
        with gr.Tab("Runs") as runs:
            timer = runs_tab(runs, path)
        gr.on([first.select, second.select], lambda: gr.Timer(active=False), None, timer, **QUIET)
        changes = [page.load, gr.Timer(SECONDS).tick]
        lists = [text.model, *pair]
        gr.on(changes, look, [known, *lists], [known, *lists], **QUIET)
    return page


class TextTab:
    """Generates or scores a text, and explains its tokens."""

    def __init__(self, page, models, choices, path):
        self.models = models
        self.text, self.picked = gr.State(), gr.State()  # Annotated, index of a token
        with gr.Row():
            with gr.Column(scale=2, min_width=320):
                self._add_inputs(choices, path)
            with gr.Column(scale=3, min_width=320):
                self._add_outputs()
        self._connect(page)

    def _add_inputs(self, choices, path):
        self.model = gr.Dropdown(choices, value=path, label="model")
        self.summary = gr.HTML(padding=False)
        with gr.Tab("Generate"):
            self.prompt = gr.Textbox(label="prompt", lines=3, placeholder=DEFAULT_PROMPT)
            self.problem = gr.HTML(padding=False)
            with gr.Row():
                self.start_button = gr.Button("Generate", variant="primary")
                self.stop_button = gr.Button("Stop")
            with gr.Row():
                self.values = [control(field) for field in controls()[:FIRST_CONTROLS]]
            with gr.Accordion("more settings", open=False):
                self.values += [control(field) for field in controls()[FIRST_CONTROLS:]]
        with gr.Tab("Score"):
            self.pasted = gr.Textbox(label="text", lines=8)
            self.score_button = gr.Button("Score", variant="primary")

    def _add_outputs(self):
        self.view = tokens_view()
        self.status = gr.HTML(padding=False)
        self.others = gr.Radio([], label=OTHERS)
        with gr.Accordion("Attention", open=False):
            with gr.Row():
                self.layer = gr.Number(0, label="layer", step=1)
                self.draw_button = gr.Button("Draw the attention of each head")
            self.figure = gr.Plot(show_label=False)

    def _connect(self, page):
        """Connects events to methods, with the components that are arguments and results."""
        shown = [self.text, self.view, self.summary, self.status, self.others]
        starts = [self.start_button.click, self.prompt.submit]
        inputs = [self.model, self.prompt, *self.values]
        branch = [self.model, self.text, self.picked, self.others, *self.values]
        changes = [self.prompt.change, self.model.change]
        gr.on([page.load, self.model.change], self.describe, self.model, self.summary, **QUIET)
        gr.on(changes, self.check, [self.model, self.prompt], self.problem, **QUIET)
        streams = [
            gr.on(starts, self.generate, inputs, shown, **QUIET),
            self.others.input(self.branch, branch, shown, **QUIET),
        ]
        self.stop_button.click(None, cancels=streams)
        self.score_button.click(self.score, [self.model, self.pasted], shown, **QUIET)
        self.view.select(self.pick, self.text, [self.picked, self.others], **QUIET)
        self.draw_button.click(self.draw, [self.text, self.layer], self.figure, **QUIET)

    def describe(self, path):
        try:
            return escape(self.models.run(lambda: self.models.newest(path)[0].checkpoint.summary))
        except UserError as error:
            return message(error)

    def check(self, path, prompt):
        trained = self.models.loaded(path)
        return escape(vocabulary_problem(trained, prompt)) if trained else ""

    def generate(self, path, prompt, *values):
        texts = generated(self.models, values, Generation.continue_prompt, path, prompt)
        yield from (self._show(path, text) for text in texts)

    def branch(self, path, text, picked, choice, *values):
        texts = generated(self.models, values, Generation.branch, text, picked, choice)
        yield from (self._show(path, text) for text in texts)

    def score(self, path, pasted):
        texts = streamed(self.models, lambda stopped: score(self.models, path, pasted))
        yield from (self._show(path, text) for text in texts)

    def pick(self, text, event: gr.SelectData):
        with reported():
            label, found = self.models.run(alternatives, self.models, text, event.index)
        return event.index, gr.Radio(found, value=None, label=label)

    def draw(self, text, layer):
        with reported():
            if not text:
                raise UserError("generate or score a text first")
            return self.models.run(attention, self.models, text, layer)

    def _show(self, path, text):
        """Returns the values of `shown`. `path` is that of the selected model."""
        if isinstance(text, str):  # a message
            return gr.skip(), gr.skip(), gr.skip(), text, gr.skip()
        model, status = escape(text.model), escape(text.status)
        if path != text.version.path:  # another model has been selected since
            model, status = gr.skip(), f"{status}; {model}"
        none = gr.Radio([], value=None, label=OTHERS)
        return text, tokens_html(text.tokens), model, status, none


def compare_tab(models, choices, path, values):
    """Continues a prompt with two models, with the same settings. Returns their lists."""
    prompt = gr.Textbox(label="prompt", lines=2, placeholder=DEFAULT_PROMPT)
    with gr.Row():
        start = gr.Button("Generate with both", variant="primary")
        stop = gr.Button("Stop")
    gr.Markdown("The seed and the other settings are those of the tab Text.")
    others = [each for _, each in choices if os.path.dirname(each) != os.path.dirname(path)]
    lists, sides = [], []
    with gr.Row():
        for name, value in (("first", path), ("second", [*others, path][0])):
            with gr.Column(min_width=320):
                lists.append(gr.Dropdown(choices, value=value, label=f"{name} model"))
                sides += [tokens_view(), gr.HTML(padding=False)]

    def compare(first, second, prompt, *values):
        shown = [gr.skip(), ""] * 2  # the old texts, until there are new ones
        for side, path in enumerate((first, second)):
            for text in generated(models, values, Generation.continue_prompt, path, prompt):
                if isinstance(text, str):  # a message
                    shown[2 * side + 1] = text
                else:
                    status = escape(f"{text.status}; {text.model}")
                    shown[2 * side : 2 * side + 2] = tokens_html(text.tokens), status
                yield shown

    inputs = [*lists, prompt, *values]
    running = start.click(compare, inputs, sides, **QUIET)
    stop.click(None, cancels=[running])
    return lists


def runs_tab(tab, path):
    """Compares the losses of runs. Returns the timer that follows those that are training."""
    known = gr.State()
    selected = gr.Dropdown([], label="runs in the plot", multiselect=True)
    with gr.Row():
        x = gr.Radio(list(AXES), value="steps", label="x axis")
        y = gr.Radio(list(LABELS), value="loss", label="y axis and table")
    plot = gr.Plot(show_label=False)
    table = gr.Dataframe(label="all runs, the best first", interactive=False)
    timer = gr.Timer(SECONDS, active=False)

    def refresh(known, selected, x, y):
        logs = overview.logs()
        if logs == known:
            return [gr.skip()] * 4
        folders, old = [folder for folder, _ in logs], dict(known or ())
        shown = [each for each in folders if each in selected or each not in old]
        with reported():
            if known is None:
                shown = overview.selection(folders, path)
            return logs, gr.Dropdown(choices=folders, value=shown), *draw(folders, shown, x, y)

    def draw(folders, shown, x, y):
        header, rows = overview.table(folders, y)
        return gr.Dataframe(rows, headers=header), overview.curves(shown, x, y)

    def redraw(known, selected, x, y):
        with reported():
            return draw([folder for folder, _ in known or ()], selected, x, y)

    inputs, outputs = [known, selected, x, y], [known, selected, table, plot]
    gr.on([tab.select, timer.tick], refresh, inputs, outputs, **QUIET)
    tab.select(lambda: gr.Timer(active=True), None, timer, **QUIET)
    gr.on([selected.input, x.input, y.input], redraw, inputs, [table, plot], **QUIET)
    return timer
