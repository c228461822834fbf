"""Plots of a trained model: attention and likely next tokens, or similarities of embeddings."""

import numpy as np
import torch
import torch.nn.functional as F

from folio.cli.errors import UserError
from folio.hardware.kernels import attention_weights
from folio.inference.generate import check_finite
from model import causal_mask

NEXT_TOKENS = 12
MAX_DRAWN_TOKENS = 32  # the last ones: of a longer prompt, cells and weights would be too small
HEAT_MAP_INCHES = 3
MAX_DRAWN_EMBEDDINGS = 100  # more labels would be too small
INCHES_PER_TOKEN = 0.125
TOKEN_STYLE = {"fontfamily": "DejaVu Sans Mono", "parse_math": False}  # I and l look different


@torch.inference_mode()
def compute_attention(model, ids):
    """Returns the attention weights of a list of ids, and the logits of the next token.

    The weights are those of the last D = MAX_DRAWN_TOKENS ids, (n_layer, n_head, D, D) float32 on
    the CPU; [l, h, t, s] is that of position s in the output for position t. Logits: (vocab_size,).
    """
    idx = torch.tensor(ids, device=model.transformer.wte.weight.device)
    positions = torch.arange(len(idx), device=idx.device)
    mask, layers = causal_mask(positions, positions, model.config.window), []

    def attend(_, q, k, v):
        weights = attention_weights(q.float(), k.float(), mask)
        layers.append(weights[0, :, -MAX_DRAWN_TOKENS:, -MAX_DRAWN_TOKENS:].cpu())
        return (weights @ v.float()).to(v.dtype)

    logits = model.lm_head(model.trunk(idx[None], attend=attend)[0, -1])
    return torch.stack(layers), logits


def draw_attention(trained, ids, title, layer=None):
    """Returns a matplotlib figure of each head's attention and of the most likely next tokens.

    `trained` is a TrainedModel, `ids` the prompt, a nonempty list, and `layer` the number of the
    layer to draw; None: all. Raises UserError if it does not exist.
    """
    from matplotlib.figure import Figure

    config, tokenizer = trained.model.config, trained.tokenizer
    if (layer or 0) not in range(config.n_layer):
        raise UserError(f"there is no layer {layer or 0}, because n_layer is {config.n_layer}")
    ids = ids[-config.block_size :]
    weights, logits = compute_attention(trained.model, ids)
    check_finite(logits)
    drawn = ids[-MAX_DRAWN_TOKENS:]
    labels = [format_token(tokenizer, token) for token in drawn]
    layers = range(config.n_layer) if layer is None else [layer]
    rows, columns = len(layers), config.n_head
    size = HEAT_MAP_INCHES * (columns + 1), HEAT_MAP_INCHES * rows + 1.5
    figure = Figure(figsize=size, layout="constrained")
    part = f"last {len(drawn)} of {len(ids)} tokens" if len(drawn) < len(ids) else "prompt"
    figure.suptitle(f"{title}\n{part} {tokenizer.decode(drawn)[:60]!r}", fontsize=10, **TOKEN_STYLE)
    [[left, right]] = figure.subfigures(1, 2, squeeze=False, width_ratios=[columns, 1])
    maps = left.subplots(rows, columns, squeeze=False)
    colors = {"cmap": "Blues", "vmin": 0, "vmax": weights[layers].max()}  # one scale for all heads
    for (row, head), axes in np.ndenumerate(maps):
        axes.set_title(f"layer {layers[row]}, head {head}", fontsize=8)
        image = draw_heat_map(axes, weights[layers[row], head], labels, **colors)
    left.colorbar(image, ax=maps, location="bottom", shrink=0.6, aspect=30)
    label = "attention weight of the column's token\nfor the row's token; same scale in all maps"
    left.supxlabel(label, fontsize=9)
    draw_next_tokens(right.subplots(), tokenizer, logits)
    return figure


def draw_next_tokens(axes, tokenizer, logits):
    """Draws a bar chart of the tokens that are likely to follow, the most likely at the top."""
    size = tokenizer.vocab_size  # without padding
    likely = logits[:size].float().softmax(dim=-1).topk(min(NEXT_TOKENS, size))
    tokens, probabilities = likely.indices.tolist(), likely.values.tolist()
    axes.set_title("probability of the next token", fontsize=9)
    bars = axes.barh(range(len(tokens)), probabilities)
    axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
    axes.margins(x=0.25)  # for these labels
    labels = [format_token(tokenizer, token) for token in tokens]
    axes.set_yticks(range(len(tokens)), labels, **TOKEN_STYLE)
    axes.invert_yaxis()


def embedding_similarity(weights):
    """Returns the cosine similarities of embeddings: (V, C) -> (V, V) float32, -1 to 1."""
    directions = F.normalize(weights.detach().float().cpu(), dim=-1)
    return directions @ directions.T


def draw_embeddings(trained, title, ids=None):
    """Returns a matplotlib figure of the similarities of token embeddings.

    `ids` are the tokens to draw, not empty; None: all. The first MAX_DRAWN_EMBEDDINGS are drawn.
    """
    from matplotlib.figure import Figure

    tokenizer = trained.tokenizer
    ids = list(dict.fromkeys(range(tokenizer.vocab_size) if ids is None else ids))  # each once
    drawn = ids[:MAX_DRAWN_EMBEDDINGS]
    similarity = embedding_similarity(trained.model.transformer.wte.weight[drawn])
    part = f"first {len(drawn)} of {len(ids):,}" if len(drawn) < len(ids) else f"{len(drawn)}"
    size = 2 + INCHES_PER_TOKEN * len(drawn)
    figure = Figure(figsize=(size + 1, size), layout="compressed")  # for squares
    figure.suptitle(f"{title}\ntoken embeddings, {part} tokens", fontsize=10, **TOKEN_STYLE)
    labels = [format_token(tokenizer, token) for token in drawn]
    axes = figure.add_subplot()
    image = draw_heat_map(axes, similarity, labels, cmap="RdBu_r", vmin=-1, vmax=1)
    figure.colorbar(image, shrink=0.6, label="cosine similarity")
    return figure


def draw_heat_map(axes, values, labels, **colors):
    """Draws values, (T, T), and returns the image. `colors` are arguments of imshow."""
    rotation = 90 if max(map(len, labels)) > 2 else 0
    axes.tick_params(labelsize=6)
    axes.set_xticks(range(len(labels)), labels, rotation=rotation, **TOKEN_STYLE)
    axes.set_yticks(range(len(labels)), labels, **TOKEN_STYLE)
    return axes.imshow(values.numpy(), **colors)


def format_token(tokenizer, token):
    """Returns a token's text, with visible spaces and line breaks; bytes if they are not text."""
    text = tokenizer.decode([token])
    if "\ufffd" in text:
        text = tokenizer.token_bytes(token)
    return repr(text).removeprefix("b")[1:-1].replace(" ", "␣")
