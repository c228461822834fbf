"""Damaged files: the content is intact, or refused in one line."""

import math
import re
from functools import partial
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
import tiny
import torch

from folio.checkpoint.format import load_checkpoint
from folio.cli.errors import UserError
from folio.data.dataset import load_dataset
from folio.data.tokenizer import ByteTokenizer

TEXT = "abcdé\nfghi" * 8

pytestmark = [
    pytest.mark.usefixtures("folder"),
    pytest.mark.filterwarnings("ignore"),  # torch warns about unusual formats
]


def read_checkpoint(optimizers=True):
    content = vars(load_checkpoint("ckpt.pt", optimizers))
    return content | {"weights": {name: w.clone() for name, w in content["weights"].items()}}


def read_dataset():
    dataset = load_dataset("own")
    content = vars(dataset) | {"tokenizer": dataset.tokenizer.to_dict()}
    return content | {"train": dataset.train[:].tolist(), "val": dataset.val[:].tolist()}


def flip_bits(raw):
    """Yields copies with one bit or several bits of a byte changed."""
    random = np.random.default_rng(len(raw))
    for _ in range(30):
        damaged, index = bytearray(raw), int(random.integers(len(raw)))
        damaged[index] ^= int(random.choice([1 << index % 8, random.integers(1, 256)]))
        yield damaged


@pytest.mark.parametrize(
    ("path", "read"),
    [
        ("ckpt.pt", read_checkpoint),
        ("ckpt.pt", partial(read_checkpoint, optimizers=False)),  # mapped
        ("data/own/train.bin", read_dataset),
        ("data/own/val.bin", read_dataset),
        ("data/own/meta.json", read_dataset),
    ],
)
def test_a_damaged_file_is_refused_or_intact_and_a_truncated_one_is_refused(path, read):
    tiny.write_checkpoint("ckpt.pt", tiny.new_tokenizer("char", TEXT), n_layer=0)
    tiny.prepare_verse("own", TEXT)
    raw, intact = Path(path).read_bytes(), read()
    for length in np.linspace(0, len(raw) - 1, 20, dtype=int):
        Path(path).write_bytes(raw[:length])
        assert is_refused(read, path)
    for damaged in flip_bits(raw):
        Path(path).write_bytes(damaged)
        assert is_refused(read, path) or tiny.equal(read(), intact)


def is_refused(read, path):
    """Whether read() raises a UserError that names the file or its folder."""
    try:
        read()
    except UserError as error:
        message = str(error)
        assert path in message or str(Path(path).parent) in message
        assert len(message) < 1000
        return True
    return False


NAME = "transformer.wte.weight"
WIDE = torch.zeros(1, 1).expand(10**9, 10**6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_args": {"n_layer": "2"}}, "n_layer='2'"),
        ({"model_args": {"n_layer": 200_000}}, "n_layer=200000"),
        ({"model_args": {"n_layer": 3}}, r"'transformer.h.2.*' is missing in the file"),
        ({"model_args": {"n_layer": 9999}}, r"'transformer.h.2.*' is missing in the file"),
        ({"model_args": {"block_size": 10**12}}, r"wpe.* \(8, 16\) in the file, \(10{12}, 16\)"),
        ({"model_args": {"n_embd": 10**30}}, "n_embd=1000"),
        ({"model_args": {"ngrams": 10**6}}, "ngrams=1000000"),
        ({"iter_num": math.inf}, "progress .* infinity"),
        ({"iter_num": -5}, "step is -5"),
        ({"tokens": 10**400}, "tokens is 1000"),
        ({"model": {NAME: 5}, "model_args": {"vocab_size": None}}, r"model_args \(.*len"),
        ({"evaluated": math.nan}, "evaluated_schedule_step is nan"),
        ({"best_val_loss": math.nan}, "best_val_loss is nan"),
        ({"model": {NAME: torch.zeros(256, 16).to_sparse()}}, f"'{NAME}' is not a dense"),
        ({"model": {NAME: torch.zeros(256, 16, dtype=torch.int64)}}, f"'{NAME}' is not a dense"),
        ({"model": {NAME: [1.0]}}, f"'{NAME}' is not a dense tensor of floats in the file"),
        (
            {"model": {NAME: WIDE, "lm_head.weight": WIDE},
             "model_args": {"vocab_size": 10**9, "n_embd": 10**6}},
            "is not a dense",
        ),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_wrong_values_in_a_checkpoint_are_refused_before_the_model_is_built(changes, words):
    tiny.write_checkpoint("ckpt.pt", ByteTokenizer())
    content = tiny.load(out_dir=".")
    for key, value in changes.items():
        content[key] = content[key] | value if isinstance(value, dict) else value
    torch.save(content, "ckpt.pt")
    assert re.search(f"^ckpt.pt: .*{words}", tiny.error_of(load_checkpoint, "ckpt.pt"))


def test_a_compressed_file_is_read_whole(folder):
    tiny.write_checkpoint("ckpt.pt", ByteTokenizer())
    with ZipFile("ckpt.pt") as old, ZipFile("small.pt", "w", ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    for optimizers in (False, True):  # without them, other files are mapped
        weights = load_checkpoint("small.pt", optimizers).weights
        assert tiny.equal(weights, load_checkpoint("ckpt.pt").weights)
