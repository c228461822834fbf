"""Tests of folio/inference/copied.py: passages that stand in the training text."""

import re

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

import sample
import train
from folio.inference.copied import MIN_CHARACTERS, find_copies

POEM = "Tell me not, in mournful numbers, Life is but an empty dream! For the soul is dead"


@given(st.text("ab\0é", min_size=8, max_size=60), st.integers(0, 60), st.integers(0, 60))
def test_the_longest_passage_is_found(source, start, end):
    text = source[start:end] + "b" + source[:9]
    passages = (text[i:j] for j in range(len(text), 0, -1) for i in range(j))
    longest = max((p for p in passages if len(p) >= 8 and p in source), key=len, default="")
    [(passage, share)] = find_copies([text], source)
    assert len(passage) == len(longest)
    assert passage in source
    assert (share > 0) == (len(passage) >= MIN_CHARACTERS)


def test_the_share_is_that_of_long_passages():
    texts = [POEM, POEM[:39], "xyz " + POEM[10:50] + "qqqq", "", "short"]
    copies = find_copies(texts, "Longfellow: " + POEM)
    shares = [share for _, share in copies]
    assert shares == [1, 0, pytest.approx(40 / 48), 0, 0]
    assert [passage for passage, _ in copies] == [POEM, POEM[:39], POEM[10:50], "", ""]


def test_a_run_reports_what_its_texts_have_copied(verse, capsys):
    train.main(tiny.flags(max_iters=3))
    flags = ["--copied", "--num_samples=2", "--max_new_tokens=20", "--device=cpu"]
    sample.main([*flags, '--stop=["a", "b", "c", "e", "h", "i", "o", " "]'])  # empty texts, too
    lines = re.findall(r"text (\d): \d+% copied \(validation text: \d+%\)", capsys.readouterr().err)
    assert lines == ["1", "2"]
    tiny.prepare_verse(text="abcdefghij\n" * 100)
    assert "data/verse has changed since out/ckpt.pt" in tiny.error_of(sample.main, flags)
