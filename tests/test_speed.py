"""What makes a step fast, by counting and never by a clock: see RESULTS.md for the seconds.

That a step waits for nothing, copies no more than it must, multiplies many matrices at once, and
is compiled once. Profiler events have torch's own names for what it does.
"""

import platform
import resource
from collections import Counter

import numpy as np
import pytest
import tiny
import torch
from torch._dynamo.testing import CompileCounter
from torch.profiler import ProfilerActivity, profile

import train
from batches import Batches, Split, on_device
from device import choose_machine
from model import GPTConfig

IDS = np.random.default_rng(0).integers(0, 65, 2000).astype(np.uint16)
# What reads a tensor's values: item() and float(), tolist(), or what has a size that they decide.
# Each has the host wait until a GPU has got so far.
READS = {"aten::_local_scalar_dense", "aten::resolve_neg", "aten::nonzero", "aten::equal"}
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}

both_optimizers = pytest.mark.parametrize("optimizer", ["adamw", "muon"])
both_models = pytest.mark.parametrize("switches", [{}, tiny.SWITCHES], ids=["gpt2", "switches"])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Training:
    """A run of a tiny model that has made its first few steps."""

    def __init__(self, **changes):
        self.config = config = tiny.settings(**changes)
        self.machine = choose_machine(config.device, config.dtype, False)
        names = set(GPTConfig.__dataclass_fields__) - {"vocab_size"}
        shape = {name: getattr(config, name) for name in names}
        self.state = train.make_state(config, GPTConfig(vocab_size=65, **shape), self.machine, None)
        self.split = Split(IDS, self.machine.device)
        self.batches = Batches(self.split, config)
        for _ in range(3):
            self.step()

    def step(self):
        state, batch = self.state, self.batches.of(self.state.step)
        _, norm = train.gradient(state.model, state, batch, self.config, self.machine)
        train.update(state, norm, 1e-3, self.config)


def events_of(act):
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        act()
    return profiler.events()


def is_within(event, name):
    """Whether the event is part of another of that name."""
    while event := event.cpu_parent:
        if event.name == name:
            return True
    return False


def reads(events):
    # AdamW's kernel for CPUs reads its step's number there; that for GPUs has it on the GPU.
    return [e for e in events if e.name in READS and not is_within(e, "aten::_fused_adamw_")]


def copies(events):
    """How many tensors were copied to another dtype, and how many to another order in memory.

    Numbers that are tensors without a dimension do not count.
    """
    made = [e for e in events if e.name == "aten::copy_" and e.input_shapes[0]]
    converted = sum(is_within(e, "aten::_to_copy") for e in made)
    return converted, len(made) - converted


# Waiting


@both_models
@both_optimizers
def test_no_step_waits_for_a_value(optimizer, switches):
    changes = {"dtype": "bfloat16", "n_layer": 2, "gradient_accumulation_steps": 2}
    training = Training(optimizer=optimizer, **changes, **switches)
    assert reads(events_of(training.step)) == []
    assert reads(events_of(lambda: train.check_finite(training.state, training.config)))


def test_an_evaluation_waits_once_for_each_split_however_many_batches_it_has(verse):
    training, dataset = Training(), on_device(verse, "cpu")
    assert len(dataset.train) // (8 * 4) > 40  # batches
    run = training.state.model, dataset, training.config, training.machine
    assert len(reads(events_of(lambda: train.evaluate(*run)))) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@both_models
@both_optimizers
def test_on_a_gpu_nothing_waits_for_it_in_a_step(optimizer, switches):
    # Above 3,072 tokens torch has another kernel for the gradient of an embedding.
    changes = {"device": "cuda", "dtype": "bfloat16", "batch_size": 512}
    training = Training(optimizer=optimizer, **changes, **switches)
    assert training.split.resident is not None
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            training.step()
        with pytest.raises(RuntimeError, match="synchroniz"):
            train.check_finite(training.state, training.config)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Copying


@pytest.mark.parametrize("n_layer", [1, 3])
@both_models
@both_optimizers
def test_a_bfloat16_step_converts_what_its_products_need_and_no_more(optimizer, switches, n_layer):
    """Each conversion of the forward pass has its like in the backward pass, hence twice as many.

    A product needs its weight in bfloat16: 4 in a block, and the head's. It needs its input so
    where that comes from a norm: 2 in a block, and the head's. Back to float32 goes what is added
    to the residual stream, 2 in a block, and the logits for the loss. With the switches, queries
    and keys are normalised in float32, there and back, and turned by two tables each, which have
    no gradient. Muon converts the matrices of each of three shapes together, and 4 updates back.
    """
    training = Training(dtype="bfloat16", n_layer=n_layer, optimizer=optimizer, **switches)
    weights, inputs, back = 4 * n_layer + 1, 2 * n_layer + 1, 2 * n_layer + 1
    bound = 2 * (weights + inputs + back)
    bound += n_layer * (2 * 2 * 2 + 2 * 2) if switches else 0
    bound += 3 + 4 * n_layer if optimizer == "muon" else 0
    assert copies(events_of(training.step))[0] <= bound


@pytest.mark.parametrize("n_layer", [1, 3])
def test_plain_attention_puts_no_more_in_order_than_its_products_need(n_layer):
    """In a block queries, keys, values, what the heads found, its gradient, and the mask.

    The inputs and the targets of the batch, too, each once.
    """
    training = Training(dtype="bfloat16", n_layer=n_layer)
    assert copies(events_of(training.step))[1] <= 6 * n_layer + 2


@both_models
@both_optimizers
def test_no_step_does_more_than_the_one_before(optimizer, switches):
    training = Training(dtype="bfloat16", optimizer=optimizer, **switches)
    first = Counter(event.name for event in events_of(training.step))
    for _ in range(5):
        training.step()
    assert Counter(event.name for event in events_of(training.step)) == first


# Multiplying


def test_muon_multiplies_matrices_of_a_shape_together_however_many_they_are():
    """Five iterations of three products, for each of the three shapes that blocks have."""
    for n_layer in (1, 4):
        training = Training(optimizer="muon", n_layer=n_layer)
        names = Counter(
            event.name
            for event in events_of(training.step)
            if is_within(event, "Optimizer.step#Muon.step")
        )
        assert sum(names[name] for name in PRODUCTS) == 3 * 5 * 3


@pytest.mark.parametrize(
    ("dtype", "block_size", "plain"),
    [("bfloat16", 512, True), ("bfloat16", 513, False), ("float32", 512, False)],
)
def test_a_cpu_attends_plainly_where_that_is_faster(dtype, block_size, plain):
    training = Training(dtype=dtype, block_size=block_size, batch_size=1)
    names = {event.name for event in events_of(training.step)}
    assert any("scaled_dot_product" in name for name in names) == (not plain)


# Compiling


@both_models
def test_all_that_is_compiled_is_compiled_before_the_first_step(verse, monkeypatch, switches):
    counter, graphs = CompileCounter(), []
    compile, train_on = torch.compile, train.train_on

    def counted(*args):
        graphs.append(counter.frame_count)
        train_on(*args)
        graphs.append(counter.frame_count)

    monkeypatch.setattr(torch, "compile", lambda model: compile(model, backend=counter))
    monkeypatch.setattr(train, "train_on", counted)
    changes = {"dtype": "bfloat16", "dropout": 0.2, "gradient_accumulation_steps": 2}
    train.main(tiny.flags(compile=True, **changes, **switches))
    assert (len(verse.train) - 1) // 8 % 4  # or no batch of the evaluation would be filled up
    assert graphs == [2, 2]  # to train and to evaluate, each in one piece


# Memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries do otherwise")
def test_a_step_on_a_cpu_asks_the_system_for_little_memory():
    shape = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12}
    training = Training(dtype="bfloat16", **shape)
    for _ in range(5):
        training.step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        training.step()
    faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10
    assert faults < 500  # pages: about 100, and 2,800 where glibc gives back what a step frees
