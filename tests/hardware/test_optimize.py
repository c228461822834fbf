import dataclasses
from contextlib import contextmanager

import pytest
import tiny
import torch
from tiny import SHAPES, random_ids, random_model
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import train
from folio.hardware import kernels
from folio.hardware.device import DTYPES, Machine
from folio.hardware.optimize import CudaGraph, optimize_for_inference
from folio.inference.completion import sample_text
from folio.training import evaluation
from model import ACTIVATIONS, Linear

# Activation checkpointing


@pytest.mark.parametrize("settings", [{"dropout": 0.3}, {"position": "rotary"}], ids=str)
def test_activation_checkpointing_repeats_blocks_with_the_same_result(verse, settings):
    results = []
    for is_used in (False, True):
        run, calls = tiny.new_run(activation_checkpointing=is_used, **settings), []
        mlp = run.model.transformer.h[0].mlp
        mlp.register_forward_pre_hook(lambda mlp, _, calls=calls: calls.append(mlp.training))
        results.append((losses_of_steps(run, count=2), run.model.state_dict()))
        assert sum(calls) == (4 if is_used else 2)  # the backward passes call the block again
    assert tiny.equal(*results)


# torch.compile


@pytest.mark.slow
@pytest.mark.parametrize(
    ("switches", "graphs"),
    [
        (tiny.SWITCHES | {"train_temperature": 0.9}, 4),  # of a block and of the loss, two each
        ({"teachers": "out-teacher"}, 5),  # one of the teacher's blocks, and one loss each
        ({"out_dir": "out-teacher", "init_from": "resume", "max_iters": 9}, 4),
        ({"activation_checkpointing": True}, 4),
    ],
    ids=["switches", "teachers", "resume", "activation_checkpointing"],
)
def test_all_blocks_are_compiled_once_before_the_first_step(verse, monkeypatch, switches, graphs):
    train.main(tiny.flags(out_dir="out-teacher", max_iters=1, n_layer=3))
    from torch._dynamo.testing import CompileCounter  # slow to import

    torch._dynamo.reset()  # its limit of graphs is for all tests together
    counter, compile = CompileCounter(), torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda model, dynamic, **_: compile(model, backend=counter, dynamic=dynamic),
    )
    settings = {"n_layer": 3, "dtype": "bfloat16", "dropout": 0.2, "compile": True}
    assert (len(verse.train) - 1) // 8 % 4  # the last batch of the evaluation is padded
    run = tiny.new_run(**settings | {"gradient_accumulation_steps": 2} | switches)
    assert counter.frame_count == graphs
    if run.settings.activation_checkpointing:
        assert all(block.forward.func is checkpoint for block in run.model.transformer.h)
    for step in range(2):
        train.train_step(run, step, 1e-3)
        evaluation.evaluate(run)
        sample_text(run.model, verse.tokenizer, seed=1)  # not compiled
    assert counter.frame_count == graphs


# CUDA graphs


class RecordedGraph(TorchDispatchMode):
    """A stand-in for torch.cuda.CUDAGraph that repeats operations on the same tensors of a CPU."""

    def __init__(self):
        super().__init__()
        self.calls, self.has_run = [], False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **kwargs or {})
        self.calls.append((function, args, kwargs or {}, outputs))
        return outputs

    @torch.no_grad()
    def replay(self):
        calls = self.calls if self.has_run else []  # unlike a GPU's, the capture runs them
        self.has_run = True
        for function, args, kwargs, outputs in calls:
            new = function(*args, **kwargs)
            if any(value.alias_info for value in function._schema.returns):
                continue  # a view, or in place
            for output, value in zip(tree_leaves(outputs), tree_leaves(new), strict=True):
                if isinstance(output, torch.Tensor):
                    output.copy_(value)


@pytest.fixture
def graphs(monkeypatch):
    """Replaces CUDA graphs. Returns a list of those that are made."""
    made = []

    @contextmanager
    def capture(graph, stream):
        made.append(graph)
        with graph:
            yield

    monkeypatch.setattr(CudaGraph, "_call_on_stream", lambda self, args: self.function(*args))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return made


def losses_of_steps(run, count=7):
    """Returns the losses and norms of steps with other rates, and of an evaluation after each."""
    losses = []
    for step in range(count):
        values = train.train_step(run, step, 1e-2 / (step + 1))
        losses.append([*map(float, values), evaluation.evaluate(run)["loss"]])
    return losses


def use_graph(run):
    run.machine = dataclasses.replace(run.machine, cuda_graph=True)
    return run


STEPS = [
    {},
    {"dtype": "bfloat16", "dropout": 0.2},
    {"optimizer": "muon", "grad_clip": 0.0, "dropout": 0.2, **tiny.SWITCHES},
    {"optimizer": "muon", "teachers": "out-teacher", "dtype": "bfloat16"},
]


@pytest.mark.parametrize("settings", STEPS, ids=str)
def test_a_graph_of_a_step_repeats_all_that_a_step_does(verse, graphs, settings):
    train.main(tiny.flags(out_dir="out-teacher", max_iters=1))
    expected, run = tiny.new_run(**settings), use_graph(tiny.new_run(**settings))
    assert losses_of_steps(run) == losses_of_steps(expected)
    assert tiny.equal(run.model.state_dict(), expected.model.state_dict())
    for name, optimizer in run.optimizers.items():
        assert tiny.equal(optimizer.state_dict(), expected.optimizers[name].state_dict())
    [graph] = graphs
    assert len(graph.calls) > 100


@pytest.mark.usefixtures("graphs")
def test_a_run_continues_if_capture_fails(verse, monkeypatch, capsys):
    expected, run = tiny.new_run(), use_graph(tiny.new_run())
    clip_gradients = train.clip_gradients

    def clip_or_fail(model, max_norm):  # after the backward pass
        if _get_current_dispatch_mode():
            raise RuntimeError("operation not permitted when stream is capturing")
        return clip_gradients(model, max_norm)

    monkeypatch.setattr(train, "clip_gradients", clip_or_fail)
    assert losses_of_steps(run) == losses_of_steps(expected)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("CUDA graph capture failed; continuing without it (operation not")


@pytest.mark.gpu
@pytest.mark.parametrize("settings", STEPS, ids=str)
@pytest.mark.parametrize("compile", [False, True])
def test_a_cuda_graph_of_a_step_is_close_to_the_step(verse, compile, settings):
    train.main(tiny.flags(out_dir="out-teacher", max_iters=1))
    settings = {"device": "cuda", "compile": compile} | settings
    run, expected = tiny.new_run(**settings), tiny.new_run(**settings)
    assert run.machine.cuda_graph
    expected.machine = dataclasses.replace(expected.machine, cuda_graph=False)
    for ours, theirs in zip(losses_of_steps(run), losses_of_steps(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3)
    assert run.graph.graph


# Inference

LAYERS = [  # dtype, texts at a time, relative error of logits, layer
    ("float32", 1, 1e-5, kernels.FewRowsLinear),
    ("float32", None, 1e-5, kernels.PackedLinear),
    ("bfloat16", 1, 3e-2, kernels.PackedLinear),  # or Linear, if the CPU has no bfloat16
    ("int8", 1, 5e-2, kernels.Int8Linear),
]
HAS_BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported


def optimized_model(dtype, texts, **changes):
    """Returns random_model(**changes) as sample.py uses it on a CPU."""
    model = random_model(dropout=0.5, **changes).train().to(DTYPES[dtype])
    return optimize_for_inference(model, Machine("cpu", dtype, False), texts)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="needs MKL")
@pytest.mark.parametrize(
    "changes", [*SHAPES, *({"activation": name} for name in ACTIVATIONS)], ids=str
)
@pytest.mark.parametrize(("dtype", "texts", "error", "kind"), LAYERS, ids=str)
@torch.no_grad()
def test_layers_for_inference_keep_the_logits(changes, dtype, texts, error, kind, monkeypatch):
    monkeypatch.setattr(kernels, "MIN_PACKED_WEIGHTS", 0)
    model = random_model(**changes)
    optimized = optimized_model(dtype, texts, **changes)
    if model.config.n_embd % 16 == 0:
        kind = Linear if dtype == "bfloat16" and not HAS_BFLOAT16() else kind
        assert isinstance(optimized.lm_head, kind)
    for rows in (1, 2, 3, 8):
        idx = random_ids(model, rows)
        for part in (idx, idx[:1, :rows]):  # whole texts, and few tokens
            logits, expected = optimized.logits(part).float(), model.logits(part)
            assert (logits - expected).norm() < error * expected.norm()
