import pytest
import tiny
import torch

import train
from device import choose_machine
from model import GPT, GPTConfig
from optimizers import EMBEDDING_RATE, Muon, learning_rate_at, make_optimizers, orthogonal

SHAPES = ((16, 16), (48, 16), (16, 48), (16, 16), (24, 32), (64, 16), (16, 64), (64, 16), (1, 5))


def tiny_model(**changes):
    torch.manual_seed(0)
    return GPT(GPTConfig(**(tiny.SHAPE | {"vocab_size": 65} | changes)))


def names_of(model, optimizer):
    """The names of each group's parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


# Learning rate


@pytest.mark.parametrize(
    ("step", "rate"),
    [(0, 1 / 11), (4, 5 / 11), (10, 1.0), (60, 0.55), (109, 0.1002), (110, 0.1), (500, 0.1)],
)
def test_the_rate_warms_up_and_falls_along_a_cosine(step, rate):
    config = tiny.settings(learning_rate=1.0, warmup_iters=10, lr_decay_iters=110, min_lr=0.1)
    assert learning_rate_at(step, config) == pytest.approx(rate, abs=5e-5)


def test_the_decay_ends_at_max_iters_at_a_tenth_unless_told():
    config = tiny.settings(learning_rate=1.0, warmup_iters=0, max_iters=50)
    assert learning_rate_at(25, config) == pytest.approx(0.55)
    assert learning_rate_at(50, config) == pytest.approx(0.1)


def test_a_warm_up_longer_than_the_decay_divides_by_nothing():
    config = tiny.settings(learning_rate=1.0, warmup_iters=10, lr_decay_iters=10)
    assert [learning_rate_at(s, config) for s in (9, 10)] == pytest.approx([10 / 11, 0.1])


def test_without_decay_the_rate_stays():
    config = tiny.settings(decay_lr=False, learning_rate=0.5)
    assert {learning_rate_at(step, config) for step in (0, 1, 100)} == {0.5}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_weight_moves_at_the_rate_of_its_step(optimizer):
    config = tiny.settings(optimizer=optimizer)
    machine = choose_machine("cpu", "float32", False)
    state = train.make_state(config, tiny_model().config, machine, None)
    before = [p.detach().clone() for p in state.model.parameters()]
    for rate, moves in ((0.0, False), (0.25, True)):
        batch = torch.arange(32).view(4, 8)
        norm = train.gradient(state.model, state, [(batch, batch)], config, machine)[1]
        train.update(state, norm, rate, config)
        groups = [group for each in state.optimizers.values() for group in each.param_groups]
        factors = [1, 1, EMBEDDING_RATE, 1] if optimizer == "muon" else [1, 1]
        assert [group["lr"] for group in groups] == [rate * factor for factor in factors]
        moved = [
            not torch.equal(*pair) for pair in zip(before, state.model.parameters(), strict=True)
        ]
        assert moved == [moves] * len(moved)


# Which weights are whose


def test_only_matrices_decay_and_the_order_is_that_of_nanogpt():
    model = tiny_model()
    optimizer = make_optimizers(model, tiny.settings(weight_decay=0.3))["adamw"]
    decayed, rest = optimizer.param_groups
    assert names_of(model, optimizer)[0] == [
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.h.0.attn.c_attn.weight",
        "transformer.h.0.attn.c_proj.weight",
        "transformer.h.0.mlp.c_fc.weight",
        "transformer.h.0.mlp.c_proj.weight",
    ]
    assert all(p.dim() == 1 for p in rest["params"])
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)


@pytest.mark.parametrize("changes", [{}, tiny.SWITCHES], ids=["gpt2", "switches"])
def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest_none_twice(changes):
    model = tiny_model(n_layer=2, **changes)
    optimizers = make_optimizers(model, tiny.settings(optimizer="muon"))
    (matrices,) = names_of(model, optimizers["muon"])
    parts = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert matrices == [f"transformer.h.{i}.{part}.weight" for i in (0, 1) for part in parts]
    others, vectors, tables = names_of(model, optimizers["adamw"])
    second = "transformer.bigrams.weight" if changes else "transformer.wpe.weight"
    assert tables == ["transformer.wte.weight", second]
    every = [name for name, _ in model.named_parameters()]
    assert sorted(matrices + others + vectors + tables) == sorted(every)


def test_without_blocks_adamw_is_alone():
    model = tiny_model(n_layer=0)
    optimizers = make_optimizers(model, tiny.settings(optimizer="muon"))
    assert optimizers.keys() == {"adamw"}
    names = sum(names_of(model, optimizers["adamw"]), [])
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_muon_multiplies_in_bfloat16_only_where_the_model_does(dtype, monkeypatch):
    model = tiny_model()
    muon = make_optimizers(model, tiny.settings(optimizer="muon", dtype=dtype))["muon"]
    seen = set()
    monkeypatch.setattr("optimizers.orthogonal", lambda x: seen.add(x.dtype) or x)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    muon.step()
    assert seen == {torch.bfloat16 if dtype == "bfloat16" else torch.float32}
    assert all(p.dtype == torch.float32 for p in model.parameters())


# Muon


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-3), (torch.float32, 2e-2)])
def test_muon_is_that_of_torch(dtype, tolerance):
    """To the bit on the CPU where this was written; torch's computes in bfloat16 alone."""
    torch.manual_seed(0)
    start = [torch.randn(shape) for shape in SHAPES]
    ours, theirs = ([torch.nn.Parameter(x.clone()) for x in start] for _ in range(2))
    muon = Muon(ours, 0.02, weight_decay=0.1, dtype=dtype)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape)
            other.grad = mine.grad.clone()
        muon.step()
        reference.step()
    for mine, other, before in zip(ours, theirs, start, strict=True):
        assert (mine - other).norm() < tolerance * (other - before).norm(), tuple(mine.shape)


@pytest.mark.parametrize("shape", [(24, 24), (16, 64), (1, 8)])
def test_what_is_made_orthogonal_keeps_its_directions_and_all_their_sizes_come_near_1(shape):
    """Between 0.68 and 1.21, where five iterations take what is in [0.002, 1] of the norm.

    What is smaller they multiply by up to 3.4445^5 = 485, which may not be enough.
    """
    torch.manual_seed(0)
    few, many = shape
    left = torch.linalg.qr(torch.randn(3, few, few)).Q
    right = torch.linalg.qr(torch.randn(3, many, few)).Q
    sizes = torch.logspace(-2.3, 0, few)
    scales = torch.tensor([1e-3, 1.0, 1e3]).view(3, 1, 1)  # the matrices' own do not matter
    x = scales * (left * sizes) @ right.mT
    made = orthogonal(x)
    assert made.shape == x.shape
    between = left.mT @ made @ right
    sizes = between.diagonal(dim1=1, dim2=2)
    assert 0.68 < sizes.min() <= sizes.max() < 1.21
    assert (between - torch.diag_embed(sizes)).abs().max() < 1e-3


def test_muons_matrices_decay_where_their_gradient_is_zero():
    model = tiny_model()
    muon = make_optimizers(model, tiny.settings(optimizer="muon", weight_decay=0.3))["muon"]
    (group,) = muon.param_groups
    group["lr"] = 0.5
    before = [p.detach().clone() for p in group["params"]]
    for p in group["params"]:
        p.grad = torch.zeros_like(p)
    muon.step()
    for p, old in zip(group["params"], before, strict=True):
        assert torch.allclose(p, (1 - 0.5 * 0.3) * old, rtol=1e-6, atol=0)
