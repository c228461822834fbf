"""What a model's parameters and time per token are made of, as formulas and as numbers.

C is n_embd, L n_layer, T block_size, V the vocabulary. FLOPs are those of one token's forward pass;
training takes three times as many (Chowdhery et al. 2022, "PaLM", appendix B).
"""

import dataclasses
import os
from types import SimpleNamespace

from config import load
from device import choose_machine, resolve_device
from model import bigram_rows, flops_per_token, num_params
from prepare import load_dataset
from tools.runs import aligned
from train import TrainConfig, make_model_config


def print_counts(arguments):
    """Print the counts of the model that train.py would train with `arguments`."""
    config = load(TrainConfig, arguments, {"device": resolve_device})
    tokenizer, about = tokenizer_like(config.dataset)
    shape = make_model_config(config, tokenizer, None)
    machine = choose_machine(config.device, config.dtype, False)
    peak, source = machine.peak
    sizes = f"L = n_layer = {shape.n_layer}, C = n_embd = {shape.n_embd}"
    print(f"{sizes}, T = block_size = {shape.block_size:,}, V = {shape.vocab_size:,} ({about})\n")
    rows = [
        [name, formula, f"{count:,}", f"{flops:,}", depends]
        for name, formula, count, flops, depends in parts(shape)
    ]
    total = ["together", "", f"{num_params(shape):,}", f"{forward_flops(shape):,}", ""]
    head = ["part", "parameters are", "parameters", "FLOPs a token", "depends on T"]
    print("\n".join(aligned([head, *rows, total])))
    print(f"\nA token's time at best, at {peak / 1e9:,.0f} GFLOP/s ({source}, {machine.dtype}):\n")
    head = ["T", "parameters", "forward, µs", "training, µs"]
    print("\n".join(aligned([head, *times(shape, peak)])))
    print(
        "\nOf the parameters, only learnt positions depend on the context: T C of them. Of the"
        "\ntime, only attention's scores and sums do: they grow with T, and a window limits them."
    )


def forward_flops(shape):
    return int(flops_per_token(shape) / 3)


def tokenizer_like(dataset):
    """Something with the vocabulary of a dataset, guessed where it is not prepared; and a note."""
    if os.path.exists(os.path.join("data", dataset)):
        tokenizer = load_dataset(dataset).tokenizer
        return SimpleNamespace(kind=tokenizer.kind, vocab_size=tokenizer.vocab_size), dataset
    kind, size = ("char", 65) if "char" in dataset else ("gpt2", 50257)
    about = f"supposed, as data/{dataset} is not there"
    return SimpleNamespace(kind=kind, vocab_size=size), about


def parts(shape):
    """[(part, formula, parameters, FLOPs of a token's forward pass, how it depends on T)]."""
    C, L, T, V = shape.n_embd, shape.n_layer, shape.block_size, shape.vocab_size
    norm = C * (2 if shape.norm == "layernorm" and shape.bias else 1)
    scores = forward_flops(shape) - 2 * (12 * L * C * C + V * C)
    head = ("the embedding's", 0) if shape.tie_weights else ("V C", V * C)
    found = [
        ("token embedding", "V C", V * C, 0, ""),
        ("positions", "T C", T * C if shape.position == "learned" else 0, 0, "parameters"),
        ("pairs of tokens", "V² C", bigram_rows(V) * C if shape.bigrams else 0, 0, ""),
        ("smear", f"{shape.smear} C", shape.smear * C, 0, ""),
        ("attention: linear layers", "L 4 C²", L * 4 * C * C, 2 * L * 4 * C * C, ""),
        ("attention: scores and sums", "none; FLOPs L 4 C T", 0, scores, "FLOPs"),
        ("MLP", "L 8 C²", L * 8 * C * C, 2 * L * 8 * C * C, ""),
        ("biases", "L 9 C", L * 9 * C if shape.bias else 0, 0, ""),
        ("norms", f"(2 L + 1) {norm // C} C", (2 * L + 1) * norm, 0, ""),
        ("head", *head, 2 * V * C, ""),
    ]
    return [part for part in found if part[2] or part[3]]


def times(shape, peak):
    """Rows for contexts around the model's: parameters, microseconds of a token."""
    rows = []
    for factor in (0.5, 1, 2, 4):
        T = int(shape.block_size * factor)
        if shape.smear < T:
            other = dataclasses.replace(shape, block_size=T)
            spent = [flops / peak * 1e6 for flops in (forward_flops(other), flops_per_token(other))]
            figures = (f"{us:,.0f}" if us >= 100 else f"{us:.3g}" for us in spent)
            rows.append([f"{T:,}", f"{num_params(other):,}", *figures])
    return rows
