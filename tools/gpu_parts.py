"""What tools.gpu_suite measures: the commands of each part."""

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from folio.checkpoint import Checkpoint, Progress, save
from folio.device import resolve_device
from folio.settings import ROOT, load
from folio.size import num_params
from folio.tokenizers import CharTokenizer
from model import GPT, GPTConfig
from train import TrainConfig

RANDOM = "random_tokens"  # a dataset: speed does not depend on the text
UNPADDED = "random_unpadded"  # the same, with a vocabulary whose size is not a multiple of 64
NEW_TOKENS = 500  # per text
XL = ("--n_layer=48", "--n_head=25", "--n_embd=1600", "--activation_checkpointing=True")
MICRO_BATCHES = (12, 32, 64)
SEQUENCES = 192  # per step
LARGE_BATCHES = (256, 192, 160, 128)  # in order of attempts
SHAPE = ("n_layer", "n_head", "n_embd", "block_size")
SPEED = (
    "config/train_gpt2.py", f"--dataset={RANDOM}", "--wandb_log=False", "--max_iters=30",
    "--eval_interval=1000", "--eval_iters=1", "--log_interval=1",
)  # fmt: skip
SMALL = ("config/shakespeare_char.py", "--max_iters=300", "--eval_iters=1")
CANDIDATES = {  # changes to GPT-2 124M or to the Shakespeare recipe; the slowest to compile last
    "small-eager": ("--compile=False",),
    "small-default": (),
    "small-cuda-graphs": ("--compile=reduce-overhead",),
    "124M-default": (),
    "124M-flash": (),  # see ENVIRONMENTS
    "124M-6-heads": ("--n_head=6",),
    "124M-unpadded": (f"--dataset={UNPADDED}",),
    "124M-muon": ("--optimizer=muon",),
    "124M-cuda-graphs": ("--compile=reduce-overhead",),
    "small-autotune": ("--compile=max-autotune",),
    "124M-autotune": ("--compile=max-autotune",),
}
ENVIRONMENTS = {"124M-flash": "TORCH_CUDNN_SDPA_DEPRIORITIZED=1"}  # torch 2.11 prefers cuDNN


@dataclass(frozen=True)
class Measurement:
    """A command whose output has figures (tools.measure)."""

    name: str
    command: tuple
    is_nanogpt: bool = False  # runs in its folder
    tokens: int = 0  # per step, if the speed is measured
    flops: int = 0  # per token, if the MFU is measured
    may_fail: bool = False
    prepare: Callable[[], None] = lambda: None  # called before the command


def with_variable(measurement, assignment):
    """Returns a Measurement whose command has an environment variable, "NAME=VALUE"."""
    return replace(measurement, command=("env", assignment, *measurement.command))


class Parts:
    """Each part is a generator of Measurements; send() tells it whether the last one succeeded."""

    def __init__(self, results, arguments):
        """`arguments` are added to every command of train.py, and take precedence over its own."""
        self.results, self.arguments = results, arguments

    def train(self, name, *flags, changes=(), **options):
        """Returns the Measurement of folio's train.py. `changes` take precedence over arguments."""
        command = [sys.executable, str(ROOT / "train.py"), *flags, f"--out_dir={self.out(name)}"]
        command += ["--overwrite=True", *self.arguments, *changes]
        return Measurement(name, tuple(command), **options)

    def train_nanogpt(self, name, *flags, **options):
        """Returns the Measurement of nanoGPT's train.py."""
        command = [sys.executable, "train.py", *flags, f"--out_dir={self.out(name)}"]
        return Measurement(name, (*command, *self.arguments), is_nanogpt=True, **options)

    def sample(self, name, *flags, **options):
        command = (sys.executable, str(ROOT / "sample.py"), *flags)
        return Measurement(name, command, **options)

    def tool(self, name, *flags, **options):
        return Measurement(name, (sys.executable, "-m", *flags), **options)

    def out(self, name):
        return self.results / name

    # The parts

    def speed(self):
        """Tokens per second of GPT-2 124M, for several micro-batches."""
        for size in MICRO_BATCHES:
            flags, options = self.speed_of(size)
            yield self.train(f"speed-folio-{size}", *flags, **options)
            yield self.train_nanogpt(f"speed-nanogpt-{size}", *flags, **options)

    def speed_of(self, size):
        """Returns the flags and the options of a Measurement with a micro-batch of this size."""
        count = SEQUENCES // size
        flags = (*SPEED, f"--batch_size={size}", f"--gradient_accumulation_steps={count}")
        settings = self.settings_of(*flags)
        options = {"tokens": settings.tokens_per_step, "flops": flops_per_token(shape_of(settings))}
        return flags, options

    def candidates(self):
        """Tokens per second with one change each."""
        speed = self.speed_of(MICRO_BATCHES[1])
        for name, changes in CANDIDATES.items():
            flags, options = (SMALL, {}) if name.startswith("small") else speed
            run = self.train(f"candidate-{name}", *flags, changes=changes, may_fail=True, **options)
            yield with_variable(run, ENVIRONMENTS[name]) if name in ENVIRONMENTS else run

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
            if name == "fast":
                run = replace(run, prepare=lambda: shutil.rmtree(cache, ignore_errors=True))
            yield with_variable(run, f"TORCHINDUCTOR_CACHE_DIR={cache}")
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
        config = shape_of(self.settings_of("config/train_gpt2.py"))
        options = {"prepare": lambda: save_untrained(weights, config)}
        for count in (1, 64):
            flags = (f"--init_from={weights}", f"--num_samples={count}", length)
            yield self.sample(f"sampling-124M-{count}", *flags, **options)
            yield self.sample(f"sampling-124M-{count}-compiled", *flags, "--compile", **options)

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
        """The tests that need a GPU, several at once, because most of the time is compilation."""
        flags = ("-q", "-n8", "--dist=worksteal", "-m", "gpu", str(ROOT / "tests"))
        yield self.tool("tests", "pytest", *flags, may_fail=True)

    def lecture(self):
        """All steps of the lecture's GPT."""
        yield self.train("lecture", "config/tutorials/lecture.py")

    def settings_of(self, *flags):
        """Returns the TrainConfig of flags and self.arguments."""
        argv = [*flags, *self.arguments]
        return load(TrainConfig, argv, {"device": resolve_device}, quiet=True)


def shape_of(settings):
    """Returns the GPTConfig of a TrainConfig without switches and biases, with GPT-2's tokens."""
    return GPTConfig(**{name: getattr(settings, name) for name in SHAPE}, bias=False)


def flops_per_token(config):
    """Returns the FLOPs per token of a training step, by nanoGPT's formula."""
    parameters = num_params(config) - config.block_size * config.n_embd
    return 6 * parameters + 12 * config.n_layer * config.n_embd * config.block_size


def save_untrained(path: Path, config):
    """Saves an untrained model with a character for each token, unless the file exists."""
    if not path.exists():
        torch.manual_seed(0)
        tokenizer = CharTokenizer("".join(map(chr, range(config.vocab_size)))).to_dict()
        state = GPT(config).state_dict()
        save(path, Checkpoint(config, state, Progress(), {}, tokenizer=tokenizer))
