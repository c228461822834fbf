"""Tests of folio/data/corpus.py: documents and their division into two splits."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st

from folio.cli.errors import UserError
from folio.data.corpus import Corpus
from folio.data.sources import find_sources
from folio.data.tokenizer import END_OF_TEXT


def read(corpus, max_characters=sys.maxsize):
    """Returns [(split, whether it is separated, text)] of all Pieces."""
    corpus.max_characters = max_characters
    corpus.scan()
    return [(split, bool(separator), text) for split, separator, text in corpus.read()]


def documents_of(pieces):
    """Returns the documents of each split that were cut into Pieces."""
    documents = {"train": [], "val": []}
    for split, separated, text in pieces:
        if separated or not documents[split]:
            documents[split].append(text)
        else:
            documents[split][-1] += text
    return documents


def texts_of(pieces, of_split):
    return [text for split, _, text in pieces if split == of_split]


def test_documents_are_separated_within_a_split():
    assert read(tiny.corpus("ab", "cdefgh", "", "ijkl")) == [  # an empty text is not a document
        ("train", False, "ab"),
        ("train", True, "cdefgh"),
        ("train", True, "ij"),
        ("val", False, "kl"),
    ]
    limited = read(tiny.corpus("abcdefgh", "ijklmnop", "q"), 12)
    assert limited == [("train", False, "abcdefgh"), ("train", True, "i"), ("val", False, "j")]


FRACTIONS = st.floats(0.01, 0.45)


@settings(max_examples=50)
@given(st.lists(st.text("ab", max_size=5)), FRACTIONS, FRACTIONS)
@example([], 0.1, 0.1)
@example(["", "a", "", "b" * 9, ""], 0.1, 0.0)
@example(["abcdefghijklmnopqrst"], 0.25, 0.1)
def test_splits_keep_every_character_and_have_their_fractions(documents, val, test):
    corpus, total = tiny.corpus(*documents), len("".join(documents))
    pieces = read(replace(corpus, val_fraction=val, test_fraction=test))
    assert "".join(text for _, _, text in pieces) == "".join(documents)
    assert len("".join(texts_of(pieces, "val"))) == pytest.approx(val * total, abs=1)
    assert len("".join(texts_of(pieces, "test"))) == pytest.approx(test * total, abs=1)
    num_documents = len(list(filter(None, documents)))
    assert num_documents <= len(pieces) <= num_documents + 2
    splits = [split for split, _, _ in pieces]
    assert sum(separated for _, separated, _ in pieces) == len(pieces) - len(set(splits))
    if num_documents == 1:
        assert splits == sorted(splits, key=["train", "val", "test"].index)


def test_a_text_that_changes_between_scan_and_read_is_an_error(folder):
    Path("a.txt").write_text("one two")
    corpus = Corpus(find_sources("a.txt", "text"), "a.txt", max_characters=sys.maxsize)
    corpus.scan()
    Path("a.txt").write_text("one two three")
    with pytest.raises(UserError, match="a.txt changed while it was read"):
        list(corpus.read())


def test_end_of_text_ends_a_document_if_it_is_allowed():
    plain = tiny.corpus("ab<|endoftext|><|endoftext|>cde<|endoftext|>")
    special = replace(plain, end_text=END_OF_TEXT)
    assert texts_of(read(plain), "train") == ["ab<|endoftext|><|endoftext|>cde<|endoftext|>"[:39]]
    assert [piece[1:] for piece in read(special)] == [
        (False, "ab"), (True, "cd"), (False, "e")
    ]  # fmt: skip
    assert special.split_ends["train"] == 4  # of 5


def test_each_line_is_a_document_if_it_is_asked_for():
    lines = [f"verse {number}" for number in range(40)]
    by_line = replace(tiny.corpus("\n\n".join(lines) + "\n"), lines=True)
    assert read(by_line) == read(tiny.corpus(*lines))  # the hash of a line decides its split
    assert {piece.separator for piece in by_line.read()} == {"", "\n"}


def test_hashes_divide_documents_whatever_their_format(folder):
    verses = [f"{line} in May {line}.\n" for line in range(40)]
    Path("all").mkdir()
    Path("all/verses.jsonl").write_text("\n".join(json.dumps({"text": verse}) for verse in verses))
    pieces = read(Corpus(find_sources("all", "text"), "all"))
    assert "".join(text for _, _, text in pieces) == "".join(verses)
    numbers = [int(text.split()[0]) for text in texts_of(pieces, "val")]
    assert numbers == [3, 12, 15, 35]  # the hashes do not change
    for number, verse in enumerate(verses):
        Path(f"all/{number}.txt").write_text(verse)
    documents = documents_of(read(Corpus(find_sources("all", "text"), "all"))).values()
    counts = [sorted(texts.count(verse) for texts in documents) for verse in verses]
    assert counts.count([0, 2]) >= len(verses) - 1  # the other one is at the boundary


def test_large_corpora_have_a_smaller_share_for_validation(monkeypatch):
    for maximum, expected in ((200, 100), (20, 20), (0, 1)):
        monkeypatch.setattr("folio.data.corpus.VAL_CHARACTERS", maximum)
        assert len(texts_of(read(tiny.corpus("a" * 1000)), "val")[0]) == expected


def test_characters_of_several_documents_include_the_line_end_between_them():
    for documents, characters in ((["ba"], "ab"), (["bé", "a", "é🦶"], "\nabé🦶"), ([], "")):
        assert tiny.corpus(*documents).scan() == characters
