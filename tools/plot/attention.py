"""Plots of a trained model's attention weights on a prompt and of its most likely next tokens."""

import math

import torch

from folio.cli.errors import UserError
from folio.inference.scoring import likely_next

STYLE = {"fontfamily": "DejaVu Sans Mono", "parse_math": False}  # I and l look different in it
TOP = 12  # next tokens that are drawn
MAX_LABELS = 32  # a longer prompt has positions instead of tokens on its axes
SIDE = 3  # inches of a heat map
MAX_COLUMNS = 4  # of the heads of a single layer


@torch.inference_mode()
def attention_weights(model, idx, layers):
    """Returns {layer: attention weights of its heads} for some layers.

    idx: (T,) int64 -> (n_head, T, T) float32 on the CPU. Element [h, t, s] is the weight of
    position s in the output for position t.
    """
    T, window, found = len(idx), model.config.window, {}
    positions = torch.arange(T, device=idx.device)
    distance = positions[:, None] - positions
    hidden = (distance < 0) | (distance >= (window or T))

    def attend(layer, q, k, v):
        scores = q.float() @ k.float().mT / math.sqrt(q.shape[-1])  # Vaswani et al. 2017, 3.2.1
        weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
        if layer in layers:
            found[layer] = weights[0].cpu()
        return (weights @ v.float()).to(v.dtype)

    model.trunk(idx[None], attend=attend)
    return found


def draw(trained, ids, title, layers=None):
    """Returns a matplotlib figure of a TrainedModel and a prompt, a nonempty list of ids.

    Draws the layers with numbers in `layers`. Default: all. Raises UserError if one is missing.
    """
    from matplotlib.figure import Figure

    config, tokenizer = trained.model.config, trained.tokenizer
    layers = range(config.n_layer) if layers is None else layers
    if missing := set(layers or [0]) - set(range(config.n_layer)):
        raise UserError(f"{title}: there is no layer {min(missing)} of {config.n_layer} layers")
    ids = ids[-config.block_size :]
    idx = torch.tensor(ids, device=trained.model.transformer.wte.weight.device)
    weights = attention_weights(trained.model, idx, layers)

    maps = [(layer, head) for layer in layers for head in range(config.n_head)]
    columns = config.n_head if len(layers) > 1 else min(config.n_head, MAX_COLUMNS)
    rows = math.ceil(len(maps) / columns)
    figure = Figure(figsize=(SIDE * (columns + 1), SIDE * rows + 1), layout="constrained")
    figure.suptitle(f"{title}\nprompt {tokenizer.decode(ids)[:60]!r}", fontsize=10, **STYLE)
    grid = figure.add_gridspec(rows, columns + 1)
    labels = [label_of(tokenizer, token) for token in ids]
    cells = []
    for number, (layer, head) in enumerate(maps):
        axes = figure.add_subplot(grid[number // columns, number % columns])
        axes.set_title(f"layer {layer}, head {head}", fontsize=8)
        image = draw_head(axes, weights[layer][head].numpy(), labels)
        cells.append(axes)
    bar = figure.colorbar(image, ax=cells, shrink=0.6, aspect=40, location="bottom")
    bar.set_label("attention weight of the column's\ntoken for the row's token", fontsize=8)
    draw_next(figure.add_subplot(grid[:, columns]), likely_next(trained, ids, TOP), tokenizer)
    return figure


def draw_head(axes, weights, labels):
    """Draws the heat map of weights, (T, T), between tokens. Returns the image."""
    axes.tick_params(labelsize=6)
    if len(labels) <= MAX_LABELS:
        rotation = 90 if max(map(len, labels)) > 2 else 0
        axes.set_xticks(range(len(labels)), labels, rotation=rotation, **STYLE)
        axes.set_yticks(range(len(labels)), labels, **STYLE)
    return axes.imshow(weights, cmap="Blues", vmin=0, vmax=1)


def draw_next(axes, likely, tokenizer):
    """Draws a bar chart of next tokens, (token, probability), the most likely at the top."""
    tokens, probabilities = zip(*likely, strict=True)
    axes.set_title("probability of the next token", fontsize=9)
    bars = axes.barh(range(len(tokens)), probabilities)
    axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
    axes.margins(x=0.25)  # for these labels
    axes.set_yticks(range(len(tokens)), [label_of(tokenizer, each) for each in tokens], **STYLE)
    axes.invert_yaxis()


def label_of(tokenizer, token):
    """Returns a token as a label that shows spaces, line breaks, and bytes of a character."""
    text = tokenizer.decode([token])
    if "\ufffd" in text:
        text = tokenizer.token_bytes(token)
    return repr(text).removeprefix("b")[1:-1].replace(" ", "␣")
