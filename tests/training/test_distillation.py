"""Training on the predictions of other models: the loss, runs, and teachers that do not fit."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import tiny
import torch
import torch.nn.functional as F
from ranks import train_ranks
from tiny import random_ids, random_model

import train
from folio.cli.errors import UserError
from folio.training import evaluation
from folio.training.distillation import Distillation, add_teachers


@pytest.fixture
def teacher(verse):
    """A run in out-teacher/, with dropout."""
    train.main(tiny.flags(out_dir="out-teacher", max_iters=3, dropout=0.5))


def scaled_model(factor):
    """Returns a model whose logits are multiplied by a factor."""
    model = random_model()
    model.lm_head.weight.data *= factor
    return model


def test_the_loss_is_cross_entropy_with_the_text_and_with_the_mean_of_the_teachers():
    model, teachers = random_model(), [scaled_model(20), scaled_model(-10)]
    idx = random_ids(model)
    logits = model.logits(idx).double()
    text_loss = F.cross_entropy(logits.flatten(0, 1), idx.flatten())
    predictions = sum(t.logits(idx).double().softmax(-1) for t in teachers) / len(teachers)
    teachers_loss = -(predictions * logits.log_softmax(-1)).sum(-1).mean()
    expected = 0.3 * text_loss + 0.7 * teachers_loss
    loss = Distillation(model.train(), teachers)(idx, idx, temperature=0.5)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert all(p.grad is None for teacher in teachers for p in teacher.parameters())


def test_a_run_evaluates_and_saves_only_the_model(teacher):
    train.main(tiny.flags(teachers="out-teacher", max_iters=3))
    train.main(tiny.flags(out_dir="out-alone", max_iters=3))
    distilled, alone = tiny.load("last.pt"), tiny.load("last.pt", "out-alone")
    assert distilled["model"].keys() == alone["model"].keys()
    assert not tiny.equal(distilled["model"], alone["model"])
    run = tiny.new_run(init_from="resume", eval_only=True, teachers="not read")
    loss = evaluation.split_loss(run, "val").item()
    assert loss == pytest.approx(distilled["best_val_loss"])


def test_a_run_with_teachers_resumes_exactly(teacher):
    Path("out-teacher").rename("lr=1,seed=2")  # as in a sweep
    settings = {"teachers": "lr=1,seed=2, ./lr=1,seed=2", "dropout": 0.2}
    train.main(tiny.flags(out_dir="out-whole", **settings))
    train.main(tiny.flags(stop_at=2, **settings))
    train.main(tiny.flags(init_from="resume", **settings))
    assert tiny.differences("out", "out-whole") == []
    first, _ = tiny.new_run(out_dir="out-new", **settings).loss_fn.teachers
    idx = torch.randint(first.config.vocab_size, (2, 8))
    assert torch.equal(first.train().logits(idx), first.eval().logits(idx))  # without dropout


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"teachers": "out-teacher,nothing"}, "nothing"),
        ({"block_size": 16}, "block_size=8"),
        ({"out_dir": "out-teacher"}, "contains out_dir"),
        ({"dataset": "same-size"}, "vocabulary"),
    ],
    ids=str,
)
def test_teachers_that_do_not_fit_are_errors(teacher, settings, value):
    tiny.prepare_verse("same-size", tiny.VERSE.replace("S", "Z") * 20)
    with pytest.raises(UserError, match=value):
        tiny.new_run(**({"teachers": "out-teacher"} | settings))


def test_fsdp_counts_only_with_several_processes(teacher):
    settings = {"teachers": "out-teacher", "parallel": "fsdp"}
    assert isinstance(tiny.new_run(**settings).loss_fn, Distillation)
    sharded_model = Mock(unshard=...)
    with pytest.raises(UserError, match="parallel=fsdp"):
        add_teachers(sharded_model, tiny.settings(**settings), None)


@pytest.mark.slow
def test_processes_with_teachers_train_the_same_model_as_one(teacher):
    settings = {"teachers": "out-teacher", "gradient_accumulation_steps": 2}
    for size, out_dir in [(1, "out-one"), (2, "out-two")]:
        train_ranks(size, out_dir=out_dir, **settings)
    one, two = (tiny.load("last.pt", folder)["model"] for folder in ("out-one", "out-two"))
    torch.testing.assert_close(two, one, rtol=0, atol=1e-5)
