"""Damaged files: the content is intact, or refused in one line."""

from pathlib import Path

import numpy as np
import pytest
import tiny

from folio.checkpoint.format import load_checkpoint
from folio.cli.errors import UserError
from folio.data.dataset import load_dataset

TEXT = "abcdé\nfghi" * 8
REFUSED = object()  # the expected content of a file that must be refused

pytestmark = [
    pytest.mark.usefixtures("folder"),
    pytest.mark.filterwarnings("ignore"),  # torch warns about unusual formats
]


def write_checkpoint():
    tiny.write_checkpoint("ckpt.pt", tiny.new_tokenizer("char", TEXT), n_layer=0)
    return Path("ckpt.pt")


def read_checkpoint(optimizers=True):
    content = vars(load_checkpoint("ckpt.pt", optimizers))
    return content | {"weights": {name: w.clone() for name, w in content["weights"].items()}}


def read_mapped_checkpoint():
    return read_checkpoint(optimizers=False)


def read_dataset():
    dataset = load_dataset("own")
    content = vars(dataset) | {"tokenizer": dataset.tokenizer.to_dict()}
    return content | {"train": dataset.train[:].tolist(), "val": dataset.val[:].tolist()}


def assert_refused_or_equal(read, expected, name):
    """Asserts that read() returns `expected`, or raises a UserError in one line with the name."""
    try:
        content = read()
    except UserError as error:
        message = str(error)
        assert name in message
        assert len(message) < 1000
        assert len(message.splitlines()) == 1
    else:
        assert expected is not REFUSED
        assert tiny.equal(content, expected)


def truncate(raw):
    return [raw[: int(length)] for length in np.linspace(0, len(raw) - 1, 20)]


def flip_bits(raw):
    """Yields copies with one bit or several bits of a byte changed."""
    random = np.random.default_rng(len(raw))
    for _ in range(30):
        damaged, index = bytearray(raw), int(random.integers(len(raw)))
        damaged[index] ^= int(random.choice([1 << index % 8, random.integers(1, 256)]))
        yield damaged


def assert_damage_is_refused_or_harmless(path, read):
    """Truncates a file and flips bits in it. A truncated file must be refused."""
    raw, intact = path.read_bytes(), read()
    name = str(path.parent if path.parent != Path() else path)
    for damage, expected in ((truncate, REFUSED), (flip_bits, intact)):
        for damaged in damage(raw):
            path.write_bytes(damaged)
            assert_refused_or_equal(read, expected, name)


@pytest.mark.parametrize("read", [read_checkpoint, read_mapped_checkpoint])
def test_damaged_checkpoint_is_refused_or_intact(read):
    assert_damage_is_refused_or_harmless(write_checkpoint(), read)


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "meta.json"])
def test_damaged_dataset_is_refused_or_intact(name):
    tiny.prepare_verse("own", TEXT)
    assert_damage_is_refused_or_harmless(Path("data/own", name), read_dataset)
