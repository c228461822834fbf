"""Plots of a trained model's attention weights on a prompt and of its most likely next tokens."""

import math

import torch

from folio.errors import UserError
from folio.scoring import likely_next

STYLE = {"fontfamily": "DejaVu Sans Mono", "parse_math": False}  # I and l look different in it
TOP = 12  # next tokens that are drawn
MAX_LABELS = 32  # a longer prompt has positions instead of tokens on its axes
SIDE = 3  # inches of a heat map
MAX_COLUMNS = 4  # of the heads of a single layer


@torch.inference_mode()
def attention_weights(model, idx, layers=None):
    """Returns the attention weights of the heads of some layers. Default: all.

    idx: (T,) int64 -> (len(layers), n_head, T, T) float32 on the CPU. Element [l, h, t, s] is the
    weight of position s in the output for position t.
    """
    T, config = len(idx), model.config
    positions = torch.arange(T, device=idx.device)
    distance = positions[:, None] - positions
    hidden = (distance < 0) | (distance >= (config.window or T))
    layers = range(config.n_layer) if layers is None else layers
    found = torch.zeros(len(layers), config.n_head, T, T)

    def attend(layer, q, k, v):
        scores = q.float() @ k.float().mT / math.sqrt(q.shape[-1])  # Vaswani et al. 2017, 3.2.1
        weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
        if layer in layers:
            found[layers.index(layer)] = weights[0]
        return (weights @ v.float()).to(v.dtype)

    model.trunk(idx[None], attend=attend)
    return found


def draw(trained, ids, title, layers=None):
    """Returns a matplotlib figure of a TrainedModel and a prompt, a nonempty list of ids.

    Args:
        layers: numbers of the layers to draw. Default: all.
    """
    from matplotlib.figure import Figure

    config, tokenizer = trained.model.config, trained.tokenizer
    layers = range(config.n_layer) if layers is None else layers
    check_layers(layers, config.n_layer, title)
    ids = ids[-config.block_size :]
    idx = torch.tensor(ids, device=trained.model.transformer.wte.weight.device)
    maps = {
        f"layer {layer}, head {head}": weights.numpy()
        for layer, heads in zip(layers, attention_weights(trained.model, idx, layers), strict=True)
        for head, weights in enumerate(heads)
    }
    top, probabilities = zip(*likely_next(trained, ids, TOP), strict=True)

    rows = len(layers) if len(layers) > 1 else math.ceil(config.n_head / MAX_COLUMNS)
    columns = math.ceil(len(maps) / rows)
    widths = [SIDE * columns, SIDE]
    figure = Figure(figsize=(sum(widths), SIDE * rows + 1), layout="constrained")
    figure.suptitle(f"{title}\nprompt {tokenizer.decode(ids)[:60]!r}", fontsize=10, **STYLE)
    left, right = figure.subfigures(1, 2, width_ratios=widths)
    grid = left.subplots(rows, columns, squeeze=False)
    draw_heads(left, grid, maps, [label_of(tokenizer, token) for token in ids])
    draw_next(right, probabilities, [label_of(tokenizer, token) for token in top])
    return figure


def check_layers(layers, count, title):
    """Raises UserError if a model of `count` layers does not have some of these, or has none."""
    if not count:
        raise UserError(f"{title}: the model has no layers, and thus no attention")
    for layer in layers:
        if not 0 <= layer < count:
            raise UserError(f"{title}: there is no layer {layer}; the last is layer {count - 1}")


def label_of(tokenizer, token):
    """Returns a token as a label that shows spaces, line breaks, and bytes of a character."""
    text = tokenizer.decode([token])
    if "\ufffd" in text:
        text = tokenizer.token_bytes(token)
    return repr(text).removeprefix("b")[1:-1].replace(" ", "␣")


def draw_heads(figure, grid, maps, tokens):
    """Draws heat maps, {title: (T, T)}, into a grid of axes, row by row."""
    cells = grid.flatten()
    for axes, (title, weights) in zip(cells, maps.items(), strict=False):
        image = axes.imshow(weights, cmap="Blues", vmin=0, vmax=1)
        axes.set_title(title, fontsize=8)
        axes.tick_params(labelsize=6)
        if len(tokens) <= MAX_LABELS:
            rotation = 90 if max(map(len, tokens)) > 2 else 0
            axes.set_xticks(range(len(tokens)), tokens, rotation=rotation, **STYLE)
            axes.set_yticks(range(len(tokens)), tokens, **STYLE)
    for axes in cells[len(maps) :]:
        axes.set_axis_off()
    bar = figure.colorbar(image, ax=grid, shrink=0.6, aspect=40, location="bottom")
    bar.set_label("attention weight of the column's\ntoken for the row's token", fontsize=8)


def draw_next(figure, probabilities, tokens):
    """Draws a bar chart of next tokens, the most likely at the top."""
    axes = figure.add_subplot()
    axes.set_title("probability of the next token", fontsize=9)
    bars = axes.barh(range(len(tokens)), probabilities)
    axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
    axes.margins(x=0.25)  # for these labels
    axes.set_yticks(range(len(tokens)), tokens, **STYLE)
    axes.invert_yaxis()
