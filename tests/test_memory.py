from dataclasses import fields, replace

import pytest
import tiny
import torch

from folio import memory
from folio.device import DTYPES
from folio.errors import UserError
from folio.memory import (
    MemoryEstimate,
    can_gather,
    check_memory,
    estimate,
    explained_out_of_memory,
    memory_advice,
)
from folio.recompute import recompute_activations
from folio.size import num_params
from model import GPT, GPTConfig


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_errors_become_user_errors_with_advice(error):
    message = "^cuda is out of memory: use less$"
    with pytest.raises(UserError, match=message), explained_out_of_memory("cuda", "use less"):
        raise error


def test_other_errors_are_not_changed():
    with pytest.raises(RuntimeError, match="a bug"), explained_out_of_memory("cpu", ""):
        raise RuntimeError("a bug")


def test_advice_keeps_tokens_per_step_and_evaluation():
    settings = tiny.settings(batch_size=15, gradient_accumulation_steps=2, eval_iters=7)
    advice = memory_advice(settings)
    assert "--batch_size=5 --gradient_accumulation_steps=6" in advice
    assert "--eval_iters=21" in advice
    assert advice.endswith(
        "; or use --activation_checkpointing=True; or decrease --block_size, --n_layer or --n_embd"
    )
    single = memory_advice(tiny.settings(batch_size=1, activation_checkpointing=True))
    assert single == "decrease --block_size, --n_layer or --n_embd"


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"n_layer": 10**9}, "decrease --n_layer or --n_embd$"),
        ({"n_embd": 10**6}, "decrease --n_layer or --n_embd$"),
        ({"batch_size": 10**15}, "use --batch_size=500000000000000 "),
    ],
    ids=str,
)
def test_training_that_cannot_fit_is_refused(changes, advice):
    settings = tiny.settings(**changes)
    config = GPTConfig(vocab_size=65, **{name: getattr(settings, name) for name in tiny.SHAPE})
    message = r"needs more than [\d,]+ GiB of memory, but cpu has [\d,]+ GiB: " + advice
    with pytest.raises(UserError, match=message):
        check_memory(config, settings)


def test_small_models_and_unknown_memory_are_accepted(monkeypatch):
    config, settings = GPTConfig(vocab_size=65, **tiny.SHAPE), tiny.settings()
    check_memory(config, settings)
    monkeypatch.setattr(memory, "memory_bytes", lambda device: None)
    check_memory(config, tiny.settings(batch_size=10**15))


def test_an_evaluation_needs_less_memory_than_training(monkeypatch):
    config = GPTConfig(vocab_size=65, **tiny.SHAPE)
    monkeypatch.setattr(memory, "memory_bytes", lambda device: 8 * num_params(config) + 10_000)
    check_memory(config, tiny.settings(eval_only=True))
    with pytest.raises(UserError, match="the model needs more than"):
        check_memory(config, tiny.settings())


def saved_bytes(config, settings):
    """Returns the bytes in storages that autograd saves in a forward pass, except weights."""
    torch.manual_seed(0)
    model = GPT(config)
    if settings.activation_checkpointing:
        recompute_activations(model)
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = tensor  # keeps it, so that no address is used twice
        return tensor

    ids = torch.zeros(settings.batch_size, settings.block_size, dtype=torch.int64)
    dtype, enabled = DTYPES[settings.dtype], settings.dtype != "float32"
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype=dtype, enabled=enabled):
        model(ids, ids)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dropout": 0.2, "bias": True},
        {"activation": "relu", "n_layer": 4},
        {"activation": "swiglu", "n_layer": 4},
        {"position": "rotary"},
        {"position": "rotary", "norm": "rmsnorm", "qk_norm": True, "activation": "relu2"},
        {"qk_norm": True, "tie_weights": False},
        {"window": 16},
        {"block_size": 640, "batch_size": 1},
    ],
    ids=str,
)
def test_the_formula_gives_what_autograd_saves(changes, dtype):
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 96, "block_size": 64, "batch_size": 4}
    settings = tiny.settings(dtype=dtype, **(shape | changes))
    names = [field.name for field in fields(GPTConfig) if field.name != "vocab_size"]
    config = GPTConfig(vocab_size=50, **{name: getattr(settings, name) for name in names})
    per_token = config.n_layer * memory.saved_by_block(config, settings)
    per_token += (4 + DTYPES[dtype].itemsize) * config.n_embd + 4 * config.vocab_size
    expected = settings.batch_size * settings.block_size * per_token
    expected += memory.cast_bytes(config, settings)
    assert saved_bytes(config, settings) == pytest.approx(expected, rel=0.1)


def test_checkpointing_keeps_the_input_of_each_block():
    settings = tiny.settings(n_layer=6, n_embd=64, batch_size=8, block_size=32)
    config = GPTConfig(vocab_size=10, n_layer=6, n_head=2, n_embd=64, block_size=32)
    inputs = 6 * 4 * 64 * 8 * 32
    everything = saved_bytes(config, settings)
    settings = replace(settings, activation_checkpointing=True)
    assert inputs < saved_bytes(config, settings) < 1.6 * inputs < everything / 4


def estimate_of(world_size=1, **changes):
    """Returns the number of parameters of a model and its estimate."""
    shape = {"n_layer": 4, "n_head": 2, "n_embd": 64, "block_size": 8}
    settings = tiny.settings(**shape, **({"batch_size": 12} | changes))
    config = GPTConfig(vocab_size=100, bias=False, **shape)
    return num_params(config), estimate(config, settings, world_size)


def test_optimizers_and_evaluations_need_different_memory():
    count, adamw = estimate_of()
    parts = (adamw.weights, adamw.gradients, adamw.optimizer, adamw.saving)
    assert parts == (4 * count, 4 * count, 8 * count, 12 * count)
    assert adamw.total == 28 * count + adamw.activations
    _, muon = estimate_of(optimizer="muon")
    assert muon.optimizer == 8 * count - 4 * 4 * 12 * 64 * 64
    _, evaluation = estimate_of(eval_only=True)
    assert evaluation.total == 4 * count + evaluation.activations


def test_fsdp_shards_everything_but_two_gathered_blocks():
    count, alone = estimate_of(parallel="fsdp")
    assert alone.weights == 4 * count
    _, shared = estimate_of(4, parallel="fsdp", gradient_accumulation_steps=4)
    block = 12 * 64 * 64 + 2 * 64
    assert shared.weights == count + 4 * (count - 2 * block)
    assert (shared.gradients, shared.optimizer) == (count, 2 * count)
    _, accumulating = estimate_of(4, parallel="fsdp", gradient_accumulation_steps=8)
    assert accumulating.gradients == 4 * count  # not reduced before the last micro-batch
    _, half = estimate_of(4, parallel="fsdp", dtype="bfloat16")
    assert half.weights == count + 2 * (count - 2 * block)
    _, ddp = estimate_of(4)
    assert (ddp.weights, ddp.gradients, ddp.optimizer) == (4 * count, 4 * count, 8 * count)


def test_gradients_replace_activations_unless_they_accumulate():
    _, once = estimate_of()
    count, accumulating = estimate_of(gradient_accumulation_steps=2)
    assert once.activations == accumulating.activations - 4 * count > 0
    _, few_tokens = estimate_of(batch_size=1)
    assert few_tokens.activations == 8 * 100 * 64  # the two gradients of the tied matrix
    _, graphs = estimate_of(compile="reduce-overhead", batch_size=1)
    assert graphs.gradients == 4 * count
    assert graphs.activations == 4 * count + 8 * 100 * 64  # results of the graph


def test_the_logits_are_counted_in_parts_if_they_are_computed_in_parts():
    settings = tiny.settings(block_size=8, batch_size=10_000)
    config = GPTConfig(vocab_size=50_304, n_layer=1, n_head=2, n_embd=8, block_size=8)
    sizes = [
        memory.activation_bytes(
            config, replace(settings, activation_checkpointing=parts, **changes)
        )
        for parts, changes in [(True, {}), (False, {}), (True, {"teachers": "out"})]
    ]
    logits = 12 * 50_304 * 8 * 10_000
    assert logits / 8 < sizes[0] < logits / 8 * 1.1
    assert logits < sizes[1] < logits * 1.1
    assert logits < sizes[2] < logits * 1.1


def test_compiled_models_have_no_log_probabilities():
    config, settings = GPTConfig(**tiny.SHAPE), tiny.settings(gradient_accumulation_steps=2)
    tokens = settings.batch_size * settings.block_size
    eager = memory.activation_bytes(config, settings)
    compiled = memory.activation_bytes(config, replace(settings, compile=True))
    assert eager - compiled == tokens * (12 - 4) * config.vocab_size


def test_the_summary_is_one_line():
    found = MemoryEstimate(2**30, 2**30, 2**31, 2**29)
    line = "weights 1.0, gradients 1.0, optimizer 2.0, activations 0.5)"
    assert found.summary() == f"memory per process: about 4.5 GiB ({line}"
    assert found.summary(80 * 2**30) == f"memory per process: about 4.5 GiB of 80 GiB ({line}"
    small = MemoryEstimate(2**20, 0, 0, 2**22)
    assert small.summary() == "memory per process: about 5 MiB (weights 1, activations 4)"


@pytest.mark.parametrize(("optimizer", "size"), [("adamw", 12), ("muon", 8)])
def test_a_copy_of_the_state_may_take_half_of_the_host_memory(monkeypatch, optimizer, size):
    config = GPTConfig(n_layer=100, n_embd=64, n_head=1, vocab_size=1, block_size=1)
    settings = tiny.settings(optimizer=optimizer)
    needed = 2 * size * num_params(config)
    for available, expected in [(None, True), (1.1 * needed, True), (0.9 * needed, False)]:
        monkeypatch.setattr(memory, "memory_bytes", {"cpu": available}.get)
        assert can_gather(config, settings) == expected
