"""Tests of folio/shards.py: several files read like one array, and the sample of large splits."""

import zlib
from pathlib import Path

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from folio import shards
from folio.batches import Split
from folio.dataset import load_dataset, verify_dataset
from folio.errors import UserError
from folio.shards import Shards

IDS = np.random.default_rng(0).integers(0, 2**16, 500).astype(np.uint16)


@given(st.lists(st.integers(1, 499), max_size=5, unique=True), st.data())
def test_windows_and_slices_are_those_of_the_concatenation(cuts, data):
    split = Shards(np.split(IDS, sorted(cuts)))
    assert (len(split), split[:1].dtype) == (500, np.uint16)
    length = data.draw(st.integers(1, 500))
    starts = np.array(
        data.draw(st.lists(st.integers(0, 500 - length), min_size=1, max_size=9)), np.int64
    )
    windows = split.windows(starts, length)
    assert windows.dtype == np.int64
    assert windows.tolist() == [IDS[start : start + length].tolist() for start in starts]
    first, last = data.draw(st.integers(-510, 510)), data.draw(st.integers(-510, 510))
    assert split[first:last].tolist() == IDS[first:last].tolist()
    assert split[:].tolist() == IDS.tolist()


def test_a_split_of_shards_is_that_of_an_array():
    starts = np.array([0, 95, 99, 100, 480])
    pairs = zip(
        Split(Shards([IDS[:100], IDS[100:]]), "cpu").windows(starts, 19),
        Split(IDS, "cpu").windows(starts, 19),
        strict=True,
    )
    assert all(tiny.same(mine, theirs) for mine, theirs in pairs)


# Large splits


@pytest.fixture
def large(folder, monkeypatch):
    """Makes splits of more than 100 bytes large; each file has two samples of four ids."""
    monkeypatch.setattr(shards, "READ_BYTES", 100)
    monkeypatch.setattr(shards, "SAMPLES", 2)
    monkeypatch.setattr(shards, "SAMPLE_TOKENS", 4)


def set_id(path, place, token):
    raw = bytearray(Path(path).read_bytes())
    raw[2 * place : 2 * place + 2] = token.to_bytes(2, "little")
    Path(path).write_bytes(raw)


def error_of(function, name):
    with pytest.raises(UserError) as caught:
        function(name)
    return str(caught.value)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("nanogpt", [False, True])
@pytest.mark.parametrize("place", [0, 3, -4, -1])
def test_a_sample_of_a_large_split_is_checked(nanogpt, place):
    (tiny.write_nanogpt_dataset if nanogpt else tiny.prepare_verse)("verse")
    count = len(load_dataset("verse").train)
    set_id("data/verse/train.bin", place % count, 999)
    message = "data/verse/train.bin is damaged (it contains token 999, but the vocabulary has 24)"
    assert error_of(load_dataset, "verse").startswith(message)


@pytest.mark.usefixtures("large")
def test_the_rest_of_a_large_split_is_checked_by_verify_only():
    tiny.prepare_verse()
    before = load_dataset("verse").fingerprint
    set_id("data/verse/train.bin", 4, 1)
    assert load_dataset("verse").fingerprint == before
    expected = "data/verse/train.bin is damaged (it does not match meta.json); prepare the dataset"
    assert error_of(verify_dataset, "verse").startswith(expected)


@pytest.mark.usefixtures("large")
def test_the_size_of_a_large_split_is_checked():
    tiny.prepare_verse()
    path = Path("data/verse/train.bin")
    path.write_bytes(path.read_bytes()[:-2])
    assert "does not match meta.json" in error_of(load_dataset, "verse")


@pytest.mark.usefixtures("large")
def test_fingerprint_of_a_large_split_of_nanogpt():
    tiny.write_nanogpt_dataset()
    raw = Path("data/verse/train.bin").read_bytes()
    expected = zlib.crc32(b"%d" % len(raw) + raw[:8] + raw[-8:])
    assert load_dataset("verse").fingerprint["train"] == expected
    set_id("data/verse/train.bin", 1, 0)
    assert load_dataset("verse").fingerprint["train"] != expected
