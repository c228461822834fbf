"""Advice at the end of a run."""

import json
from pathlib import Path

import pytest
import tiny

import train
from folio.advice import advice
from folio.run_dir import RunDir


def events(train_losses, val_losses):
    pairs = enumerate(zip(train_losses, val_losses, strict=True))
    return [(100 * i, *losses) for i, losses in pairs]


@pytest.mark.parametrize(
    ("train_losses", "val_losses", "epochs", "expected"),
    [
        ([4, 2, 1.5, 1.0], [4, 2.1, 1.7, 1.9], 9, "risen by 0.20 since step 200 (overfitting)"),
        ([4, 2, 1.5, 1.0], [4, 2.1, 1.7, 1.4], 9, "from 0.10 to 0.40 (memorization): more text"),
        ([4, 2, 1.5, 1.4], [4, 2.3, 1.8, 1.7], 4, "4 passes over the text: a larger model or lo"),
        (
            [4, 2, 1.5, 1.4],
            [4, 2.3, 1.8, 1.7],
            0.25,
            "0.25 passes over the text: longer tr",
        ),
    ],
)
def test_advice_by_the_form_of_the_curves(train_losses, val_losses, epochs, expected):
    assert expected in advice(events(train_losses, val_losses), epochs)


def test_a_validation_text_of_another_kind_is_not_memorization():
    """There the gap is large, but as large after the first steps."""
    found = advice(events([4, 2, 1.5, 1.4], [4, 2.8, 2.3, 2.2]), 4)
    assert "larger model" in found


def test_two_evaluations_are_too_few():
    assert advice(events([4, 2], [4, 3]), 1) is None


def test_a_resumed_run_is_judged_from_its_whole_log(verse, capsys):
    train.main(tiny.flags(eval_interval=2, stop_at=5))
    train.main(tiny.flags(eval_interval=2, init_from="resume"))
    gap = "the gap between validation and training loss went from"
    assert gap in capsys.readouterr().out


def test_damaged_lines_of_a_log_are_skipped(folder):
    event = {"split": "val", "step": 1, "train_loss": 2.0, "loss": 3.0}
    lines = [json.dumps(event), "[1]", "{", '{"split": "train"}', '{"split": "val"}', "\0"]
    Path("log.jsonl").write_text("\n".join(lines))
    assert RunDir(".").evaluations() == [(1, 2.0, 3.0)]
    assert RunDir("nowhere").evaluations() == []
