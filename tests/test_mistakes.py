"""Invalid inputs of every kind to the three scripts, and the error line that each must give."""

import io
import os
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny
import torch
from test_scripts import call

import prepare
import sample
import train
from folio import process

MAINS = {"prepare.py": prepare.main, "train.py": train.main, "sample.py": sample.main}
NOTES = ("run/ckpt.pt: step ", "machine: ")  # lines of sample.py before the error
# A bug, an error without a reason, and torch's advice to execute a checkpoint.
NEVER = ("Traceback", " ()", "weights_only")

TRAIN = ["train.py", *tiny.flags()]
RESUME = ["train.py", *tiny.flags(out_dir="run", init_from="resume", max_iters=9)]
SAMPLE = ["sample.py", "--out_dir=run", "--device=cpu", "--dtype=float32", "--max_new_tokens=5"]
PREPARE = ["prepare.py", "--dataset=new"]
TEXT = [*PREPARE, "--input=text.txt"]
BIN = "data/verse/train.bin"
META, TABLE = "data/verse/meta.json", "data/verse/meta.pkl"
BEST, LAST = "run/ckpt.pt", "run/last.pt"
HUGE = f"1{'0' * 400}"  # beyond the largest float
LONG = "a" * 300  # too long for a file name

HAS_CUDA = torch.cuda.is_available()


class Mistake(NamedTuple):
    """Damage to the working folder, a command, and a part of the error line."""

    damage: Callable | str | bytes | None  # a function, or the content of text.txt
    command: list
    message: str
    stdin: bytes | None = b""  # None: closed
    skip: bool = False


# Damage to files


def put(path, content=b""):
    """Writes a file and creates its folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(content.encode() if isinstance(content, str) else content)


def put_folder(path):
    """Creates a folder in place of a file."""
    Path(path).unlink(missing_ok=True)
    Path(path).mkdir()


def remove(path):
    Path(path).unlink()


def cut(path):
    put(path, Path(path).read_bytes()[:-20])


def flip(path, at=0):
    """Changes the lowest bit of a byte."""
    raw = bytearray(Path(path).read_bytes())
    raw[at] ^= 1
    put(path, bytes(raw))


def flip_weight(path):
    weights = torch.load(path)["model"]["transformer.wte.weight"].numpy().tobytes()
    flip(path, Path(path).read_bytes().index(weights))


def alter(path, change):
    """Rewrites a checkpoint after calling `change` on its content."""
    content = torch.load(path)
    change(content)
    torch.save(content, path)


def alter_moments(change):
    """Calls `change` on AdamW's state of each parameter in last.pt."""
    alter(LAST, lambda content: list(map(change, content["optimizer"]["state"].values())))


def put_table(content):
    """Makes the dataset nanoGPT's, with a pickle as its character table."""
    remove(META)
    put(TABLE, content if isinstance(content, bytes) else pickle.dumps(content))


def put_zip(path, *names):
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"3\n")


def rename_weight(content):
    weights = content["model"]
    weights["transformer.h.0.other.weight"] = weights.pop("transformer.h.0.ln_1.weight")


class Hostile:
    """Creates a folder if it is unpickled without restrictions."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


# Settings and config files; tests/test_fields.py and tests/test_settings.py have more

SETTINGS = {
    "unknown": (None, ["train.py", "--colour=red"], "unknown setting --colour"),
    "dash for underscore": (None, ["train.py", "--max-iters=3"], "did you mean --max_iters?"),
    "of another script": (None, ["prepare.py", "--out_dir=x"], "unknown setting --out_dir"),
    "two dashes alone": (None, ["train.py", "--"], "unknown setting --; --help lists"),
    "init_from": (
        None, [*TRAIN, "--init_from=gpt3"], "a folder or a hub id; did you mean gpt2?",
    ),
    "large seed in sample.py": (
        None, [*SAMPLE, "--seed=9223372036854775808"], "--seed must be a 64-bit integer",
    ),
    "5000 digits": (None, ["train.py", f"--max_iters={'9' * 5000}"], "--max_iters must be int"),
    "beyond floats": (None, [*TRAIN, f"--block_size={HUGE}"], "--block_size must be a 64-bit"),
    "one dash": (None, ["train.py", "-max_iters=3"], "write settings as --name="),
    "heads": (None, [*TRAIN, "--n_embd=15"], "n_embd=15 is not divisible by n_head=2"),
    "odd heads": (None, [*TRAIN, "--n_embd=6", "--position=rotary"], "needs an even head size"),
    "smear": (None, [*TRAIN, "--smear=8"], "smear=8 and ngrams=0 need more context than"),
    "min_lr": (None, [*TRAIN, "--min_lr=0.1"], "must not be greater than learning_rate=0.01"),
    "url and input": (None, [*TEXT, "--url=http://localhost"], "--url applies to tiny Shakespeare"),
}  # fmt: skip

CONFIG_FILES = {
    "a folder": (lambda: put_folder("mine.py"), "there is no config file mine.py"),
    "not UTF-8": (lambda: put("mine.py", b"out_dir = '\xff'"), "mine.py"),
    "with NUL": (lambda: put("mine.py", "max_iters = \0"), "mine.py: SyntaxError: source code"),
    "endless recursion": (
        lambda: put("mine.py", "def _f(): _f()\n_f()"), "mine.py line 1: RecursionError: ",
    ),
    "preset of train.py": (None, "unknown setting", ["sample.py", "config/shakespeare_char.py"]),
}  # fmt: skip
CONFIG_FILES = {
    name: (damage, *(command or [["train.py", "mine.py"]]), message)
    for name, (damage, message, *command) in CONFIG_FILES.items()
}

# Datasets

DATASETS = {
    "missing": (None, "data/vers/train.bin is missing; prepare it with", "--dataset=vers"),
    "a file": (lambda: put("data/file"), "data/file/train.bin is missing", "--dataset=file"),
    "a long name": (None, "File name too long", f"--dataset={LONG}"),
    "train.bin a folder": (lambda: put_folder(BIN), BIN),
    "train.bin with a bit flipped": (lambda: flip(BIN, 1000), f"{BIN} is damaged (it does not"),
    "too short": (None, "fewer than the 513 of block_size", "--block_size=512"),
    "meta.json cut": (lambda: cut(META), f"{META} is damaged"),
    "meta.pkl hostile": (
        lambda: put_table({"itos": Hostile(), "vocab_size": 3}),
        f"{TABLE} is damaged (it refers to ",
    ),
    "meta.pkl with control characters": (
        lambda: put_table(b"c\x1b[31mos\nsystem\n."), f"{TABLE} is damaged (it refers to ",
    ),
    "meta.pkl with a long name": (
        lambda: put_table(b"c" + b"os" * 5000 + b"\nsystem\n."), f"{TABLE} is damaged",
    ),
    "meta.pkl with a huge vocabulary": (
        lambda: put_table({"vocab_size": 10**15, "itos": "ab"}), f"{TABLE} is damaged",
    ),
    "meta.pkl with a small vocabulary": (
        lambda: put_table({"vocab_size": 2, "itos": "ab"}),
        f"{BIN} is damaged (it contains token 23, but the vocabulary has 2)",
    ),
}  # fmt: skip
DATASETS = {
    name: (damage, [*TRAIN, *flags], message)
    for name, (damage, message, *flags) in DATASETS.items()
}

# Checkpoints, for resuming and for sampling

CHECKPOINTS = {
    "cut": (cut, " is damaged or not a checkpoint"),
    "with a bit flipped": (flip_weight, "the checksum of "),
    "hostile": (lambda path: torch.save({"model": Hostile()}, path), " is damaged or not a"),
    "a folder": (put_folder, "is not a regular file"),
    "another archive": (lambda path: put_zip(path, "letter.txt"), " is damaged or not a"),
    "only weights": (
        lambda path: torch.save(torch.load(path)["model"], path), " is not a checkpoint of a GPT",
    ),
}  # fmt: skip
CONTENTS = {
    "a later format": (
        lambda c: c.update(format=99),
        "is from a later version of folio (format 99)",
    ),
    "no weights": (lambda c: c["model"].clear(), "the weights do not fit the model"),
    "another weight name": (rename_weight, "the weights do not fit the model"),
    "another width": (lambda c: c["model_args"].update(n_embd=32), "32"),
}
CHECKPOINTS |= {
    name: (lambda path, change=change: alter(path, change), message)
    for name, (change, message) in CONTENTS.items()
}
CHECKPOINTS = {
    f"{Path(path).name} {name}": (lambda path=path, damage=damage: damage(path), command, message)
    for name, (damage, message) in CHECKPOINTS.items()
    for path, command in ((LAST, RESUME), (BEST, SAMPLE))
}

# Resuming and output folders

RESUMING = {
    "no run": (None, "no checkpoint none/ckpt.pt; available: run", "--out_dir=none"),
    "another model": (
        None, "block_size is 8 in the checkpoint and 4 in the settings; n_layer is 1 in the",
        "--n_layer=2", "--block_size=4",
    ),
    "another optimizer": (None, "optimizer is adamw in the checkpoint", "--optimizer=muon"),
    "another vocabulary": (
        lambda: tiny.prepare_verse("new", "Rough winds do shake the darling buds of May.\n" * 9),
        "the tokenizer is char with 24 tokens in the checkpoint and char with", "--dataset=new",
    ),
    "other data": (
        lambda: tiny.prepare_verse("new", tiny.VERSE * 30),
        "dataset is verse in the checkpoint and new in the settings", "--dataset=new",
    ),
    "other data of the same name": (
        lambda: tiny.prepare_verse(text=tiny.VERSE * 30), "content of dataset verse has changed",
    ),
    "no dataset": (lambda: shutil.rmtree("data"), f"{BIN} is missing"),
    "no optimizer state": (
        lambda: alter(LAST, lambda c: c.update(optimizer=None)),
        f"{LAST} has no optimizer state to resume from",
    ),
    "second moments of another shape": (  # fused AdamW would crash
        lambda: alter_moments(lambda moments: moments.update(exp_avg_sq=torch.zeros(3))),
        f"{LAST}: the optimizer state does not fit",
    ),
    "a folder as log": (lambda: put_folder("run/log.jsonl"), "run/log.jsonl is not a regular file"),
}  # fmt: skip
RESUMING = {
    name: (damage, [*RESUME, *flags], message)
    for name, (damage, message, *flags) in RESUMING.items()
}

RUNS = {
    "an empty out_dir": (None, "out_dir must not be empty", "--out_dir="),
    "a file as out_dir": (None, "cannot write to verse.txt: ", "--out_dir=verse.txt"),
    "out_dir below a file": (None, "cannot write to verse.txt/out: ", "--out_dir=verse.txt/out"),
    "a long out_dir": (None, "name too long", f"--out_dir={LONG}"),
    "a folder as lock": (lambda: put_folder("run/.lock"), "cannot write to run: ", "--out_dir=run"),
    "unknown device": (None, "train.py: device must be auto, cpu, cuda,", "--device=gpu"),
    "a billion blocks": (None, "GiB of memory, but cpu has", "--n_layer=1000000000"),
    "a huge batch": (None, "GiB of memory, but cpu has", "--batch_size=1000000000000000"),
}
RUNS = {
    name: (damage, [*TRAIN, *flags], message) for name, (damage, message, *flags) in RUNS.items()
} | {
    "no CUDA": Mistake(None, [*TRAIN, "--device=cuda"], "no CUDA GPU", skip=HAS_CUDA),
    "no CUDA in sample.py": Mistake(None, [*SAMPLE, "--device=cuda"], "no CUDA", skip=HAS_CUDA),
}

# Preparing

INPUTS = {
    "missing": (None, "cannot read text.txt: "),
    "below a file": (None, "cannot read verse.txt/text.txt: ", "--input=verse.txt/text.txt"),
    "not UTF-8": (b"caf\xe9 au lait\n" * 9, "it has byte 0xe9"),
    "UTF-16": (tiny.VERSE.encode("utf-16"), "it has byte 0xff"),
    "too short": (b"rose\n", "text.txt is too short to split"),
    "an address": (None, "download https://x.org/a.txt first", "--input=https://x.org/a.txt"),
    "a folder with a binary file": (
        lambda: (put("texts/a", tiny.VERSE), put("texts/b.png", b"\x89PNG")),
        "texts/b.png is not UTF-8 text", "--input=texts",
    ),
    "a dataset name that is a path": (tiny.VERSE, "plain folder name", "--dataset=../new"),
    "a long dataset name": (tiny.VERSE, "data/aaa", f"--dataset={LONG}"),
    "a file as dataset": (
        lambda: (put("text.txt", tiny.VERSE), put("data/new")), "cannot write to data/new: ",
    ),
    "a file as data folder": (
        lambda: (put("text.txt", tiny.VERSE), shutil.rmtree("data"), put("data")),
        "cannot write to data/new: ",
    ),
}  # fmt: skip
INPUTS = {
    name: (damage, [*TEXT, *flags], message) for name, (damage, message, *flags) in INPUTS.items()
} | {
    "another text as Shakespeare": (
        lambda: put("data/shakespeare_char/input.txt", tiny.VERSE), ["prepare.py"],
        "data/shakespeare_char/input.txt is not tiny Shakespeare",
    ),
    "an invalid url": (None, ["prepare.py", "--url=no"], "be downloaded (no: MissingSchema)"),
}  # fmt: skip

# Sampling


def without_tokenizer(name="verse"):
    alter(BEST, lambda c: (c.update(tokenizer=None), c["config"].update(dataset=name)))


SAMPLING = {
    "no best state": (lambda: remove(BEST), f"there is no checkpoint {BEST}; last.pt exists"),
    "a small vocabulary": (
        lambda: alter(BEST, lambda c: c["tokenizer"].update(characters="abc")),
        "has a vocabulary of 24, but ",
    ),
    "a path as dataset": (lambda: without_tokenizer(".."), f"{BEST}: the name of a dataset must"),
    "control characters as dataset": (
        lambda: without_tokenizer("a\x1b[31m"), "has a vocabulary of 24, but ",
    ),
    "a hostile table": (
        lambda: (without_tokenizer(), put_table({"itos": Hostile()})),
        f"{BEST}: {TABLE} is damaged (it refers to ",
    ),
    "an invalid byte": (None, "(U+DCFF) at position 0", "--start=\udcff"),
    "a prompt file without a name": (None, "the file to read is empty", "--start=FILE:"),
}  # fmt: skip
SAMPLING = {
    name: (damage, [*SAMPLE, *flags], message)
    for name, (damage, message, *flags) in SAMPLING.items()
} | {
    f"{name} stdin": Mistake(None, [*SAMPLE, "--start=-"], message, stdin)
    for name, message, stdin in (
        ("empty", "the prompt is empty", b""),
        ("not UTF-8", "standard input is not UTF-8 text: byte 2 is 0xff", b"ab\xff"),
        ("closed", "the prompt is empty", None),
    )
}

MISTAKES = {
    f"{group}: {name}": Mistake(*row)
    for group, rows in (
        ("settings", SETTINGS), ("config file", CONFIG_FILES), ("dataset", DATASETS),
        ("checkpoint", CHECKPOINTS), ("resuming", RESUMING), ("run", RUNS), ("input", INPUTS),
        ("sampling", SAMPLING),
    )
    for name, row in rows.items()
}  # fmt: skip


# The tests


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with a text, its dataset, and a model trained on it."""
    folder = tmp_path_factory.mktemp("workplace")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        tiny.prepare_verse()
        train.main(tiny.flags(out_dir="run"))
    return folder


@pytest.fixture
def damaged(workplace, tmp_path, monkeypatch):
    """A function that makes a copy of the workplace the current folder, and damages it."""

    def copy(mistake, name="copy"):
        folder = shutil.copytree(workplace, tmp_path / name)
        monkeypatch.chdir(folder)
        if callable(mistake.damage):
            mistake.damage()
        elif mistake.damage:
            put("text.txt", mistake.damage)
        return folder

    return copy


@pytest.fixture
def run(monkeypatch, capfd, recwarn):
    """A function that runs a script in this process. Returns its exit status and stderr."""

    def run_in_process(mistake):
        stdin = mistake.stdin if mistake.stdin is None else io.BytesIO(mistake.stdin)
        monkeypatch.setattr(sys, "stdin", stdin and io.TextIOWrapper(stdin))
        monkeypatch.setattr(sys, "argv", mistake.command)
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # process.run sets its own
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            process.run(MAINS[mistake.command[0]])
        warnings = [str(warning.message) for warning in recwarn]  # would be printed otherwise
        return caught.value.code, "\n".join([*warnings, capfd.readouterr().err])

    return run_in_process


def contents(folder):
    """Returns {path: bytes, or None if it is not a regular file} without lock files."""
    paths = (path for path in folder.rglob("*") if path.name != ".lock")
    return {p.relative_to(folder): p.read_bytes() if p.is_file() else None for p in paths}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gives_one_error_line_and_status_2_and_changes_no_file(name, damaged, run):
    mistake = MISTAKES[name]
    if mistake.skip:
        pytest.skip("no mistake on this machine")
    folder = damaged(mistake)
    before = contents(folder)
    code, err = run(mistake)
    assert code == 2
    *notes, line = err.splitlines()
    script = mistake.command[0]
    assert line.startswith(f"{script}: ")
    assert mistake.message in line
    assert line.isprintable()
    assert len(line) < 1000
    assert not [words for words in NEVER if words in err]
    assert all(script == "sample.py" and note.startswith(NOTES) for note in notes)
    after = contents(folder)
    assert {p for p in before | after if before.get(p, p) != after.get(p, p)} == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["input: too short", "sampling: not UTF-8 stdin"])
def test_a_process_gives_the_same_error(name, damaged, run):
    mistake = MISTAKES[name]
    folder = damaged(mistake, "apart")
    code, _, err = call(*mistake.command, cwd=folder, stdin=mistake.stdin)
    damaged(mistake)
    assert run(mistake) == (code, err)
