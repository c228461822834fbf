"""Damaged and crafted files: what is read is intact, or refused in one line; nothing executes."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from folio.checkpoint.format import load_checkpoint
from folio.cli.errors import UserError
from folio.data.dataset import load_dataset, load_tokenizer
from folio.data.tokenizer import CharTokenizer

TEXT = "abcdé\nfghi" * 8
REFUSED = object()  # in place of content: the file must be refused

pytestmark = [
    pytest.mark.usefixtures("folder"),
    pytest.mark.filterwarnings("ignore"),  # torch's, about the formats it is given
]


def write_checkpoint():
    tiny.write_checkpoint("ckpt.pt", CharTokenizer.from_text(TEXT), n_layer=0)
    return Path("ckpt.pt")


def read_checkpoint(optimizers=True):
    content = vars(load_checkpoint("ckpt.pt", optimizers))
    return content | {"weights": {name: w.clone() for name, w in content["weights"].items()}}


def read_mapped_checkpoint():
    return read_checkpoint(optimizers=False)


def read_own():
    data = load_dataset("own")
    content = vars(data) | {"tokenizer": data.tokenizer.to_dict()}
    return content | {"train": data.train[:].tolist(), "val": data.val[:].tolist()}


def read_nano():
    return load_tokenizer("nano").vocab_size > 0  # a damaged table can be another table


def wrong_result(read, intact, name):
    """Returns None if read() equals `intact` or raises a one-line UserError with the name."""
    try:
        found = read()
    except UserError as error:
        message = str(error)
        fine = len(message) < 1000 and len(message.splitlines()) == 1 and name in message
        return None if fine else f"says {message[:200]!r}"
    fine = intact is not REFUSED and tiny.equal(found, intact)
    return None if fine else "reads other content"


def cuts(raw):
    return [raw[: int(length)] for length in np.linspace(0, len(raw) - 1, 20)]


def flips(raw):
    """Yields copies with one bit or several bits of a byte changed."""
    random = np.random.default_rng(len(raw))
    for _ in range(30):
        damaged, place = bytearray(raw), int(random.integers(len(raw)))
        damaged[place] ^= int(random.choice([1 << place % 8, random.integers(1, 256)]))
        yield damaged


def assert_damage_is_refused_or_harmless(path, read):
    """Tries cut and changed content of a file. What is cut must be refused."""
    raw, intact = path.read_bytes(), read()
    name = str(path.parent if path.parent != Path() else path)
    for damages, expected in ((cuts(raw), REFUSED), (flips(raw), intact)):
        for damaged in damages:
            path.write_bytes(damaged)
            assert wrong_result(read, expected, name) is None, bytes(damaged)


@pytest.mark.parametrize("read", [read_checkpoint, read_mapped_checkpoint])
def test_damaged_checkpoint_is_refused_or_intact(read):
    assert_damage_is_refused_or_harmless(write_checkpoint(), read)


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "meta.json"])
def test_damaged_dataset_is_refused_or_intact(name):
    tiny.prepare_verse("own", TEXT)
    assert_damage_is_refused_or_harmless(Path("data/own", name), read_own)


def test_damaged_table_of_nanogpt_is_refused_or_a_table():
    tiny.write_nanogpt_dataset("nano", TEXT)
    assert_damage_is_refused_or_harmless(Path("data/nano/meta.pkl"), read_nano)


class Call:
    """A pickle that calls a function."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


def test_no_file_executes_code():
    call = Call(os.mkdir, ("ran",))
    write_checkpoint()
    content = torch.load("ckpt.pt", weights_only=True)
    for changed in (call, content | {"config": call}):
        torch.save(changed, "ckpt.pt")
        assert wrong_result(read_checkpoint, REFUSED, "ckpt.pt") is None
    Path("ckpt.pt").write_bytes(pickle.dumps(call))
    assert wrong_result(read_checkpoint, REFUSED, "ckpt.pt") is None
    tiny.write_nanogpt_dataset("nano", TEXT)
    Path("data/nano/meta.pkl").write_bytes(pickle.dumps(call))
    assert wrong_result(read_nano, REFUSED, "data/nano") is None
    assert not Path("ran").exists()
