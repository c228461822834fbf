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
from folio.data.batches import Batches
from folio.hardware import compile
from folio.hardware.compile import CudaGraph, fast_linear, optimize_for_inference, run_compiler
from folio.hardware.device import DTYPES, Machine
from folio.hardware.kernels import use_fast_kernels
from folio.inference.completion import sample_text
from folio.training import evaluation
from folio.training.setup import make_plan
from model import ACTIVATIONS, Linear

# torch.compile


def test_a_failing_trial_leaves_the_model_in_training_mode_without_gradients(monkeypatch, capsys):
    model = random_model()
    idx = random_ids(model)

    def forward(x, y):  # fails after the backward pass
        loss = model(x, y)
        if loss.requires_grad:
            loss.backward()
            raise RuntimeError("no graph")
        return loss

    assert not run_compiler(forward, model, (idx, idx))
    assert "no graph" in capsys.readouterr().err
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("switches", "graphs"),
    [
        (tiny.SWITCHES | {"train_temperature": 0.9}, 4),  # of a block and of the loss, two each
        ({"teachers": "out-teacher"}, 5),  # one of the teacher's blocks, and one loss each
        ({"out_dir": "out-teacher", "init_from": "resume", "max_iters": 9}, 4),
        ({"activation_checkpointing": True}, 4),
        ({"device": "gpu"}, 4),  # a CPU that uses what is faster on a GPU
    ],
    ids=["switches", "teachers", "resume", "activation_checkpointing", "as on a GPU"],
)
def test_all_blocks_are_compiled_once_before_the_first_step(verse, monkeypatch, switches, graphs):
    train.main(tiny.flags(out_dir="out-teacher", max_iters=1, n_layer=3))
    if "device" in switches:
        switches = {}
        monkeypatch.setattr(
            train, "use_fast_kernels", lambda model, _: use_fast_kernels(model, True)
        )
    from torch._dynamo.testing import CompileCounter  # slow to import

    torch._dynamo.reset()  # its limit of graphs is for all tests together
    counter, compile = CompileCounter(), torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda model, dynamic, **_: compile(model, backend=counter, dynamic=dynamic),
    )
    settings = tiny.settings(
        n_layer=3,
        dtype="bfloat16",
        dropout=0.2,
        compile=True,
        **{"gradient_accumulation_steps": 2, **switches},
    )
    assert (len(verse.train) - 1) // 8 % 4  # the last batch of the evaluation is padded
    run = train.make_run(make_plan(settings))
    assert counter.frame_count == graphs
    if settings.activation_checkpointing:
        assert all(block.forward.func is checkpoint for block in run.model.transformer.h)
    batches = Batches(run.dataset.train, settings, run.world)
    for step in range(2):
        train.train_step(run, batches.at(step), step, 1e-3)
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
    batches, losses = Batches(run.dataset.train, run.settings, run.world), []
    for step in range(count):
        values = train.train_step(run, batches.at(step), step, lr=1e-2 / (step + 1))
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
    assert tiny.equal(run.state_dict(), expected.state_dict())
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


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
def test_gpu_dropout_depends_on_the_step_only(verse, compile):
    settings = tiny.settings(device="cuda", dtype="bfloat16", compile=compile, dropout=0.5)
    run = train.make_run(make_plan(settings))
    [batch] = Batches(run.dataset.train, settings, run.world).at(0)

    def loss(step):
        return train.train_step(run, [batch], step, lr=0.0)[0].item()

    warmup = [loss(step) for step in range(5)]
    assert [loss(step) for step in range(5)] == warmup
    assert len(set(warmup)) > 1  # two of them can be equal in bfloat16


# Inference

LAYERS = [  # dtype, texts at a time, relative error of logits, layer
    ("float32", 1, 1e-5, compile.FewRowsLinear),
    ("float32", None, 1e-5, compile.PackedLinear),
    ("bfloat16", 1, 3e-2, compile.PackedLinear),  # or Linear, if the CPU has no bfloat16
    ("int8", 1, 5e-2, compile.Int8Linear),
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
    monkeypatch.setattr(compile, "MIN_PACKED_WEIGHTS", 0)
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


@pytest.mark.parametrize("has_mkl", [False, True])
@pytest.mark.parametrize("has_bfloat16", [False, True])
def test_layers_depend_on_what_the_cpu_has(has_mkl, has_bfloat16, monkeypatch):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: has_mkl)
    monkeypatch.setattr(torch.ops.mkldnn, HAS_BFLOAT16.__name__, lambda: has_bfloat16)
    for kind in ("PackedLinear", "FewRowsLinear"):  # which the CPU may not have
        monkeypatch.setattr(compile, kind, lambda linear, kind=kind: kind)
    linear = Linear(400, 400)
    packed = "PackedLinear" if has_mkl else linear
    assert fast_linear(linear, "float32", None) is packed
    assert fast_linear(linear, "float32", 3) is ("FewRowsLinear" if has_mkl else linear)
    assert fast_linear(linear, "bfloat16", 3) is (packed if has_bfloat16 else linear)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="needs MKL")
def test_only_large_layers_are_packed_in_float32(monkeypatch):
    monkeypatch.setattr(compile, "MIN_PACKED_WEIGHTS", 16 * 48)
    block = optimized_model("float32", None).transformer.h[0]
    layers = [block.mlp.c_fc, block.mlp.c_proj, block.attn.c_attn, block.attn.c_proj]  # 16 x 16
    kinds = [type(layer) for layer in layers]
    assert kinds == [compile.PackedLinear] * 3 + [Linear]
