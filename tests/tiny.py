"""A small dataset and model for tests, and files in nanoGPT's format."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import prepare
import train
from folio.checkpoint.format import Checkpoint, save_checkpoint
from folio.checkpoint.progress import Progress
from folio.cli.errors import UserError
from folio.cli.files import LOCK_FILE
from folio.cli.settings import load_settings
from folio.data import writer
from folio.data.corpus import Corpus
from folio.data.dataset import load_dataset
from folio.data.sources import Source
from folio.data.tokenizer import TOKENIZERS, ListTokenizer
from folio.distributed.world import SINGLE_PROCESS
from folio.pretrained.architectures import find_architecture
from folio.pretrained.huggingface import write_pretrained
from folio.training.evaluation import evaluate
from folio.training.optimizers import make_optimizers
from model import GPT, GPTConfig

VERSE = "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate:\n"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:5a\nsize 12345\n"
SHAPE = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 8}
SETTINGS = {
    **SHAPE,
    "out_dir": "out",
    "dataset": "verse",
    "batch_size": 4,
    "gradient_accumulation_steps": 1,
    "max_iters": 6,
    "eval_interval": 3,
    "eval_iters": 4,
    "warmup_iters": 2,
    "learning_rate": 1e-2,
    "device": "cpu",
    "dtype": "float32",
    "compile": False,
}
SWITCHES = {  # every switch of GPTConfig, with a value that is not its default
    "position": "rotary",
    "norm": "rmsnorm",
    "qk_norm": True,
    "activation": "swiglu",
    "tie_weights": False,
    "ngrams": 3,
    "ngram_rows": 31,
    "smear": 2,
    "window": 3,
}

QWEN3 = {  # the switches of Qwen3, as in config/portable.py
    "position": "rotary",
    "norm": "rmsnorm",
    "qk_norm": True,
    "activation": "swiglu",
    "bias": False,
}

SMALL = {"block_size": 8, "vocab_size": 37, "n_layer": 2, "n_head": 2, "n_embd": 16}
SHAPES = (
    {},
    {"n_layer": 0},
    {"bias": False},
    {"tie_weights": False},
    {"position": "rotary"},
    {"position": "rotary", "norm": "rmsnorm", "qk_norm": True, "smear": 2},
    {"window": 2},
    {"window": 3},
    {"ngrams": 2},
    {"ngrams": 4},
    {"activation": "swiglu"},
    {"ngrams": 2, "vocab_size": 300},
    {"norm": "rmsnorm", "bias": False, "activation": "relu2"},
    {"n_layer": 3, "n_head": 5, "n_embd": 30, "block_size": 12, "vocab_size": 11},
)


def random_model(**changes):
    """Returns a GPT in eval mode in which every parameter, norms and biases too, has an effect."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**(SMALL | changes))).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5 if parameter.dim() == 1 else 0.2)
    return model


def post_norm(block, x, rotation=None, attend=None):
    """Block.forward of an edited model.py: norms after, as in Vaswani et al. 2017."""
    x = block.ln_1(x + block.attn(x, rotation, attend))
    return block.ln_2(x + block.mlp(x))


def random_ids(model, rows=3, length=None):
    config, generator = model.config, torch.Generator().manual_seed(1)
    shape = (rows, length or config.block_size)
    return torch.randint(config.vocab_size, shape, generator=generator)


def flags(**settings):
    """Returns SETTINGS with changes as arguments of train.py."""
    return [f"--{name}={value}" for name, value in (SETTINGS | settings).items()]


def settings(**changes):
    """Returns SETTINGS with changes as a TrainConfig."""
    return load_settings(train.TrainConfig, flags(**changes))


def new_run(machine=None, **changes):
    """Returns the Run of SETTINGS with changes, as train.main makes it, on a machine if given."""
    with pytest.MonkeyPatch.context() as patch:
        if machine:
            patch.setattr(train, "choose_machine", lambda *_: machine)
        return train.make_run(settings(**changes), SINGLE_PROCESS)


def prepare_verse(name="verse", text=VERSE * 20):
    Path("verse.txt").write_text(text, encoding="utf-8")
    prepare.main(["--input=verse.txt", f"--dataset={name}"])


class Document(Source):
    """A source whose path is its text."""

    def read(self):
        yield self.path, True

    def sha256(self):
        return "5a"


def corpus(*documents):
    """Returns a Corpus of texts in memory."""
    return Corpus([Document(text, name="own.txt") for text in documents], "own.txt")


def write_dataset(folder, documents, tokenizer):
    """Writes a dataset of a Corpus like prepare.py. Returns the content of meta.json."""
    documents.scan()
    folder.mkdir(parents=True, exist_ok=True)
    return writer.write_dataset(folder, documents, tokenizer)


def text_of(name):
    """Returns the text of a prepared dataset."""
    data = load_dataset(name)
    return data.tokenizer.decode(data.train) + data.tokenizer.decode(data.val)


def new_tokenizer(kind, text, vocab_size=300):
    """Returns a tokenizer for a text like prepare.py."""
    if kind == "list":
        return ListTokenizer(sorted({*text, text[:2]}))
    texts = [text] if kind == "char" else [text[: int(0.9 * len(text))]]
    return TOKENIZERS[kind].from_texts(texts, vocab_size)


def error_of(function, *args):
    """Returns the message, a single line, of the UserError that function(*args) raises."""
    with pytest.raises(UserError) as caught:
        function(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def contents(folder="."):
    """Returns {path: bytes} of the files in a folder, without lock files."""
    paths = (p for p in Path(folder).rglob("*") if p.name != LOCK_FILE and p.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def log_events(out_dir="out"):
    return [json.loads(line) for line in Path(out_dir, "log.jsonl").read_text().splitlines()]


def write_run(name, losses, bits=(), **settings):
    """Writes the log of a run with these validation losses; training losses are lower by 0.1.

    `bits`: bits per byte of the first evaluations.
    """
    Path(name).mkdir(parents=True)
    settings = {"n_layer": 2, "learning_rate": 1e-3, "seed": 1} | settings
    start = {"step": 0, "event": "start", "parameters": 1000, "elapsed_s": 1.0}
    events = [start | {"settings": settings}]
    for number, loss in enumerate(losses):
        step = 10 * number
        common = {"step": step, "tokens": 100 * step, "elapsed_s": 2 + step / 5}
        bits_per_byte = {"bits_per_byte": bits[number]} if number < len(bits) else {}
        events.append(common | {"event": "val", "loss": loss} | bits_per_byte)
        events.append(common | {"event": "train", "loss": loss - 0.1, "tokens_per_s": 500 + step})
    Path(name, "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def fake_losses(monkeypatch, *losses):
    """Sets the validation losses of the next evaluations of a run."""
    remaining = iter(losses)
    monkeypatch.setattr(
        train, "evaluate", lambda *args, **kw: evaluate(*args, **kw) | {"loss": next(remaining)}
    )


def load(name="ckpt.pt", out_dir="out"):
    """Returns the content of a checkpoint file."""
    return torch.load(Path(out_dir, name), weights_only=True)


def write_checkpoint(path, tokenizer, dataset=None, **changes):
    """Writes a checkpoint of random_model(**changes)."""
    model = random_model(**{"vocab_size": tokenizer.padded_vocab_size} | changes)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    progress = Progress(step=3, evaluated_schedule_step=3, best_step=3, best_val_loss=2.5)
    run = {"dataset": dataset} if dataset else {}
    checkpoint = Checkpoint(
        model.config, model.state_dict(), progress, run, tokenizer=tokenizer.to_dict()
    )
    save_checkpoint(path, checkpoint)


def export(model, tokenizer, folder="exported", architecture=None):
    """Writes a model and a tokenizer in Hugging Face's format."""
    architecture = architecture or find_architecture(model.config)
    write_pretrained(folder, model, tokenizer, architecture)


def write_nanogpt_dataset(name="verse", text=VERSE * 20):
    """Writes data/<name> in nanoGPT's format. Returns the number of characters."""
    folder = Path("data", name)
    folder.mkdir(parents=True)
    characters = sorted(set(text))
    stoi = {character: i for i, character in enumerate(characters)}
    itos = dict(enumerate(characters))
    ids = np.array([stoi[character] for character in text], dtype=np.uint16)
    cut = int(0.9 * len(ids))
    ids[:cut].tofile(folder / "train.bin")
    ids[cut:].tofile(folder / "val.bin")
    meta = {"vocab_size": len(characters), "itos": itos, "stoi": stoi}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return len(characters)


def write_nanogpt_checkpoint(vocab_size, dataset="verse", prefix="_orig_mod."):
    """Writes out/ckpt.pt with nanoGPT's keys, after one AdamW step of a compiled model."""
    torch.manual_seed(7)
    args = {**SHAPE, "bias": False, "vocab_size": vocab_size, "dropout": 0.0}
    model = GPT(GPTConfig(**args)).init_weights()
    optimizer = make_optimizers(model, settings())["adamw"]
    idx = torch.arange(8)[None]
    model(idx, idx).backward()
    optimizer.step()
    Path("out").mkdir()
    content = {
        "model": {prefix + name: tensor for name, tensor in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "model_args": args,
        "iter_num": 3,
        "best_val_loss": torch.tensor(2.5),
        "config": {"dataset": dataset, "out_dir": "out"},
    }
    torch.save(content, Path("out", "ckpt.pt"))
    return model


STATE_KEYS = (
    "model", "optimizer", "muon", "scaler",
    "iter_num", "best_val_loss", "best_step", "evaluated", "data",
)  # fmt: skip
TIME_KEYS = ("elapsed_s", "tokens_per_s", "mfu", "peak_memory_gib")


def equal(a, b):
    """Whether two structures of plain data and tensors are bit-identical."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def differences(out_dir, other, names=("ckpt.pt", "last.pt")):
    """Returns the names of what differs in two folders' checkpoints and logs (without times)."""
    different = []
    for name in names:
        a, b = load(name, out_dir), load(name, other)
        different += [f"{name} {key}" for key in STATE_KEYS if not equal(a[key], b[key])]
    if untimed_log(out_dir) != untimed_log(other):
        different.append("log.jsonl")
    return different


def untimed_log(out_dir="out"):
    return [{k: v for k, v in e.items() if k not in TIME_KEYS} for e in log_events(out_dir)]
