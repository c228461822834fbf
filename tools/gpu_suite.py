"""Figures of folio and nanoGPT on one GPU.

    python -m tools.bench --gpu_suite --vs_dir=../nanoGPT --parts=speed,curve

Each measurement is one command. When it ends, its figures are written to out-gpu-suite/NAME.json.
If that file exists, the command is not repeated. Arguments after -- are added to every command of
train.py; with those of a small model, the suite runs on a CPU. Needs data/shakespeare_char.
"""

import json
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from folio.checkpoint import Checkpoint, Progress, save
from folio.dataset import load_dataset
from folio.device import resolve_device
from folio.errors import UserError
from folio.files import replacing
from folio.settings import ROOT, load
from folio.size import num_params
from folio.tokenizers import CharTokenizer
from model import GPT, GPTConfig
from tools.measure import figures, measure
from tools.table import aligned
from train import TrainConfig

PEAK = 989e12  # FLOP/s of an H100 or H200 in bfloat16, as for published figures
TARGET = 1.4697  # validation loss of nanoGPT's Shakespeare recipe, from its README
RANDOM = "random_tokens"  # a dataset: speed does not depend on the text
GPT2_TOKENS = 50_257
NEW_TOKENS = 500  # per text
XL = ("--n_layer=48", "--n_head=25", "--n_embd=1600", "--activation_checkpointing=True")
MICRO_BATCHES = (12, 32, 64)
LARGE_BATCHES = (256, 192, 160, 128)  # in order of attempts
HIDDEN = ("last_s", "memory_gib")  # in the JSON files only
SHAPE = ("n_layer", "n_head", "n_embd", "block_size")


@dataclass(frozen=True)
class Measurement:
    """A command whose output has figures (tools.measure). `theirs`: it runs in nanoGPT's folder."""

    name: str
    command: tuple
    theirs: bool = False
    tokens: int = 0  # per step, for tokens/s
    may_fail: bool = False  # as it may need too much memory


class Suite:
    """The measurements, in a folder for results, with a nanoGPT checkout."""

    def __init__(self, results, theirs, arguments, machine):
        """arguments: those added to commands of train.py; machine: a description of it."""
        self.results, self.theirs = Path(results).resolve(), Path(theirs)
        self.arguments, self.machine = arguments, machine
        self.results.mkdir(parents=True, exist_ok=True)

    def train(self, name, *flags, **options):
        """Returns the Measurement of folio's train.py."""
        out = (f"--out_dir={self.results / name}", "--overwrite=True")
        command = (sys.executable, str(ROOT / "train.py"), *flags, *out, *self.arguments)
        return Measurement(name, command, **options)

    def nanogpt(self, name, script, *flags, **options):
        command = (sys.executable, f"{script}.py", *flags)
        command += self.arguments if script == "train" else ()
        return Measurement(name, command, theirs=True, **options)

    def sample(self, name, *flags):
        return Measurement(name, (sys.executable, str(ROOT / "sample.py"), *flags))

    def tool(self, name, *flags, **options):
        return Measurement(name, (sys.executable, "-m", *flags), **options)

    # Parts

    def speed(self):
        """Tokens per second of GPT-2 124M, for several micro-batches."""
        flags = (f"--dataset={RANDOM}", "--max_iters=30", "--eval_interval=1000", "--eval_iters=1")
        flags += ("--log_interval=1", "--wandb_log=False")
        for size in MICRO_BATCHES:
            count = 96 // size
            batch = (f"--batch_size={size}", f"--gradient_accumulation_steps={count}")
            tokens, preset = size * count * self.shape().block_size, "config/train_gpt2.py"
            all_flags = (preset, *flags, *batch)
            yield self.train(f"speed-folio-{size}", *all_flags, tokens=tokens)
            yield self.nanogpt(f"speed-nanogpt-{size}", "train", *all_flags, tokens=tokens)

    def curve(self):
        """nanoGPT's Shakespeare recipe: its validation losses and the time of the whole process."""
        yield self.train("curve-folio", "config/shakespeare_char.py")
        yield self.nanogpt("curve-nanogpt", "train", "config/train_shakespeare_char.py")

    def fast(self):
        """The fast recipe: the time to nanoGPT's loss, with and without compilation."""
        yield self.train("fast", "config/shakespeare_char_fast.py")
        yield self.train("fast-cached", "config/shakespeare_char_fast.py")
        yield self.train("fast-eager", "config/shakespeare_char_fast.py", "--compile=False")

    def sampling(self):
        """Tokens per second of the curve's models, and of 124 M parameters."""
        length = f"--max_new_tokens={NEW_TOKENS}"
        flags = ("--num_samples=10", length)
        ours = f"--out_dir={self.results / 'curve-folio'}"
        yield self.sample("sampling-folio", ours, *flags)
        yield self.sample("sampling-folio-compiled", ours, *flags, "--compile")
        yield self.nanogpt("sampling-nanogpt", "sample", "--out_dir=out-shakespeare-char", *flags)
        weights = self.results / "gpt2.pt"
        if not weights.exists():
            save_random_model(weights, self.shape())
        for count in (1, 64):
            flags = (f"--init_from={weights}", f"--num_samples={count}", length)
            yield self.sample(f"sampling-124M-{count}", *flags)
            yield self.sample(f"sampling-124M-{count}-compiled", *flags, "--compile")

    def memory(self):
        """Estimated and measured peak memory: the largest batch of GPT-2 124M, and 1.5B."""
        flags = ("config/train_gpt2.py", f"--dataset={RANDOM}", "--gradient_accumulation_steps=1")
        bench = ("tools.bench", "--memory", "--", *flags)
        for size in LARGE_BATCHES:
            flags = (*bench, f"--batch_size={size}", *self.arguments)
            yield (each := self.tool(f"memory-124M-{size}", *flags, may_fail=True))
            if self.result(each)["figures"]:
                break
        yield self.tool("memory-1.5B", *bench, "--batch_size=16", *XL, *self.arguments)

    def tests(self):
        """The tests that need a GPU."""
        flags = ("-q", "-n0", "-m", "gpu", str(ROOT / "tests"))
        yield self.tool("tests", "pytest", *flags, may_fail=True)

    def lecture(self):
        """The GPT of a published lecture in full."""
        yield self.train("lecture", "config/tutorials/lecture.py")

    def shape(self):
        """Returns the GPTConfig of the model that is GPT-2 unless self.arguments change it."""
        argv = ["config/train_gpt2.py", *self.arguments]
        settings = load(TrainConfig, argv, {"device": resolve_device}, quiet=True)
        return GPTConfig(**{name: getattr(settings, name) for name in SHAPE}, bias=False)

    # Running

    def run(self, parts):
        """Runs the measurements of parts, in order, and prints their figures."""
        self.prepare()
        rows = [("measurement", "figures")]
        for part in parts:
            for each in getattr(self, part)():
                found = self.result(each)["figures"]
                shown = [f"{name} {found[name]:,.5g}" for name in found if name not in HIDDEN]
                shown = ", ".join(shown)
                print(f"{each.name}: {shown}", flush=True)
                rows.append((each.name, shown))
        print("", self.machine, "", *aligned(rows), sep="\n")

    def result(self, measurement):
        """Returns what the JSON file of a measurement contains, which is made if it is missing."""
        path = self.results / f"{measurement.name}.json"
        if not path.exists():
            found = self.measure(measurement)
            with replacing(path) as [file]:
                file.write(json.dumps(found, indent=1).encode())
        return json.loads(path.read_text(encoding="utf-8"))

    def measure(self, measurement):
        found = {"command": measurement.command, "machine": self.machine, "figures": {}}
        try:
            values = measure(measurement.command, self.theirs if measurement.theirs else ".")
        except UserError as error:
            if not measurement.may_fail:
                raise
            return found | {"error": str(error)}
        found["figures"] = figures(values, TARGET)
        found["curve"] = values.get("val_loss", [])
        if measurement.tokens:
            speed = measurement.tokens / found["figures"]["step_ms"] * 1e3
            found["figures"] |= {"tokens_per_s": speed, "mfu": 100 * speed * self.flops() / PEAK}
        return found

    def flops(self):
        """Returns the FLOPs per token of the `speed` model, by nanoGPT's formula."""
        config = self.shape()
        parameters = num_params(config) - config.block_size * config.n_embd
        return 6 * parameters + 12 * config.n_layer * config.n_embd * config.block_size

    def prepare(self):
        """Writes the datasets of both sides, in nanoGPT's format."""
        random = np.random.default_rng(0).integers(GPT2_TOKENS, size=2**21, dtype=np.uint16)
        shakespeare = load_dataset("shakespeare_char")
        for data in (Path("data"), self.theirs / "data"):
            write_split_files(data / RANDOM, random, random[: 2**17])
        ids = dict(enumerate(shakespeare.tokenizer.characters))
        folder = self.theirs / "data" / "shakespeare_char"
        write_split_files(folder, shakespeare.train, shakespeare.val)
        meta = {"vocab_size": len(ids), "itos": ids, "stoi": {c: i for i, c in ids.items()}}
        (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


def write_split_files(folder, train, val):
    folder.mkdir(parents=True, exist_ok=True)
    train.tofile(folder / "train.bin")
    val.tofile(folder / "val.bin")


def save_random_model(path, config):
    """Saves an untrained model, with a character for each token, which needs no download."""
    torch.manual_seed(0)
    tokenizer = CharTokenizer("".join(map(chr, range(config.vocab_size))))
    saved = {"tokenizer": tokenizer.to_dict()}
    save(path, Checkpoint(config, GPT(config).state_dict(), Progress(), {}, **saved))
