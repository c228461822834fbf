"""What each head of a trained model looks at over a prompt, and what it expects to come next."""

import math
from functools import partial

import torch

import checkpoint as ckpt
from config import UserError
from sample import SampleConfig, opened, read_prompt

LIKELIEST = 12  # of the next tokens
LABELLED = 48  # tokens of a prompt at most that have room for their names


@torch.inference_mode()
def attention_weights(model, idx):
    """Weights of all heads, and the logits of what comes next.

    idx: (T,) int64 -> (n_layer, n_head, T, T), where [l, h, t, s] is how much position t takes of
    s, and (vocab_size,). Rows sum to one, and what comes after a position weighs nothing.
    """
    window, found = model.config.window or len(idx), []

    def attend(q, k, v):
        back = torch.arange(len(idx))[:, None] - torch.arange(len(idx))
        scores = q @ k.mT / math.sqrt(q.shape[-1])  # Vaswani et al. 2017, section 3.2.1
        weights = scores.masked_fill((back < 0) | (back >= window), -math.inf).softmax(dim=-1)
        found.append(weights[0])
        return weights @ v

    x, rotation = model.embed(idx[None])
    for block in model.transformer.h:
        x = block(x, rotation, attend)
    logits = model.lm_head(model.transformer.ln_f(x[0, -1]))
    return torch.stack(found) if found else torch.zeros(0, 0, len(idx), len(idx)), logits


def picture(out_dir, start):
    """A matplotlib figure of the best model of a run, reading a prompt."""
    try:
        from matplotlib.figure import Figure  # which needs no screen
    except ImportError as error:
        raise UserError(
            f"--attention needs matplotlib ({error}): pip install matplotlib"
        ) from error

    checkpoint, tokenizer = opened(SampleConfig(out_dir=out_dir))
    model = ckpt.build_model(checkpoint).eval()
    ids = tokenizer.encode(read_prompt(start, tokenizer))[-model.config.block_size :]
    weights, logits = attention_weights(model, torch.from_numpy(ids.astype("int64")))
    tokens = [name_of(tokenizer, each) for each in ids.tolist()]
    layers, heads = weights.shape[:2]
    side = min(max(2.2, len(ids) / 10), max(30 / max(heads, 1), 2.2))  # inches, for names of 7 pt
    widths = [side * max(heads, 1), 3.2]
    figure = Figure(figsize=(sum(widths), max(side * layers, 4.4) + 1.2), layout="constrained")
    title = drawable(f"{out_dir}, reading {tokenizer.decode(ids)[:60]!r}")
    figure.suptitle(title, fontsize=10, parse_math=False)
    left, right = figure.subfigures(1, 2, width_ratios=widths)
    draw_heads(left, weights, tokens, side)
    draw_next(right.add_subplot(), logits[: tokenizer.vocab_size], partial(name_of, tokenizer))
    return figure


def name_of(tokenizer, token):
    """A token as a label: visible where it is a space or a line's end."""
    text = tokenizer.bytes_of(token).decode("utf-8", "backslashreplace")
    return drawable(repr(text)[1:-1].replace(" ", "␣"))


def drawable(text):
    """A text with what matplotlib's font has not as its code."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont("DejaVu Sans"))
    return "".join(c if font.get_char_index(ord(c)) else f"U+{ord(c):04X}" for c in text)


def draw_heads(figure, weights, tokens, side):
    """A square for each layer (down) and head (across), darker where a token takes more."""
    layers, heads = weights.shape[:2]
    if not layers:
        figure.text(0.5, 0.5, "no layers, so no attention", ha="center")
        return
    grid = figure.subplots(layers, heads, squeeze=False)
    for layer in range(layers):
        for head in range(heads):
            axes = grid[layer][head]
            image = axes.imshow(weights[layer, head].numpy(), cmap="Blues", vmin=0, vmax=1)
            axes.set_title(f"layer {layer}, head {head}", fontsize=8)
            label(axes, tokens, side)
    bar = figure.colorbar(image, ax=grid, shrink=0.6, aspect=40, location="bottom")
    bar.set_label(
        "weight: how much a row's token takes of a column's; a row sums to one", fontsize=8
    )
    bar.ax.tick_params(labelsize=7)


def label(axes, tokens, side):
    """Tokens along a square of some inches, as far as they have room."""
    if len(tokens) > LABELLED:
        axes.tick_params(labelsize=6)
        return
    form = {"fontsize": min(7, 52 * side / len(tokens)), "parse_math": False}
    turned = 90 if max(map(len, tokens)) > 2 else 0
    axes.set_xticks(range(len(tokens)), tokens, rotation=turned, **form)
    axes.set_yticks(range(len(tokens)), tokens, **form)
    axes.tick_params(length=0, pad=1)


def draw_next(axes, logits, name_of):
    """The likeliest next tokens and their probabilities."""
    likeliest = logits.softmax(dim=-1).topk(min(LIKELIEST, len(logits)))
    probabilities, ids = (each.tolist() for each in likeliest)
    bars = axes.barh(range(len(ids)), probabilities, color="C0")
    axes.bar_label(bars, [f"{each:.3f}" for each in probabilities], padding=2, fontsize=8)
    axes.set_yticks(range(len(ids)), [name_of(each) for each in ids], parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(0, max(probabilities) * 1.25)
    axes.tick_params(labelsize=8)
    axes.set_title("what comes next, and its probability", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
