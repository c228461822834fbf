"""Wrong input of every kind to the three scripts, and the one line that each has to answer."""

import io
import json
import os
import pickle
import shutil
import struct
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
import safety
import sample
import train

MAINS = {"prepare.py": prepare.main, "train.py": train.main, "sample.py": sample.main}
NOTES = ("run/ckpt.pt: step ", "machine: ")  # what sample.py says before it writes
# A bug of ours, an error that says nothing, and torch's advice to run what is in a checkpoint.
NEVER = ("Traceback", " ()", "weights_only")

TRAIN = ["train.py", *tiny.flags()]
RESUME = ["train.py", *tiny.flags(out_dir="run", init_from="resume", max_iters=9)]
SAMPLE = ["sample.py", "--out_dir=run", "--device=cpu", "--dtype=float32", "--max_new_tokens=5"]
PREPARE = ["prepare.py", "--dataset=new"]
TEXT = [*PREPARE, "--input=text.txt"]
BIN, VAL = "data/verse/train.bin", "data/verse/val.bin"
META, TABLE = "data/verse/meta.json", "data/verse/meta.pkl"
BEST, LAST = "run/ckpt.pt", "run/last.pt"
HUGE = f"1{'0' * 400}"  # more than a float can be
LONG = "a" * 300  # more than a file's name can have

SEES_CUDA, SEES_MPS = torch.cuda.is_available(), torch.backends.mps.is_available()


class Mistake(NamedTuple):
    """What to spoil first, the command, and words of the line that answers it."""

    spoil: Callable | None
    command: list
    words: str
    stdin: bytes | None = b""  # None is a closed one
    skip: bool = False
    apart: bool = False  # in a process of its own, as it once took the whole process down


# How files are spoilt


def put(path, content=b""):
    """Write a file, in a folder that is made where it is missing."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(content.encode() if isinstance(content, str) else content)


def put_folder(path):
    """A folder where a file was."""
    Path(path).unlink(missing_ok=True)
    Path(path).mkdir()


def remove(path):
    Path(path).unlink()


def cut(path):
    put(path, Path(path).read_bytes()[:-20])


def flip(path, at=0):
    """Change the lowest bit of a byte."""
    raw = bytearray(Path(path).read_bytes())
    raw[at] ^= 1
    put(path, bytes(raw))


def flip_a_weight(path):
    weights = torch.load(path)["model"]["transformer.wte.weight"].numpy().tobytes()
    flip(path, Path(path).read_bytes().index(weights))


def alter(path, change):
    """Rewrite a checkpoint after `change` was called on its content."""
    content = torch.load(path)
    change(content)
    torch.save(content, path)


def alter_moments(change):
    """Call `change` on what AdamW keeps for each of the weights of last.pt."""
    alter(LAST, lambda content: list(map(change, content["optimizer"]["state"].values())))


def alter_meta(change):
    """Rewrite meta.json after `change` was called on it, with a checksum that is right again."""
    meta = json.loads(Path(META).read_text())
    change(meta)
    put(META, json.dumps(meta | {"crc32": prepare._checksum(meta)}))


def put_table(content):
    """The dataset as nanoGPT's, with a pickle as its character table."""
    remove(META)
    put(TABLE, content)


def put_zip(path, *names):
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"3\n")


def fill(content, value):
    content["model"]["transformer.wte.weight"][0, 0] = value


def rename_a_weight(content):
    content["model"]["transformer.h.0.strange.weight"] = content["model"].pop(
        "transformer.h.0.ln_1.weight"
    )


def transpose_a_weight(content):
    weights = content["model"]
    weights["transformer.wpe.weight"] = weights["transformer.wpe.weight"].T.contiguous()


class Hostile:
    """Whoever unpickles it without care makes a folder."""

    def __reduce__(self):
        return os.mkdir, ("broken-in",)


# What can be wrong

SETTINGS = {
    "a setting that there is not": (None, ["train.py", "--colour=red"], "unknown setting --colour"),
    "a misspelt setting": (
        None, ["train.py", "--learning_rat=1"], "--learning_rat; did you mean learning_rate?",
    ),
    "a dash for an underscore": (None, ["train.py", "--max-iters=3"], "did you mean max_iters?"),
    "a setting of another script": (
        None, ["prepare.py", "--out_dir=x"], "unknown setting --out_dir",
    ),
    "two dashes alone": (None, ["train.py", "--"], "unknown setting --; --help lists"),
    "no setting of sample.py": (
        None, ["sample.py", "--temprature=1"], "did you mean temperature?",
    ),
    "a word for a number": (
        None, ["train.py", "--learning_rate=fast"], "--learning_rate must be float, not 'fast'",
    ),
    "a fraction for an int": (None, ["train.py", "--n_layer=1.5"], "--n_layer must be int, not"),
    "an exponent for an int": (None, ["train.py", "--max_iters=1e4"], "--max_iters must be int"),
    "yes for True": (None, ["train.py", "--bias=yes"], "--bias must be True or False, not 'yes'"),
    "a number for a bool": (
        None, ["train.py", "--compile=1"], "--compile must be auto, True or False, not '1'",
    ),
    "a number format that there is not": (
        None, ["train.py", "--dtype=int8"], "--dtype must be auto, float32, bfloat16 or float16",
    ),
    "a start from nanoGPT's GPT-2": (
        None, ["train.py", "--init_from=gpt2"], "--init_from must be scratch, resume or auto, not",
    ),
    "nothing for a number": (None, ["train.py", "--max_iters="], "--max_iters must be int, not ''"),
    "no value at the end": (None, ["train.py", "--max_iters"], "--max_iters needs a value"),
    "no value before another flag": (
        None, ["train.py", "--compile", "--max_iters=3"], "--compile needs a value",
    ),
    "None for an int": (None, ["train.py", "--max_iters=None"], "must be int, not 'None'"),
    "None for a float": (None, ["train.py", "--dropout=None"], "must be float, not 'None'"),
    "above the bounds": (None, ["train.py", "--dropout=1.5"], "must lie in [0, 1), not 1.5"),
    "on an open bound": (None, ["train.py", "--beta1=1"], "--beta1 must lie in [0, 1), not 1"),
    "below the bounds": (None, ["train.py", "--weight_decay=-0.1"], "--weight_decay must lie in"),
    "a negative number after a space": (
        None, ["train.py", "--learning_rate", "-1"], "--learning_rate must lie in [0, inf), not -1",
    ),
    "no steps": (None, ["train.py", "--max_iters=0"], "--max_iters must lie in [1, inf), not 0"),
    "no steps between evaluations": (None, ["train.py", "--eval_interval=0"], "must lie in [1, "),
    "no sequences": (None, ["train.py", "--batch_size=0"], "--batch_size must lie in [1, inf)"),
    "nan": (None, ["train.py", "--learning_rate=nan"], "must lie in [0, inf), not nan"),
    "infinity": (None, ["train.py", "--grad_clip=inf"], "must lie in [0, inf), not inf"),
    "a float too large": (None, ["train.py", "--min_lr=1e400"], "must lie in [0, inf), not inf"),
    "a seed of 20 digits": (
        None, ["train.py", "--seed=99999999999999999999"], "--seed must ",
    ),
    "the first seed that is too large": (
        None, [*TRAIN, "--seed=9223372036854775808"], "--seed must ",
    ),
    "the first seed that is too large for sample.py": (
        None, [*SAMPLE, "--seed=9223372036854775808"], "--seed must ",
    ),
    "an int of 5000 digits": (
        None, ["train.py", f"--max_iters={'9' * 5000}"], "--max_iters must be int",
    ),
    "an int for a float that is too large": (
        lambda: put("mine.py", f"dropout = {HUGE}"), ["train.py", "mine.py"], "64 bits",
    ),
    "steps beyond floats": (None, [*TRAIN, f"--max_iters={HUGE}"], "max_iters"),
    "a warm-up beyond floats": (None, [*TRAIN, f"--warmup_iters={HUGE}"], "warmup_iters"),
    "batches beyond floats": (
        None, [*TRAIN, f"--gradient_accumulation_steps={HUGE}"], "gradient_accumulation_steps",
    ),
    "blocks beyond floats": (None, [*TRAIN, f"--n_layer={HUGE}"], "n_layer"),
    "a context beyond floats": (None, [*TRAIN, f"--block_size={HUGE}"], "block_size"),
    "a setting without dashes": (
        None, ["train.py", "max_iters=3"], "settings are written --key=value, not max_iters=3",
    ),
    "a setting of one dash": (None, ["train.py", "-max_iters=3"], "settings are written --key="),
    "one dash alone": (None, ["train.py", "-"], "settings are written --key=value, not -"),
    "a word": (None, ["train.py", "please"], "there is no config file please; at hand: config/"),
    "an input without its flag": (
        lambda: put("text.txt", tiny.VERSE), ["prepare.py", "text.txt"],
        "text.txt is not a config file: those are Python files",
    ),
    "heads that do not divide the width": (
        None, [*TRAIN, "--n_embd=15"], "n_embd=15 is not divisible by n_head=2",
    ),
    "heads of odd size that should turn": (
        None, [*TRAIN, "--n_embd=6", "--position=rotary"], "make heads of odd size",
    ),
    "more to smear than there is": (
        None, [*TRAIN, "--smear=8"], "smear=8 does not fit block_size=8",
    ),
    "more heads than the width": (None, [*TRAIN, "--n_head=32"], "is not divisible by n_head=32"),
    "a rate that would rise": (
        None, [*TRAIN, "--min_lr=0.1"], "min_lr=0.1 is above learning_rate=0.01",
    ),
    "an out_dir without a name": (None, [*TRAIN, "--out_dir="], "out_dir is empty"),
    "an address for one's own text": (
        None, [*TEXT, "--url=http://localhost"], "--url is for tiny Shakespeare alone",
    ),
    "an address for pydocs": (
        None, ["prepare.py", "--dataset=pydocs", "--url=http://localhost"], "--url is for tiny",
    ),
}  # fmt: skip

CONFIG_FILES = {
    "missing": (None, "there is no config file mine.py"),
    "in a missing folder": (None, "there is no config file config/none.py", "config/none.py"),
    "misspelt preset": (
        None, "did you mean config/shakespeare_char.py?", "config/shakespeare_chr.py",
    ),
    "a folder": (lambda: put_folder("mine.py"), "there is no config file mine.py"),
    "not Python": (lambda: put("mine.txt"), "mine.txt is not a config file", "mine.txt"),
    "not UTF-8": (lambda: put("mine.py", b"out_dir = '\xff'"), "mine.py"),
    "UTF-16": (lambda: put("mine.py", "max_iters = 3".encode("utf-16")), "mine.py"),
    "with NUL": (lambda: put("mine.py", "max_iters = \0"), "mine.py: SyntaxError: source code"),
    "a syntax error": (
        lambda: put("mine.py", "max_iters = 3\nmax_iters 4"), "mine.py line 2: SyntaxError: ",
    ),
    "an error": (
        lambda: put("mine.py", "\n\nmax_iters = 1 // 0"), "mine.py line 3: ZeroDivisionError: ",
    ),
    "a missing module": (
        lambda: put("mine.py", "import nothing"), "mine.py line 1: ModuleNotFoundError: ",
    ),
    "an endless recursion": (
        lambda: put("mine.py", "def _f(): _f()\n_f()"), "mine.py line 1: RecursionError: ",
    ),
    "an exit": (lambda: put("mine.py", "raise SystemExit(0)"), "mine.py line 1: SystemExit"),
    "an unknown setting": (
        lambda: put("mine.py", "learning_rte = 1e-3"),
        "mine.py: unknown setting learning_rte; did you mean learning_rate?",
    ),
    "an int for a name": (lambda: put("mine.py", "dataset = 3"), "mine.py: dataset must be str"),
    "a bool for an int": (
        lambda: put("mine.py", "n_layer = True"), "mine.py: n_layer must be int, not True",
    ),
    "None for an int": (
        lambda: put("mine.py", "max_iters = None"), "mine.py: max_iters must be int, not None",
    ),
    "a list for a float": (
        lambda: put("mine.py", "dropout = [0.1]"), "mine.py: dropout must be float, not [0.1]",
    ),
    "out of bounds": (
        lambda: put("mine.py", "batch_size = 0"), "mine.py: batch_size must lie in [1, inf)",
    ),
    "nan": (
        lambda: put("mine.py", "learning_rate = float('nan')"), "mine.py: learning_rate must lie",
    ),
    "a device that there is not": (
        lambda: put("mine.py", "device = 'gpu'"), "mine.py: device must be auto, cpu, cuda",
    ),
}  # fmt: skip
CONFIG_FILES = {
    f"config file: {name}": (spoil, ["train.py", *(file or ["mine.py"])], words)
    for name, (spoil, words, *file) in CONFIG_FILES.items()
} | {
    "config file: one of train.py for sample.py": (
        None, ["sample.py", "config/shakespeare_char.py"], "unknown setting dataset",
    ),
    "config file: NUL in out_dir": (
        lambda: put("mine.py", "out_dir = 'a\\0b'"), [*TRAIN, "mine.py"], "null byte",
    ),
    "config file: NUL in sample.py's out_dir": (
        lambda: put("mine.py", "out_dir = 'a\\0b'"), [*SAMPLE, "mine.py"], "null byte",
    ),
    "config file: NUL in input": (
        lambda: put("mine.py", "input = 'a\\0b'"), [*PREPARE, "mine.py"], "null byte",
    ),
    "config file: NUL in a prompt's file": (
        lambda: put("mine.py", "start = 'FILE:a\\0b'"), [*SAMPLE, "mine.py"], "null byte",
    ),
    "config file: NUL in dataset": (
        lambda: put("mine.py", "dataset = 'a\\0b'"), [*TRAIN, "mine.py"], "null byte",
    ),
}  # fmt: skip

DATASETS = {
    "missing": (None, "data/vers/train.bin is missing; make it by python", "--dataset=vers"),
    "a path": (None, "a dataset's name is a plain folder name", "--dataset=data/verse"),
    "the folder above": (None, "a dataset's name is a plain folder name", "--dataset=.."),
    "no name": (None, "a dataset's name is a plain folder name, not ''", "--dataset="),
    "a file": (
        lambda: put("data/file"), "data/file/train.bin is missing", "--dataset=file",
    ),
    "a long name": (None, "train.bin is missing", f"--dataset={LONG}"),
    "train.bin missing": (lambda: remove(BIN), f"{BIN} is missing; make it by python"),
    "val.bin missing": (lambda: remove(VAL), f"cannot read {VAL}: "),
    "train.bin of odd length": (
        lambda: put(BIN, b"abc"), f"{BIN} is damaged: its 3 bytes are no uint16",
    ),
    "val.bin of odd length": (lambda: put(VAL, b"abc"), f"{VAL} is damaged: its 3 bytes"),
    "train.bin empty": (lambda: put(BIN), f"{BIN} is damaged: its 0 bytes"),
    "val.bin empty": (lambda: put(VAL), f"{VAL} is damaged: its 0 bytes"),
    "train.bin a folder": (lambda: put_folder(BIN), BIN),
    "val.bin a folder": (lambda: put_folder(VAL), VAL),
    "train.bin cut": (lambda: cut(BIN), f"{BIN} is damaged: it holds other tokens"),
    "train.bin with a bit flipped": (
        lambda: flip(BIN, 1000), f"{BIN} is damaged: it holds other tokens",
    ),
    "val.bin with a bit flipped": (lambda: flip(VAL), f"{VAL} is damaged: it holds other tokens"),
    "ids beyond the vocabulary": (
        lambda: flip(BIN, 1001), f"{BIN} holds token 2", "--dataset=verse",
    ),
    "the bins of another dataset": (
        lambda: (tiny.prepare_verse("new", tiny.VERSE), shutil.copy("data/new/train.bin", BIN)),
        f"{BIN} is damaged: it holds other tokens",
    ),
    "too short for the context": (None, "fewer than the 513 of block_size", "--block_size=512"),
    "meta.json empty": (lambda: put(META), f"{META} is damaged"),
    "meta.json cut": (lambda: cut(META), f"{META} is damaged"),
    "meta.json with a bit flipped": (lambda: flip(META, 100), f"{META} is damaged"),
    "meta.json an array": (lambda: put(META, "[1, 2]"), f"{META} is damaged"),
    "meta.json null": (lambda: put(META, "null"), f"{META} is damaged"),
    "meta.json a text": (lambda: put(META, "Shall I compare"), f"{META} is damaged"),
    "meta.json not UTF-8": (lambda: put(META, b'{"format": "\xff"}'), f"{META} is damaged"),
    "meta.json nested deeply": (lambda: put(META, "[" * 100_000), f"{META} is damaged"),
    "meta.json a folder": (lambda: put_folder(META), f"{META} is damaged"),
    "meta.json too large": (lambda: os.truncate(META, 2**24 + 1), "it is too large"),
    "meta.json of a later format": (
        lambda: alter_meta(lambda meta: meta.update(format=99)), "later folio (format 99)",
    ),
    "meta.json with a format of 400 digits": (
        lambda: alter_meta(lambda meta: meta.update(format=int(HUGE))), "is damaged (its format",
    ),
    "meta.json with an endless format": (
        lambda: alter_meta(lambda meta: meta.update(format=float("inf"))), f"{META} ",
    ),
    "meta.json with a number too long": (
        lambda: put(META, f'{{"format": {"9" * 5000}}}'), f"{META} is damaged",
    ),
    "meta.json with huge tokens": (
        lambda: alter_meta(lambda meta: meta["val"].update(tokens=int(HUGE))), "is damaged",
    ),
    "meta.json with huge bytes": (
        lambda: alter_meta(lambda meta: meta["val"].update(bytes=int(HUGE))), f"{META} is damaged",
    ),
    "meta.json without tokens": (
        lambda: alter_meta(lambda meta: meta["val"].update(tokens=0)), f"{META} is damaged",
    ),
    "meta.json with a tokenizer that there is not": (
        lambda: alter_meta(lambda meta: meta.update(tokenizer={"kind": "words"})),
        "data/verse: its tokenizer is damaged or unknown",
    ),
    "meta.json with too small a vocabulary": (
        lambda: alter_meta(lambda meta: meta["tokenizer"].update(characters="abc")),
        f"{BIN} holds token 23, beyond its vocabulary of 3",
    ),
    "meta.pkl empty": (lambda: put_table(b""), "data/verse: meta.pkl is not nanoGPT's"),
    "meta.pkl cut": (
        lambda: (put_table(pickle.dumps({"itos": list("abcdefghijklmn")})), cut(TABLE)),
        "data/verse: meta.pkl is not nanoGPT's character table",
    ),
    "meta.pkl a folder": (
        lambda: (remove(META), put_folder(TABLE)), "data/verse: meta.pkl is not nanoGPT's",
    ),
    "meta.pkl hostile": (
        lambda: put_table(pickle.dumps({"itos": Hostile(), "vocab_size": 3})),
        "meta.pkl is not nanoGPT's character table (it is more than",
    ),
    "meta.pkl that draws on the terminal": (
        lambda: put_table(b"c\x1b[31mos\nsystem\n."), "meta.pkl is not nanoGPT's character table",
    ),
    "meta.pkl with a long name": (
        lambda: put_table(b"c" + b"os" * 5000 + b"\nsystem\n."), "meta.pkl is not nanoGPT's",
    ),
    "meta.pkl that claims much memory": (
        lambda: put_table(b"\x80\x05\x96" + struct.pack("<Q", 2**62) + b"."), "meta.pkl is not",
    ),
    "meta.pkl without a table": (
        lambda: put_table(pickle.dumps({"vocab_size": 3})), "meta.pkl is not nanoGPT's",
    ),
    "meta.pkl a list": (lambda: put_table(pickle.dumps([3])), "meta.pkl is not nanoGPT's"),
    "meta.pkl of words": (
        lambda: put_table(pickle.dumps({"vocab_size": 2, "itos": ["to", "be"]})),
        "tokens that are not single characters",
    ),
    "meta.pkl with a huge vocabulary": (
        lambda: put_table(pickle.dumps({"vocab_size": 10**15, "itos": "ab"})), "meta.pkl is not",
    ),
    "meta.pkl with too small a vocabulary": (
        lambda: put_table(pickle.dumps({"vocab_size": 2, "itos": "ab"})),
        f"{BIN} holds token 23, beyond its vocabulary of 2",
    ),
}  # fmt: skip
DATASETS = {
    f"dataset: {name}": (spoil, [*TRAIN, *flags], words)
    for name, (spoil, words, *flags) in DATASETS.items()
}

# Each is a mistake for who resumes and for who samples.
CHECKPOINTS = {
    "empty": (put, " is damaged or not a checkpoint"),
    "cut": (cut, " is damaged or not a checkpoint"),
    "a bit flipped in a weight": (flip_a_weight, "the checksum of "),
    "a text": (lambda path: put(path, tiny.VERSE), " is damaged or not a checkpoint"),
    "hostile": (lambda path: torch.save({"model": Hostile()}, path), " is damaged or not a"),
    "a plain pickle": (lambda path: put(path, pickle.dumps({"model": 3})), " is damaged or not a"),
    "a folder": (put_folder, "cannot read "),
    "another archive": (lambda path: put_zip(path, "letter.txt"), " is damaged or not a"),
    "an archive of nothing": (put_zip, " is damaged or not a checkpoint"),
    "TorchScript": (
        lambda path: put_zip(path, "a/constants.pkl", "a/data.pkl", "a/version"),
        " is damaged or not a checkpoint",
    ),
    "a list": (lambda path: torch.save([3], path), " is not a checkpoint that folio knows"),
    "weights alone": (
        lambda path: torch.save(torch.load(path)["model"], path), " is not a checkpoint that",
    ),
    "of a later format": (
        lambda path: alter(path, lambda content: content.update(format=99)),
        "was written by a later folio (format 99)",
    ),
    "without weights": (
        lambda path: alter(path, lambda content: content["model"].clear()), "it has 0 weights",
    ),
    "a weight that is no number": (
        lambda path: alter(path, lambda content: fill(content, float("nan"))),
        "has weights that are no finite numbers",
    ),
    "an endless weight": (
        lambda path: alter(path, lambda content: fill(content, float("inf"))),
        "has weights that are no finite numbers",
    ),
    "a weight of another name": (
        lambda path: alter(path, rename_a_weight), "the weights do not fit the model",
    ),
    "a weight of another shape": (
        lambda path: alter(path, transpose_a_weight), "the weights do not fit the model",
    ),
    "a model of another width": (
        lambda path: alter(path, lambda content: content["model_args"].update(n_embd=32)),
        "it has 3,632 weights, and its model ",
    ),
    "a model too large for this world": (
        lambda path: alter(path, lambda content: content["model_args"].update(n_layer=10**9)),
        "it has 3,632 weights, and its model 3,104,000,000,528",
    ),
    "a model whose heads do not divide it": (
        lambda path: alter(path, lambda content: content["model_args"].update(n_head=3)),
        "is not divisible by n_head=3",
    ),
    "a step before the first": (
        lambda path: alter(path, lambda content: content.update(iter_num=-1)), "its steps are -1",
    ),
    "a loss that is no number": (
        lambda path: alter(path, lambda content: content.update(best_val_loss=float("nan"))),
        "its validation loss nan",
    ),
    "settings that are a list": (
        lambda path: alter(path, lambda content: content.update(config=[3])),
        " is not a checkpoint that folio knows",
    ),
}  # fmt: skip
CHECKPOINTS = {
    f"{what}: {name}": (lambda path=path, spoil=spoil: spoil(path), command, words)
    for name, (spoil, words) in CHECKPOINTS.items()
    for what, path, command in (("last.pt", LAST, RESUME), ("ckpt.pt", BEST, SAMPLE))
}

RESUMING = {
    "no run there": (None, "no checkpoint none/ckpt.pt; runs at hand: run", "--out_dir=none"),
    "a misspelt run": (None, "no checkpoint runn/ckpt.pt; did you mean run?", "--out_dir=runn"),
    "another width": (None, "n_embd 16 there and 32 here", "--n_embd=32"),
    "other layers and context": (
        None, "block_size 8 there and 4 here; n_layer 1 there and 2 here",
        "--n_layer=2", "--block_size=4",
    ),
    "another vocabulary": (
        lambda: tiny.prepare_verse("new", "Rough winds do shake the darling buds of May.\n" * 9),
        "another vocabulary", "--dataset=new",
    ),
    "other data": (
        lambda: tiny.prepare_verse("new", tiny.VERSE * 30),
        "other data: verse there and new as it is here", "--dataset=new",
    ),
    "other data of the same name": (
        lambda: tiny.prepare_verse(text=tiny.VERSE * 30), "other data",
    ),
    "a dataset that is gone": (lambda: shutil.rmtree("data"), f"{BIN} is missing"),
    "no optimiser's state": (
        lambda: alter(LAST, lambda content: content.update(optimizer=None)),
        f"{LAST} has no optimiser's state to go on from",
    ),
    "an optimiser's state without moments": (
        lambda: alter(LAST, lambda content: content["optimizer"]["state"].clear()), "optimiser's",
    ),
    "an optimiser's state that is a text": (
        lambda: alter(LAST, lambda content: content.update(optimizer="AdamW")),
        f"{LAST}: the optimiser's state does not fit",
    ),
    "second moments missing": (
        lambda: alter_moments(lambda moments: moments.pop("exp_avg_sq")),
        f"{LAST}: the optimiser's state does not fit",
    ),
    "moments of another shape": (
        lambda: alter_moments(lambda moments: moments.update(exp_avg=torch.zeros(3))),
        f"{LAST}: the optimiser's state does not fit",
    ),
    "moments that are no numbers": (
        lambda: alter_moments(lambda moments: moments["exp_avg"].fill_(float("nan"))), LAST,
    ),
    "settings that are tensors": (
        lambda: alter(LAST, lambda content: content["config"].update(dropout=torch.ones(2))), LAST,
    ),
    "a setting that is a tensor": (
        lambda: alter(LAST, lambda content: content["config"].update(dropout=torch.ones(()))), LAST,
    ),
    "data that are a tensor": (
        lambda: alter(LAST, lambda content: content.update(data=torch.ones(2))), LAST,
    ),
    "a folder where the log was": (
        lambda: put_folder("run/log.jsonl"), "cannot read run/log.jsonl: ",
    ),
    "a folder where the lock would be": (lambda: put_folder("run/.lock"), "cannot write to run: "),
}  # fmt: skip
RESUMING = {
    f"resuming: {name}": (spoil, [*RESUME, *flags], words)
    for name, (spoil, words, *flags) in RESUMING.items()
} | {
    "resuming: second moments of another shape": Mistake(
        lambda: alter_moments(lambda moments: moments.update(exp_avg_sq=torch.zeros(3))),
        RESUME, f"{LAST}: the optimiser's state does not fit", apart=True,
    ),
}  # fmt: skip

RUNS = {
    "out_dir: a file": (None, [*TRAIN, "--out_dir=verse.txt"], "cannot write to verse.txt: "),
    "out_dir: below a file": (
        None, [*TRAIN, "--out_dir=verse.txt/out"], "cannot write to verse.txt/out: ",
    ),
    "out_dir: a long name": (None, [*TRAIN, f"--out_dir={LONG}"], "name too long"),
    "a folder where the lock would be": (
        lambda: put_folder("run/.lock"), [*TRAIN, "--out_dir=run"], "cannot write to run: ",
    ),
    "a device that there is not": (
        None, [*TRAIN, "--device=gpu"], "--device: device must be auto, cpu, cuda, cuda:N or mps",
    ),
    "a device without a name": (None, [*TRAIN, "--device="], "device must be auto, cpu, cuda"),
    "a device without its number": (None, [*TRAIN, "--device=cuda:"], "not 'cuda:'"),
    "cuda on a CPU": Mistake(
        None, [*TRAIN, "--device=cuda"], "sees no CUDA GPU; use --device=auto", skip=SEES_CUDA,
    ),
    "cuda:9 on a CPU": Mistake(
        None, [*TRAIN, "--device=cuda:9"], "device=cuda:9, but ", skip=SEES_CUDA,
    ),
    "cuda on a CPU for sample.py": Mistake(
        None, [*SAMPLE, "--device=cuda"], "sees no CUDA GPU; use --device=auto", skip=SEES_CUDA,
    ),
    "mps on a CPU": Mistake(
        None, [*TRAIN, "--device=mps"], "sees no Apple GPU; use --device=auto", skip=SEES_MPS,
    ),
    "a billion blocks": (None, [*TRAIN, "--n_layer=1000000000"], "GiB of memory, and cpu has"),
    "a million channels": (None, [*TRAIN, "--n_embd=1000000"], "GiB of memory, and cpu has"),
    "a batch too large for memory": (
        None, [*TRAIN, "--batch_size=1000000000000000"], "GiB of memory, and cpu has",
    ),
}  # fmt: skip

INPUTS = {
    "missing": (None, "cannot read text.txt: "),
    "no name": (None, "--input is empty", "--input="),
    "a long name": (None, f"cannot read {LONG}: ", f"--input={LONG}"),
    "below a file": (None, "cannot read verse.txt/text.txt: ", "--input=verse.txt/text.txt"),
    "empty": (lambda: put("text.txt"), "text.txt is empty"),
    "a byte order mark alone": (lambda: put("text.txt", b"\xef\xbb\xbf"), "text.txt is empty"),
    "not UTF-8": (
        lambda: put("text.txt", b"caf\xe9 au lait\n" * 9),
        "text.txt is not UTF-8 text: byte 3 is 0xe9",
    ),
    "cut inside a character": (
        lambda: put("text.txt", "café".encode()[:-1]), "text.txt is not UTF-8 text: byte 3",
    ),
    "UTF-16": (
        lambda: put("text.txt", tiny.VERSE.encode("utf-16")), "is NUL, as in UTF-16",
    ),
    "UTF-16 without NUL": (
        lambda: put("text.txt", ("薔薇" * 9).encode("utf-16")), "is not UTF-8 text: byte 0 is 0xff",
    ),
    "NUL": (lambda: put("text.txt", b"rose\0rose"), "text.txt is not UTF-8 text: byte 4 is NUL"),
    "too short": (lambda: put("text.txt", "rose\n"), "text.txt is too short to split"),
    "too many characters": (
        lambda: put("text.txt", "".join(map(chr, range(0x10000, 0x20001)))),
        "65,537 distinct characters, more than the 65,536",
    ),
    "a folder of nothing": (lambda: put_folder("text.txt"), "text.txt (0 files) is empty"),
    "a folder of hidden files": (
        lambda: put("texts/.hidden", tiny.VERSE), "texts (0 files) is empty", "--input=texts",
    ),
    "a folder of empty files": (
        lambda: put("texts/a"), "texts (1 files) is empty", "--input=texts",
    ),
    "a folder with what is no text": (
        lambda: (put("texts/a", tiny.VERSE), put("texts/b.png", b"\x89PNG")),
        "texts/b.png is not UTF-8 text: byte 0 is 0x89", "--input=texts",
    ),
    "a prepared dataset": (None, f"{BIN} is not UTF-8 text: byte 1 is NUL", "--input=data/verse"),
    "a dataset's name that is a path": (
        lambda: put("text.txt", tiny.VERSE), "is a plain folder name", "--dataset=data/new",
    ),
    "a dataset's name that leads away": (
        lambda: put("text.txt", tiny.VERSE), "is a plain folder name", "--dataset=../new",
    ),
    "a dataset without a name": (
        lambda: put("text.txt", tiny.VERSE), "is a plain folder name, not ''", "--dataset=",
    ),
    "a dataset's long name": (
        lambda: put("text.txt", tiny.VERSE), "cannot write to data/aaa", f"--dataset={LONG}",
    ),
    "a tokenizer that there is not": (
        None, "--tokenizer must be char, gpt2 or None, not 'words'", "--tokenizer=words",
    ),
    "a file where the dataset would be": (
        lambda: (put("text.txt", tiny.VERSE), put("data/new")), "cannot write to data/new: ",
    ),
    "a file where all datasets would be": (
        lambda: (put("text.txt", tiny.VERSE), shutil.rmtree("data"), put("data")),
        "cannot write to data/new: ",
    ),
    "a folder where val.bin was": (
        lambda: (put("text.txt", tiny.VERSE), put_folder(VAL)), "cannot write ", "--dataset=verse",
    ),
    "a folder where meta.json was": (
        lambda: (put("text.txt", tiny.VERSE), put_folder(META)), "cannot write ", "--dataset=verse",
    ),
}  # fmt: skip
INPUTS = {
    f"input: {name}": (spoil, [*TEXT, *flags], words)
    for name, (spoil, words, *flags) in INPUTS.items()
} | {
    "input: a folder with a pipe": Mistake(
        lambda: (put("texts/a", tiny.VERSE), os.mkfifo("texts/pipe")),
        [*PREPARE, "--input=texts"], "texts/pipe is no regular file",
        skip=not hasattr(os, "mkfifo"),
    ),
    "input: without a dataset": (
        None, ["prepare.py", "--input=verse.txt"], "name the dataset that --input becomes",
    ),
    "input: none for an unknown dataset": (None, PREPARE, "dataset new needs its text, --input="),
    "input: none for a misspelt dataset": (
        None, ["prepare.py", "--dataset=shakespear"], "did you mean shakespeare?",
    ),
    "input: another text in Shakespeare's place": (
        lambda: put("data/shakespeare_char/input.txt", tiny.VERSE), ["prepare.py"],
        "data/shakespeare_char/input.txt is not tiny Shakespeare",
    ),
    "input: an address that is none": (
        None, ["prepare.py", "--url=nonsense"], "could not be downloaded (nonsense: Invalid URL",
    ),
    "input: an empty address": (  # the other text keeps it off the network
        lambda: put("data/shakespeare_char/input.txt", tiny.VERSE), ["prepare.py", "--url="],
        "--url is empty",
    ),
}  # fmt: skip

SAMPLING = {
    "no run there": (None, "no checkpoint none/ckpt.pt; runs at hand: run", "--out_dir=none"),
    "a long name": (None, "cannot read aaa", f"--out_dir={LONG}"),
    "no best state": (lambda: remove(BEST), f"there is no checkpoint {BEST}, only last.pt"),
    "a vocabulary of another size": (
        lambda: alter(BEST, lambda content: content["tokenizer"].update(characters="abc")),
        f"{BEST} has 24 tokens, but its tokenizer 3",
    ),
    "a tokenizer that there is not": (
        lambda: alter(BEST, lambda content: content["tokenizer"].update(kind="words")),
        f"{BEST}: its tokenizer is damaged or unknown",
    ),
    "a tokenizer that is a tensor": (
        lambda: alter(BEST, lambda content: content.update(tokenizer=torch.ones(2))), BEST,
    ),
    "no tokenizer and a dataset that is a path": (
        lambda: alter(BEST, lambda c: (c.update(tokenizer=None), c["config"].update(dataset=".."))),
        f"{BEST}: a dataset's name is a plain folder name",
    ),
    "no tokenizer and a dataset that draws on the terminal": (
        lambda: alter(
            BEST, lambda c: (c.update(tokenizer=None), c["config"].update(dataset="a\x1b[31m"))
        ),
        f"{BEST} has 24 tokens, but its tokenizer 50,257",
    ),
    "no tokenizer and a hostile table": (
        lambda: (
            alter(BEST, lambda content: content.update(tokenizer=None)),
            put_table(pickle.dumps({"itos": Hostile()})),
        ),
        f"{BEST}: data/verse: meta.pkl is not nanoGPT's character table",
    ),
    "an empty prompt": (None, "the prompt is empty", "--start="),
    "an unknown character": (None, "character '€' (U+20AC) at position 4", "--start=art €"),
    "a byte that is no character": (None, "(U+DCFF) at position 0", "--start=\udcff"),
    "a prompt's file missing": (
        None, "cannot read prompt.txt: ", "--start=FILE:prompt.txt",
    ),
    "a prompt's file without a name": (None, "FILE:", "--start=FILE:"),
    "a prompt's file a folder": (None, "cannot read data: ", "--start=FILE:data"),
    "a prompt's file empty": (
        lambda: put("prompt.txt"), "the prompt is empty", "--start=FILE:prompt.txt",
    ),
    "a prompt's file not UTF-8": (
        lambda: put("prompt.txt", b"Sh\xe4ll"), "prompt.txt is not UTF-8 text: byte 2 is 0xe4",
        "--start=FILE:prompt.txt",
    ),
    "a negative temperature": (None, "--temperature must lie in [0, inf)", "--temperature=-1"),
    "a temperature that is no number": (None, "[0, inf), not nan", "--temperature=nan"),
    "an endless temperature": (None, "[0, inf), not inf", "--temperature=inf"),
    "top_k of none": (None, "--top_k must lie in [1, inf), not 0", "--top_k=0"),
    "top_k that is negative": (None, "--top_k must lie in [1, inf), not -3", "--top_k=-3"),
    "top_k that is a share": (None, "--top_k must be int or None, not '0.5'", "--top_k=0.5"),
    "no tokens": (None, "--max_new_tokens must lie in [1, inf), not 0", "--max_new_tokens=0"),
    "no texts": (None, "--num_samples must lie in [1, inf), not 0", "--num_samples=0"),
    "a negative seed": (None, "--seed must ", "--seed=-1"),
}  # fmt: skip
SAMPLING = {
    f"sampling: {name}": (spoil, [*SAMPLE, *flags], words)
    for name, (spoil, words, *flags) in SAMPLING.items()
} | {
    f"sampling: {name}": Mistake(None, [*SAMPLE, "--start=-"], words, stdin)
    for name, words, stdin in (
        ("an empty standard input", "the prompt is empty", b""),
        ("standard input not UTF-8", "standard input is not UTF-8 text: byte 2 is 0xff", b"ab\xff"),
        ("standard input with NUL", "standard input is not UTF-8 text: byte 1 is NUL", b"a\0"),
        ("standard input with an unknown character", "character 'X' (U+0058)", b"X"),
        ("standard input closed", "the prompt is empty", None),
    )
}

GROUPS = (SETTINGS, CONFIG_FILES, DATASETS, CHECKPOINTS, RESUMING, RUNS, INPUTS, SAMPLING)
MISTAKES = {name: Mistake(*row) for group in GROUPS for name, row in group.items()}


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
def spoilt(workplace, tmp_path, monkeypatch):
    """A function that spoils a copy of the workplace, goes there and returns it."""

    def spoil(mistake, name="copy"):
        folder = shutil.copytree(workplace, tmp_path / name)
        monkeypatch.chdir(folder)
        if mistake.spoil:
            mistake.spoil()
        return folder

    return spoil


@pytest.fixture
def answer(monkeypatch, capfd, recwarn):
    """A function that runs a mistake's script in this process; returns its status and stderr."""

    def run(mistake):
        stdin = mistake.stdin if mistake.stdin is None else io.BytesIO(mistake.stdin)
        monkeypatch.setattr(sys, "stdin", stdin and io.TextIOWrapper(stdin))
        monkeypatch.setattr(sys, "argv", mistake.command)
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # as the script sets its own
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            safety.run(MAINS[mistake.command[0]])
        warnings = [str(warning.message) for warning in recwarn]  # else they were on stderr
        return caught.value.code, "\n".join([*warnings, capfd.readouterr().err])

    return run


def answer_apart(mistake, folder):
    """The same in a process of its own."""
    code, _, err = call(*mistake.command, cwd=folder, stdin=mistake.stdin)
    return code, err


def contents(folder):
    """{path: bytes} of all that is in a folder; None for what is no regular file."""
    paths = folder.rglob("*")
    return {p.relative_to(folder): p.read_bytes() if p.is_file() else None for p in paths}


def differences(before, after):
    return {p for p in before.keys() | after.keys() if before.get(p, p) != after.get(p, p)}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_status_2_and_leaves_all_as_it_was(name, spoilt, answer):
    mistake = MISTAKES[name]
    if mistake.skip:
        pytest.skip("this machine can do it")
    folder = spoilt(mistake)
    before = contents(folder)
    code, err = answer_apart(mistake, folder) if mistake.apart else answer(mistake)
    assert code == 2
    *notes, line = err.splitlines()
    script = mistake.command[0]
    assert line.startswith(f"{script}: ")
    assert mistake.words in line
    assert line.isprintable()
    assert len(line) < 1000
    assert not [words for words in NEVER if words in err]
    assert all(script == "sample.py" and note.startswith(NOTES) for note in notes)
    assert not differences(before, contents(folder))


@pytest.mark.parametrize(
    "name",
    [
        "input: a folder with what is no text",
        "resuming: other data",
        "ckpt.pt: a weight that is no number",
        "sampling: standard input not UTF-8",
    ],
)
def test_a_process_of_its_own_answers_alike(name, spoilt, answer):
    mistake = MISTAKES[name]
    apart = answer_apart(mistake, spoilt(mistake, "apart"))
    spoilt(mistake)
    assert answer(mistake) == apart
