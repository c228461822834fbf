"""Training, evaluation and sampling do not wait for a device between log lines.

They run on torch's meta device, whose tensors have shapes but no values. Reading a value, for which
a GPU would have to be waited for, raises there, and so does combining tensors of two devices.
"""

import dataclasses

import numpy as np
import pytest
import tiny
import torch

import train
from folio.checkpoint.format import empty_model
from folio.checkpoint.progress import Progress
from folio.data.batches import Batches, Split, to_device
from folio.hardware.device import Machine, choose_machine
from folio.inference.generate import generate
from folio.inference.sampling import SamplingParams
from folio.training import evaluation
from folio.training.setup import model_config

META = Machine("meta", "float32", False)
OPTIONS = {  # beside those of the presets
    "gradient_accumulation_steps": 2,
    "activation_checkpointing": True,
    "train_temperature": 0.9,
    "dropout": 0.1,
}
SWITCHES = [{}, tiny.SWITCHES, *({name: value} for name, value in tiny.SWITCHES.items())]
models = pytest.mark.parametrize(
    ("dtype", "optimizer", "switches"),
    [("float32", "adamw", {}), *(("float16", "muon", switches) for switches in SWITCHES)],
    ids=str,
)


@pytest.fixture
def no_adamw(monkeypatch):
    """Replaces the fused AdamW, which the meta device does not have, by one without steps."""

    class NoAdamW(torch.optim.AdamW):
        _step_supports_amp_scaling = True

        def __init__(self, groups, fused, **options):
            super().__init__(groups, **options)

        def step(self):
            pass

    monkeypatch.setattr(torch.optim, "AdamW", NoAdamW)


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_evaluation_and_sampling_read_no_value(verse, switches):
    settings = tiny.settings(**switches)
    config = model_config(settings, verse.tokenizer)
    run = train.make_run(tiny.plan_of(config, settings, machine=META))
    assert evaluation.split_loss(run, Split(np.zeros(3000, np.uint16), "meta"), 4).is_meta
    model = run.model.eval()
    prompts = [[1] * config.block_size, [2, 3]]  # the first context is full and drops tokens
    params = SamplingParams(0.8, 20, 0.9, 0.1, 1.3, max_new_tokens=3, context_stride=4)
    for accelerate in (None, lambda step, *_: step):
        tokens = list(generate(model, prompts, [1, 2], params, accelerate=accelerate))
        assert [(ids.is_meta, logprobs.is_meta) for ids, logprobs in tokens] == [(True, True)] * 3


@models
@pytest.mark.usefixtures("no_adamw")
def test_a_run_reads_values_only_at_log_lines(verse, dtype, optimizer, switches):
    settings = tiny.settings(
        log_interval=10, eval_interval=99, max_iters=99, optimizer=optimizer, **OPTIONS, **switches
    )
    config = model_config(settings, verse.tokenizer)
    machine = dataclasses.replace(META, dtype=dtype)
    plan = tiny.plan_of(config, settings, to_device(verse, "meta"), machine)
    plan.teachers = [empty_model(config, "meta")]
    run = train.make_run(plan)
    run.progress = Progress(step=6, evaluated_at=6)
    with pytest.raises(RuntimeError, match="meta tensors"):  # float(loss)
        train.train(run)
    assert run.progress.step == 10


@pytest.mark.gpu
@models
def test_a_step_on_a_gpu_does_not_synchronize(verse, dtype, optimizer, switches):
    # Above 3,072 tokens torch uses another kernel for the gradient of an embedding.
    settings = tiny.settings(
        dtype=dtype,
        batch_size=512,
        optimizer=optimizer,
        activation_checkpointing=dtype == "float16",
        **switches,
    )
    config = model_config(settings, verse.tokenizer)
    machine = choose_machine("cuda", dtype, False)
    run = train.make_run(tiny.plan_of(config, settings, machine=machine))
    batches = Batches(to_device(verse, "cuda").train, settings, run.world)
    assert batches.split.resident is not None
    for number in range(3):
        train.train_step(run, batches.at(number), number, 1e-3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train.train_step(run, batches.at(3), 3, 1e-3)
        train.train_step(run, batches.at(4), 4, 1e-3)
        with pytest.raises(RuntimeError, match="synchroniz"):
            run.save()
    finally:
        torch.cuda.set_sync_debug_mode("default")
