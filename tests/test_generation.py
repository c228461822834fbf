"""generation.py against the model without a cache, and the drawing of tokens by its definition."""

import math

import pytest
import torch
import torch.nn.functional as F
from test_model import twin
from tiny import SHAPES, random_ids, random_model

import generation
from device import Machine, accelerator
from generation import (
    Controls,
    KVCache,
    continuations,
    decode_one,
    lookback,
    packs,
    prefill,
    prepare_to_write,
    sample_next,
    surprisals,
)
from model import ACTIVATIONS

GREEDY = Controls(temperature=0.0)
PENALISING = Controls(repetition_penalty=1.3)


@pytest.fixture
def two_threads():
    """One thread alone rounds the sums of all rows alike."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def last_logits(model, ids):
    """What the model says without a cache about what follows a text: (vocab_size,)."""
    return model(torch.tensor([ids]))[0][0, -1]


def uncached(model, ids, count, stride=1):
    """`count` likeliest tokens after `ids`, the whole context read for each."""
    size, context, drawn = model.config.block_size, list(ids)[-model.config.block_size :], []
    for _ in range(count):
        drawn.append(int(last_logits(model, context).argmax()))
        context.append(drawn[-1])
        if len(context) > size:
            context = context[stride:]
    return drawn


def cached(model, prompts, count, controls=GREEDY, seeds=None, **settings):
    seeds = seeds or range(len(prompts))
    steps = continuations(model, prompts, seeds, controls, count, **settings)
    return torch.stack([ids for ids, _ in steps], dim=1).tolist()


def tails(model, idx, count):
    """The last of the first `count` ids of each row, as decode_one() wants them."""
    back = lookback(model.config)
    return F.pad(idx, (back, 0))[:, count - 1 : count + back]


@pytest.mark.parametrize("way", [list, torch.tensor])
@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_cached_logits_are_those_without_a_cache_at_every_position(changes, way):
    model = random_model(**changes)
    idx = random_ids(model)
    cache = KVCache(model.config, len(idx), "cpu")
    for begin in (0, 1, 3):
        if begin:
            prefill(model, cache, idx[:, :begin])
        for T in range(begin + 1, model.config.block_size + 1):
            logits = decode_one(model, cache, tails(model, idx, T), way([T - 1] * len(idx)))
            assert (logits - model(idx[:, :T])[0][:, -1]).abs().max() < 1e-5


@pytest.mark.parametrize("way", [list, torch.tensor])
@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_texts_of_different_lengths_do_not_see_each_other(changes, way):
    model = random_model(**changes)
    idx = random_ids(model)
    begun = [1, model.config.block_size - 2, 3]
    cache = KVCache(model.config, len(idx), "cpu")
    prefill(model, cache, idx[:, :-2])
    for columns in (begun, [column + 1 for column in begun]):
        tail = torch.cat([tails(model, idx, T + 1)[i : i + 1] for i, T in enumerate(columns)])
        logits = decode_one(model, cache, tail, way(columns))
        for row, ids, T in zip(logits, idx, columns, strict=True):
            assert (row - last_logits(model, ids[: T + 1].tolist())).abs().max() < 1e-5


def test_in_bfloat16_with_attention_in_float32_both_ways_say_the_same():
    model = random_model().bfloat16()
    idx, caches = random_ids(model), [KVCache(model.config, 3, "cpu") for _ in range(2)]
    for T in range(1, 9):
        one, other = (
            decode_one(model, cache, idx[:, T - 1 : T], way([T - 1] * 3))
            for cache, way in zip(caches, (list, torch.tensor), strict=True)
        )
        assert torch.allclose(one, other, atol=0.02)


def test_some_rows_can_be_read_anew_while_others_stay():
    model = random_model()
    idx = random_ids(model)
    cache = KVCache(model.config, len(idx), "cpu")
    prefill(model, cache, idx[:, :5])
    prefill(model, cache, idx[[2, 0], 2:4], [2, 0])
    logits = decode_one(model, cache, idx[:, [5]], [2, 5, 2])
    for row, ids, begin in zip(logits, idx.tolist(), (2, 0, 2), strict=True):
        seen = ids[2:4] + ids[5:6] if begin else ids[:6]
        assert (row - last_logits(model, seen)).abs().max() < 1e-5


@pytest.mark.parametrize("changes", SHAPES, ids=str)
@pytest.mark.parametrize("stride", [1, 3, "all"])
def test_greedy_text_is_that_of_the_uncached_sliding_window(changes, stride):
    model = random_model(**changes)
    size = model.config.block_size
    stride = size if stride == "all" else stride
    ids = random_ids(model)[0].tolist()
    prompts = [ids[:2], ids[:size], ids + ids[:3], ids[:5]]
    expected = [uncached(model, prompt, 3 * size, stride) for prompt in prompts]
    assert cached(model, prompts, 3 * size, context_stride=stride) == expected


@pytest.mark.parametrize("length", [2, 5, 9, 10, 17, 40])
@pytest.mark.parametrize("stride", [1, 3, 8, 50])
def test_each_token_but_the_first_is_foretold_once_from_all_the_context_there_is(length, stride):
    model = random_model()
    size = model.config.block_size
    ids = random_ids(model, rows=1, length=length)[0]
    found = surprisals(model, ids, stride)
    assert found.shape == (length - 1,)
    step = min(stride, size, length - 1)
    begin = 0
    for at in range(1, length):
        while at - begin > size:
            begin = min(begin + step, max(0, length - 1 - size))
        expected = -last_logits(model, ids[begin:at].tolist()).log_softmax(0)[ids[at]]
        assert found[at - 1] == pytest.approx(expected.item(), abs=1e-5)


# Faster models


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_a_model_made_ready_to_write_says_what_it_said(changes, activation):
    changes = {"activation": activation} | changes
    model, ready = random_model(**changes), prepare_to_write(random_model(**changes))
    idx = random_ids(model)
    assert torch.allclose(ready(idx, idx)[0], model(idx, idx)[0], atol=1e-5)


def test_a_model_made_ready_to_write_drops_nothing():
    model = prepare_to_write(random_model(dropout=0.5).train())
    idx = random_ids(model)
    assert torch.equal(model(idx)[0], model(idx)[0])


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(5, 5, 40, 5, 1, 40), (3, 3, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("changes", [{}, {"position": "rotary", "window": 20, "smear": 2}], ids=str)
@pytest.mark.usefixtures("two_threads")
def test_a_text_is_to_the_bit_that_which_it_is_alone(changes, dtype, lengths, monkeypatch):
    """Wherever the sums of a row were rounded otherwise in a batch, a text would be another."""
    if not packs(dtype):
        pytest.skip("needs oneDNN's products")
    monkeypatch.setattr(generation, "TOKENS_AT_ONCE", 100)  # less than the prompts, together
    model = random_model(block_size=80, n_embd=256, n_head=4, **changes).to(dtype)
    model = prepare_to_write(model)
    prompts = [[i % 37 for i in range(n)] for n in lengths]
    seeds = range(len(prompts))
    steps = list(continuations(model, prompts, seeds, Controls(), 120, context_stride=30))
    for row in range(len(prompts)):
        prompt = prompts[row : row + 1]
        alone = continuations(model, prompt, [row], Controls(), 120, context_stride=30)
        for (ids, logprobs), (id_alone, logprob_alone) in zip(steps, alone, strict=True):
            assert ids[row] == id_alone[0]
            assert logprobs[row] == logprob_alone[0]


@pytest.mark.parametrize("changes", [{}, {"position": "rotary", "bigrams": True}], ids=str)
def test_a_step_that_is_compiled_is_compiled_once_and_writes_the_same(changes):
    model, compiled = random_model(**changes), []

    def count(graph, inputs):
        compiled.append(graph)
        return graph.forward

    def accelerate(step, *arguments):
        return torch.compile(step, backend=count, fullgraph=True)

    prompts, settings = [[1, 2, 3], [4], [5, 6]], {"context_stride": 4, "controls": PENALISING}
    expected = cached(model, prompts, 30, **settings)
    assert cached(model, prompts, 30, accelerate=accelerate, **settings) == expected
    assert len(compiled) == 1


def test_reading_in_pieces_reads_the_same(monkeypatch):
    prompts = [[i % 37 for i in range(n)] for n in (3, 7, 7, 7, 2)]
    expected = cached(random_model(), prompts, 30, context_stride=2)
    monkeypatch.setattr(generation, "TOKENS_AT_ONCE", 10)
    assert cached(random_model(), prompts, 30, context_stride=2) == expected


@pytest.mark.parametrize(("count", "columns"), [(1, 4), (3, 6), (100, 8)])
def test_a_cache_is_no_wider_than_what_is_to_come(count, columns, monkeypatch):
    made = []

    class Noted(KVCache):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self.keys[0].shape[2] - generation.LINE)

    monkeypatch.setattr(generation, "KVCache", Noted)
    cached(random_model(), [[1, 2, 3], [4]], count)
    assert made == [columns]


def test_where_nothing_makes_a_step_faster_it_is_done_without():
    expected = cached(random_model(), [[1, 2], [3]], 20)
    assert cached(random_model(), [[1, 2], [3]], 20, accelerate=lambda *_: None) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("controls", [GREEDY, PENALISING])
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_a_gpu_writes_as_a_cpu_does(changes, compile, controls):
    prompts = [[1, 2, 3], [4], [5, 6]]
    expected = cached(random_model(**changes), prompts, 30, controls, context_stride=4)
    accelerate = accelerator(Machine("cuda", "float32", compile, ""))
    model = prepare_to_write(random_model(**changes).cuda())
    settings = {"context_stride": 4, "accelerate": accelerate}
    assert cached(model, prompts, 30, controls, **settings) == expected


# Drawing


def rows_of(logits, draws):
    return torch.tensor(logits).expand(draws, -1), (torch.arange(draws) + 0.5) / draws


def shares(logits, draws=10_000, **controls):
    """How often each id is drawn where the chances lie evenly."""
    rows, uniform = rows_of(logits, draws)
    ids = sample_next(rows, uniform, Controls(**controls))
    return torch.bincount(ids, minlength=len(logits)) / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_ids_are_drawn_as_often_as_their_probability_says(temperature):
    logits = [0.0, 1.0, -0.5, -math.inf, 2.0]
    expected = (torch.tensor(logits) / temperature).softmax(0)
    assert torch.allclose(shares(logits, temperature=temperature), expected, atol=2e-4)


@pytest.mark.parametrize(
    ("controls", "kept"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.45}, {1}),
        ({"top_p": 0.47}, {1, 3}),
        ({"top_p": 1e-9}, {1}),
        ({"top_p": 0.9}, {0, 1, 3}),
        ({"min_p": 0.61}, {1}),
        ({"min_p": 0.6}, {1, 3}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 3, "top_p": 0.9}, {0, 1, 3}),
    ],
    ids=str,
)
def test_what_the_controls_exclude_is_never_drawn(controls, kept):
    """Of probabilities 0.169, 0.459, 0.094 and 0.278."""
    found = shares([0.0, 1.0, -0.587, 0.5], **controls)
    assert set(found.nonzero().flatten().tolist()) == kept


def test_top_k_of_ids_that_tie_is_k_ids():
    assert (shares([0.0, 1.0, 1.0, 1.0], top_k=2) > 0).sum() == 2


@pytest.mark.parametrize("temperature", [0, 1e-40, 1e-5])
def test_hardly_any_temperature_is_greedy(temperature):
    assert shares([1.0, 3.0, 2.0], temperature=temperature).tolist() == [0, 1, 0]


def test_the_last_bit_of_chance_draws_what_is_likely_at_all():
    size = 50_000
    logits = torch.full((1, size), -math.inf)
    logits[0, : size // 2] = torch.randn(size // 2, generator=torch.Generator().manual_seed(0))
    for chance in (0.0, 1 - 2**-24):
        assert sample_next(logits, torch.tensor([chance]), Controls()).item() < size // 2


def test_what_is_no_number_draws_an_id_and_tells_by_its_log_probability():
    logits = torch.full((1, 5), math.nan)
    assert 0 <= sample_next(logits, torch.tensor([0.5]), Controls()).item() < 5
    model = random_model()
    model.transformer.ln_f.weight.fill_(math.inf)
    ((_, logprob),) = continuations(model, [[1]], [1], Controls(), 1)
    assert not logprob.isfinite()


def test_repetition_penalty_divides_what_is_likely_and_multiplies_what_is_not():
    logits, present = [2.0, 2.0, -1.0, -1.0], torch.tensor([[True, False, True, False]])
    rows, uniform = rows_of(logits, 10_000)
    ids = sample_next(rows, uniform, Controls(repetition_penalty=2.0), present)
    expected = torch.tensor([1.0, 2.0, -2.0, -1.0]).softmax(0)
    assert torch.allclose(torch.bincount(ids, minlength=4) / 10_000, expected, atol=2e-4)


def test_the_penalty_is_for_all_that_the_text_has_even_what_the_model_sees_no_more():
    model, text = random_model(), [1, 2, 3]
    found = cached(model, [text], 30, Controls(temperature=0.0, repetition_penalty=1.5))[0]
    assert found != cached(model, [text], 30)[0]
    for token in found:
        logits = last_logits(model, text[-model.config.block_size :])
        for seen in set(text):
            logits[seen] = logits[seen] / 1.5 if logits[seen] > 0 else logits[seen] * 1.5
        assert token == logits.argmax()
        text.append(token)


def test_a_text_is_the_same_whatever_others_are_written_beside_it():
    model = random_model()
    prompts, seeds = [[1, 2, 3], [4], [5, 6]], [7, 8, 9]
    together = cached(model, prompts, 30, Controls(), seeds)
    alone = [
        cached(model, [p], 30, Controls(), [s])[0] for p, s in zip(prompts, seeds, strict=True)
    ]
    assert together == alone
    assert cached(model, [[1, 2, 3]] * 2, 30, Controls(), [1, 2])[0] != together[0]


def test_ids_from_the_limit_on_are_never_drawn():
    assert max(cached(random_model(), [[1]] * 9, 30, Controls(temperature=5.0), limit=5)[0]) < 5


@pytest.mark.parametrize("changes", [{}, {"bias": False, "activation": "gelu_tanh"}], ids=str)
def test_greedy_text_is_that_of_transformers(changes):
    model = random_model(block_size=64, **changes)
    idx = random_ids(model, length=5)
    theirs = twin(model).generate(idx, max_new_tokens=59, do_sample=False, pad_token_id=0)
    assert cached(model, idx.tolist(), 59) == theirs[:, 5:].tolist()
