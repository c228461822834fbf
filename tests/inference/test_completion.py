"""Tests of folio/inference/completion.py: completions of prompts as text, loading a model."""

import pytest
import tiny
import torch

from folio.checkpoint.run_dir import RunDir
from folio.cli.errors import UserError
from folio.data.tokenizer import CharTokenizer
from folio.inference import completion
from folio.inference.completion import Completion, complete, load_trained
from folio.inference.sampling import Controls


def completion_of(prompt, tokenizer, stops=(), seed=1):
    return Completion(prompt, tokenizer.encode(prompt).tolist(), seed, tokenizer, list(stops))


# The end of a text


@pytest.mark.parametrize(
    ("characters", "stops", "text", "stopped", "count"),
    [
        ("abcd", ["bc", "c"], "a", "bc", 3),
        ("aabab", ["abab"], "a", "abab", 5),
        ("bcd", ["abc"], "bcd", None, 3),  # the prompt is not searched
        ("a\n\nb", ["\n\n"], "a", "\n\n", 3),
    ],
)
def test_text_ends_before_its_first_stop_text(characters, stops, text, stopped, count):
    tokenizer = CharTokenizer("\nabcd")
    each = completion_of("a", tokenizer, stops)
    for token in tokenizer.encode(characters).tolist():
        each.add(token, -1.0)
    assert (each.text, each.stopped) == (text, stopped)
    assert len(each.ids) == len(each.logprobs) == len(each.pieces) == count


def test_text_ends_at_the_end_of_text_token(gpt2_of_bytes):
    each = completion_of("a", gpt2_of_bytes)
    for token in gpt2_of_bytes.encode("ab<|endoftext|>cd", allow_special=True).tolist():
        each.add(token, 0.0)
    assert (each.text, each.stopped, each.ids) == ("ab", "end of text", [97, 98, 256])


@pytest.mark.parametrize("content", ["ab", "🦶🏽"])
def test_incomplete_character_is_not_confirmed_until_the_end(gpt2_of_bytes, content):
    each = completion_of("x", gpt2_of_bytes)
    for byte in [*content.encode(), 0xC3]:
        each.add(byte, 0.0)
        assert "\N{REPLACEMENT CHARACTER}" not in each.confirmed()
    assert each.confirmed() == "x" + content
    each.finish("length")
    assert each.confirmed() == f"x{content}\N{REPLACEMENT CHARACTER}"


def test_possible_start_of_a_stop_text_is_not_confirmed():
    tokenizer, shown = CharTokenizer("abc"), []
    each = completion_of("a", tokenizer, ["bbc", "cc"])
    for token in tokenizer.encode("abbabbcab").tolist():
        each.add(token, 0.0)
        shown.append(each.confirmed())
    assert shown == ["aa", "aa", "aa", "aabba", "aabba", "aabba", "aabba", "aabba", "aabba"]


@pytest.mark.parametrize("stop", ["a", "12", '{"a": 1}', "[a"])
def test_stop_texts_are_one_text_or_a_json_list(stop):
    assert completion.stop_texts(stop) == [stop]
    assert completion.stop_texts('["a", "\\n"]') == ["a", "\n"]
    assert completion.stop_texts("[]") == completion.stop_texts(None) == []


# Batches


def test_generation_ends_when_all_texts_have(trained):
    batch = [completion_of("a", trained.tokenizer, trained.tokenizer.characters) for _ in range(2)]
    assert len(list(complete(trained, batch, Controls(), 10_000))) == 1
    assert [each.text for each in batch] == ["", ""]


@pytest.mark.parametrize(("memory", "size"), [(7.99, 1), (8, 2), (0.001, 1)])
def test_batch_size_is_limited_to_a_quarter_of_the_memory(trained, monkeypatch, memory, size):
    row = 4 * (2 * 2 * 8 * 16 + 8 * 37)  # bytes of keys and values, and of logits
    monkeypatch.setattr(completion, "memory_bytes", lambda device: int(memory * row))
    assert completion.max_batch_size(trained.model) == size


# Loading


def test_nanogpts_checkpoint_uses_the_tokenizer_of_its_dataset(folder):
    size = tiny.write_nanogpt_dataset("nano")
    model = tiny.write_nanogpt_checkpoint(size, dataset="nano").eval()
    trained = load_trained(RunDir("out").load_best())
    ids = torch.from_numpy(trained.tokenizer.encode("Shall I").astype("int64"))[None]
    assert torch.allclose(trained.model.logits(ids), model.logits(ids), atol=1e-5)


def test_nanogpts_checkpoint_without_its_dataset_is_a_user_error(folder):
    tiny.write_nanogpt_checkpoint(65, dataset="nowhere")
    with pytest.raises(UserError, match=r"of 65, .*50,257 .*copy the meta.pkl .* to data/nowhere"):
        load_trained(RunDir("out").load_best())
