import pytest
import tiny
import torch

from folio import memory
from folio.errors import UserError
from folio.memory import check_memory, explained_out_of_memory, memory_advice
from model import GPTConfig, num_params


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_errors_become_user_errors_with_advice(error):
    message = "^cuda is out of memory: use less$"
    with pytest.raises(UserError, match=message), explained_out_of_memory("cuda", "use less"):
        raise error


def test_other_errors_are_not_changed():
    with pytest.raises(RuntimeError, match="a bug"), explained_out_of_memory("cpu", ""):
        raise RuntimeError("a bug")


def test_advice_keeps_tokens_per_step_and_evaluation():
    settings = tiny.settings(batch_size=15, gradient_accumulation_steps=2, eval_iters=7)
    advice = memory_advice(settings)
    assert "--batch_size=5 --gradient_accumulation_steps=6" in advice
    assert "--eval_iters=21" in advice
    single = memory_advice(tiny.settings(batch_size=1))
    assert single == "decrease --block_size, --n_layer or --n_embd"


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"n_layer": 10**9}, "decrease --n_layer or --n_embd$"),
        ({"n_embd": 10**6}, "decrease --n_layer or --n_embd$"),
        ({"batch_size": 10**15}, "use --batch_size=500000000000000 "),
    ],
    ids=str,
)
def test_training_that_cannot_fit_is_refused(changes, advice):
    settings = tiny.settings(**changes)
    config = GPTConfig(vocab_size=65, **{name: getattr(settings, name) for name in tiny.SHAPE})
    message = r"needs more than [\d,]+ GiB of memory, but cpu has [\d,]+ GiB: " + advice
    with pytest.raises(UserError, match=message):
        check_memory(config, settings)


def test_small_models_and_unknown_memory_are_accepted(monkeypatch):
    config, settings = GPTConfig(vocab_size=65, **tiny.SHAPE), tiny.settings()
    check_memory(config, settings)
    monkeypatch.setattr(memory, "memory_bytes", lambda device: None)
    check_memory(config, tiny.settings(batch_size=10**15))


def test_an_evaluation_needs_less_memory_than_training(monkeypatch):
    config = GPTConfig(vocab_size=65, **tiny.SHAPE)
    monkeypatch.setattr(memory, "memory_bytes", lambda device: 8 * num_params(config) + 10_000)
    check_memory(config, tiny.settings(eval_only=True))
    with pytest.raises(UserError, match="the model needs more than"):
        check_memory(config, tiny.settings())
