"""Optimizers, the learning rate, and runs whose loss or gradient is not finite."""

import copy
import math
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch

import train
from folio.checkpoint import format as checkpoint_format
from folio.cli.errors import UserError
from folio.distributed.world import SINGLE_PROCESS
from folio.training.muon import Muon, orthogonalize_together
from folio.training.optimizers import EMBEDDING_LR_SCALE, make_optimizers
from model import GPT
from train import learning_rate_at, momentum_at

BLOCK_MATRICES = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
SHAPES = ((16, 16), (40, 16), (16, 48), (16, 16), (24, 32), (64, 16), (16, 64), (64, 16), (1, 5))


def group_names(model, optimizer):
    """Returns the names of the parameters of each group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


# Learning rate


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lr_decay_iters": 110}, {0: 1 / 11, 10: 1.0, 60: 0.55, 109: 0.1002, 110: 0.1, 500: 0.1}),
        ({"max_iters": 50, "min_lr": 0.0}, {10: 1.0, 30: 0.5, 50: 0.0}),
        ({"lr_decay_iters": 10}, {9: 10 / 11, 10: 0.1}),
        ({"decay_lr": False}, {0: 1.0, 1: 1.0, 100: 1.0}),
        ({"lr_decay_iters": 100, "lr_decay_start": 0.4}, {0: 1 / 11, 40: 1.0, 70: 0.55, 100: 0.1}),
        ({"max_iters": 20, "lr_decay_start": 0.0}, {10: 1.0, 15: 0.55}),  # after the warmup
    ],
    ids=str,
)
def test_learning_rate_has_linear_warmup_and_cosine_or_linear_decay(changes, expected):
    settings = tiny.settings(learning_rate=1.0, warmup_iters=10, **changes)
    for step, lr in expected.items():
        assert learning_rate_at(step, settings) == pytest.approx(lr, abs=5e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_update_moves_every_parameter_with_the_given_learning_rate(verse, optimizer):
    run = tiny.new_run(optimizer=optimizer)
    initial = [p.detach().clone() for p in run.model.parameters()]
    for lr, is_moving in ((0.0, False), (0.25, True)):
        train.train_step(run, 0, lr)
        groups = sum((opt.param_groups for opt in run.optimizers.values()), [])
        scales = [1, 1, EMBEDDING_LR_SCALE, 1] if optimizer == "muon" else [1, 1]
        assert [group["lr"] for group in groups] == [lr * scale for scale in scales]
        for old, new in zip(initial, run.model.parameters(), strict=True):
            assert torch.equal(old, new) != is_moving


def test_momentum_of_muon_rises(verse):
    assert momentum_at(0, tiny.settings()) == 0.95
    run = tiny.new_run(optimizer="muon", momentum_warmup_iters=20)
    for step, momentum in {0: 0.85, 10: 0.9, 20: 0.95, 500: 0.95}.items():
        train.train_step(run, step, 0.1)
        assert run.optimizers["muon"].param_groups[0]["momentum"] == pytest.approx(momentum)


# Parameter groups


def test_adamw_decays_only_matrices_and_keeps_the_order_of_nanogpt():
    model = tiny.random_model(n_layer=1)
    optimizer = make_optimizers(model, tiny.settings(weight_decay=0.3))["adamw"]
    decayed, not_decayed = optimizer.param_groups
    blocks = [f"transformer.h.0.{name}.weight" for name in BLOCK_MATRICES]
    tables = ["transformer.wte.weight", "transformer.wpe.weight"]
    assert group_names(model, optimizer)[0] == tables + blocks
    assert all(p.dim() == 1 for p in not_decayed["params"])
    assert (decayed["weight_decay"], not_decayed["weight_decay"]) == (0.3, 0.0)


@pytest.mark.parametrize(("n_layer", "changes"), [(0, {}), (2, tiny.SWITCHES)])
def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest(changes, n_layer):
    model = tiny.random_model(n_layer=n_layer, **changes)
    optimizers = make_optimizers(model, tiny.settings(optimizer="muon"))
    names = {key: group_names(model, optimizer) for key, optimizer in optimizers.items()}
    blocks = [f"transformer.h.{i}" for i in range(n_layer)]
    matrices = [f"{block}.{name}.weight" for block in blocks for name in BLOCK_MATRICES]
    assert names.get("muon", [[]]) == [matrices]
    if n_layer:
        tables = ("wte", "context.ngrams.2", "context.ngrams.3")
        assert names["adamw"][-1] == [f"transformer.{name}.weight" for name in tables]
    all_names = sum(names["adamw"], matrices)
    assert sorted(all_names) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_frozen_and_unused_parameters_train_and_resume(verse, optimizer, monkeypatch):
    class EditedGPT(GPT):
        def __init__(self, config):
            super().__init__(config)
            self.transformer.h[0].requires_grad_(False)
            self.transformer.h[1].unused = torch.nn.Linear(3, 3)

    for module in (checkpoint_format, train):
        monkeypatch.setattr(module, "GPT", EditedGPT)
    settings = {"n_layer": 2, "optimizer": optimizer}
    initial = tiny.new_run(**settings).model.transformer.h[0].state_dict()
    train.main(tiny.flags(**settings))
    train.main(tiny.flags(**settings, init_from="resume", max_iters=9))
    weights = tiny.load()["model"]
    for name, weight in initial.items():
        assert torch.equal(weight, weights[f"transformer.h.0.{name}"])
        assert not torch.equal(weight, weights[f"transformer.h.1.{name}"])


# Muon


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-3), (torch.float32, 2e-2)])
def test_muon_equals_torchs(dtype, tolerance):
    """The tolerance is large for float32 because torch's Muon computes in bfloat16 only."""
    torch.manual_seed(0)
    initial = [torch.randn(shape) for shape in SHAPES]
    ours, theirs = ([torch.nn.Parameter(x.clone()) for x in initial] for _ in range(2))
    muon = Muon(ours, torch.tensor(0.02), weight_decay=0.1, dtype=dtype)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        for our, their in zip(ours, theirs, strict=True):
            our.grad = torch.randn(our.shape)
            their.grad = our.grad.clone()
        muon.step()
        reference.step()
    for our, their, start in zip(ours, theirs, initial, strict=True):
        assert (our - their).norm() < tolerance * (their - start).norm(), tuple(our.shape)


def test_muon_orthogonalizes_queries_keys_and_values_separately():
    query, key, value = (torch.randn(8, 8) for _ in range(3))
    [combined] = orthogonalize_together([torch.cat((query, 100 * key, value))], SINGLE_PROCESS)
    separate = orthogonalize_together([query, key, value], SINGLE_PROCESS)
    torch.testing.assert_close(combined, torch.cat(separate))


# Divergence


def saved_step():
    """Returns the step of last.pt, whose weights must be finite."""
    last = tiny.load("last.pt")
    assert all(weight.isfinite().all() for weight in last["model"].values())
    return last["iter_num"]


@pytest.mark.parametrize(("quantity", "log_interval"), [("loss", 100), ("gradient", 1)])
def test_a_run_that_diverged_resumes_from_a_finite_state(verse, quantity, log_interval):
    settings = {"max_iters": 9, "eval_interval": 7, "checkpoint_interval": 2}
    run, steps = tiny.new_run(log_interval=log_interval, **settings), iter(range(100))

    def diverge(tensor):
        return tensor * (math.inf if next(steps) == 4 else 1)

    if quantity == "loss":
        norm = run.model.transformer.ln_f
        norm.register_forward_hook(lambda *a: diverge(a[2]) if a[0].training else None)
    else:
        run.model.lm_head.weight.register_hook(diverge)
    found = "4 .* gradient norm" if log_interval == 1 else "6 .* norm of the weights"
    with pytest.raises(UserError, match=f"at step {found} (nan|inf).*--learning_rate"):
        train.train(run)
    assert saved_step() == 4
    assert all(math.isfinite(event["loss"]) for event in tiny.log_events()[1:])
    train.main(tiny.flags(init_from="resume", **settings))
    assert saved_step() == 9


def test_steps_that_the_loss_scaler_skips_do_not_end_a_run(verse, monkeypatch):
    scaler = partial(torch.amp.GradScaler, init_scale=2.0**26)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    train.main(tiny.flags(dtype="float16", max_iters=20, eval_interval=20))
    norms = [event["grad_norm"] for event in tiny.log_events() if event["event"] == "train"]
    assert norms[0] is None
    assert 0 < norms[-1] < 100
    assert tiny.load("last.pt")["scaler"]["scale"] < 2.0**26
    assert "Infinity" not in Path("out/log.jsonl").read_text()


def test_overflow_at_the_smallest_loss_scale_ends_a_run(verse, monkeypatch):
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=1.0))
    run = tiny.new_run(dtype="float16")
    run.model.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(UserError, match=r"at step 0 .* gradient norm (nan|inf)"):
        train.train(run)


def test_float16_overflow_in_one_optimizer_does_not_spread_to_the_other(verse):
    run = tiny.new_run(dtype="float16", optimizer="muon")
    adamw = run.optimizers["adamw"]
    for factor in (1.0, math.nan):
        old = copy.deepcopy(adamw.state_dict())
        run.model.lm_head.weight.register_hook(lambda gradient, factor=factor: gradient * factor)
        train.train_step(run, 0, 0.1)
        assert tiny.equal(adamw.state_dict(), old) == math.isnan(factor)
        assert all(weight.isfinite().all() for weight in run.model.state_dict().values())
