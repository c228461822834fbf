"""Training, evaluation and sampling do not wait for a device between log lines.

They run on torch's meta device, whose tensors have shapes but no values. Reading a value, for which
a GPU would have to be waited for, raises there, and so does combining tensors of two devices.
"""

import pytest
import tiny
import torch

import train
from folio.checkpoint.format import empty_model
from folio.hardware import device
from folio.hardware.device import Machine, set_up_machine
from folio.inference.generate import generate
from folio.inference.sampling import SamplingParams
from folio.training import evaluation
from folio.training.distillation import Distillation

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


def new_run(monkeypatch, dtype="float32", **settings):
    """Returns a Run on the meta device."""
    monkeypatch.setattr(device, "_measure_peak", lambda *_: 1e12)
    return tiny.new_run(Machine("meta", dtype, False), **settings)


@pytest.fixture
def no_adamw(monkeypatch):
    """Makes AdamW, whose fused steps the meta device does not have, keep the weights."""
    adamw = torch.optim.AdamW
    unfused = lambda groups, fused, **options: adamw(groups, **options)  # noqa: E731
    monkeypatch.setattr(torch.optim, "AdamW", unfused)
    monkeypatch.setattr(adamw, "_step_supports_amp_scaling", True, raising=False)
    monkeypatch.setattr(adamw, "step", lambda self: None)


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_evaluation_and_sampling_read_no_value(verse, monkeypatch, switches):
    run = new_run(monkeypatch, **switches)
    assert evaluation.split_loss(run, "val").is_meta
    model = run.model.eval()
    prompts = [[1] * model.config.block_size, [2, 3]]  # the first is full and drops tokens
    params = SamplingParams(0.8, 20, 0.9, 0.1, 1.3, max_new_tokens=3, context_stride=4)
    for accelerate in (None, lambda step, *_: step):
        tokens = list(generate(model, prompts, [1, 2], params, accelerate=accelerate))
        assert [(ids.is_meta, logprobs.is_meta) for ids, logprobs in tokens] == [(True, True)] * 3


@models
@pytest.mark.usefixtures("no_adamw")
def test_a_run_reads_values_only_at_log_lines(verse, monkeypatch, dtype, optimizer, switches):
    intervals = {"log_interval": 10, "eval_interval": 99, "max_iters": 99}
    run = new_run(monkeypatch, dtype, optimizer=optimizer, **intervals, **OPTIONS, **switches)
    if optimizer == "muon":
        run.loss_fn = Distillation(run.model, [empty_model(run.model.config, "meta")])
    run.progress.step = run.progress.evaluated_schedule_step = 6
    with pytest.raises(RuntimeError, match="meta tensors"):  # float(loss)
        train.train(run)
    assert run.progress.step == 10


@pytest.mark.gpu
@models
def test_a_step_on_a_gpu_does_not_synchronize(verse, dtype, optimizer, switches):
    run = tiny.new_run(
        set_up_machine("cuda", dtype, False),
        device="cuda",
        batch_size=512,  # above 3,072 tokens, the gradient of an embedding has a different kernel
        optimizer=optimizer,
        activation_checkpointing=dtype == "float16",
        **switches,
    )
    assert run.dataset.train.resident is not None
    for step in range(3):
        train.train_step(run, step, 1e-3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3, 5):
            train.train_step(run, step, 1e-3)
        with pytest.raises(RuntimeError, match="synchroniz"):
            run.save()
    finally:
        torch.cuda.set_sync_debug_mode("default")
