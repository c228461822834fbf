"""What is read is whole, or refused in one line: cut files, flipped bits, files made to do harm."""

import contextlib
import dataclasses
import faulthandler
import io
import json
import os
import pickle
import re
import reprlib
import resource
import shutil
import struct
import sys
import zipfile
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import prepare
import train
from checkpoint import Checkpoint, build_model, load, restore_optimizers, save
from config import UserError
from config import load as load_settings
from model import GPT, GPTConfig
from prepare import Text, load_dataset, load_tokenizer, write_dataset
from report import Log
from tokenizer import CharTokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of the odd formats that it is shown

SHAPE = {"n_layer": 0, "n_head": 1, "n_embd": 16, "block_size": 4, "vocab_size": 11}
REFUSED = object()  # in place of a content: there is none that would be right


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Files of each kind, and what they hold


def write_checkpoint(path="ckpt.pt"):
    """A checkpoint with all that a run keeps; returns the path."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    idx = torch.arange(4)[None]
    model(idx, idx)[1].backward()
    optimizer.step()
    fields = {
        "optimizers": {"adamw": optimizer.state_dict()},
        "scaler": {"scale": 1024.0, "_growth_tracker": 7},
        "tokenizer": {"kind": "char", "characters": "\nabcdefghij"},
        "seed": 7,
        "evaluated": 2,
        "data": {"train": 1, "val": 2},
    }
    config = {"dataset": "own", "learning_rate": 0.01}
    save([path], Checkpoint(model.config, model.state_dict(), 3, 2.5, config, **fields))
    return Path(path)


def read_checkpoint(path="ckpt.pt"):
    fields = vars(load(path))
    return {name: value for name, value in fields.items() if name not in ("path", "stamp")}


def write_own():
    """data/own as folio writes it; returns the folder."""
    text = "abcdé\nfghi" * 8
    write_dataset(Path("data/own"), Text(text, "own.txt", "5a"), CharTokenizer.from_text(text))
    return Path("data/own")


def write_nano():
    """data/nano as nanoGPT writes it; returns the folder."""
    tiny.write_nanogpt_dataset("nano", "abcdé\nfghi" * 8)
    return Path("data/nano")


def read_dataset(name):
    data = load_dataset(name)
    fields = dataclasses.asdict(data) | {"tokenizer": data.tokenizer.to_dict()}
    return fields | {"train": data.train.tolist(), "val": data.val.tolist()}


def read_own():
    return read_dataset("own")


def read_nano():
    return read_dataset("nano")


def bad_line(message, name):
    """What is wrong with an error's message; None for one line, not too long, with the name."""
    if len(message) > 1000 or len(message.splitlines()) != 1:
        return f"{len(message):,} characters, or no single line: {message[:200]!r}"
    return None if name in message else f"without {name}: {message}"


def verdict(read, whole, name):
    """None where `read()` gives `whole` or refuses in one line, else what it does instead."""
    try:
        found = read()
    except UserError as error:
        return bad_line(str(error), name)
    except Exception as error:
        return f"raises {error!r}"
    fine = whole is not REFUSED and tiny.same(found, whole)
    return None if fine else "reads other content"


def wrongs(path, damages, read, whole=None):
    """[(damage, what is wrong)] where a damaged file is neither refused in one line nor whole."""
    before, found = path.read_bytes(), []
    whole = read() if whole is None else whole
    name = str(path.parent if path.parent != Path() else path)
    for damage, raw in damages:
        path.write_bytes(raw)
        if wrong := verdict(read, whole, name):
            found.append((damage, wrong))
    path.write_bytes(before)
    return found


# Files cut short


def cuts(raw, lengths):
    return ((f"cut to {length} bytes", raw[:length]) for length in lengths)


def test_a_checkpoint_cut_anywhere_is_refused():
    path = write_checkpoint()
    raw = path.read_bytes()
    size = len(raw)
    lengths = {*range(10), *range(0, size, size // 60), *range(size - 40, size)}
    assert wrongs(path, cuts(raw, sorted(lengths)), read_checkpoint, REFUSED) == []


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "meta.json"])
def test_a_dataset_cut_anywhere_is_refused(name):
    path = write_own() / name
    raw = path.read_bytes()
    assert wrongs(path, cuts(raw, range(len(raw))), read_own, REFUSED) == []


def test_white_space_cut_from_meta_json_is_no_harm():
    path = write_own() / "meta.json"
    raw = path.read_bytes()
    spaces = b"\n \r\n\t"
    path.write_bytes(raw + spaces)
    whole = read_own()
    for n in range(len(spaces)):
        path.write_bytes(raw + spaces[:n])
        assert read_own() == whole


def test_a_table_of_nanogpt_cut_anywhere_is_refused():
    path = write_nano() / "meta.pkl"
    raw = path.read_bytes()
    assert wrongs(path, cuts(raw, range(len(raw))), read_nano, REFUSED) == []


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_a_bin_of_nanogpt_has_no_checksum_and_is_read_where_its_bytes_are_tokens(name):
    path = write_nano() / name
    raw = path.read_bytes()
    split, ids = name.removesuffix(".bin"), np.frombuffer(raw, "<u2").tolist()
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        if length == 0 or length % 2:
            assert verdict(read_nano, REFUSED, "data/nano") is None
        else:
            assert read_nano()[split] == ids[: length // 2]


# Flipped bits, and blocks that a disk lost


def flipped(raw, place, mask):
    damaged = bytearray(raw)
    damaged[place] ^= mask
    return f"byte {place} xor {mask:#04x}", damaged


def flips(raw, count, places=None):
    """`count` copies of `raw` in which one bit, or all of a byte, is another."""
    random = np.random.default_rng(len(raw))
    places = np.arange(len(raw)) if places is None else np.array(places)
    for _ in range(count):
        place = int(random.choice(places))
        yield flipped(raw, place, int(random.choice([1 << place % 8, random.integers(1, 256)])))


def lost_blocks(raw, count):
    """`count` copies of `raw` with zeros, or noise, in place of up to a sector."""
    random = np.random.default_rng(len(raw))
    for _ in range(count):
        start = int(random.integers(len(raw)))
        size = min(int(random.integers(2, 513)), len(raw) - start)
        block = random.bytes(size) if random.integers(2) else bytes(size)
        yield f"{size} bytes from {start} lost", raw[:start] + block + raw[start + size :]


def headers(raw):
    """The places in an archive that belong to no member's content, but for its padding."""
    local = [match.start() for match in re.finditer(rb"PK\x03\x04", raw)]
    central = raw.index(b"PK\x01\x02")
    return [at for start in local for at in range(start, start + 46)] + [*range(central, len(raw))]


def test_a_flip_anywhere_in_a_checkpoint_is_refused_or_no_harm():
    path = write_checkpoint()
    raw = path.read_bytes()
    assert wrongs(path, flips(raw, 400), read_checkpoint) == []


def test_a_flip_in_the_headers_of_a_checkpoints_archive_is_refused_or_no_harm():
    path = write_checkpoint()
    raw = path.read_bytes()
    assert wrongs(path, flips(raw, 500, headers(raw)), read_checkpoint) == []


@pytest.mark.slow
def test_each_byte_of_an_archives_directory_is_checked_or_of_no_matter():
    path = write_checkpoint()
    raw = path.read_bytes()
    places = range(raw.index(b"PK\x01\x02"), len(raw))
    every = (flipped(raw, place, 1 << (place + k) % 8) for place in places for k in (0, 3))
    assert wrongs(path, every, read_checkpoint) == []


def test_a_flip_that_makes_a_member_a_folder_does_not_make_its_tensor_noise():
    path = write_checkpoint()
    raw = path.read_bytes()
    members = [match.start() for match in re.finditer(rb"PK\x01\x02", raw)]
    # 38 bytes on are the attributes; of a folder torch reads nothing, and keeps what memory held
    as_folders = [flipped(raw, start + 38, 0x10) for start in members]
    assert wrongs(path, as_folders, read_checkpoint) == []


def test_a_block_lost_from_a_checkpoint_is_refused_or_no_harm():
    path = write_checkpoint()
    raw = path.read_bytes()
    assert wrongs(path, lost_blocks(raw, 120), read_checkpoint) == []


@pytest.mark.parametrize(
    ("name", "count"), [("meta.json", 200), ("train.bin", 120), ("val.bin", 80)]
)
def test_a_flip_in_a_dataset_is_refused_or_no_harm(name, count):
    path = write_own() / name
    raw = path.read_bytes()
    assert wrongs(path, flips(raw, count), read_own) == []
    assert wrongs(path, lost_blocks(raw, 50), read_own) == []


def test_a_flip_in_a_table_of_nanogpt_is_refused_or_leaves_a_table():
    path = write_nano() / "meta.pkl"
    raw = path.read_bytes()

    def whether_it_is_one():
        tokenizer = load_tokenizer("nano")
        return tokenizer.kind == "char" and tokenizer.vocab_size > 0

    for damages in (flips(raw, 200), lost_blocks(raw, 50)):
        assert wrongs(path, damages, whether_it_is_one) == []


@given(st.binary())
def test_any_bytes_for_a_table_are_refused(raw):
    Path("data/any").mkdir(parents=True, exist_ok=True)
    Path("data/any/meta.pkl").write_bytes(raw)
    assert verdict(lambda: load_tokenizer("any"), REFUSED, "data/any") is None


# Hostile files, read in a child of ours: they may crash it, hang it, or take the memory

MIB = 2**20
ENOUGH = 100 * MIB  # of memory, to refuse any file below
Outcome = namedtuple("Outcome", "error message grown")


def apart(call):
    """The Outcome of `call()` in a child; "" for no error, and "died" for a crash or a hang."""
    if sys.platform != "linux":
        pytest.skip("the bounds of a child are set and read as Linux does it")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, json.dumps(outcome_here(call)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    status = os.waitpid(child, 0)[1]
    return Outcome(*json.loads(told)) if told else Outcome("died", f"status {status}", 0)


def outcome_here(call):
    faulthandler.disable()  # a crash is told by the status
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    bound = pages * resource.getpagesize() + 5 * ENOUGH
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    resource.setrlimit(resource.RLIMIT_CPU, (3, 3))  # seconds, where 0.1 do
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error, message = "", ""
    try:
        call()
    except BaseException as caught:
        error, message = type(caught).__name__, str(caught)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return error, message, grown * 2**10  # it counts in KiB


def assert_refused(call, name):
    """In one line, and without a crash, a hang or much memory."""
    outcome = apart(call)
    assert outcome.error == "UserError", outcome
    assert bad_line(outcome.message, name) is None
    assert outcome.grown < ENOUGH, f"it took {outcome.grown // MIB} MiB"


def assert_harmless(call):
    """Refused, or without a crash, a hang or much memory."""
    outcome = apart(call)
    assert outcome.error in ("", "UserError"), outcome
    assert not outcome.error or bad_line(outcome.message, "") is None
    assert outcome.grown < ENOUGH, f"it took {outcome.grown // MIB} MiB"


def assert_checkpoint_refused():
    assert_refused(lambda: load("ckpt.pt"), "ckpt.pt")


def test_a_child_tells_what_happened_in_it():
    assert apart(lambda: None)[:2] == ("", "")
    assert apart(lambda: load("nope.pt")).error == "UserError"
    assert apart(lambda: os.kill(os.getpid(), 9)).error == "died"
    assert apart(lambda: bytearray(2 * ENOUGH)).grown > ENOUGH


# Opcodes that pickle and torch both know


def glob(module, name):
    return f"c{module}\n{name}\n".encode()


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def put(index):
    return b"r" + struct.pack("<I", 10**6 + index)  # beyond the indices of what is around it


def get(index):
    return b"j" + struct.pack("<I", 10**6 + index)


def laughs(depth):
    """Opcodes for a tuple of two times the same tuple of two times the same, and so on."""
    return b")" + put(0) + b"".join(get(i) + b"\x86" + put(i + 1) for i in range(depth))


NESTS = {
    "a key whose hash never ends": b"}" + laughs(60) + b"Ns",
    "a key whose hash overflows the stack": b"})" + b"\x85" * 500_000 + b"Ns",
    "a nest of lists": b"]" * 100_000 + b"a" * 99_999,
    "a list that holds itself": b"]" + put(0) + get(0) + b"a",
    "copies without end": laughs(60),
    "very many sets": b"(" + b"\x8f" * 600_000 + b"t",  # of 216 bytes each
}

RUNNERS = [
    ("os", "system", "touch ran"),
    ("builtins", "eval", "open('ran', 'w')"),
    ("__builtin__", "exec", "open('ran', 'w')"),
    ("posix", "system", "touch ran"),
    ("subprocess", "Popen", "touch ran"),
    ("runpy", "run_path", "ran.py"),
    ("torch.hub", "load_state_dict_from_url", "http://127.0.0.1:9/x.pt"),
    ("torch.serialization", "load", "ran.pt"),
]


def hook(module, name, argument):
    """Opcodes that call module.name(argument)."""
    return glob(module, name) + text(argument) + b"\x85R"


# Hostile checkpoints


def members(path="ckpt.pt"):
    with zipfile.ZipFile(path) as archive:
        return {entry.filename: archive.read(entry) for entry in archive.infolist()}


def archive_of(contents, method=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return file.getvalue()


def with_pickle(edit):
    """ckpt.pt as an archive whose checksums are right, and whose pickle is edited."""
    pickled = {name: edit(raw) for name, raw in members().items() if name.endswith("/data.pkl")}
    Path("ckpt.pt").write_bytes(archive_of(members() | pickled))


def rewrite(**changes):
    """ckpt.pt with some of its entries changed."""
    write_checkpoint()
    torch.save(torch.load("ckpt.pt", weights_only=True) | changes, "ckpt.pt")


def with_opcodes(opcodes, **place):
    """ckpt.pt in which some opcodes stand where `place` has the text HERE."""
    rewrite(**place)
    with_pickle(lambda raw: raw.replace(text("HERE"), opcodes))


def test_an_archive_written_anew_is_still_a_checkpoint():
    whole = read_checkpoint(write_checkpoint())
    with_pickle(bytes)
    assert tiny.same(read_checkpoint(), whole)
    with_opcodes(text("own"), config={"dataset": "HERE", "learning_rate": 0.01})
    assert tiny.same(read_checkpoint(), whole)


@pytest.mark.parametrize("runner", RUNNERS, ids=".".join)
@pytest.mark.parametrize("whole", [True, False])
def test_a_checkpoint_that_would_run_code_runs_none(whole, runner):
    Path("ran.py").write_text("open('ran', 'w')")
    write_checkpoint()
    if whole:
        with_pickle(lambda raw: b"\x80\x02" + hook(*runner) + b".")
    else:
        with_opcodes(hook(*runner), config={"dataset": "HERE"})
    assert verdict(read_checkpoint, REFUSED, "ckpt.pt") is None
    assert not Path("ran").exists()


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize(
    "place",
    [{"optimizer": "HERE"}, {"tokenizer": "HERE"}, {"model_args": SHAPE | {"n_layer": "HERE"}}],
    ids=lambda place: next(iter(place)),
)
def test_a_checkpoint_cannot_hang_or_crash_us_by_its_nesting(place, nest):
    with_opcodes(NESTS[nest], **place)
    assert_harmless(lambda: load("ckpt.pt"))


def encoded(encoding):
    """Opcodes that encode the last text anew, for a list of them all."""
    return get(0) + get(1) + text(encoding) + b"\x86R" + put(1) + b"a"


DOUBLING = b"]" + glob("_codecs", "encode") + put(0) + b"a" + text("a") + put(1) + b"a"
DOUBLING += encoded("latin1") + encoded("hex") * 26


@pytest.mark.parametrize(
    "opcodes",
    [
        glob("builtins", "bytearray") + b"J" + struct.pack("<i", 3 * ENOUGH) + b"\x85R",
        DOUBLING,
    ],
    ids=["bytearray", "hex"],
)
def test_a_few_bytes_of_a_checkpoint_cannot_claim_much_memory(opcodes):
    with_opcodes(opcodes, tokenizer="HERE")
    assert_harmless(lambda: load("ckpt.pt"))


def bomb(method):
    """ckpt.pt's members, and a tensor of zeros that fits it in no way, packed."""
    rewrite(seed=torch.zeros(3 * ENOUGH // 8))
    return archive_of(members(), method)


@pytest.mark.parametrize(
    "method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA], ids=str
)
def test_a_checkpoint_that_would_unpack_to_more_is_refused_unread(method):
    small = method != zipfile.ZIP_DEFLATED  # those two take long to pack
    raw = archive_of(members(write_checkpoint()), method) if small else bomb(method)
    Path("ckpt.pt").write_bytes(raw)
    assert_checkpoint_refused()


def two_faced(raw):
    """ckpt.pt whose directory is `raw`'s for torch, and an empty one for zipfile.

    torch follows a pointer to a 64-bit directory wherever it leads, and zipfile only to the place
    right before it; here it is the comment of a decoy.
    """
    end = raw.rindex(b"PK\x05\x06")
    count, size, offset = struct.unpack("<HII", raw[end + 10 : end + 20])
    numbers = (0x06064B50, 44, 45, 45, 0, 0, count, count, size, offset)
    Path("ckpt.pt").write_bytes(raw[:end] + struct.pack("<IQHHIIQQQQ", *numbers))
    decoy = zipfile.ZipInfo("decoy")
    decoy.comment = struct.pack("<IIQI", 0x07064B50, 0, end, 1)
    with zipfile.ZipFile("ckpt.pt", "a") as archive:
        archive.writestr(decoy, b"")


def test_an_archive_that_shows_torch_other_members_is_refused_unread():
    two_faced(bomb(zipfile.ZIP_DEFLATED))
    assert_checkpoint_refused()


def test_an_archive_that_shows_torch_other_members_is_not_read_unchecked():
    write_checkpoint()
    raw = archive_of(members())
    content = load("ckpt.pt").weights["transformer.wte.weight"].numpy().tobytes()
    two_faced(flipped(raw, raw.index(content), 0x40)[1])
    assert verdict(read_checkpoint, REFUSED, "ckpt.pt") is None


def test_a_file_of_torchs_old_format_before_an_archive_is_not_read_unchecked():
    write_checkpoint()
    plain = torch.load("ckpt.pt", weights_only=True)
    content = plain["model"]["transformer.wte.weight"].numpy().tobytes()
    torch.save(plain, "ckpt.pt", _use_new_zipfile_serialization=False)
    raw = Path("ckpt.pt").read_bytes()
    Path("ckpt.pt").write_bytes(flipped(raw, raw.index(content), 0x40)[1])
    with zipfile.ZipFile("ckpt.pt", "a") as archive:  # which is then all that is checked
        archive.writestr("data.pkl", b"")
    assert verdict(read_checkpoint, REFUSED, "ckpt.pt") is None


def test_a_tensor_that_claims_more_than_its_record_is_refused():
    write_checkpoint()
    claim = b"K\xb0t"  # the 176 numbers of wte, the last of its tuple
    with_pickle(lambda raw: raw.replace(claim, b"J" + struct.pack("<i", 2**28) + b"t", 1))
    assert_checkpoint_refused()


@pytest.mark.parametrize(
    "claim",
    [
        {"n_layer": 10**9},
        {"n_embd": 10**6},
        {"vocab_size": 2**40},
        {"block_size": 2**40},
        {"n_layer": 10**600},
        {"n_head": 10**600, "n_embd": 10**600},
        {"n_layer": 0, "n_embd": 0},
        {"vocab_size": -11},
        {"n_head": 0},
        {"n_layer": True},
        {"dropout": float("nan")},
        {"dropout": 10**600},
        {"activation": "x" * 10**6},
        {"activation": "gelu\n\x1b[31m"},
        {"\x1b[31mrope\n" * 10**4: 1},
        {3: 4},
    ],
    ids=lambda claim: str(claim)[:30],
)
def test_a_shape_that_the_weights_do_not_have_is_refused(claim):
    rewrite(model_args=SHAPE | claim)
    assert_checkpoint_refused()


def test_a_number_of_hundreds_of_digits_for_a_format_is_refused():
    rewrite(format=10**600)
    assert_checkpoint_refused()


ODD_TENSORS = {
    "expanded": lambda z: torch.zeros(1, 1).expand_as(z),
    "overlapping": lambda z: torch.zeros(40).as_strided((11, 16), (1, 1)),
    "meta": lambda z: z.to("meta"),
    "sparse": lambda z: z.to_sparse(),
    "compressed": lambda z: z.to_sparse_csr(),
    "sparse and full": lambda z: torch.ones_like(z).to_sparse(),
    "nested": lambda z: torch.nested.nested_tensor(list(z)),
    "quantised": lambda z: torch.quantize_per_tensor(z, 0.1, 0, torch.qint8),
    "complex": lambda z: z * 1j,
    "int": lambda z: z.int(),
    "bool": lambda z: z.bool(),
}


@pytest.mark.parametrize("kind", ODD_TENSORS)
def test_weights_of_an_odd_kind_are_refused(kind):
    write_checkpoint()
    model = torch.load("ckpt.pt", weights_only=True)["model"]
    rewrite(model=model | {"transformer.wte.weight": ODD_TENSORS[kind](torch.zeros(11, 16))})
    assert_refused(lambda: build_model(load("ckpt.pt")), "ckpt.pt")


@pytest.mark.parametrize("kind", ["expanded", "overlapping", "meta", "sparse", "compressed"])
def test_moments_without_their_data_are_refused(kind):
    write_checkpoint()
    optimizer = torch.load("ckpt.pt", weights_only=True)["optimizer"]
    optimizer["state"][0]["exp_avg"] = ODD_TENSORS[kind](torch.zeros(11, 16))
    rewrite(optimizer=optimizer)
    assert_refused(restore, "ckpt.pt")


def restore():
    loaded = load("ckpt.pt")
    optimizer = torch.optim.AdamW(build_model(loaded).parameters())
    restore_optimizers(loaded, {"adamw": optimizer}, torch.amp.GradScaler("cpu", enabled=False))


SMALL_FLOATS = [name for name in dir(torch) if re.match(r"float[48]_", name)]


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_weights_in_a_format_of_few_bits_make_a_model_or_are_refused(name):
    write_checkpoint()
    weights = torch.load("ckpt.pt", weights_only=True)["model"]
    empty = torch.zeros(11, 16, dtype=torch.uint8).view(getattr(torch, name))
    rewrite(model=weights | {"transformer.wte.weight": empty, "lm_head.weight": empty})
    assert_harmless(lambda: build_model(load("ckpt.pt")))


def test_weights_that_are_all_the_same_numbers_are_no_large_model():
    numbers = torch.zeros(2**16)
    shape = {"n_layer": 0, "n_head": 1, "n_embd": 1, "vocab_size": 2**16}
    shape["block_size"] = 2**26 - 2**16 - 2  # with the norm's two, 2**10 times the numbers
    rewrite(model={f"w{i}": numbers for i in range(2**10)}, model_args=shape)
    assert Path("ckpt.pt").stat().st_size < MIB
    assert_checkpoint_refused()


@pytest.mark.parametrize(
    "changes",
    [{"evaluated": 4}, {"evaluated": 10**600}, {"iter_num": -1}, {"best_val_loss": float("nan")}],
    ids=lambda changes: str(changes)[:30],
)
def test_numbers_that_cannot_be_those_of_a_run_are_refused(changes):
    rewrite(**changes)  # it was made at step 3
    assert_checkpoint_refused()


def test_a_file_of_zeros_larger_than_memory_is_refused():
    write_checkpoint()
    os.truncate("ckpt.pt", 2**36)
    assert_checkpoint_refused()


@pytest.fixture(scope="module")
def run_at_2(tmp_path_factory):
    """A folder with a dataset and a run of two steps."""
    folder = tmp_path_factory.mktemp("run")
    with contextlib.chdir(folder):
        tiny.prepare_verse()
        train.main(tiny.flags(max_iters=2))
    return folder


DOUBLED = [1]
for _ in range(60):
    DOUBLED = [DOUBLED, DOUBLED]


@pytest.mark.parametrize(
    "changes",
    [
        {"data": torch.zeros(2)},
        {"data": [1, 2]},
        {"tokenizer": torch.zeros(2)},
        {"tokenizer": [1]},
        {"scaler": torch.zeros(2)},
        {"scaler": [1]},
        {"seed": "seed"},
        {"optimizer": {"state": {}, "param_groups": []}},
        {"optimizer": {"state": {0: {"exp_avg": torch.zeros(1)}}, "param_groups": [{}]}},
        {"iter_num": 10**600, "evaluated": -1},
        {"config": {}},
        {"config": {"learning_rate": torch.zeros(2)}},
        {"config": {"learning_rate": DOUBLED}},
        {"config": {"learning_rate": 10**600}},
        {"config": {1: 2}},
        {"tokenizer": DOUBLED},
        {"data": DOUBLED},
    ],
    ids=lambda changes: reprlib.repr(changes)[:60],
)
def test_a_run_resumes_from_odd_content_or_refuses_it(run_at_2, changes):
    shutil.copytree(run_at_2, ".", dirs_exist_ok=True)
    torch.save(torch.load("out/last.pt", weights_only=True) | changes, "out/last.pt")
    assert_harmless(lambda: train.main(tiny.flags(max_iters=3, init_from="resume")))


# Hostile tables of nanoGPT

TABLE = {"vocab_size": 1, "itos": {0: "a"}, "stoi": {"a": 0}}


def table(raw):
    (write_nano() / "meta.pkl").write_bytes(raw)


def assert_table_refused():
    assert_refused(lambda: load_tokenizer("nano"), "data/nano")


def calls(module, name, argument):
    """Each way in which a pickle can call module.name(argument)."""
    function = glob(module, name)
    return {
        "REDUCE": hook(module, name, argument),
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


@pytest.mark.parametrize("way", calls("os", "system", ""))
@pytest.mark.parametrize("runner", RUNNERS[:2], ids=".".join)
def test_a_table_that_would_run_code_runs_none(runner, way):
    table(b"\x80\x04" + calls(*runner)[way] + b".")
    assert verdict(lambda: load_tokenizer("nano"), REFUSED, "data/nano") is None
    assert not Path("ran").exists()


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("key", [None, "itos", "stoi"])
def test_a_table_cannot_hang_or_crash_us_by_its_nesting(key, nest):
    opcodes = NESTS[nest]
    if key:
        sound = pickle.dumps(TABLE | {key: "HERE"}, 2)
        opcodes = sound[2:-1].replace(text("HERE"), opcodes)
    table(b"\x80\x04" + opcodes + b".")
    assert_harmless(lambda: load_tokenizer("nano"))


@pytest.mark.parametrize(
    "opcodes",
    [
        b"}r\xff\xff\xff\xff",
        b"}r\xff\xff\xff\x7f" * 3,
        *(code + struct.pack("<Q", 2**40) + b"abc" for code in (b"\x8e", b"\x8d", b"\x95")),
        *(code + b"\xff\xff\xff\x7fabc" for code in (b"T", b"B", b"X", b"\x8b")),
        *(code + b"\xff\xff\xff\xffabc" for code in (b"T", b"\x8b")),
        b"\x96" + struct.pack("<Q", 3 * ENOUGH) + b"abc",
        b"\x96" + struct.pack("<Q", 2**62) + b"abc",
        b"\x97",
        b"I" + b"9" * 10**5 + b"\n",
        b"L" + b"9" * 10**5 + b"L\n",
        b"g" + b"9" * 4000 + b"\n",
        b"p" + b"-9\n",
        b"c" + b"x" * 10**5 + b"\ny\n",
        text("a\n\x1b[31m") + text("b") + b"\x93",
        b"(S'unterminated\n",
        b"Vabc\\ud800\n",
        b"\xff",
        b"000",
        b"",
    ],
    ids=lambda opcodes: repr(opcodes)[:30],
)
def test_opcodes_that_claim_or_break_something_are_refused(opcodes):
    table(b"\x80\x05" + opcodes + b".")
    assert_table_refused()


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 10**5000},
        {"vocab_size": -(10**5000)},
        {"vocab_size": 2**62},
        {"vocab_size": 1.0},
        {"vocab_size": "1"},
        {"itos": {0: "ab"}},
        {"itos": {0: b"a"}},
        {"itos": {0: ""}},
        {"itos": {0: ["a"]}},
        {"itos": bytearray(b"a")},
        {"itos": None},
        {"itos": {1: "a"}},
        {"itos": dict(enumerate(map(chr, range(2**16 + 1)))), "vocab_size": 2**16 + 1},
    ],
    ids=lambda changes: str(changes)[:30] if "vocab_size" not in changes else None,
)
def test_a_table_of_odd_values_is_refused(changes):
    table(pickle.dumps(TABLE | changes))
    assert verdict(lambda: load_tokenizer("nano"), REFUSED, "data/nano") is None


@pytest.mark.parametrize("name", ["meta.pkl", "meta.json"])
def test_a_description_larger_than_memory_is_refused_unread(name):
    os.truncate(write_nano() / "meta.pkl", 0)
    (Path("data/nano") / name).touch()
    os.truncate(Path("data/nano") / name, 2**36)
    assert_table_refused()


# Hostile meta.json


def sound_meta():
    return json.loads((write_own() / "meta.json").read_bytes())


def changed(meta, changes):
    """A meta.json that says something else, and with the right checksum."""
    meta = meta | changes
    return json.dumps(meta | {"crc32": prepare._checksum(meta)}).encode()


def assert_meta_refused(raw, whole=REFUSED):
    path = write_own() / "meta.json"
    assert wrongs(path, [(raw[:60], raw)], read_own, whole) == []


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 10**5 + b"]" * 10**5,
        b'{"a":' * 10**5 + b"1" + b"}" * 10**5,
        b'{"format": 1, "crc32": ' + b"[" * 10**5,
        b'{"format": ' + b"9" * 5000 + b"}",
        b'{"format": ' + b"9" * 4000 + b"}",
        b'{"format": ' + b"9" * 10**6 + b"}",
        b'{"format": 1e999}',
        b'{"format": NaN}',
        b'{"format": "\\u001b[31m\\n"}',
        b"NaN",
        b"null",
        b'"format"',
        b"\xef\xbb\xbf{}",
        '{"format": 1}'.encode("utf-16"),
        b"\0" * 100,
        b"\xff" * 100,
        b'{"\xed\xa0\x80": 1}',
    ],
    ids=lambda raw: repr(raw)[:30],
)
def test_json_of_no_dataset_is_refused(raw):
    assert_meta_refused(raw)


def test_of_keys_that_come_twice_the_checksum_tells_which_hold():
    raw, whole = changed(sound_meta(), {}), read_own()
    assert_meta_refused(raw[:-1] + b', "train": {"tokens": 72, "bytes": 80, "crc32": 1}}')
    assert_meta_refused(raw[:-1] + b', "format": 1}', whole)


VALUES = [None, True, False, -1, 0, 1.5, float("nan"), float("inf"), 10**4000, -(10**4000)]
VALUES += ["", "x", "\ud800", [], [[]], {}, {"kind": "char"}, {"kind": []}, {"tokens": "72"}]


def test_a_wrong_type_with_the_right_checksum_is_refused_or_no_harm():
    meta, damages = sound_meta(), []
    for key, entry in meta.items():
        odd = [{key: value} for value in VALUES]
        if isinstance(entry, dict):
            odd += [{key: entry | {name: value}} for name in entry for value in VALUES]
        damages += [(str(changes)[:60], changed(meta, changes)) for changes in odd]
    assert wrongs(Path("data/own/meta.json"), damages, read_own) == []


def test_a_nest_with_the_right_checksum_is_refused_or_no_harm():
    meta, nest = sound_meta(), []
    for _ in range(400):
        nest = [nest]
    assert_meta_refused(changed(meta, {"source": nest}), read_own())
    assert_meta_refused(changed(meta, {"tokenizer": nest}))


# Bins


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=20), st.integers(1, 25))
def test_any_tokens_come_back_whatever_the_pieces_they_are_checked_in(ids, piece):
    Path("own.bin").write_bytes(np.array(ids, "<u2").tobytes())
    found = prepare._read_bin(Path("own.bin"))
    assert found.tolist() == ids
    checksum = prepare._check_bin(Path("own.bin"), found, 2**16, None, piece)
    assert checksum == prepare._check_bin(Path("own.bin"), found, max(ids) + 1, None)
    with pytest.raises(UserError, match=f"own.bin holds token {max(ids)}, beyond"):
        prepare._check_bin(Path("own.bin"), found, max(ids), None, len(ids))


# The log


def line_of(step, split, **rest):
    return json.dumps({"step": step, "split": split} | rest).encode() + b"\n"


def tale(max_iters, eval_interval, log_interval):
    """What an uninterrupted run writes, as ([line], [(step, evaluated, lines so far)]).

    The latter are the states that a checkpoint may be of.
    """
    lines, states, evaluated = [], [], -1
    for step in range(max_iters + 1):
        states.append((step, evaluated, len(lines)))
        if step % eval_interval == 0 or step == max_iters:
            lines.append(line_of(step, "val", loss=3.5, train_loss=3.25))
            evaluated = step
            states.append((step, evaluated, len(lines)))
        if step < max_iters and step % log_interval == 0:
            lines.append(line_of(step, "train", loss=3.75, grad_norm=None))
    return lines, states


def cut_log(raw, step, evaluated):
    """What is in the file after Log.cut."""
    path = Path("log.jsonl")
    path.write_bytes(raw)
    Log(path).cut(step, evaluated, {"max_iters": 12})
    return path.read_bytes()


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 3), st.booleans(), st.data())
def test_a_log_cut_and_told_on_is_that_of_a_run_without_interruption(
    max_iters, eval_interval, log_interval, resumed, data
):
    lines, states = tale(max_iters, eval_interval, log_interval)
    chosen = data.draw(st.integers(0, len(states) - 1))
    step, evaluated, count = states[chosen]
    if resumed and chosen:  # with other settings, from a state before
        earlier = data.draw(st.sampled_from(states[:chosen]))
        lines.insert(earlier[2], line_of(earlier[0], "resume", changed={"max_iters": [1, 12]}))
        count += 1
    written = b"".join(lines[:count])  # by the time of the checkpoint
    killed = data.draw(st.integers(len(written), len(b"".join(lines))))
    assert cut_log(b"".join(lines)[:killed], step, evaluated) == written
    log = Log("log.jsonl")
    for line in lines[count:]:
        assert log.write(json.loads(line)) is None
    assert Path("log.jsonl").read_bytes() == b"".join(lines)


GARBAGE = [
    b"",
    b"garbage",
    b"\xff\xfe\x00",
    b"\0" * 100,
    b"one\rtwo",
    b"\r",
    b"\x1c\x85\xe2\x80\xa8",
    b"[" * 10**5,
    b'{"step":' * 10**5,
    b'{"step": ' + b"9" * 5000 + b', "split": "train"}',
    b'{"step": 1e999, "split": "train"}',
    b'{"step": NaN, "split": "train"}',
    b'{"step": true, "split": "train"}',
    b'{"step": "9", "split": "val"}',
    b'{"step": 9, "split": "test"}',
    b'{"step": 9, "split": ["val"]}',
    b'{"step": 9, "split": {}}',
    b'{"step": 9}',
    b'{"split": "val"}',
    b'[{"step": 9, "split": "val"}]',
    b'{"step": 9, "spl',
    '{"step": 9, "split": "val"}'.encode("utf-16-le"),
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda raw: repr(raw)[:30])
def test_garbage_in_a_log_stays_where_it_ends_in_a_new_line(garbage):
    kept = garbage + b"\n" + line_of(1, "train") + garbage + b"\n" + line_of(1, "val")
    gone = line_of(2, "train") + line_of(2, "val") + line_of(10**400, "val")
    assert cut_log(gone + kept + gone + garbage, 2, 1) == kept


lines_of_logs = st.one_of(
    st.binary().map(lambda raw: raw.replace(b"\n", b"") + b"\n"),
    st.builds(line_of, st.integers(-9, 9), st.sampled_from(["train", "val", "resume", "other"])),
)


@given(st.lists(lines_of_logs), st.binary(), st.integers(-1, 9), st.integers(-1, 9))
@example([b"one\rtwo\n"], b"", 0, 0)
def test_any_log_keeps_its_lines_but_those_that_come_again(lines, torn, step, evaluated):
    torn = torn.replace(b"\n", b"")
    gone = {line_of(s, "train") for s in range(step, 10)}
    gone |= {line_of(s, "val") for s in range(evaluated + 1, 10)}
    found = cut_log(b"".join(lines) + torn, step, evaluated)
    assert found == b"".join(line for line in lines if line not in gone)


def test_a_log_that_is_a_folder_is_told_in_one_line(folder):
    (folder / "log.jsonl").mkdir()
    assert verdict(lambda: Log("log.jsonl").cut(1, 1, {}), REFUSED, "log.jsonl") is None


# Settings

NAMES = [field.name for field in dataclasses.fields(train.TrainConfig)]
plain_values = st.one_of(
    st.text(), st.integers(), st.floats(), st.booleans(), st.none(), st.binary(max_size=9)
)
arguments = st.one_of(
    st.text(st.characters()),
    st.builds("--{}={}".format, st.sampled_from([*NAMES, "other"]), plain_values),
    st.builds("--{}".format, st.sampled_from(NAMES)),
    st.sampled_from(["config/shakespeare_char.py", "-h", "--help", "--", "-", "="]),
)


@given(st.lists(arguments, max_size=4))
def test_any_arguments_of_training_are_taken_or_refused_and_help_ends_well(argv):
    asked = bool({"-h", "--help"} & set(argv))
    ends_well = pytest.raises(SystemExit, match="^0$") if asked else contextlib.suppress(UserError)
    with contextlib.redirect_stdout(io.StringIO()), ends_well:
        load_settings(train.TrainConfig, argv)


@given(st.dictionaries(st.sampled_from([*NAMES, "_other"]), plain_values, max_size=3))
def test_any_values_in_a_config_of_training_are_taken_or_refused(values):
    lines = [f"{name} = {value!r}" for name, value in values.items()]
    Path("a.py").write_text("\n".join(lines), encoding="utf-8")
    with contextlib.suppress(UserError):
        load_settings(train.TrainConfig, ["a.py"])


@given(st.binary())
def test_any_bytes_for_a_config_are_taken_or_refused(raw):
    Path("a.py").write_bytes(raw)
    with contextlib.suppress(UserError):
        load_settings(train.TrainConfig, ["a.py"])


@pytest.mark.parametrize("value", ["10**5000", "-10**5000", "10**5000 + 1", "'x' * 10**6", "[...]"])
def test_a_value_too_long_to_print_is_taken_or_refused_in_one_line(value):
    odd = []
    for name in NAMES:
        Path("a.py").write_text(f"{name} = {value}\n")
        wrong = verdict(lambda: load_settings(train.TrainConfig, ["a.py"]) and None, None, name)
        odd += [(name, wrong)] if wrong else []
    assert odd == []
