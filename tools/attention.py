"""Plots of a trained model's attention weights on a prompt and of its most likely next tokens."""

import math

import torch

from folio.completion import load_trained, read_prompt
from folio.errors import UserError
from folio.run_dir import RunDir

STYLE = {"fontfamily": "DejaVu Sans Mono", "parse_math": False}  # I and l look different in it
TOP = 12  # next tokens that are drawn
MAX_LABELS = 32  # a longer prompt has positions instead of tokens on its axes
SIDE = 3  # inches of a heat map


@torch.inference_mode()
def attention_weights(model, idx):
    """Returns the attention weights of all heads, and the logits of the next token.

    idx: (T,) int64 -> (n_layer, n_head, T, T) and (vocab_size,). Element [l, h, t, s] is the weight
    of position s in the output for position t.
    """
    T, config = len(idx), model.config
    distance = torch.arange(T)[:, None] - torch.arange(T)
    hidden = (distance < 0) | (distance >= (config.window or T))
    weights = torch.zeros(config.n_layer, config.n_head, T, T)

    def attend(layer, q, k, v):
        scores = q @ k.mT / math.sqrt(q.shape[-1])  # Vaswani et al. 2017, section 3.2.1
        weights[layer] = scores[0].masked_fill(hidden, -math.inf).softmax(dim=-1)
        return weights[layer] @ v

    states = model.trunk(idx[None], attend=attend)
    return weights, model.lm_head(states[:, -1])[0]


def draw(folder, start=None):
    """Returns a matplotlib figure for the best model of a run and a prompt, as for sample.py."""
    from matplotlib.figure import Figure

    trained = load_trained(RunDir(folder).load_best())
    model, tokenizer = trained.model, trained.tokenizer
    if not model.config.n_layer:
        raise UserError(f"the model in {folder} has no layers, and thus no attention")
    ids = tokenizer.encode(read_prompt(start) or tokenizer.start).tolist()
    ids = ids[-model.config.block_size :]
    weights, logits = attention_weights(model, torch.tensor(ids))
    logits = logits[: tokenizer.vocab_size]  # without padding
    probabilities, top = logits.softmax(dim=-1).topk(min(TOP, len(logits)))

    layers, heads = weights.shape[:2]
    widths = [SIDE * heads, SIDE]
    figure = Figure(figsize=(sum(widths), SIDE * layers + 1), layout="constrained")
    figure.suptitle(f"{folder}\nprompt {tokenizer.decode(ids)[:60]!r}", fontsize=10, **STYLE)
    left, right = figure.subfigures(1, 2, width_ratios=widths)
    draw_heads(left, weights, [label_of(tokenizer, token) for token in ids])
    draw_next(right, probabilities, [label_of(tokenizer, token) for token in top.tolist()])
    return figure


def label_of(tokenizer, token):
    """Returns a token as a label that shows spaces and line breaks."""
    return repr(tokenizer.decode([token]))[1:-1].replace(" ", "␣")


def draw_heads(figure, weights, tokens):
    """Draws a heat map for each layer (down) and head (across)."""
    grid = figure.subplots(*weights.shape[:2], squeeze=False)
    for layer, row in enumerate(grid):
        for head, axes in enumerate(row):
            image = axes.imshow(weights[layer, head].numpy(), cmap="Blues", vmin=0, vmax=1)
            axes.set_title(f"layer {layer}, head {head}", fontsize=8)
            axes.tick_params(labelsize=6)
            if len(tokens) <= MAX_LABELS:
                rotation = 90 if max(map(len, tokens)) > 2 else 0
                axes.set_xticks(range(len(tokens)), tokens, rotation=rotation, **STYLE)
                axes.set_yticks(range(len(tokens)), tokens, **STYLE)
    bar = figure.colorbar(image, ax=grid, shrink=0.6, aspect=40, location="bottom")
    bar.set_label("attention weight of the column's\ntoken for the row's token", fontsize=8)


def draw_next(figure, probabilities, tokens):
    """Draws a bar chart of next tokens, the most likely at the top."""
    axes = figure.add_subplot()
    axes.set_title("probability of the next token", fontsize=9)
    bars = axes.barh(range(len(tokens)), probabilities.tolist())
    axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
    axes.margins(x=0.25)  # for these labels
    axes.set_yticks(range(len(tokens)), tokens, **STYLE)
    axes.invert_yaxis()
