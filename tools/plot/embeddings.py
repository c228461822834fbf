"""A plot of the cosine similarities of a trained model's token embeddings, and heat maps."""

import torch.nn.functional as F

MAX_DRAWN_EMBEDDINGS = 100  # more labels would be too small
INCHES_PER_TOKEN = 0.125
TOKEN_STYLE = {"fontfamily": "DejaVu Sans Mono", "parse_math": False}  # I and l look different


def embedding_similarity(weights):
    """Returns the cosine similarities of embeddings: (V, C) -> (V, V) float32, -1 to 1."""
    directions = F.normalize(weights.detach().float().cpu(), dim=-1)
    return directions @ directions.T


def draw_embeddings(trained, title, ids=None):
    """Returns a matplotlib figure of the similarities of token embeddings.

    `trained` is a TrainedModel, `ids` the tokens to draw, not empty; None: all. Of more than
    MAX_DRAWN_EMBEDDINGS tokens, the first are drawn.
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
    """Draws values, (T, T), with the same labels for rows and columns. Returns the image.

    `colors` are arguments of imshow.
    """
    rotation = 90 if max(map(len, labels)) > 2 else 0
    axes.tick_params(labelsize=6)
    axes.set_xticks(range(len(labels)), labels, rotation=rotation, **TOKEN_STYLE)
    axes.set_yticks(range(len(labels)), labels, **TOKEN_STYLE)
    return axes.imshow(values.numpy(), **colors)


def format_token(tokenizer, token):
    """Returns a token's text, with visible spaces and line breaks; bytes if they are no text."""
    text = tokenizer.decode([token])
    if "\ufffd" in text:
        text = tokenizer.token_bytes(token)
    return repr(text).removeprefix("b")[1:-1].replace(" ", "␣")
