"""Plots of a trained model's attention weights on a prompt and of its most likely next tokens."""

import math

import torch

from folio.cli.errors import UserError
from folio.inference.scoring import likely_next
from model import attention_weights, causal_mask

TOKEN_STYLE = {"fontfamily": "DejaVu Sans Mono", "parse_math": False}  # I and l look different
NEXT_TOKENS = 12
MAX_DRAWN_TOKENS = 32  # the last ones: of a longer prompt, cells and weights would be too small
HEAT_MAP_INCHES = 3
HEADS_PER_ROW = 4  # if a single layer is drawn


@torch.inference_mode()
def compute_attention(model, idx, layers):
    """Returns {layer: attention weights of its heads} for the layers with these numbers.

    idx: (T,) int64 -> weights: (n_head, T, T) float32 on the CPU. Element [h, t, s] is the weight
    of position s in the output for position t.
    """
    positions = torch.arange(len(idx), device=idx.device)
    mask = causal_mask(positions, positions, model.config.window)
    weights_of_layer = {}

    def attend(layer, q, k, v):
        weights = attention_weights(q.float(), k.float(), mask)
        if layer in layers:
            weights_of_layer[layer] = weights[0].cpu()
        return (weights @ v.float()).to(v.dtype)

    model.trunk(idx[None], attend=attend)
    return weights_of_layer


def draw_attention(trained, ids, title, layer=None):
    """Returns a matplotlib figure of each head's attention and of the most likely next tokens.

    `trained` is a TrainedModel, `ids` the prompt, a nonempty list, and `layer` the number of the
    layer to draw; None: all. Raises UserError if it does not exist.
    """
    from matplotlib.figure import Figure

    config, tokenizer = trained.model.config, trained.tokenizer
    if (layer or 0) not in range(config.n_layer):
        raise UserError(f"{title}: there is no layer {layer or 0} of {config.n_layer} layers")
    layers = range(config.n_layer) if layer is None else [layer]
    ids = ids[-config.block_size :]
    idx = torch.tensor(ids, device=trained.model.transformer.wte.weight.device)
    weights = compute_attention(trained.model, idx, layers)

    heads = [(layer, head) for layer in layers for head in range(config.n_head)]
    columns = config.n_head if len(layers) > 1 else min(config.n_head, HEADS_PER_ROW)
    rows = math.ceil(len(heads) / columns)
    size = HEAT_MAP_INCHES * (columns + 1), HEAT_MAP_INCHES * rows + 1.5
    figure = Figure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.08)  # inches between labels and titles
    drawn = ids[-MAX_DRAWN_TOKENS:]
    part = f"last {len(drawn)} of {len(ids)} tokens" if len(drawn) < len(ids) else "prompt"
    figure.suptitle(f"{title}\n{part} {tokenizer.decode(drawn)[:60]!r}", fontsize=10, **TOKEN_STYLE)
    heights = [1] * rows + [0.04]  # the last row is the color bar
    grid = figure.add_gridspec(rows + 1, columns + 1, height_ratios=heights)
    labels = [format_token(tokenizer, token) for token in drawn]
    weights = {layer: weights[layer][:, -len(drawn) :, -len(drawn) :] for layer in layers}
    highest = max(float(values.max()) for values in weights.values())
    colors = {"cmap": "Blues", "vmin": 0, "vmax": highest}  # one scale for all heads
    for number, (layer, head) in enumerate(heads):
        axes = figure.add_subplot(grid[number // columns, number % columns])
        axes.set_title(f"layer {layer}, head {head}", fontsize=8)
        image = draw_heat_map(axes, weights[layer][head], labels, **colors)
    bar = figure.add_subplot(grid[rows, : min(columns, HEADS_PER_ROW)])
    figure.colorbar(image, cax=bar, orientation="horizontal")
    bar.set_xlabel(
        "attention weight of the column's token\nfor the row's token; same scale in all maps",
        fontsize=8,
    )
    draw_next_tokens(figure.add_subplot(grid[:, columns]), trained, ids)
    return figure


def draw_heat_map(axes, values, labels, **colors):
    """Draws values, (T, T), with the same labels for rows and columns. Returns the image.

    `colors` are arguments of imshow.
    """
    rotation = 90 if max(map(len, labels)) > 2 else 0
    axes.tick_params(labelsize=6)
    axes.set_xticks(range(len(labels)), labels, rotation=rotation, **TOKEN_STYLE)
    axes.set_yticks(range(len(labels)), labels, **TOKEN_STYLE)
    return axes.imshow(values.numpy(), **colors)


def draw_next_tokens(axes, trained, ids):
    """Draws a bar chart of the tokens that are likely to follow, the most likely at the top."""
    tokens, probabilities = zip(*likely_next(trained, ids, NEXT_TOKENS), strict=True)
    axes.set_title("probability of the next token", fontsize=9)
    bars = axes.barh(range(len(tokens)), probabilities)
    axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
    axes.margins(x=0.25)  # for these labels
    labels = [format_token(trained.tokenizer, token) for token in tokens]
    axes.set_yticks(range(len(tokens)), labels, **TOKEN_STYLE)
    axes.invert_yaxis()


def format_token(tokenizer, token):
    """Returns a token's text, with visible spaces and line breaks; bytes if they are no text."""
    text = tokenizer.decode([token])
    if "\ufffd" in text:
        text = tokenizer.token_bytes(token)
    return repr(text).removeprefix("b")[1:-1].replace(" ", "␣")
