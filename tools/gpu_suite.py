"""Figures of folio and nanoGPT on one GPU.

    python -m tools.bench --gpu_suite --vs_dir=../nanoGPT --parts=speed,curve

Each measurement is one command. When it ends, its figures are written to out-gpu-suite/NAME.json.
If that file exists, with the same command, machine and commit, the command is not repeated.
Arguments after -- are added to every command of train.py.

Replaces nanoGPT's data/shakespeare_char by folio's, and adds random_tokens to both data folders.
"""

import json
import pickle
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from folio.checkpoint import Checkpoint, Progress, save
from folio.dataset import load_dataset
from folio.device import choose_machine, resolve_device
from folio.errors import UserError
from folio.files import replacing
from folio.settings import ROOT, load
from folio.size import num_params
from folio.tokenizers import CharTokenizer
from model import GPT, GPTConfig
from tools.measure import figures, measure
from tools.table import aligned
from train import TrainConfig

TARGET = 1.4697  # validation loss of nanoGPT's Shakespeare recipe, from its README
RANDOM = "random_tokens"  # a dataset: speed does not depend on the text
GPT2_TOKENS = 50_257
NEW_TOKENS = 500  # per text
XL = ("--n_layer=48", "--n_head=25", "--n_embd=1600", "--activation_checkpointing=True")
MICRO_BATCHES = (12, 32, 64)
SEQUENCES = 192  # per step
LARGE_BATCHES = (256, 192, 160, 128)  # in order of attempts
HIDDEN = ("last_s", "memory_gib")  # only in the JSON files
SHAPE = ("n_layer", "n_head", "n_embd", "block_size")


@dataclass(frozen=True)
class Measurement:
    """A command whose output has figures (tools.measure)."""

    name: str
    command: tuple
    is_nanogpt: bool = False  # runs in its folder
    tokens: int = 0  # per step, if the speed is measured
    may_fail: bool = False


class Suite:
    """The measurements by part; each part is a generator of Measurements."""

    def __init__(self, results, nanogpt, arguments, machine):
        """`machine` is tools.bench.where(): a date, which may differ, the machine, the commit."""
        self.results, self.nanogpt = Path(results).resolve(), Path(nanogpt)
        self.arguments, self.machine = arguments, machine
        self.results.mkdir(parents=True, exist_ok=True)

    def train(self, name, *flags, **options):
        """Returns the Measurement of folio's train.py."""
        command = [sys.executable, str(ROOT / "train.py"), *flags, f"--out_dir={self.out(name)}"]
        return Measurement(name, (*command, "--overwrite=True", *self.arguments), **options)

    def train_nanogpt(self, name, *flags, **options):
        """Returns the Measurement of nanoGPT's train.py."""
        command = [sys.executable, "train.py", *flags, f"--out_dir={self.out(name)}"]
        return Measurement(name, (*command, *self.arguments), is_nanogpt=True, **options)

    def sample(self, name, *flags):
        return Measurement(name, (sys.executable, str(ROOT / "sample.py"), *flags))

    def tool(self, name, *flags, **options):
        return Measurement(name, (sys.executable, "-m", *flags), **options)

    def out(self, name):
        return self.results / name

    # Parts

    def speed(self):
        """Tokens per second of GPT-2 124M, for several micro-batches."""
        flags = ["config/train_gpt2.py", f"--dataset={RANDOM}", "--wandb_log=False"]
        flags += ["--max_iters=30", "--eval_interval=1000", "--eval_iters=1", "--log_interval=1"]
        for size in MICRO_BATCHES:
            count = SEQUENCES // size
            batch = (f"--batch_size={size}", f"--gradient_accumulation_steps={count}")
            tokens = size * count * self.shape().block_size
            yield self.train(f"speed-folio-{size}", *flags, *batch, tokens=tokens)
            yield self.train_nanogpt(f"speed-nanogpt-{size}", *flags, *batch, tokens=tokens)

    def curve(self):
        """Validation losses of nanoGPT's Shakespeare recipe, and the time of the whole process."""
        yield self.train("curve-folio", "config/shakespeare_char.py")
        yield self.train_nanogpt("curve-nanogpt", "config/train_shakespeare_char.py")

    def fast(self):
        """The time of the fast recipe to nanoGPT's loss.

        It is measured with an empty cache of compiled code, with a filled one, and not compiled.
        """
        cache = self.out("inductor")
        for name in ("fast", "fast-cached"):
            run = self.train(name, "config/shakespeare_char_fast.py")
            run = Measurement(name, ("env", f"TORCHINDUCTOR_CACHE_DIR={cache}", *run.command))
            if name == "fast" and not self.stored(run):
                shutil.rmtree(cache, ignore_errors=True)
            yield run
        yield self.train("fast-eager", "config/shakespeare_char_fast.py", "--compile=False")

    def sampling(self):
        """Tokens per second of the models of `curve`, and of an untrained GPT-2 124M."""
        length = f"--max_new_tokens={NEW_TOKENS}"
        flags, ours = ("--num_samples=10", length), f"--out_dir={self.out('curve-folio')}"
        yield self.sample("sampling-folio", ours, *flags)
        yield self.sample("sampling-folio-compiled", ours, *flags, "--compile")
        command = (sys.executable, "sample.py", f"--out_dir={self.out('curve-nanogpt')}", *flags)
        yield Measurement("sampling-nanogpt", command, is_nanogpt=True)
        weights = self.out("untrained-gpt2.pt")
        if not weights.exists():
            save_untrained(weights, self.shape())
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
            fits = yield self.tool(f"memory-124M-{size}", *flags, may_fail=True)
            if fits:
                break
        yield self.tool("memory-1.5B", *bench, "--batch_size=16", *XL, *self.arguments)

    def tests(self):
        """The tests that need a GPU."""
        flags = ("-q", "-n0", "-m", "gpu", str(ROOT / "tests"))
        yield self.tool("tests", "pytest", *flags, may_fail=True)

    def lecture(self):
        """All steps of the lecture's GPT."""
        yield self.train("lecture", "config/tutorials/lecture.py")

    def shape(self):
        """Returns the GPTConfig of GPT-2 124M, with the changes of self.arguments."""
        argv = ["config/train_gpt2.py", *self.arguments]
        settings = load(TrainConfig, argv, {"device": resolve_device}, quiet=True)
        return GPTConfig(**{name: getattr(settings, name) for name in SHAPE}, bias=False)

    # Running

    def run(self, parts):
        """Runs the measurements of parts, in order, and prints their figures."""
        prepare(self.nanogpt / "data")
        rows = [("measurement", "figures")]
        for part in parts:
            generator, success = getattr(self, part)(), None
            try:
                while True:
                    measurement = generator.send(success)
                    success, text = self.result(measurement)
                    print(f"{measurement.name}: {text}", flush=True)
                    rows.append((measurement.name, text))
            except StopIteration:
                pass
        print("", self.machine, "", *aligned(rows), sep="\n")

    def result(self, measurement):
        """Returns whether a measurement succeeded, and its figures or the error, as text."""
        found = self.stored(measurement)
        if not found:
            try:
                found = self.measure(measurement)
            except UserError as error:
                if not measurement.may_fail:
                    raise
                return False, str(error)
            with replacing(self.out(f"{measurement.name}.json")) as [file]:
                file.write(json.dumps(self.key(measurement) | found, indent=1).encode())
        shown = {name: value for name, value in found["figures"].items() if name not in HIDDEN}
        return True, ", ".join(f"{name} {value:,.5g}" for name, value in shown.items())

    def stored(self, measurement):
        """Returns what the JSON file of a Measurement contains; None if it must be repeated."""
        path, key = self.out(f"{measurement.name}.json"), self.key(measurement)
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return found if found.items() >= key.items() else None

    def key(self, measurement):
        return {"command": list(measurement.command), "machine": self.machine.partition(", ")[2]}

    def measure(self, measurement):
        """Runs a Measurement. Returns its figures, and the validation losses with their times."""
        values = measure(measurement.command, self.nanogpt if measurement.is_nanogpt else ".")
        found = figures(values, TARGET)
        step_ms = found.pop("step_ms", None)  # without --log_interval=1, nanoGPT's is not exact
        found.pop("mfu", None)  # nanoGPT's is relative to an A100
        if measurement.tokens:
            if step_ms is None:
                raise UserError(f"{measurement.name} prints no time of step 10 or later")
            speed = measurement.tokens / step_ms * 1e3
            machine = choose_machine(resolve_device("auto"), "bfloat16", False)
            mfu = 100 * speed * self.flops() / machine.peak[0]
            found |= {"step_ms": step_ms, "tokens_per_s": speed, "mfu": mfu}
        date, losses = self.machine.partition(", ")[0], values.get("val_loss", [])
        return {"date": date, "figures": found, "curve": losses}

    def flops(self):
        """Returns the FLOPs per token of the model of `speed`, by nanoGPT's formula."""
        config = self.shape()
        parameters = num_params(config) - config.block_size * config.n_embd
        return 6 * parameters + 12 * config.n_layer * config.n_embd * config.block_size


def prepare(data):
    """Writes the datasets to nanoGPT's data folder, and the random one also to folio's."""
    random = np.random.default_rng(0).integers(GPT2_TOKENS, size=2**21, dtype=np.uint16)
    for each in (Path("data"), data):
        write_splits(each / RANDOM, random, random[: 2**17])
    shakespeare = load_dataset("shakespeare_char")
    if shakespeare.tokenizer.kind != "char":
        raise UserError("data/shakespeare_char does not have characters: run python prepare.py")
    folder, ids = data / "shakespeare_char", dict(enumerate(shakespeare.tokenizer.characters))
    write_splits(folder, shakespeare.train, shakespeare.val)
    meta = {"vocab_size": len(ids), "itos": ids, "stoi": {c: i for i, c in ids.items()}}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


def write_splits(folder, train, val):
    folder.mkdir(parents=True, exist_ok=True)
    for name, ids in (("train.bin", train), ("val.bin", val)):
        (folder / name).unlink(missing_ok=True)  # it may be a link to the file that is read
        ids.tofile(folder / name)


def save_untrained(path, config):
    """Saves an untrained model with a character for each token, so that it needs no download."""
    torch.manual_seed(0)
    tokenizer = CharTokenizer("".join(map(chr, range(config.vocab_size)))).to_dict()
    save(path, Checkpoint(config, GPT(config).state_dict(), Progress(), {}, tokenizer=tokenizer))
