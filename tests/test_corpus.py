"""Tests of folio/corpus.py: documents and their division into two splits."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import tiny
from hypothesis import example, given
from hypothesis import strategies as st

from folio import corpus, formats
from folio.corpus import Corpus, Piece, Position
from folio.sources import find_sources

VERSES = [f"{line} in May {line}.\n" for line in range(40)]


@pytest.fixture
def verses(folder):
    """JSON lines of VERSES."""
    lines = [json.dumps({"text": verse}) for verse in VERSES]
    Path("verses.jsonl").write_text("\n".join(lines))
    return Corpus(find_sources("verses.jsonl", "text"), "verses.jsonl")


def survey(corpus, limit=None):
    return corpus.survey("byte", limit, lambda *_: None)[0]


def read(corpus, start=None):
    """Returns all Pieces from a Position on, by default from the start."""
    at = replace(start or survey(corpus))
    return [piece for pieces in corpus.read(at) for piece in pieces]


def documents_of(pieces):
    """Returns the documents of each split that were cut into Pieces."""
    found = {"train": [], "val": []}
    for split, separated, text in pieces:
        if separated or not found[split]:
            found[split].append(text)
        else:
            found[split][-1] += text
    return found


def texts_of(pieces, split):
    return [piece.text for piece in pieces if piece.split == split]


def test_documents_are_separated_within_a_split():
    assert read(tiny.corpus("ab", "cdefgh", "", "ijkl")) == [
        Piece("train", False, "ab"),
        Piece("train", True, "cdefgh"),
        Piece("train", True, ""),
        Piece("train", True, "ij"),
        Piece("val", False, "kl"),
    ]


@given(st.lists(st.text("ab", max_size=5)))
@example([])
@example(["", "a", "", "b" * 9, ""])
def test_split_keeps_every_character_and_gives_nine_tenths_to_training(documents):
    pieces = read(tiny.corpus(*documents))
    train, val = texts_of(pieces, "train"), texts_of(pieces, "val")
    assert "".join(train + val) == "".join(documents)
    assert len("".join(train)) == int(0.9 * len("".join(documents)))
    assert len(pieces) in (len(documents), len(documents) + 1)
    assert sum(piece.separated for piece in pieces) == len(pieces) - len({p.split for p in pieces})


def test_end_of_text_ends_a_document_if_it_is_allowed():
    plain = tiny.corpus("ab<|endoftext|>cd<|endoftext|>", "e")
    special = replace(plain, allow_special=True)
    assert texts_of(read(plain), "train") == ["ab<|endoftext|>cd<|endoftext|"[:27]]
    pieces = read(special)
    assert [(p.separated, p.text) for p in pieces] == [
        (False, "ab"), (True, "cd"), (True, ""), (False, "e")
    ]  # fmt: skip
    assert survey(special).left == 4


@pytest.mark.parametrize("allow_special", [False, True])
def test_a_text_in_chunks_has_the_same_splits(allow_special, folder, monkeypatch):
    text = "\ufeffé one <|endoftext|>two\nthree🦶 <|endoftext|><|endoftext|> four five\n" * 9
    Path("a.txt").write_text(text, encoding="utf-8")
    Path("b.txt").write_text("")
    whole = Corpus(find_sources("*.txt", "text"), "texts", allow_special)

    expected = documents_of(read(whole))
    for size in (1, 2, 7, 64):
        monkeypatch.setattr(formats, "CHUNK", size)
        assert documents_of(read(whole)) == expected


def test_reading_continues_from_every_position(verses, folder, monkeypatch):
    monkeypatch.setattr(formats, "CHUNK", 50)
    Path("a.txt").write_text("\ufeffone two 🦶\n" * 20, encoding="utf-8")
    Path("b.txt").write_text("")
    texts = Corpus(find_sources("*.txt", "text"), "texts")
    mixed = Corpus(find_sources(".", "text"), "both")
    for each in (texts, verses, mixed):
        at = survey(each)
        done, expected = [], documents_of(read(each))
        for pieces in each.read(at):
            done += pieces
            restored = Position(**json.loads(json.dumps(asdict(at))))
            assert documents_of(done + read(each, restored)) == expected


def test_hashes_divide_json_lines(verses, monkeypatch):
    pieces = read(verses)
    train, val = texts_of(pieces, "train"), texts_of(pieces, "val")
    assert sorted(train + val) == sorted(VERSES)
    assert 1 <= len(val) <= 10
    monkeypatch.setattr(corpus, "VAL_BYTES", 0)
    monkeypatch.setattr(corpus, "VAL_SHARES", (0.5, 0.9))
    assert 12 <= len(texts_of(read(verses), "val")) <= 28


def test_equal_documents_are_in_the_same_split_in_every_format(verses):
    Path("all").mkdir()
    Path("verses.jsonl").rename("all/verses.jsonl")
    for number, verse in enumerate(VERSES):
        Path(f"all/{number}.txt").write_text(verse)
    pieces = read(Corpus(find_sources("all", "text"), "all"))
    joined = {split: "".join(texts_of(pieces, split)) for split in ("train", "val")}
    for verse in VERSES:
        assert sorted(text.count(verse) for text in joined.values()) == [0, 2]


def test_limit_ends_texts_and_moves_the_boundary():
    texts = tiny.corpus("abcdefgh", "ijklmnop", "q")
    pieces = read(texts, survey(texts, 10))
    assert texts_of(pieces, "train") == ["abcdefgh", "i"]
    assert texts_of(pieces, "val") == ["j"]
    assert survey(texts, 100) == replace(survey(texts), limit=100)


def test_characters_of_several_documents_include_the_line_end_between_them():
    for documents, characters in ((["ba"], "ab"), (["b", "a"], "\nab"), (["é", "é"], "\né")):
        tokenizer = tiny.corpus(*documents).survey("char", None, lambda *_: None)[1]
        assert tokenizer.characters == characters
