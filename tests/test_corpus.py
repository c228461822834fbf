"""Tests of folio/corpus.py: documents and their division into two splits."""

import tiny
from hypothesis import example, given
from hypothesis import strategies as st


def test_separated_documents_are_those_of_a_text_with_end_of_text_tokens(gpt2_of_bytes):
    text = "ab<|endoftext|>cd<|endoftext|>"
    cut = tiny.corpus(text, "e").cut_at_end_of_text()
    assert cut.documents == ["ab", "cd", "", "e"]
    ids = gpt2_of_bytes.encode(text, allow_special=True).tolist()
    assert gpt2_of_bytes.encode_documents(cut.documents).tolist() == [*ids, 256, ord("e")]


@given(st.lists(st.text("ab", max_size=5)))
@example([])
@example(["", "a", "", "b" * 9, ""])
def test_split_keeps_every_character_and_gives_nine_tenths_to_training(documents):
    corpus = tiny.corpus(*documents)
    train, val = corpus.split()
    assert "".join(train + val) == "".join(documents)
    assert len("".join(train)) == int(0.9 * corpus.characters)
    assert len(train) + len(val) in (len(documents), len(documents) + 1)
