import pytest
import tiny
import torch
from tiny import SHAPES, random_ids, random_model

import train
from folio.data.batches import Batches
from folio.hardware.compile import compile_model, optimize_for_inference
from folio.hardware.device import Machine
from folio.training.run import Run
from folio.training.setup import make_plan
from model import ACTIVATIONS

CPU = Machine("cpu", "float32", True, "")


# torch.compile


def test_a_failing_trial_leaves_the_model_in_training_mode_without_gradients(monkeypatch, capsys):
    model = random_model()
    idx = random_ids(model)

    def compiled(x, y):  # fails after the backward pass
        loss = model(x, y)
        if loss.requires_grad:
            loss.backward()
            raise RuntimeError("no graph")
        return loss

    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled)
    assert compile_model(model, CPU, (idx, idx)) is model
    assert "no graph" in capsys.readouterr().err
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    "switches",
    [
        tiny.SWITCHES | {"train_temperature": 0.9},
        {"teachers": "out-teacher"},
        {"out_dir": "out-teacher", "init_from": "resume", "max_iters": 9},
    ],
    ids=["switches", "teachers", "resume"],
)
def test_training_and_evaluation_are_compiled_before_the_first_step(verse, monkeypatch, switches):
    train.main(tiny.flags(out_dir="out-teacher", max_iters=1))
    from torch._dynamo.testing import CompileCounter  # slow to import

    counter, compile = CompileCounter(), torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda model, dynamic, **_: compile(model, backend=counter, dynamic=dynamic),
    )
    settings = tiny.settings(
        dtype="bfloat16", dropout=0.2, gradient_accumulation_steps=2, compile=True, **switches
    )
    assert (len(verse.train) - 1) // 8 % 4  # the last batch of the evaluation is padded
    run = Run(make_plan(settings))
    assert counter.frame_count == 2  # one graph each
    batches = Batches(run.dataset.train, settings)
    for step in range(2):
        train.train_step(run, batches.at(step), step, 1e-3)
        train.evaluate(run)
    assert counter.frame_count == 2


def test_a_mode_with_cuda_graphs_keeps_the_gradients(verse, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **_: lambda *arguments: model(*arguments))
    settings = tiny.settings(compile="reduce-overhead", gradient_accumulation_steps=2)
    run, expected = Run(make_plan(settings)), tiny.new_run(gradient_accumulation_steps=2)
    batches = Batches(run.dataset.train, settings)
    addresses = [p.grad.data_ptr() for p in run.model.parameters()]
    for step in range(3):
        losses = [train.train_step(r, batches.at(step), step, 1e-3) for r in (run, expected)]
        assert losses[0] == losses[1]
        assert [p.grad.data_ptr() for p in run.model.parameters()] == addresses
    assert tiny.equal(run.model.state_dict(), expected.model.state_dict())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("compile", [False, True, "reduce-overhead"])
def test_gpu_dropout_depends_on_the_step_only(verse, compile):
    settings = tiny.settings(device="cuda", dtype="bfloat16", compile=compile, dropout=0.5)
    run = Run(make_plan(settings))
    [batch] = Batches(run.dataset.train, settings).at(0)

    def loss(step):
        return train.train_step(run, [batch], step, lr=0.0)[0].item()

    warmup = [loss(step) for step in range(5)]
    assert [loss(step) for step in range(5)] == warmup
    assert len(set(warmup)) > 1  # two of them can be equal in bfloat16


# Inference


@pytest.mark.parametrize(
    "changes", [*SHAPES, *({"activation": name} for name in ACTIVATIONS)], ids=str
)
@torch.no_grad()
def test_optimizing_for_inference_keeps_the_logits(changes):
    model, optimized = random_model(**changes), random_model(dropout=0.5, **changes).train()
    idx = random_ids(model)
    logits = optimize_for_inference(optimized).logits(idx)
    assert torch.allclose(logits, model.logits(idx), atol=1e-5)
