"""Damaged and crafted files: what is read is intact, or refused in one line; nothing executes.

The default suite draws a seeded sample of damages. `pytest -m campaign` tries every byte.
"""

import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from folio.checkpoint import load
from folio.dataset import load_dataset, load_tokenizer
from folio.errors import UserError
from folio.tokenizers import CharTokenizer

TEXT = "abcdé\nfghi" * 8
REFUSED = object()  # in place of content: the file must be refused

pytestmark = [
    pytest.mark.usefixtures("folder"),
    pytest.mark.filterwarnings("ignore"),  # torch's, about the formats it is given
]


# Intact files, and how they are read


def write_checkpoint():
    tiny.write_checkpoint("ckpt.pt", CharTokenizer.from_text(TEXT), n_layer=0)
    return Path("ckpt.pt")


def read_checkpoint(optimizers=True):
    content = vars(load("ckpt.pt", optimizers))
    return content | {"weights": {name: w.clone() for name, w in content["weights"].items()}}


def read_mapped_checkpoint():
    return read_checkpoint(optimizers=False)


def write_nano():
    """Writes data/nano in nanoGPT's format. Returns the path of its table."""
    tiny.write_nanogpt_dataset("nano", TEXT)
    return Path("data/nano/meta.pkl")


def read_own():
    data = load_dataset("own")
    content = vars(data) | {"tokenizer": data.tokenizer.to_dict()}
    return content | {"train": data.train[:].tolist(), "val": data.val[:].tolist()}


def wrong_result(read, intact, name):
    """Returns None if read() equals `intact` or raises a one-line UserError with the name."""
    try:
        found = read()
    except UserError as error:
        message = str(error)
        fine = len(message) < 1000 and len(message.splitlines()) == 1 and name in message
        return None if fine else f"says {message[:200]!r}"
    except Exception as error:
        return f"raises {error!r}"
    fine = intact is not REFUSED and tiny.same(found, intact)
    return None if fine else "reads other content"


def wrong_results(path, damages, read, intact=None):
    """Returns [(damage, what is wrong)] for a file that is replaced by each damaged content."""
    before, name = path.read_bytes(), str(path.parent if path.parent != Path() else path)
    intact = read() if intact is None else intact
    found = []
    for damage, raw in damages:
        path.write_bytes(raw)
        if wrong := wrong_result(read, intact, name):
            found.append((damage, wrong))
    path.write_bytes(before)
    return found


# Damages


def cuts(raw, count):
    """Returns `count` copies of `raw`, cut to different lengths."""
    lengths = {int(length) for length in np.linspace(0, len(raw) - 1, count)}
    return [(f"cut to {n} bytes", raw[:n]) for n in sorted(lengths)]


def flipped(raw, place, mask):
    damaged = bytearray(raw)
    damaged[place] ^= mask
    return f"byte {place} xor {mask:#04x}", damaged


def flips(raw, count, start=0):
    """Yields `count` copies of `raw`, each with one bit or several bits of a byte changed."""
    random = np.random.default_rng(len(raw))
    for _ in range(count):
        place = int(random.integers(start, len(raw)))
        yield flipped(raw, place, int(random.choice([1 << place % 8, random.integers(1, 256)])))


# Checkpoints


@pytest.mark.parametrize("read", [read_checkpoint, read_mapped_checkpoint])
def test_damaged_checkpoint_is_refused_or_intact(read):
    path = write_checkpoint()
    raw = path.read_bytes()
    directory = raw.index(b"PK\1\2")
    # torch reads nothing for a member with the attribute of a folder, 38 bytes into its entry
    damages = [flipped(raw, directory + 38, 0x10), *flips(raw, 30), *flips(raw, 30, directory)]
    assert wrong_results(path, damages, read) == []
    assert wrong_results(path, cuts(raw, 20), read, REFUSED) == []


@pytest.mark.slow
@pytest.mark.campaign
def test_flip_of_any_byte_of_a_checkpoint_is_refused_or_harmless():
    path = write_checkpoint()
    raw = path.read_bytes()
    damages = [flipped(raw, place, mask) for place in range(len(raw)) for mask in (0x01, 0x10)]
    assert wrong_results(path, damages, read_checkpoint) == []


def rewrite_archive(edit=bytes, method=zipfile.ZIP_STORED):
    """Writes ckpt.pt again with valid checksums, after an edit of its pickle."""
    with zipfile.ZipFile("ckpt.pt") as archive:
        contents = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile("ckpt.pt", "w", method) as archive:
        for name, content in contents.items():
            archive.writestr(name, edit(content) if name.endswith("/data.pkl") else content)


def test_archive_with_valid_checksums_can_still_be_refused():
    write_checkpoint()
    intact = read_checkpoint()
    rewrite_archive()
    assert tiny.same(read_checkpoint(), intact)
    weight = intact["weights"]["transformer.wte.weight"]
    size = b"K" + bytes([weight.numel()]) + b"t"  # at the end of a tuple
    larger = b"J" + struct.pack("<i", 2**20) + b"t"
    rewrite_archive(lambda raw: raw.replace(size, larger, 1))
    assert wrong_result(read_checkpoint, REFUSED, "ckpt.pt") is None
    write_checkpoint()
    rewrite_archive(method=zipfile.ZIP_DEFLATED)
    assert wrong_result(read_checkpoint, REFUSED, "ckpt.pt") is None


# Datasets


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "meta.json"])
def test_damaged_dataset_is_refused_or_intact(name):
    tiny.prepare_verse("own", TEXT)
    path = Path("data/own", name)
    raw = path.read_bytes()
    assert wrong_results(path, cuts(raw, 20), read_own, REFUSED) == []
    assert wrong_results(path, flips(raw, 40), read_own) == []


def test_damaged_table_of_nanogpt_is_refused_or_a_table():
    def is_table():
        return load_tokenizer("nano").vocab_size > 0

    path = write_nano()
    raw = path.read_bytes()
    assert wrong_results(path, cuts(raw, 40), is_table, REFUSED) == []
    assert wrong_results(path, flips(raw, 60), is_table) == []


# Crafted files that try to execute code


class Call:
    """A pickle that calls a function."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("call", [(os.mkdir, ("ran",)), (eval, ("open('ran', 'w')",))], ids=str)
def test_no_file_executes_code(call):
    write_checkpoint()
    content = torch.load("ckpt.pt", weights_only=True)
    for changed in (Call(*call), content | {"config": Call(*call)}):
        torch.save(changed, "ckpt.pt")
        assert wrong_result(read_checkpoint, REFUSED, "ckpt.pt") is None
    Path("ckpt.pt").write_bytes(pickle.dumps(Call(*call)))
    assert wrong_result(read_checkpoint, REFUSED, "ckpt.pt") is None
    write_nano().write_bytes(pickle.dumps(Call(*call)))
    assert wrong_result(lambda: load_tokenizer("nano"), REFUSED, "data/nano") is None
    assert not Path("ran").exists()
