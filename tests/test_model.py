"""The model, compared with definitions of its parts and with transformers."""

import dataclasses
import math

import pytest
import tiny
import torch
import torch.nn.functional as F
from tiny import SHAPES, SMALL, random_ids, random_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from folio.checkpoint.format import empty_model
from folio.data.tokenizer import ByteTokenizer
from model import ACTIVATIONS, BOUNDS, GPT, NORMS, GPTConfig, LocalContext, swiglu, swiglu_widths
from train import TrainConfig


@torch.no_grad()
def logits_of(model, idx):
    return model.logits(idx)


def embeddings(model, idx):
    return model.transformer.context(model.embed, idx, torch.arange(idx.shape[1]))


# Dropout and rotary positions. tests/pretrained/test_huggingface.py compares the rest of GPT-2.


def test_dropout_is_applied_where_transformers_applies_it(folder):
    from transformers import GPT2LMHeadModel  # slow to import

    ours = random_model(dropout=0.4)
    tiny.export(ours, ByteTokenizer())
    ours.train()
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.4)
    theirs = GPT2LMHeadModel.from_pretrained("exported", attn_implementation="eager", **rates)
    idx = random_ids(ours)
    torch.manual_seed(2)  # both draw the same masks in the same order
    loss = ours(idx, F.pad(idx[:, 1:], (0, 1), value=-1))
    torch.manual_seed(2)
    expected = theirs.train()(idx, labels=idx).loss  # shifts the labels itself
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@torch.no_grad()
def test_rotary_positions_turn_pairs_of_queries_and_keys():
    model = random_model(position="rotary", n_embd=24)

    def queries_and_keys():  # of the first layer
        calls = []
        model.trunk(random_ids(model), attend=lambda _, q, k, v: calls.append((q, k)) or v)
        return torch.stack(calls[0])  # (2, B, H, 8, 12)

    rotated, model.rotary = queries_and_keys(), None
    first, second = queries_and_keys().chunk(2, dim=-1)  # of each pair
    angles = torch.outer(torch.arange(8), 10_000 ** (-torch.arange(6) / 6))
    expected = torch.complex(first, second) * torch.polar(torch.ones(8, 6), angles)
    assert torch.allclose(rotated, torch.cat((expected.real, expected.imag), dim=-1), atol=1e-6)


# Data types


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_activations_of_16_bits_change_loss_and_gradients_little(changes, dtype):
    exact, rounded = random_model(**changes), random_model(**changes)
    rounded.dtype = dtype
    idx = random_ids(exact)
    assert rounded.trunk(idx).dtype == rounded.logits(idx).dtype == dtype
    losses = [model(idx, idx) for model in (exact, rounded)]
    assert losses[1].dtype == torch.float32
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=0.01)
    for loss in losses:
        loss.backward()
    for ours, theirs in zip(rounded.parameters(), exact.parameters(), strict=True):
        assert ours.grad.dtype == torch.float32
        assert (ours.grad - theirs.grad).norm() < 0.05 * theirs.grad.norm()


# Query-key normalization


@pytest.mark.parametrize("norm", NORMS)
def test_qk_norm_makes_the_scale_of_queries_and_keys_irrelevant(norm):
    model = random_model(qk_norm=True, norm=norm, bias=False, position="rotary")
    for block in model.transformer.h:
        block.attn.c_attn.weight.data *= 50  # makes the epsilon of the norms negligible
    idx = random_ids(model)
    original = logits_of(model, idx)
    for block in model.transformer.h:
        block.attn.c_attn.weight.data[: 2 * 16] *= 7  # queries and keys
    assert torch.allclose(logits_of(model, idx), original, atol=1e-4)
    block.attn.c_attn.weight.data[2 * 16 :] *= 7  # values
    assert not torch.allclose(logits_of(model, idx), original, atol=1e-4)


# Other parts


def test_smear_adds_weighted_preceding_embeddings():
    model = random_model(smear=2, position="rotary")
    idx = random_ids(model)
    x, weight = model.transformer.wte(idx), model.transformer.context.smear["weight"]
    smeared = embeddings(model, idx)
    for t in range(idx.shape[1]):
        expected = x[:, t] + sum(x[:, t - b] * weight[b - 1] for b in (1, 2) if t >= b)
        assert torch.allclose(smeared[:, t], expected, atol=1e-6)


def test_ngrams_add_embeddings_of_two_and_more_tokens():
    model = random_model(ngrams=4, position="rotary", vocab_size=9)
    idx, tables = random_ids(model), model.transformer.context.ngrams
    third, second, first = (F.pad(idx, (n, 0))[:, :-n] for n in (1, 2, 3))
    parts = [
        tables["2"].weight.view(9, 9, 5)[third, idx],
        tables["3"].weight.view(9, 9, 9, 5)[second, third, idx],
        tables["4"].weight.view(9, 9, 9, 9, 5)[first, second, third, idx],
        torch.zeros(*idx.shape, 1),  # 16 channels are not divisible by 3
    ]
    expected = model.transformer.wte(idx) + torch.cat(parts, dim=-1)
    assert torch.allclose(embeddings(model, idx), expected, atol=1e-6)


def test_bigrams_of_a_large_vocabulary_share_rows_evenly():
    context = LocalContext(GPTConfig(vocab_size=50_304, n_head=2, n_embd=2, ngrams=2))
    idx = torch.randint(50_304, (1000, 200), generator=torch.Generator().manual_seed(0))
    rows = context.ngram_ids(idx, 2, context.ngrams["2"].num_embeddings)
    assert rows.flatten().bincount().max() < 24  # six on average


@pytest.mark.parametrize("rows", [49_157, 64_997])  # of the presets
def test_ngrams_of_bytes_share_rows_evenly(rows):
    context = LocalContext(GPTConfig(vocab_size=256, n_head=2, n_embd=2, ngrams=2))
    letters = torch.tensor(list(b" aehinorst"))
    idx = letters[torch.cartesian_prod(*[torch.arange(10)] * 4)]  # all texts of four letters
    assert context.ngram_ids(idx, 4, rows)[:, -1].bincount().max() < 6  # 65,537 rows: 100


def test_swiglu_multiplies_one_half_by_the_swish_of_the_other():
    x = torch.linspace(-3, 3, 12).view(2, 6)
    gate, value = x[:, :3], x[:, 3:]
    assert torch.allclose(swiglu(x), gate * torch.sigmoid(gate) * value)


def test_mlp_has_about_as_many_parameters_with_swiglu():
    for width in (16, 128, 384):
        outer, inner = swiglu_widths(width)
        assert outer == 2 * inner
        assert inner % 32 == 0
        assert 0 <= inner - 8 * width / 3 < 32


# Parameters


def test_state_dict_has_the_names_and_order_of_nanogpt():
    parts = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    block = [f"transformer.h.0.{part}.{kind}" for part in parts for kind in ("weight", "bias")]
    assert list(random_model(n_layer=1).state_dict()) == [
        "transformer.wte.weight",
        "transformer.wpe.weight",
        *block,
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
        "lm_head.weight",
    ]


def test_weights_are_initialized_as_in_gpt2():
    torch.manual_seed(0)
    shape = {"n_layer": 8, "n_embd": 64, "block_size": 64, "vocab_size": 64, "tie_weights": False}
    model = GPT(GPTConfig(**(SMALL | shape), ngrams=2, smear=32)).init_weights()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif parameter.dim() == 1:
            assert (parameter == 1).all(), name
        else:
            std = 0.02 / math.sqrt(2 * 8) if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert parameter.mean().item() == pytest.approx(0, abs=0.1 * std), name


def test_a_new_kind_of_parameter_needs_a_rule_for_its_initial_value():
    model = random_model()
    model.transformer.ln_f.alpha = torch.nn.Parameter(torch.full((1,), 0.5))
    with pytest.raises(ValueError, match="no rule for transformer.ln_f.alpha"):
        model.init_weights()


def test_gpt2_has_124_million_parameters():
    assert empty_model(GPTConfig(vocab_size=50257), "meta").num_params() == 124_439_808


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_flops_per_token_equals_torchs_count(changes):
    model = random_model(**changes)
    idx = random_ids(model)
    # the counter does not support the fused attention kernel for CPUs
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(idx, idx).backward()
    assert counter.get_total_flops() == model.flops_per_token() * idx.numel()


# Forward


@pytest.mark.parametrize(
    "changes",
    [*SHAPES, *({"activation": name} for name in ACTIVATIONS), {"window": 3, "n_layer": 7}],
    ids=str,
)
def test_logits_depend_on_no_later_token(changes):
    model = random_model(**changes)
    T = model.config.block_size
    idx = random_ids(model, rows=1).repeat(T, 1)
    changed = idx.clone()
    changed.diagonal().add_(1).remainder_(model.config.vocab_size)  # token t in row t
    original, other = logits_of(model, idx), logits_of(model, changed)
    for t in range(T):
        assert torch.equal(original[t, :t], other[t, :t])
        assert not torch.equal(original[t, t:], other[t, t:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_embd": 15}, "n_embd=15 .* n_head=2"),
        ({"ngrams": 1}, "ngrams .* 1"),
        ({"ngram_rows": 0}, r"ngram_rows=0 must be int in \[1, inf\]"),
        ({"n_layer": "2"}, r"n_layer='2' must be int in \[0, 10000\]"),
        ({"n_layer": 2.5}, "n_layer=2.5"),
        ({"n_layer": 10_001}, "n_layer=10001"),
        ({"n_head": -2}, "n_head=-2"),
        ({"vocab_size": 65.0}, "vocab_size=65.0"),
        ({"dropout": 5}, r"dropout=5 must be float in \[0.0, 1.0\]"),
        ({"dropout": math.nan}, "dropout=nan"),
        ({"smear": -1}, "smear=-1"),
        ({"window": -1}, "window=-1"),
        ({"ngrams": 17}, "ngrams .* n_embd=16, not 17"),
        ({"smear": 6, "ngrams": 3}, "smear=6 and ngrams=3 .* block_size=8"),
        ({"position": "rotary", "n_embd": 6}, "position=rotary .* 3"),
        ({"activation": "swish"}, "activation .* gelu, .*swiglu.*, not swish"),
    ],
)
def test_invalid_config_raises_value_error(changes, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**(SMALL | changes))


def test_bounds_are_those_of_the_settings():
    fields = {field.name: field for field in dataclasses.fields(TrainConfig)}
    for name in BOUNDS.keys() - {"vocab_size"}:
        low, high = fields[name].metadata["bounds"][1:-1].split(",")
        assert (float(low), float(high)) == BOUNDS[name], name


@pytest.mark.parametrize("length", [0, 9])
def test_wrong_context_length_raises_value_error(length):
    idx = torch.zeros(1, length, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"{length} tokens do not fit block_size=8"):
        random_model()(idx, idx)
