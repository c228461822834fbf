"""Damaged and crafted files: what is read is intact, or refused in one line; nothing executes.

The default suite draws a seeded sample of damages. `pytest -m campaign` tries every byte.
"""

import pickle
import re
import struct
import zipfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from folio.checkpoint import Checkpoint, Progress, load, save
from folio.dataset import load_dataset, load_tokenizer, verify_dataset
from folio.errors import UserError
from folio.optim import make_optimizers
from folio.tokenizers import CharTokenizer
from model import GPT, GPTConfig

SHAPE = {"n_layer": 0, "n_head": 1, "n_embd": 16, "block_size": 4, "vocab_size": 11}
TEXT = "abcdé\nfghi" * 8
REFUSED = object()  # in place of content: the file must be refused

pytestmark = [
    pytest.mark.usefixtures("folder"),
    pytest.mark.filterwarnings("ignore"),  # torch's, about the formats it is given
]


# Intact files, and how they are read


def write_checkpoint():
    """Writes ckpt.pt with every field set."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPE))
    optimizer = make_optimizers(model, tiny.settings())["adamw"]
    idx = torch.arange(4)[None]
    model(idx, idx).backward()
    optimizer.step()
    checkpoint = Checkpoint(
        config=model.config,
        weights=model.state_dict(),
        progress=Progress(3, 2, 2, 2.5, 1.5),
        settings={"dataset": "own", "learning_rate": 0.01},
        optimizers={"adamw": optimizer.state_dict()},
        scaler={"scale": 1024.0, "_growth_tracker": 7},
        tokenizer={"kind": "char", "characters": "\nabcdefghij"},
        data={"train": 1, "val": 2},
        log_bytes=17,
    )
    save("ckpt.pt", checkpoint)
    return Path("ckpt.pt")


def read_checkpoint(optimizers=True):
    content = vars(load("ckpt.pt", optimizers))
    weights = {name: weight.clone() for name, weight in content["weights"].items()}
    parts = {name: asdict(content[name]) for name in ("config", "progress")}
    return content | parts | {"weights": weights}


def read_mapped_checkpoint():
    return read_checkpoint(optimizers=False)


def write_own(name="meta.json"):
    """Writes data/own in folio's format. Returns the path of a file in it."""
    tiny.write_dataset(Path("data/own"), tiny.corpus(TEXT), CharTokenizer.from_text(TEXT))
    return Path("data/own", name)


def write_nano(name="meta.pkl"):
    """Writes data/nano in nanoGPT's format. Returns the path of a file in it."""
    tiny.write_nanogpt_dataset("nano", TEXT)
    return Path("data/nano", name)


def read_dataset(name):
    data = load_dataset(name)
    content = vars(data) | {"tokenizer": data.tokenizer.to_dict()}
    return content | {"train": data.train[:].tolist(), "val": data.val[:].tolist()}


def read_own():
    return read_dataset("own")


def verify_own():
    return verify_dataset("own")


def read_nano():
    return read_dataset("nano")


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


def cuts(raw, lengths=None):
    return [(f"cut to {n} bytes", raw[:n]) for n in lengths or range(len(raw))]


def flipped(raw, place, mask):
    damaged = bytearray(raw)
    damaged[place] ^= mask
    return f"byte {place} xor {mask:#04x}", damaged


def flips(raw, count, places=None):
    """Yields `count` copies of `raw`, each with one bit or several bits of a byte changed."""
    random = np.random.default_rng(len(raw))
    places = np.arange(len(raw)) if places is None else np.array(places)
    for _ in range(count):
        place = int(random.choice(places))
        yield flipped(raw, place, int(random.choice([1 << place % 8, random.integers(1, 256)])))


def all_flips(raw, places, masks):
    return (flipped(raw, place, mask) for place in places for mask in masks)


def lost_blocks(raw, count):
    """Yields `count` copies of `raw` with zeros or noise in place of up to a sector."""
    random = np.random.default_rng(len(raw))
    for _ in range(count):
        start = int(random.integers(len(raw)))
        size = min(int(random.integers(2, 513)), len(raw) - start)
        block = random.bytes(size) if random.integers(2) else bytes(size)
        yield f"{size} bytes from {start} lost", raw[:start] + block + raw[start + size :]


def headers(raw):
    """Returns the places in an archive that are not in the content of a member."""
    starts = [match.start() for match in re.finditer(rb"PK\x03\x04", raw)]
    names = [struct.unpack("<HH", raw[start + 26 : start + 30]) for start in starts]
    ends = [start + 30 + sum(each) for start, each in zip(starts, names, strict=True)]
    local = [place for span in map(range, starts, ends) for place in span]
    return local + [*range(raw.index(b"PK\1\2"), len(raw))]


# Checkpoints


def test_truncated_checkpoint_is_refused():
    path = write_checkpoint()
    raw = path.read_bytes()
    lengths = {*range(10), *range(0, len(raw), len(raw) // 60), *range(len(raw) - 40, len(raw))}
    assert wrong_results(path, cuts(raw, sorted(lengths)), read_checkpoint, REFUSED) == []


@pytest.mark.parametrize("read", [read_checkpoint, read_mapped_checkpoint])
def test_damaged_checkpoint_is_refused_or_intact(read):
    path = write_checkpoint()
    raw = path.read_bytes()
    members = [match.start() for match in re.finditer(rb"PK\x01\x02", raw)]
    # torch reads nothing for a member with the attribute of a folder, 38 bytes into its entry
    damages = [flipped(raw, start + 38, 0x10) for start in members]
    damages += [*flips(raw, 100), *flips(raw, 200, headers(raw)), *lost_blocks(raw, 60)]
    assert wrong_results(path, damages, read) == []


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("read", [read_checkpoint, read_mapped_checkpoint])
@pytest.mark.parametrize(
    ("places", "masks"), [(headers, (0x01, 0x10, 0x80, 0xFF)), (lambda raw: range(len(raw)), (4,))]
)
def test_flip_of_any_byte_of_a_checkpoint_is_refused_or_harmless(read, places, masks):
    path = write_checkpoint()
    raw = path.read_bytes()
    assert wrong_results(path, all_flips(raw, places(raw), masks), read) == []


@pytest.mark.parametrize(
    "content",
    [b"version https://git-lfs", b"PK\x03\x04" + bytes(999), bytes(999), pickle.dumps({})],
    ids=["text", "like a zip", "zeros", "pickle"],
)
def test_other_files_are_refused(content):
    Path("ckpt.pt").write_bytes(content)
    assert wrong_result(read_checkpoint, REFUSED, "ckpt.pt is damaged or not a check") is None


@pytest.mark.parametrize("content", [{}, [1, 2], torch.zeros(2)], ids=str)
def test_other_files_of_torch_are_refused(content):
    torch.save(content, "ckpt.pt")
    assert wrong_result(read_checkpoint, REFUSED, "ckpt.pt is not a checkpoint") is None


def rewrite_archive(edit=bytes, method=zipfile.ZIP_STORED):
    """Writes ckpt.pt again with valid checksums, after an edit of its pickle."""
    with zipfile.ZipFile("ckpt.pt") as archive:
        contents = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile("ckpt.pt", "w", method) as archive:
        for name, content in contents.items():
            archive.writestr(name, edit(content) if name.endswith("/data.pkl") else content)


def test_compressed_checkpoint_is_refused():
    write_checkpoint()
    intact = read_checkpoint()
    rewrite_archive()
    assert tiny.same(read_checkpoint(), intact)
    rewrite_archive(method=zipfile.ZIP_DEFLATED)
    assert wrong_result(read_checkpoint, REFUSED, "ckpt.pt") is None


def test_tensor_larger_than_its_record_is_refused():
    write_checkpoint()
    size = b"K\xb0t"  # the 176 numbers of wte, at the end of a tuple
    rewrite_archive(lambda raw: raw.replace(size, b"J" + struct.pack("<i", 2**20) + b"t", 1))
    assert wrong_result(read_checkpoint, REFUSED, "ckpt.pt") is None


# Datasets


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "meta.json"])
def test_damaged_dataset_is_refused_or_intact(name):
    path = write_own(name)
    raw = path.read_bytes()
    assert wrong_results(path, cuts(raw), read_own, REFUSED) == []
    assert wrong_results(path, [*flips(raw, 120), *lost_blocks(raw, 50)], read_own) == []
    assert wrong_results(path, flips(raw, 40), verify_own) == []


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("name", ["train.bin", "val.bin", "meta.json"])
def test_flip_of_any_byte_of_a_dataset_is_refused_or_harmless(name):
    path = write_own(name)
    raw = path.read_bytes()
    masks = [1 << bit for bit in range(8)] + [0xFF]
    assert wrong_results(path, all_flips(raw, range(len(raw)), masks), read_own) == []


def test_damaged_table_of_nanogpt_is_refused_or_a_table():
    path = write_nano()
    raw = path.read_bytes()

    def is_table():
        return load_tokenizer("nano").vocab_size > 0

    assert wrong_results(path, cuts(raw), read_nano, REFUSED) == []
    assert wrong_results(path, [*flips(raw, 200), *lost_blocks(raw, 50)], is_table) == []


@given(st.binary())
def test_random_bytes_are_not_a_table_of_nanogpt(raw):
    Path("data/any").mkdir(parents=True, exist_ok=True)
    Path("data/any/meta.pkl").write_bytes(raw)
    assert wrong_result(lambda: load_tokenizer("any"), REFUSED, "data/any") is None


def test_bin_of_nanogpt_has_no_checksum_and_is_read_if_its_size_is_even():
    path = write_nano("train.bin")
    raw = path.read_bytes()
    ids = np.frombuffer(raw, "<u2").tolist()
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        if length == 0 or length % 2:
            assert wrong_result(read_nano, REFUSED, "data/nano") is None
        else:
            assert read_nano()["train"] == ids[: length // 2]


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 10**5 + b"]" * 10**5,
        b'{"format": 1, "crc32": ' + b"[" * 10**5,
        b'{"format": ' + b"9" * 5000 + b"}",
        b'{"format": 1e999}',
        b'{"format": "\\u001b[31m\\n"}',
        b"NaN",
        b'{"format": 1}'.decode().encode("utf-16"),
        bytes(100),
        b"\xff" * 100,
    ],
    ids=lambda raw: repr(raw)[:30],
)
def test_other_json_is_not_a_dataset(raw):
    assert wrong_results(write_own(), [(raw[:60], raw)], read_own, REFUSED) == []


# Crafted files that try to execute code

CALLS = [
    ("os", "system", "touch ran"),
    ("builtins", "eval", "open('ran', 'w')"),
    ("__builtin__", "exec", "open('ran', 'w')"),
    ("posix", "system", "touch ran"),
    ("subprocess", "Popen", "touch ran"),
    ("runpy", "run_path", "ran.py"),
]


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def opcodes(module, name, argument):
    """Returns each way in which a pickle can call module.name(argument)."""
    function = f"c{module}\n{name}\n".encode()
    return {
        "REDUCE": function + text(argument) + b"\x85R",
        "STACK_GLOBAL": text(module) + text(name) + b"\x93" + text(argument) + b"\x85R",
        "INST": b"(" + text(argument) + f"i{module}\n{name}\n".encode(),
        "OBJ": b"(" + function + text(argument) + b"o",
        "NEWOBJ": function + text(argument) + b"\x85\x81",
        "NEWOBJ_EX": function + text(argument) + b"\x85}\x92",
        "BUILD": function + b"}" + text("x") + text(argument) + b"sb",
        "EXT": b"\x82\x01" + text(argument) + b"\x85R",
        "PERSID": f"P{module}.{name}\n".encode(),
        "BINPERSID": text(argument) + b"Q",
    }


@pytest.mark.parametrize("call", CALLS, ids=lambda call: ".".join(call[:2]))
@pytest.mark.parametrize("way", opcodes("os", "system", ""))
def test_no_file_executes_code(call, way):
    Path("ran.py").write_text("open('ran', 'w')")
    code = opcodes(*call)[way]
    for prefix in (b"\x80\x02", b"\x80\x04"):
        write_checkpoint()
        rewrite_archive(lambda raw, prefix=prefix: prefix + code + b".")
        assert wrong_result(read_checkpoint, REFUSED, "ckpt.pt") is None
    write_checkpoint()
    rewrite_archive(lambda raw: raw.replace(text("own"), code))
    assert wrong_result(read_checkpoint, REFUSED, "ckpt.pt") is None
    Path("ckpt.pt").write_bytes(b"\x80\x02" + code + b".")
    assert wrong_result(read_checkpoint, REFUSED, "ckpt.pt") is None
    write_nano().write_bytes(b"\x80\x04" + code + b".")
    assert wrong_result(lambda: load_tokenizer("nano"), REFUSED, "data/nano") is None
    assert not Path("ran").exists()
