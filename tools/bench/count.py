"""Prints the parameters and FLOPs of the model that train.py would train."""

import re
from collections import Counter

import torch

from folio.checkpoint.format import empty_model
from folio.cli.settings import load_settings
from folio.data.dataset import load_tokenizer
from folio.hardware.device import resolve_device
from folio.training.setup import model_config
from tools.plot.table import format_table
from train import TrainConfig


def print_counts(arguments):
    """Prints the parameters and FLOPs of each kind of module, summed over the layers.

    Tied weights count where they are first, in the embedding. FLOPs are those of the forward pass,
    a third of GPT.flops_per_token().
    """
    settings = load_settings(TrainConfig, arguments, {"device": resolve_device})
    tokenizer = load_tokenizer(settings.dataset)  # GPT-2's, if the dataset is not prepared
    model = empty_model(model_config(settings, tokenizer), "meta")
    config = model.config
    print(
        f"{config.n_layer} layers, width {config.n_embd}, {config.block_size:,} tokens of context, "
        f"vocabulary of {config.vocab_size:,} ({tokenizer.kind} tokenizer)\n"
    )
    parameters, flops = Counter(), Counter()  # of each kind of module
    for name, parameter in model.named_parameters():
        parameters[remove_layer(name.rpartition(".")[0])] += parameter.numel()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            flops[remove_layer(name)] += 2 * module.weight.numel()
    flops["attention: scores and values"] = model.flops_per_token() / 3 - flops.total()
    rows = [["part", "parameters", "FLOPs per token"]]
    for kind in parameters | flops:
        rows.append([kind, f"{parameters[kind]:,}", f"{flops[kind]:,.0f}"])
    rows.append(["total", f"{model.num_params():,}", f"{flops.total():,.0f}"])
    print("\n".join(format_table(rows)))


def remove_layer(name):
    """Returns a module's name without its layer, which is the kind of module."""
    return re.sub(r"^transformer\.|\bh\.\d+\.", "", name)
