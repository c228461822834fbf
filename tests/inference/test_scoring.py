"""Tests of folio/inference/scoring.py: tokens and texts."""

import math

import pytest
import tiny
import torch

from folio.cli.errors import UserError
from folio.inference import scoring
from folio.inference.completion import Completion
from folio.inference.generate import complete, stride_of
from folio.inference.sampling import SamplingParams
from folio.inference.scoring import score_texts, token_nll


@pytest.fixture(params=["exact", "padded"])
def trained(trained, request):
    """The model of 37 characters, and the same with a padded vocabulary."""
    if request.param == "padded":
        trained.model = tiny.random_model(vocab_size=64)
    return trained


# Tokens


@pytest.mark.parametrize("stride", [None, 1, 3, 50])
@pytest.mark.parametrize("prompt", ["a", "more than 8 tokens"])
@torch.no_grad()
def test_a_generated_token_has_the_probability_of_the_next_token(trained, prompt, stride):
    prompt_ids = trained.tokenizer.encode(prompt).tolist()
    completion = Completion(prompt, prompt_ids, 1, trained.tokenizer)
    params = SamplingParams(max_new_tokens=25, context_stride=stride)
    for _ in complete(trained, [completion], params):
        pass
    ids = prompt_ids + completion.ids
    start = max(0, len(prompt) - 8)
    for index, logprob in enumerate(completion.logprobs, start=len(prompt)):
        if index - start > 8:  # the context is full
            start += stride_of(trained.model, stride)
        expected = trained.model.logits(torch.tensor([ids[start:index]]))[0, -1, :37]
        assert logprob == pytest.approx(expected.log_softmax(0)[ids[index]].item(), abs=1e-5)


@pytest.mark.parametrize("length", [2, 9, 40])
@pytest.mark.parametrize("stride", [1, 3, 50])
@torch.no_grad()
def test_each_token_is_scored_in_the_first_window_that_contains_it(length, stride, monkeypatch):
    monkeypatch.setattr(scoring, "TOKENS_PER_PASS", 16)  # several passes
    model = tiny.random_model()
    size = model.config.block_size
    ids = tiny.random_ids(model, rows=1, length=length)[0]
    texts = [ids.tolist(), [5, 6], ids.tolist()[-12:]]  # also of other lengths, in the same pass
    losses, *others = token_nll(model, texts, stride)
    assert losses.shape == (length - 1,)
    for other, text in zip(others, texts[1:], strict=True):
        assert torch.allclose(other, token_nll(model, [text], stride)[0], atol=1e-5)
    step = min(stride, size, length - 1)
    start = 0
    for index in range(1, length):
        while index - start > size:
            start = min(start + step, max(0, length - 1 - size))
        expected = -model.logits(ids[None, start:index])[0, -1].log_softmax(0)[ids[index]]
        assert losses[index - 1] == pytest.approx(expected.item(), abs=1e-5)


# Texts


def test_score_is_the_mean_loss_of_the_model(trained):
    ids = torch.from_numpy(trained.tokenizer.encode("9 letters").astype("int64"))
    logits = trained.model.logits(ids[None, :-1])[0, :, :37]
    loss = torch.nn.functional.cross_entropy(logits, ids[1:]).item()
    _, [totals, _] = score_texts(trained, [ids.tolist()])
    assert totals == {
        "tokens": 8,
        "loss": pytest.approx(loss),
        "perplexity": pytest.approx(math.exp(loss)),
        "bits_per_byte": pytest.approx(loss / math.log(2)),
    }


def test_bits_per_byte_exclude_the_first_token_and_end_of_text_tokens(trained, gpt2_of_bytes):
    trained.model = tiny.random_model(vocab_size=257)
    trained.tokenizer = gpt2_of_bytes
    ids = gpt2_of_bytes.encode("a<|endoftext|>bc", allow_special=True).tolist()
    _, [first, second, totals] = score_texts(trained, [ids, [*b"xyz"]])
    assert (first["tokens"], second["tokens"], totals["tokens"]) == (3, 2, 5)
    assert first["bits_per_byte"] == pytest.approx(3 * first["loss"] / math.log(2) / 2)
    assert totals["loss"] == pytest.approx((3 * first["loss"] + 2 * second["loss"]) / 5)
    assert totals["bits_per_byte"] == pytest.approx(5 * totals["loss"] / math.log(2) / 4)
    with pytest.raises(UserError, match="tokens of the text: 2"):
        score_texts(trained, [ids, ids[:2]])


def test_output_that_is_not_finite_is_a_user_error(trained):
    trained.model.transformer.ln_f.weight.data.fill_(math.inf)
    with pytest.raises(UserError, match="not finite.*--dtype=float32"):
        score_texts(trained, [[1, 2, 3]])
