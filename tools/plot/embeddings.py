"""A plot of the cosine similarities of a trained model's token embeddings."""

import torch
import torch.nn.functional as F

from tools.plot.tokens import TOKEN_STYLE, draw_heat_map, format_token

MAX_DRAWN_EMBEDDINGS = 100  # more labels would be too small
INCHES_PER_TOKEN = 0.125


def embedding_similarity(weights):
    """Returns the cosine similarities of embeddings: (V, C) -> (V, V) float32, -1 to 1."""
    directions = F.normalize(weights.detach().float().cpu(), dim=-1)
    return directions @ directions.T


def group_similar(similarity):
    """Returns an order of V tokens in which similar ones are neighbors. similarity: (V, V).

    It is that of hierarchical clustering: starting with one group for each token, the two groups
    with the highest mean similarity are joined until one is left.
    """
    groups = [[token] for token in range(len(similarity))]
    while len(groups) > 1:
        means = torch.stack([similarity[group].mean(dim=0) for group in groups])  # (G, V)
        means = torch.stack([means[:, group].mean(dim=1) for group in groups])  # (G, G)
        first, second = sorted(divmod(means.fill_diagonal_(-2).argmax().item(), len(groups)))
        groups[first] += groups.pop(second)
    return groups[0]


def draw_embeddings(trained, title, ids=None):
    """Returns a matplotlib figure of the similarities of token embeddings, in groups.

    `trained` is a TrainedModel, `ids` the tokens to draw, not empty; None: all. Of more than
    MAX_DRAWN_EMBEDDINGS tokens, the first are drawn.
    """
    from matplotlib.figure import Figure

    tokenizer = trained.tokenizer
    ids = list(dict.fromkeys(range(tokenizer.vocab_size) if ids is None else ids))  # each once
    drawn = ids[:MAX_DRAWN_EMBEDDINGS]
    similarity = embedding_similarity(trained.model.transformer.wte.weight[drawn])
    order = group_similar(similarity)
    part = f"first {len(drawn)} of {len(ids):,}" if len(drawn) < len(ids) else f"{len(drawn)}"
    size = 2 + INCHES_PER_TOKEN * len(drawn)
    figure = Figure(figsize=(size + 1, size), layout="compressed")  # for squares
    figure.suptitle(f"{title}\ntoken embeddings, {part} tokens", fontsize=10, **TOKEN_STYLE)
    axes = figure.add_subplot()
    labels = [format_token(tokenizer, drawn[index]) for index in order]
    image = draw_heat_map(axes, similarity[order][:, order], labels, cmap="RdBu_r", vmin=-1, vmax=1)
    figure.colorbar(image, shrink=0.6, label="cosine similarity")
    return figure
