"""Cached generation, with the model without a cache as reference."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny import SHAPES, SWITCHES, random_ids, random_model

from folio.hardware.device import Machine
from folio.hardware.optimize import accelerate, optimize_for_inference
from folio.inference.generate import generate
from folio.inference.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
PENALIZED = SamplingParams(repetition_penalty=1.3)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def last_logits(model, ids):
    """Returns the logits after a list of ids, without a cache: (vocab_size,)."""
    return model.logits(torch.tensor([ids]))[0, -1]


def generate_uncached(model, prompt, count, stride):
    """Returns the `count` most likely ids and their log-probabilities: (2, count).

    When the context is full, it drops `stride` tokens.
    """
    size = model.config.block_size
    context, generated = prompt[-size:], []
    for _ in range(count):
        logprob, token = last_logits(model, context).log_softmax(0).max(0)
        generated.append(torch.stack((token, logprob)))
        context = [*context, token.item()]
        if len(context) > size:
            context = context[stride:]
    return torch.stack(generated, dim=1)


def generate_cached(model, prompts, count, params=GREEDY, context_stride=1, **arguments):
    params = replace(params, max_new_tokens=count, context_stride=context_stride)
    steps = generate(model, prompts, range(len(prompts)), params, **arguments)
    return torch.stack([ids for ids, _ in steps], dim=1).tolist()


def fixed_shapes(step, *_):
    """An accelerator that has no effect, so that generate calls `step` with fixed shapes."""
    return step


@pytest.mark.parametrize(
    ("prompts", "stride", "accelerate"), [(5, 1, None), (5, 3, fixed_shapes), (1, 3, None)]
)
@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_a_batch_of_prompts_equals_an_uncached_sliding_window(changes, prompts, stride, accelerate):
    """A stride of 1 is nanoGPT's sampling."""
    model = random_model(**changes)
    size = model.config.block_size
    ids = random_ids(model)[0].tolist()
    texts = [ids[:1], ids[:size], ids + ids[:3], ids[:2], ids[:5]][:prompts]
    params = replace(GREEDY, max_new_tokens=2 * size, context_stride=stride)
    steps = generate(model, texts, range(prompts), params, accelerate=accelerate)
    actual = torch.stack([torch.stack(step) for step in steps], dim=-1)  # (2, B, tokens)
    expected = [generate_uncached(model, text, 2 * size, stride) for text in texts]
    torch.testing.assert_close(actual, torch.stack(expected, dim=1), rtol=0, atol=1e-5)


def test_many_prompts_are_read_in_several_passes():
    model = random_model()
    prompts = [random_ids(model)[0].tolist()[:n] for n in (8, 1, 7)]
    expected = generate_cached(model, prompts, 5)
    assert generate_cached(model, prompts * 1000, 5) == expected * 1000  # > 2^14 tokens


@pytest.mark.parametrize(
    ("changes", "excluded"), [({}, 0), ({"min_new_tokens": 4}, 4), ({"ignore_end": True}, 12)]
)
def test_the_end_token_is_excluded_from_the_first_tokens(changes, excluded):
    model, text = random_model(), [1, 2, 3]
    end = last_logits(model, text).argmax()  # the first token without the settings
    params = replace(GREEDY, **changes)
    for number, token in enumerate(generate_cached(model, [text], 12, params, end=end)[0]):
        logits = last_logits(model, text[-model.config.block_size :])
        if number < excluded:
            logits[end] = -torch.inf
        assert token == logits.argmax()
        text.append(token)


def test_repetition_penalty_applies_to_tokens_beyond_the_context_but_not_to_the_end_token():
    model, text, seen = random_model(), [0, 1, 2, 3], {1, 2, 3}
    params = SamplingParams(temperature=0.0, repetition_penalty=1.3)
    ids = generate_cached(model, [text], 30, params, end=0)[0]
    assert ids != generate_cached(model, [text], 30)[0]
    assert ids != generate_cached(model, [text], 30, params)[0]
    for token in ids:
        logits = last_logits(model, text[-model.config.block_size :])
        for old in seen:
            logits[old] = logits[old] / 1.3 if logits[old] > 0 else logits[old] * 1.3
        assert token == logits.argmax()
        text.append(token)
        seen.add(token)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"position": "rotary", "ngrams": 2}], ids=str)
def test_a_compiled_step_is_compiled_once_and_generates_the_same(changes):
    model, graphs = random_model(**changes), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def accelerate(step, *_):
        return torch.compile(step, backend=backend, fullgraph=True)

    prompts, arguments = [[1, 2, 3], [4], [5, 6]], {"context_stride": 4, "params": PENALIZED}
    expected = generate_cached(model, prompts, 30, **arguments)
    assert generate_cached(model, prompts, 30, accelerate=accelerate, **arguments) == expected
    assert len(graphs) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("params", [GREEDY, PENALIZED], ids=["greedy", "penalized"])
@pytest.mark.parametrize(
    ("changes", "compile"),
    [*((changes, False) for changes in SHAPES), ({}, True), (SWITCHES, True)],
    ids=str,
)
def test_a_gpu_generates_the_same_text_as_a_cpu(changes, compile, params):
    prompts = [[1, 2, 3], [4], [5, 6], [*range(10)] * 2]  # longer than the context
    expected = generate_cached(random_model(**changes), prompts, 30, params, context_stride=4)
    machine = Machine("cuda", "float32", compile)
    model = optimize_for_inference(random_model(**changes).cuda(), machine)
    arguments = {"context_stride": 4, "accelerate": partial(accelerate, machine)}
    assert generate_cached(model, prompts, 30, params, **arguments) == expected
