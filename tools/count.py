"""Parameters and FLOPs of each part of a model, which needs no memory on the meta device.

FLOPs are those of the forward pass on one token of a full context: 2 per multiplication with a
weight, in attention scores and in sums of values. Training takes three times as many (Chowdhery et
al. 2022, "PaLM", appendix B).
"""

import re
from collections import Counter

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from folio.dataset import load_tokenizer
from folio.device import resolve_device
from folio.plan import model_config
from folio.settings import load
from model import GPT
from tools.table import aligned
from train import TrainConfig

SCORES = "attention: scores and values"


def print_counts(arguments):
    """Prints the counts of the model that train.py would train with `arguments`."""
    settings = load(TrainConfig, arguments, {"device": resolve_device})
    tokenizer = load_tokenizer(settings.dataset)  # GPT-2's, if the dataset is not prepared
    config = model_config(settings, tokenizer)
    print(
        f"{config.n_layer} layers, width {config.n_embd}, {config.block_size:,} tokens of context, "
        f"vocabulary of {config.vocab_size:,} ({tokenizer.kind} tokenizer)\n"
    )
    found = parts(config)
    found["total"] = tuple(map(sum, zip(*found.values(), strict=True)))
    rows = [[name, *(f"{number:,}" for number in numbers)] for name, numbers in found.items()]
    print("\n".join(aligned([["part", "parameters", "FLOPs per token"], *rows])))


def parts(config):
    """Returns {part: (parameters, FLOPs)}. A part is a kind of module, summed over the layers.

    Tied weights count where they are first, in the embedding.
    """
    model = GPT.uninitialized(config, "meta")
    idx = torch.zeros(1, config.block_size, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(idx, idx)
    parameters, flops = Counter(), Counter()
    for name, parameter in model.named_parameters():
        parameters[part_of(name.rpartition(".")[0])] += parameter.numel()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            flops[part_of(name)] += 2 * module.weight.numel()
    flops[SCORES] = counter.get_total_flops() // config.block_size - flops.total()
    return {part: (parameters[part], flops[part]) for part in [*parameters, *flops]}


def part_of(name):
    """Returns a module's name without its layer."""
    return re.sub(r"^transformer\.|\bh\.\d+\.", "", name)
