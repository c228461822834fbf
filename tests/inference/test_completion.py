"""Tests of folio/inference/completion.py: completions of prompts as text."""

from contextlib import nullcontext

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from folio.data.tokenizer import CharTokenizer
from folio.hardware import kernels
from folio.hardware.optimize import optimize_for_inference
from folio.inference import generate
from folio.inference.completion import Completion
from folio.inference.generate import complete, max_batch_size
from folio.inference.sampling import SamplingParams


def make_completion(prompt, tokenizer, stop_texts=(), seed=1):
    return Completion(prompt, tokenizer.encode(prompt).tolist(), seed, tokenizer, list(stop_texts))


# The end of a text


@given(st.text("ab\n", max_size=12), st.lists(st.text("ab\n", min_size=1, max_size=3)))
def test_text_ends_before_its_first_stop_text_and_is_returned_once(characters, stop_texts):
    tokenizer = CharTokenizer("\nab")
    completion = make_completion("a", tokenizer, stop_texts)  # the prompt is not searched
    returned = completion.new_text()
    for token in tokenizer.encode(characters).tolist():
        completion.add(token, -1.0)
        returned += completion.new_text()
    completion.finish("length")
    ends = [characters.find(stop) + len(stop) for stop in stop_texts if stop in characters]
    seen = characters[: min(ends, default=None)]
    text = min((seen.partition(stop)[0] for stop in stop_texts), key=len, default=seen)
    assert (completion.text, completion.stopped) == (text, seen[len(text) :] or "length")
    assert len(completion.ids) == len(completion.logprobs) == len(completion.pieces) == len(seen)
    assert returned + completion.new_text() == "a" + text


def test_text_ends_at_the_end_of_text_token(gpt2_of_bytes):
    completion = make_completion("a", gpt2_of_bytes)
    for token in gpt2_of_bytes.encode("ab<|endoftext|>cd", allow_special=True).tolist():
        completion.add(token, 0.0)
    assert (completion.text, completion.stopped) == ("ab", "end of text")
    assert completion.ids == [97, 98, 256]


@pytest.mark.parametrize("content", ["ab", "🦶🏽"])
def test_incomplete_character_is_not_returned_before_the_end(gpt2_of_bytes, content):
    completion, returned = make_completion("x", gpt2_of_bytes), ""
    for byte in [*content.encode(), 0xC3]:
        completion.add(byte, 0.0)
        returned += completion.new_text()
    assert returned == "x" + content
    completion.finish("length")
    assert completion.new_text() == "\N{REPLACEMENT CHARACTER}"


def test_possible_start_of_a_stop_text_is_not_returned():
    tokenizer, returned = CharTokenizer("abc"), []
    completion = make_completion("a", tokenizer, ["bbc", "cc"])
    for token in tokenizer.encode("abbabbc").tolist():
        completion.add(token, 0.0)
        returned.append(completion.new_text())
    assert returned == ["aa", "", "", "bba", "", "", ""]


# Batches


def test_generation_ends_when_all_texts_have(trained):
    tokenizer = trained.tokenizer
    batch = [make_completion("a", tokenizer, tokenizer.characters) for _ in range(2)]
    assert len(list(complete(trained, batch, SamplingParams(max_new_tokens=10_000)))) == 1
    assert [completion.text for completion in batch] == ["", ""]


def test_threads_are_chosen_by_the_multiplications_of_a_step(trained, monkeypatch):
    model, products = tiny.random_model(ngrams=4), []
    expected = model.flops_per_token() / 6
    assert expected < model.num_params() / 2  # most are rows of tables
    monkeypatch.setattr(kernels, "MIN_PACKED_WEIGHTS", 0)
    trained.model = optimize_for_inference(model, trained.machine)
    monkeypatch.setattr(
        generate, "one_thread_for_small", lambda n: products.append(n) or nullcontext()
    )
    batch = [make_completion("a", trained.tokenizer) for _ in range(3)]
    list(complete(trained, batch, SamplingParams(max_new_tokens=5)))
    assert set(products) == {3 * expected}


@pytest.mark.parametrize(("memory", "size"), [(7.99, 1), (8, 2), (0.001, 1)])
def test_batch_size_is_limited_to_a_quarter_of_the_memory(trained, monkeypatch, memory, size):
    row = 4 * (2 * 2 * 8 * 16 + 8 * 37)  # bytes of keys and values, and of logits
    monkeypatch.setattr(generate, "memory_bytes", lambda device: int(memory * row))
    assert max_batch_size(trained.model.config, "cpu") == size
