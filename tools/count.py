"""Parameters and FLOPs of a model by part, as formulas and numbers.

C is n_embd, L n_layer, T block_size, V vocab_size. FLOPs are those of the forward pass on one
token; training takes three times as many (Chowdhery et al. 2022, "PaLM", appendix B).
"""

from folio.dataset import load_tokenizer
from folio.device import resolve_device
from folio.plan import model_config
from folio.settings import load
from folio.size import flops_per_token, matrix_params
from model import BIGRAM_ROWS, NGRAM_ROWS, mlp_widths, ngram_rows
from tools.table import aligned
from train import TrainConfig


def print_counts(arguments):
    """Prints the counts of the model that train.py would train with `arguments`."""
    settings = load(TrainConfig, arguments, {"device": resolve_device})
    tokenizer = load_tokenizer(settings.dataset)  # GPT-2's, if the dataset is not prepared
    config = model_config(settings, tokenizer)
    print(
        f"L = n_layer = {config.n_layer}, C = n_embd = {config.n_embd}, T = block_size = "
        f"{config.block_size:,}, V = {config.vocab_size:,} ({tokenizer.kind} tokenizer)\n"
    )
    found = parts(config)
    found.append(("total", "", *(sum(part[i] for part in found) for i in (2, 3))))
    rows = [[name, formula, f"{count:,}", f"{flops:,}"] for name, formula, count, flops in found]
    print("\n".join(aligned([["part", "formula", "parameters", "FLOPs per token"], *rows])))


def parts(config):
    """Returns [(part, formula, parameters, FLOPs per token)]."""
    C, L, T, V = config.n_embd, config.n_layer, config.block_size, config.vocab_size
    norm = C * (2 if config.norm == "layernorm" and config.bias else 1)
    scores = round(flops_per_token(config) / 3) - 2 * (matrix_params(config) + V * C)
    head = ("shared", 0) if config.tie_weights else ("V C", V * C)
    outer, inner = mlp_widths(config)
    mlp, ratio = L * C * (outer + inner), (outer + inner) / C
    ngrams = [ngram_rows(V, n) * C for n in range(2, config.ngrams + 1)]
    found = [
        ("token embedding", "V C", V * C, 0),
        ("positions", "T C", T * C if config.position == "learned" else 0, 0),
        ("bigrams", f"min(V², {BIGRAM_ROWS:,}) C", sum(ngrams[:1]), 0),
        ("longer n-grams", f"min(Vⁿ, {NGRAM_ROWS:,}) C each", sum(ngrams[1:]), 0),
        ("smear", f"{config.smear} C", config.smear * C, 0),
        ("attention: linear layers", "L 4 C²", L * 4 * C * C, 2 * L * 4 * C * C),
        ("attention: scores and values", "none; FLOPs L 4 C T", 0, scores),
        ("MLP", f"L {ratio:.3g} C²", mlp, 2 * mlp),
        ("biases", f"L {5 + outer / C:.3g} C", L * (5 * C + outer) if config.bias else 0, 0),
        ("norms", f"(2 L + 1) {norm // C} C", (2 * L + 1) * norm, 0),
        ("head", *head, 2 * V * C),
    ]
    return [part for part in found if part[2] or part[3]]
