import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from tiny import SHAPES, SMALL, random_ids, random_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

import model as model_module
from model import (
    ACTIVATIONS,
    BIGRAM_ROWS,
    GPT,
    NORMS,
    GPTConfig,
    attend,
    attend_by_products,
    bigram_ids,
    flops_per_token,
    num_params,
    relu2,
    rotary_tables,
    rotate,
)

NAMES = ("activation", "bias", "tie_weights", "n_layer")
CHOICES = (ACTIVATIONS, (True, False), (True, False), (0, 2))


def next_tokens(idx):
    """The token after each; the last of a row has none and does not count."""
    return torch.cat((idx[:, 1:], torch.full((len(idx), 1), -1)), dim=1)


def all_logits(model, idx):
    with torch.no_grad():
        return model(idx, idx)[0]


# GPT-2, against transformers

CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # stored (in, out) there


def turned(name, tensor):
    return tensor.T if name.endswith(CONV1D) else tensor


def twin(model):
    """The same GPT in transformers; biases that `model` lacks are zero there."""
    config = model.config
    names = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.block_size,
            n_embd=config.n_embd,
            n_layer=config.n_layer,
            n_head=config.n_head,
            activation_function=names[config.activation],
            resid_pdrop=config.dropout,
            embd_pdrop=config.dropout,
            attn_pdrop=config.dropout,
            tie_word_embeddings=config.tie_weights,
            attn_implementation="eager",
        )
    ).train(model.training)
    ours = model.state_dict()
    theirs.load_state_dict(
        {
            name: turned(name, ours.get(name, torch.zeros_like(tensor)))
            for name, tensor in theirs.state_dict().items()
        }
    )
    return theirs


def error(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize(
    "changes",
    [
        {"n_layer": 1, "n_head": 1},
        {"activation": "gelu_tanh", "n_layer": 4, "n_head": 4, "n_embd": 64, "block_size": 32},
        {"activation": "relu", "n_layer": 2, "n_head": 3, "n_embd": 48, "tie_weights": False},
        {"bias": False},
    ],
    ids=str,
)
def test_logits_loss_and_every_gradient_are_those_of_transformers(changes):
    ours = random_model(**changes)
    theirs = twin(ours)
    idx = random_ids(ours)
    logits, loss = ours(idx, next_tokens(idx))
    reference = theirs(idx, labels=idx)  # moves the labels by one itself
    assert error(logits, reference.logits) < 1e-5
    assert error(loss, reference.loss) < 1e-5
    loss.backward()
    reference.loss.backward()
    gradients = {name: turned(name, p.grad) for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert error(parameter.grad, gradients[name]) < 1e-5, name


def test_dropout_falls_where_it_does_in_transformers():
    ours = random_model(dropout=0.4).train()
    theirs = twin(ours)
    idx = random_ids(ours)
    torch.manual_seed(2)  # both draw the same masks in the same order
    loss = ours(idx, next_tokens(idx))[1]
    torch.manual_seed(2)
    assert error(loss, theirs(idx, labels=idx).loss) < 1e-5


def test_training_drops_anew_in_every_step():
    model = random_model(dropout=0.4).train()
    idx = random_ids(model)
    assert not torch.equal(all_logits(model, idx), all_logits(model, idx))


def test_evaluation_drops_nothing():
    idx = random_ids(random_model())
    assert torch.equal(all_logits(random_model(dropout=0.4), idx), all_logits(random_model(), idx))


# Rotary positions, against transformers


def neox_twin(model):
    """The same GPT as a GPT-NeoX, which keeps the three projections of each head together."""
    config = model.config
    heads = (config.n_head, config.n_embd // config.n_head)
    theirs = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=config.vocab_size,
            max_position_embeddings=config.block_size,
            hidden_size=config.n_embd,
            intermediate_size=4 * config.n_embd,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head,
            hidden_act="gelu",
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1},
            use_parallel_residual=False,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
    ).eval()
    names = {
        "ln_1": "input_layernorm",
        "attn.c_attn": "attention.query_key_value",
        "attn.c_proj": "attention.dense",
        "ln_2": "post_attention_layernorm",
        "mlp.c_fc": "mlp.dense_h_to_4h",
        "mlp.c_proj": "mlp.dense_4h_to_h",
    }
    weights = {"lm_head.weight": model.lm_head.weight}
    weights["gpt_neox.embed_in.weight"] = model.transformer.wte.weight
    for end in ("weight", "bias"):
        weights[f"gpt_neox.final_layer_norm.{end}"] = getattr(model.transformer.ln_f, end)
        for i, block in enumerate(model.transformer.h):
            for ours, other in names.items():
                tensor = block.get_parameter(f"{ours}.{end}")
                if ours == "attn.c_attn":
                    tensor = tensor.unflatten(0, (3, *heads)).transpose(0, 1).flatten(0, 2)
                weights[f"gpt_neox.layers.{i}.{other}.{end}"] = tensor
    theirs.load_state_dict(weights)
    return theirs


def test_rotary_positions_turn_queries_and_keys_as_in_transformers():
    ours = random_model(position="rotary", tie_weights=False, n_head=2, n_embd=24, block_size=16)
    idx = random_ids(ours)
    with torch.no_grad():
        reference = neox_twin(ours)(idx).logits
    assert error(all_logits(ours, idx), reference) < 1e-5


def test_rotary_attention_knows_distances_and_no_places():
    torch.manual_seed(0)
    tables = [table.double() for table in rotary_tables(64, 8)]
    q, k = torch.randn(2, 8, dtype=torch.float64)

    def score(i, j):
        turned = [
            rotate(x.view(1, 1, 1, 8), *(table[at : at + 1] for table in tables))
            for x, at in ((q, i), (k, j))
        ]
        return (turned[0] * turned[1]).sum().item()

    assert score(9, 4) == pytest.approx(score(63, 58), abs=1e-6)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)
    assert score(7, 7) == pytest.approx((q @ k).item(), abs=1e-6)


# The other switches


def test_smeared_embeddings_are_sums_over_the_tokens_before():
    model = random_model(smear=2, position="rotary")
    idx = random_ids(model)
    x, weight = model.transformer.wte(idx), model.transformer.smear.weight
    mixed = model.embed(idx)[0]
    for t in range(idx.shape[1]):
        expected = x[:, t] + sum(x[:, t - b] * weight[b - 1] for b in (1, 2) if t >= b)
        assert torch.allclose(mixed[:, t], expected, atol=1e-6)


def test_each_pair_of_a_small_vocabulary_has_a_row_of_its_own():
    pairs = torch.cartesian_prod(torch.arange(37), torch.arange(37))
    assert bigram_ids(pairs, 37)[:, 1].tolist() == list(range(37 * 37))
    assert bigram_ids(pairs, 37)[:, 0].tolist() == pairs[:, 0].tolist()  # as after token 0


def test_pairs_of_a_large_vocabulary_share_rows_evenly():
    ids = torch.randint(50_304, (1000, 200), generator=torch.Generator().manual_seed(0))
    rows = bigram_ids(ids, 50_304)
    assert 0 <= rows.min() <= rows.max() < BIGRAM_ROWS
    assert rows.flatten().bincount().max() < 20  # three on average


def test_a_token_gets_the_embedding_of_its_pair():
    model = random_model(bigrams=True, position="rotary")
    idx = random_ids(model)
    table = model.transformer.bigrams.weight.view(37, 37, 16)
    expected = model.transformer.wte(idx)[:, 1:] + table[idx[:, :-1], idx[:, 1:]]
    assert torch.equal(model.embed(idx)[0][:, 1:], expected)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_with_qk_norm_the_size_of_queries_and_keys_does_not_matter(norm):
    model = random_model(qk_norm=True, norm=norm, bias=False, position="rotary")
    for block in model.transformer.h:
        block.attn.c_attn.weight.data *= 50  # beside which the norms' epsilon is nothing
    idx = random_ids(model)
    before = all_logits(model, idx)
    for block in model.transformer.h:
        block.attn.c_attn.weight.data[: 2 * 16] *= 7
    assert torch.allclose(all_logits(model, idx), before, atol=1e-4)
    block.attn.c_attn.weight.data[2 * 16 :] *= 7
    assert not torch.allclose(all_logits(model, idx), before, atol=1e-4)


def test_rmsnorm_divides_by_the_root_mean_square():
    norm = random_model(norm="rmsnorm").transformer.ln_f
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(2))
    expected = x / x.square().mean(-1, keepdim=True).sqrt() * norm.weight
    assert torch.allclose(norm(x), expected, atol=1e-5)


def test_relu2_and_its_gradient_are_those_of_the_square():
    x = torch.linspace(-3, 3, 13, dtype=torch.float64, requires_grad=True)
    assert torch.equal(relu2(x), x.clamp(min=0) ** 2)
    assert torch.autograd.gradcheck(relu2, x[1::2].detach().requires_grad_())


@pytest.mark.parametrize("tie_weights", [True, False])
def test_with_zero_init_blocks_begin_as_the_identity(tie_weights):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SMALL, zero_init=True, tie_weights=tie_weights)).eval()
    idx = random_ids(model)
    x = model.embed(idx)[0]
    assert torch.equal(model.transformer.h[0](x), x)
    assert (all_logits(model, idx) == 0).all() == (not tie_weights)


def test_with_zero_init_and_an_untied_head_embeddings_make_the_stream():
    torch.manual_seed(0)
    config = GPTConfig(
        n_layer=0, n_head=1, n_embd=64, bigrams=True, zero_init=True, tie_weights=False
    )
    tables = GPT(config).transformer
    for table in (tables.wte, tables.bigrams):
        assert table.weight.std().item() == pytest.approx(0.3, rel=0.05)


# Parameters


def test_names_and_their_order_are_those_of_nanogpt():
    assert list(random_model(n_layer=1).state_dict()) == [
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.h.0.ln_1.weight",
        "transformer.h.0.ln_1.bias",
        "transformer.h.0.attn.c_attn.weight",
        "transformer.h.0.attn.c_attn.bias",
        "transformer.h.0.attn.c_proj.weight",
        "transformer.h.0.attn.c_proj.bias",
        "transformer.h.0.ln_2.weight",
        "transformer.h.0.ln_2.bias",
        "transformer.h.0.mlp.c_fc.weight",
        "transformer.h.0.mlp.c_fc.bias",
        "transformer.h.0.mlp.c_proj.weight",
        "transformer.h.0.mlp.c_proj.bias",
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
        "lm_head.weight",
    ]


@pytest.mark.parametrize("tie_weights", [True, False])
def test_a_tied_head_is_the_embedding_itself(tie_weights):
    model = random_model(tie_weights=tie_weights)
    assert (model.lm_head.weight is model.transformer.wte.weight) == tie_weights


def test_weights_start_as_those_of_gpt2():
    torch.manual_seed(0)
    shape = {"n_layer": 8, "n_embd": 64, "block_size": 64, "vocab_size": 64, "tie_weights": False}
    for name, parameter in GPT(GPTConfig(**(SMALL | shape))).named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif parameter.dim() == 1:
            assert (parameter == 1).all(), name
        else:
            std = 0.02 / math.sqrt(2 * 8) if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert parameter.mean().item() == pytest.approx(0, abs=0.1 * std), name


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_num_params_counts_what_is_there(changes):
    model = random_model(**changes)
    assert num_params(model.config) == sum(p.numel() for p in model.parameters())


def test_gpt2_has_124_million_parameters():
    assert num_params(GPTConfig(vocab_size=50257)) == 124_439_808


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_flops_per_token_are_those_that_torch_counts(changes):
    model = random_model(**changes)
    idx = random_ids(model)
    # the counter does not know the kernel that fuses attention on a CPU
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(idx, idx)[1].backward()
    assert counter.get_total_flops() == flops_per_token(model.config) * idx.numel()


# Forward


@pytest.mark.parametrize(
    "changes",
    [
        *(dict(zip(NAMES, values, strict=True)) for values in product(*CHOICES)),
        *({"position": "rotary", "norm": norm, "qk_norm": True, "smear": 3} for norm in NORMS),
        {"smear": 7},
        {"bigrams": True},
        {"window": 3, "n_layer": 7},
    ],
    ids=str,
)
def test_a_later_token_changes_no_earlier_logit(changes):
    model = random_model(**changes)
    T = model.config.block_size
    same = random_ids(model, rows=1).repeat(T, 1)
    changed = same.clone()
    changed.diagonal().add_(1).remainder_(model.config.vocab_size)  # token t in row t
    before, after = all_logits(model, same), all_logits(model, changed)
    for t in range(T):
        assert torch.equal(before[t, :t], after[t, :t])
        assert not torch.equal(before[t, t:], after[t, t:])


def test_without_layers_only_the_last_token_counts():
    model = random_model(n_layer=0)
    idx = random_ids(model)
    others = torch.cat((idx.flip(0)[:, :-1], idx[:, -1:]), dim=1)
    assert torch.equal(model(idx)[0], model(others)[0])


def test_without_targets_there_is_one_logit_row_and_no_loss():
    model = random_model()
    idx = random_ids(model)
    logits, loss = model(idx)
    assert loss is None
    assert logits.shape == (3, 1, 37)
    assert torch.allclose(logits, all_logits(model, idx)[:, -1:], atol=1e-6)


def test_loss_is_the_mean_surprise_of_the_targets_that_count():
    model = random_model()
    idx = random_ids(model)
    targets = idx.masked_fill(idx % 3 == 0, -1)
    logits, loss = model(idx, targets)
    surprise = -logits.double().log_softmax(-1).gather(-1, idx[..., None])[..., 0]
    assert loss.item() == pytest.approx(surprise[targets != -1].mean().item(), rel=1e-6)


def test_bfloat16_loses_little_and_none_of_it_in_the_loss():
    model = random_model()
    idx = random_ids(model)
    full = model(idx, idx)[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, loss = model(idx, idx)
    assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    assert loss.item() == pytest.approx(full.item(), rel=1e-2)
    exact = F.cross_entropy(logits.double().flatten(0, 1), idx.flatten())
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_embd": 15}, "n_embd=15 is not divisible by n_head=2"),
        ({"n_head": 0}, "n_head must be at least 1, not 0"),
        ({"n_embd": 0}, "n_embd must be at least 1, not 0"),
        ({"block_size": 0}, "block_size must be at least 1, not 0"),
        ({"vocab_size": -1}, "vocab_size must be at least 1, not -1"),
        ({"n_layer": -1}, "n_layer must not be negative"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\), not 1.0"),
        ({"dropout": math.nan}, r"dropout must lie in \[0, 1\), not nan"),
        ({"smear": -1}, "smear must not be negative"),
        ({"smear": SMALL["block_size"]}, "smear=.* does not fit block_size"),
        ({"window": -1}, "window must not be negative"),
        ({"norm": "batch"}, "norm must be one of layernorm, rmsnorm, not batch"),
        ({"position": "none"}, "position must be one of learned, rotary, not none"),
        ({"position": "rotary", "n_embd": 6}, "n_embd=6 and n_head=2 make heads of odd size"),
        ({"activation": "swish"}, "one of gelu, gelu_tanh, relu, relu2, not swish"),
    ],
)
def test_a_shape_that_cannot_be_built_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**(SMALL | changes))


@pytest.mark.parametrize(
    ("idx", "message"),
    [
        ([[0] * 9], "context of 9 tokens does not fit block_size=8"),
        ([[]], "context of 0 tokens"),
    ],
)
def test_a_context_that_does_not_fit_is_named(idx, message):
    with pytest.raises(ValueError, match=message):
        random_model()(torch.tensor(idx, dtype=torch.int64))


# The ways to attend


@pytest.fixture(params=[True, False], ids=["products", "kernel"])
def kind(request, monkeypatch):
    monkeypatch.setattr(model_module, "products_are_faster", lambda *_: request.param)


@pytest.mark.parametrize("window", [0, 1, 4, 5, 8, 32, 33, 40])
@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (1, 1, 1, 4), (2, 2, 33, 16)], ids=str)
def test_a_position_attends_to_itself_and_those_before_within_the_window(kind, shape, window):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, *shape, requires_grad=True).unbind()
    back = torch.arange(shape[2])[:, None] - torch.arange(shape[2])
    seen = (back >= 0) & (back < (window or shape[2]))
    scores = (q @ k.mT / math.sqrt(shape[3])).masked_fill(~seen, -math.inf)
    expected, y = scores.softmax(dim=-1) @ v, attend(q, k, v, window)
    assert torch.allclose(y, expected, atol=1e-6)
    direction = torch.randn(shape)
    gradients = [torch.autograd.grad((of * direction).sum(), (q, k, v)) for of in (y, expected)]
    for each, other in zip(*gradients, strict=True):
        assert torch.allclose(each, other, atol=1e-5)


def test_dropout_of_attention_by_products_keeps_the_mean_and_drops_its_share():
    torch.manual_seed(0)
    q = k = torch.zeros(1, 1, 400, 8)
    v = torch.eye(400)[None, None]
    weights = attend_by_products(q, k, v, torch.zeros(1, 400, 400), dropout=0.25)
    assert (weights == 0).float().mean() == pytest.approx(0.25, abs=0.01)
    assert weights.max() == pytest.approx(1 / 400 / 0.75)


@pytest.mark.parametrize(
    ("dtype", "length", "window", "by_products"),
    [
        (torch.bfloat16, 512, 0, True),
        (torch.bfloat16, 513, 0, False),
        (torch.bfloat16, 900, 256, True),
        (torch.bfloat16, 900, 257, False),
        (torch.float32, 8, 0, False),
        (torch.float32, 8, 2, False),
    ],
)
def test_attention_is_by_products_for_few_bfloat16_keys_on_a_cpu(
    dtype, length, window, by_products, monkeypatch
):
    called = []
    original = model_module.attend_by_products
    monkeypatch.setattr(
        model_module, "attend_by_products", lambda *args: called.append(1) or original(*args)
    )
    x = torch.zeros(1, 1, length, 2, dtype=dtype)
    attend(x, x, x, window)
    assert bool(called) == by_products
