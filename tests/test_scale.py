"""tools.scale: the tables of docs/scale.md."""

import math

import pytest
import tiny
import torch
from ranks import Ranks, in_setup

from folio.batches import Batches
from folio.settings import ROOT
from folio.size import num_params
from model import GPTConfig
from tools import scale

SMALL = GPTConfig(bias=False)


def test_ddp_sends_gradients_once_per_step():
    gradients = 4 * num_params(SMALL)
    assert scale.sent_bytes(SMALL, "ddp", 1, micro_batches=5) == 0
    assert scale.sent_bytes(SMALL, "ddp", 2, micro_batches=5) == gradients
    assert scale.sent_bytes(SMALL, "ddp", 8, micro_batches=1) == 2 * 7 / 8 * gradients


def test_fsdp_sends_parameters_for_every_micro_batch():
    blocks = 12 * (12 * 768**2 + 2 * 768)
    data = 2 * (num_params(SMALL) + blocks)  # those of blocks twice, in bfloat16
    for micro_batches in (1, 3):
        sent = scale.sent_bytes(SMALL, "fsdp", 4, micro_batches)
        assert sent == 3 / 4 * (micro_batches * data + 4 * num_params(SMALL))


def test_the_largest_micro_batch_fits_and_the_next_does_not():
    config = scale.MODELS["1.5B"]
    size = scale.largest_micro_batch(config, 8)
    limit = scale.USED * scale.GPU_BYTES
    used = [
        scale.estimate(config, scale.settings_of("ddp", 8, each), 8).total
        for each in (size, 2 * size)
    ]
    assert used[0] <= limit < used[1]
    assert scale.largest_micro_batch(GPTConfig(n_layer=1000, n_embd=12288), 8) == 0


def test_compute_is_the_products_at_the_assumed_speed():
    tokens = scale.SEQUENCES * 1024
    flops = 6 * (12 * 12 * 768**2 + 50304 * 768 + 12 * 2 * 768 * 1024)
    expected = tokens * flops / (0.33 * 989e12 * 8)
    assert scale.compute_seconds(SMALL, 8) == pytest.approx(expected)


def test_the_tables_in_the_documentation_are_those_of_the_command(capsys):
    scale.main([])
    documentation = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    for table in capsys.readouterr().out.strip().split("\n\n"):
        assert table in documentation


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("micro_batches", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_step_sends_what_the_formulas_say(verse, parallel, micro_batches):
    settings = {"parallel": parallel, "gradient_accumulation_steps": 2 * micro_batches}
    settings |= {"dtype": "bfloat16", "n_layer": 3, "n_embd": 64}
    (config, sent), _ = Ranks(2, in_setup, bytes_of_a_step, tiny.flags(**settings)).results()
    expected = scale.sent_bytes(config, parallel, 2, micro_batches)
    assert expected <= sent < expected + 200  # the loss, the norm and the stop signal


def bytes_of_a_step(run):
    """Returns the GPTConfig and the bytes that torch's profiler counts in a step after the first.

    Each collective of two processes sends half of its data, an all-reduce twice that. gloo has no
    reduce-scatter; the profiler shows the one requested and the all-reduce that replaces it.
    """
    learner, batches = run.learner, Batches(run.dataset.train, run.settings, run.learner.world)
    for step in range(2):
        _, norm = learner.gradient(batches.at(step), step)
        learner.update(norm, 1e-3)
    with torch.profiler.profile(record_shapes=True) as profiler:
        learner.gradient(batches.at(2), 2)
    halves = {"gloo:all_reduce": 2, "gloo:all_gather": 2, "c10d::_reduce_scatter_base_": -1}
    item_sizes, sent = {"float": 4, "c10::BFloat16": 2}, 0.0
    for event in profiler.profiler.kineto_results.events():
        if event.name() in halves:  # an all-gather has a half as input
            place = int("scatter" in event.name())
            size = math.prod(event.shapes()[place]) * item_sizes[event.dtypes()[place]]
            sent += halves[event.name()] * size / 2
    return learner.model.config, sent
