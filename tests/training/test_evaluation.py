"""Evaluations of a run: their windows, what they return, and the final one of the best model."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import tiktoken
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

import train
from folio.checkpoint.format import build_model
from folio.checkpoint.progress import Progress
from folio.checkpoint.run_dir import RunDir
from folio.data.batches import Split
from folio.training.evaluation import (
    FINAL_VAL_SHARE,
    count_windows,
    evaluate,
    evaluation_cost,
    evaluation_starts,
    split_loss,
)

SIZES = st.integers(1, 20)


def loss_of_windows(model, ids, starts):
    """Returns the mean loss of the windows of 8 tokens at `starts`."""
    rows = torch.tensor(np.stack([ids[start : start + 9] for start in starts]).astype(np.int64))
    return model(rows[:, :-1], rows[:, 1:]).item()


# Windows


@given(
    tokens=st.integers(21, 100_000),
    steps=st.integers(0, 10_000),
    max_iters=st.integers(1, 10_000),
    eval_interval=st.integers(1, 1000),
    eval_iters=st.none() | SIZES,
    gradient_accumulation_steps=SIZES,
    batch_size=SIZES,
    block_size=SIZES,
)
def test_windows_lie_in_the_split_and_are_a_share_of_the_run(tokens, steps, **settings):
    settings = dataclasses.replace(tiny.settings(), **settings)
    dataset = SimpleNamespace(train=range(tokens), val=range(tokens))
    run = SimpleNamespace(settings=settings, dataset=dataset, progress=Progress(steps))
    B, T = settings.batch_size, settings.block_size
    for split, is_final in (("train", False), ("val", False), ("val", True)):
        count = count_windows(run, split, is_final)
        starts = evaluation_starts(run, split, count)
        assert len(starts) == count
        assert starts[0] == 0
        assert starts[-1] + T < tokens  # the last target
        assert (np.diff(starts) >= T).all()

    whole, normal, final = (tokens - 1) // T, count_windows(run, "val"), len(starts)
    assert 1 <= normal <= final <= whole
    batches = settings.gradient_accumulation_steps * (steps or settings.max_iters)
    if settings.eval_iters:
        assert final == normal == min(whole, settings.eval_iters * B)
    elif final > normal:
        assert final <= FINAL_VAL_SHARE * batches * B
    interval = settings.eval_interval
    if not settings.eval_iters and interval * settings.gradient_accumulation_steps >= 20:
        assert evaluation_cost(run) <= 0.05 * interval + 1e-9  # steps


def test_a_loss_is_the_mean_of_windows_spread_over_the_split(verse):
    run = tiny.new_run(eval_iters=100, dropout=0.5)
    ids = np.random.default_rng(0).integers(0, 24, 41).astype(np.uint16)
    run.dataset = dataclasses.replace(run.dataset, val=Split(ids, "cpu"))
    starts = [0, 8, 16, 24, 32]  # of which a second batch of 4 has one
    expected = loss_of_windows(run.model.eval(), ids, starts)
    assert split_loss(run, "val").item() == pytest.approx(expected)
    assert run.model.training


# The evaluation at the end


def test_the_final_evaluation_is_that_of_the_best_model_over_the_split(verse, monkeypatch, capsys):
    losses = iter([9.0, 2.0, 3.0])  # of the evaluations before

    def fake_evaluate(run, final=False):
        return evaluate(run, final) if final else evaluate(run) | {"loss": next(losses)}

    monkeypatch.setattr(train, "evaluate", fake_evaluate)
    train.main(tiny.flags(eval_iters=None, max_iters=40, eval_interval=20))
    best, final = RunDir("out").load_best(), tiny.log_events()[-1]
    assert best.progress.step == 20
    starts = np.linspace(0, len(verse.val) - 9, (len(verse.val) - 1) // 8).astype(int)
    expected = loss_of_windows(build_model(best).eval(), verse.val, starts)
    assert (final["event"], final["step"], final["loss"]) == ("final", 40, pytest.approx(expected))
    line = (
        f"done; best val bits per byte {final['bits_per_byte']:.4f} (val loss {final['loss']:.4f})"
    )
    assert f"{line} at step 20;" in capsys.readouterr().out


def test_a_smaller_batch_when_a_run_is_resumed_does_not_make_its_final_evaluation_smaller(folder):
    tiny.prepare_verse(text=tiny.VERSE * 200)
    settings = {"max_iters": 20, "eval_interval": 10, "eval_iters": None, "batch_size": 16}
    windows = []
    for changes in ({}, {"batch_size": 3, "init_from": "resume"}):
        train.main(tiny.flags(**settings | changes))
        windows.append(tiny.log_events()[-1]["val_windows"])
    assert windows == [64, 63]  # whole batches


# Other measures


def test_perplexity_and_bits_per_byte_are_those_of_the_evaluated_targets(folder):
    tiny.prepare_verse(text="ä" * 3600 + "ab" * 180 + "äu" * 19 + "uä")
    run = tiny.new_run(eval_iters=1, batch_size=2)
    starts, ids = [0, len(run.dataset.val) - 9], run.dataset.val.ids
    text = "".join(run.dataset.tokenizer.decode(ids[at + 1 : at + 9]) for at in starts)
    losses = evaluate(run)
    assert (len(text), len(text.encode())) == (16, 20)
    assert losses["bits_per_byte"] == pytest.approx(16 * losses["loss"] / math.log(2) / 20)
    assert losses["perplexity"] == pytest.approx(math.exp(losses["loss"]))


def test_without_the_files_of_gpt2s_vocabulary_bits_per_byte_are_omitted(folder, monkeypatch):
    tiny.write_nanogpt_dataset()
    Path("data/verse/meta.pkl").unlink()  # GPT-2's tokens, if there is no table
    monkeypatch.setattr(tiktoken, "get_encoding", Mock(side_effect=OSError))
    train.main(tiny.flags(max_iters=1))
    assert "bits_per_byte" not in tiny.log_events()[-1]
    assert tiktoken.get_encoding.call_count == 1
