"""Parameters and FLOPs of a GPT in closed form."""

from model import mlp_widths, ngram_rows


def matrix_params(config):
    """Returns the number of parameters in the matrices of all blocks."""
    C = config.n_embd
    return config.n_layer * C * (4 * C + sum(mlp_widths(config)))  # attention 4 C^2


def num_params(config):
    """Returns the number of parameters in closed form; tied weights count once."""
    C, L, bias = config.n_embd, config.n_layer, int(config.bias)
    norm = C * (1 + (bias if config.norm == "layernorm" else 0))
    others = bias * (5 * C + mlp_widths(config)[0]) + 2 * norm  # of a block
    positions = config.block_size if config.position == "learned" else 0
    tables = sum(ngram_rows(config.vocab_size, n) for n in range(2, config.ngrams + 1))
    embeddings = (config.vocab_size + tables + positions + config.smear) * C
    head = 0 if config.tie_weights else config.vocab_size * C
    return embeddings + matrix_params(config) + L * others + norm + head


def flops_per_token(config):
    """Returns the FLOPs of training on one token: the forward pass, and twice that for backward.

    2 FLOPs per multiplication with a weight, in attention scores and in sums of values (Chowdhery
    et al. 2022, "PaLM", appendix B), masked or not. Embeddings count as 0.
    """
    C, L, T, window = config.n_embd, config.n_layer, config.block_size, config.window
    weights = matrix_params(config) + config.vocab_size * C
    pairs = -(-T // window) * 2 * window**2 if 0 < window < T else T * T  # query and key
    attention = L * 2 * C * pairs / T
    return 3 * 2 * (weights + attention)
