"""Train a GPT on a dataset that prepare.py made; checkpoints and a log go to out_dir.

    python train.py config/shakespeare_char.py
    python train.py config/shakespeare_char.py --learning_rate=3e-4 --out_dir=out-slower
    python train.py config/shakespeare_char.py --init_from=resume --max_iters=8000

In this order: the settings, the run, one step, batches, evaluation, what is told and written.
"""

import dataclasses
import json
import math
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from config import STARTED, UserError, answer_early, changed, load, run, setting


@dataclass(frozen=True)
class TrainConfig:
    """Train a GPT on data/<dataset>; --help of prepare.py tells how to make one."""

    out_dir: str = setting("out", "folder for checkpoints and log.jsonl", group="Output")
    eval_interval: int = setting(2000, "steps between evaluations", bounds="[1, inf)")
    log_interval: int = setting(1, "steps between log lines", bounds="[1, inf)")
    eval_iters: int = setting(
        200, "batches per split and evaluation; the whole split if that is less", bounds="[1, inf)"
    )
    eval_only: bool = setting(False, "evaluate once and stop, writing nothing")
    always_save_checkpoint: bool = setting(
        False, "write ckpt.pt at every evaluation, not only at the best one"
    )
    init_from: Literal["scratch", "resume"] = setting(
        "scratch", "start a model, or continue the newest state in out_dir"
    )
    seed: int = setting(
        1337, "fixes initial weights, batches and dropout", bounds="[0, 9223372036854775807]"
    )

    wandb_log: bool = setting(False, "not there yet; log.jsonl has the figures", group="Logging")
    wandb_project: str = setting("owt", "nanoGPT's; not used yet")
    wandb_run_name: str = setting("gpt2", "nanoGPT's; not used yet")

    dataset: str = setting("openwebtext", "name of the folder in data/", group="Data")
    gradient_accumulation_steps: int = setting(
        40, "batches whose gradients add up to one step", bounds="[1, inf)"
    )
    batch_size: int = setting(12, "sequences per batch", bounds="[1, inf)")
    block_size: int = setting(1024, "tokens per sequence: the context", bounds="[1, inf)")

    n_layer: int = setting(12, "blocks; 0 is the bigram baseline", bounds="[0, inf)", group="Model")
    n_head: int = setting(12, "attention heads; must divide n_embd", bounds="[1, inf)")
    n_embd: int = setting(768, "width of the residual stream", bounds="[1, inf)")
    dropout: float = setting(
        0.0, "share of activations to drop; 0.1 to 0.3 for short texts", bounds="[0, 1)"
    )
    bias: bool = setting(False, "biases in linear layers and layer norms")
    activation: Literal["gelu", "gelu_tanh", "relu"] = setting("gelu", "activation of the MLP")
    tie_weights: bool = setting(True, "the output head shares the token embedding")

    learning_rate: float = setting(
        6e-4, "the highest, after warm-up", bounds="[0, inf)", group="Optimiser"
    )
    max_iters: int = setting(600_000, "steps to train", bounds="[1, inf)")
    weight_decay: float = setting(0.1, "AdamW's, of matrices and embeddings", bounds="[0, inf)")
    beta1: float = setting(0.9, "AdamW's momentum", bounds="[0, 1)")
    beta2: float = setting(0.95, "AdamW's memory of squared gradients", bounds="[0, 1)")
    grad_clip: float = setting(1.0, "largest gradient norm; 0 is no limit", bounds="[0, inf)")
    decay_lr: bool = setting(True, "decay the learning rate along a cosine")
    warmup_iters: int = setting(2000, "steps of linear warm-up", bounds="[0, inf)")
    lr_decay_iters: int | None = setting(
        None, "step at which the decay ends; None is max_iters", bounds="[0, inf)"
    )
    min_lr: float | None = setting(
        None, "the rate it ends at; None is a tenth of learning_rate", bounds="[0, inf)"
    )

    device: str = setting("auto", "auto, cpu, cuda, cuda:N or mps", group="Machine")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "number format of the products; weights stay float32"
    )
    compile: Literal["auto"] | bool = setting("auto", "compile the model before training")
    backend: str = setting("nccl", "nanoGPT's; not used on one process")

    def __post_init__(self):
        if self.n_embd % self.n_head:
            raise UserError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}")
        if self.decay_lr and (self.min_lr or 0) > self.learning_rate:
            raise UserError(
                f"min_lr={self.min_lr} is above learning_rate={self.learning_rate}: the rate would "
                "rise instead of decay; lower --min_lr, or leave it out of the config"
            )


if __name__ == "__main__":
    run(answer_early, TrainConfig)  # --help and misspelt flags should not wait for torch

import numpy as np
import torch
from tqdm import tqdm

import checkpoint as ckpt
from device import choose_machine, compile_or_fall_back, kind_of, resolve_device
from model import GPT, GPTConfig, flops_per_token, num_params
from prepare import load_dataset


def main(argv=None):
    config = load(TrainConfig, sys.argv[1:] if argv is None else argv, {"device": resolve_device})
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("folio trains in one process: start it by python, not by torchrun")
    dataset = load_dataset(config.dataset)
    resumed = ckpt.load(ckpt.newest(config.out_dir)) if config.init_from == "resume" else None
    model_config = make_model_config(config, dataset.tokenizer, resumed)
    if resumed:
        check_resumed(resumed, model_config, dataset.tokenizer)
    check_data(dataset, model_config, config.dataset)
    if resumed and resumed.step >= config.max_iters and not config.eval_only:
        print(f"{resumed.path} is at step {resumed.step}; train on with a larger --max_iters")
    else:
        train(config, dataset, model_config, resumed)


# The run


@dataclass
class State:
    """What a run carries from step to step, and a checkpoint keeps."""

    model: GPT
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # does nothing but for float16
    step: int = 0  # updates made so far
    best_val_loss: float = math.inf


def train(config, dataset, model_config, resumed):
    """Train from scratch, or from a checkpoint on, to max_iters; write checkpoints and the log."""
    steps = config.max_iters - (resumed.step if resumed else 0)
    flops = flops_per_token(model_config) * tokens_per_step(config) * steps
    machine = choose_machine(config.device, config.dtype, config.compile, flops)
    config = dataclasses.replace(config, dtype=machine.dtype, compile=machine.compile)
    print_start(config, dataset, model_config, machine)
    state = make_state(config, model_config, machine, resumed)
    start = state.step
    model = state.model
    if machine.compile:
        model = compile_or_fall_back(
            model, partial(warm_up_compiler, config, machine, dataset.train)
        )
    if config.eval_only:
        print(evaluation_line(state.step, evaluate(model, dataset, config, machine)))
        return
    with Report(config, machine, model_config, start) as report:
        while True:
            done = state.step >= config.max_iters
            due = done or state.step % config.eval_interval == 0
            rate = learning_rate_at(state.step, config)
            if due and not (resumed and state.step == start):  # it was evaluated before it stopped
                with report.evaluating():
                    losses = evaluate(model, dataset, config, machine)
                    report.evaluated(state.step, losses, rate)
                    save_checkpoints(state, losses["val"], config, model_config, dataset.tokenizer)
            if done:
                break
            loss = take_step(model, state, dataset.train, rate, config, machine)
            report.stepped(state.step, loss, rate)
            state.step += 1
    print_end(state, config)


def make_model_config(config, tokenizer, resumed):
    """The model's shape: the settings of the same names, and the tokenizer's vocabulary."""
    names = {field.name for field in dataclasses.fields(GPTConfig)} - {"vocab_size"}
    size = tokenizer.vocab_size
    if resumed and resumed.fits(tokenizer):
        size = resumed.model_config.vocab_size
    elif tokenizer.kind == "gpt2":
        size += -size % 64  # GPUs multiply faster so, and nanoGPT does it
    return GPTConfig(vocab_size=size, **{name: getattr(config, name) for name in names})


def check_data(dataset, model_config, name):
    """Raise UserError where a split is too short for the context or holds unknown tokens."""
    needed = model_config.block_size + 1
    for split in ("train", "val"):
        ids = getattr(dataset, split)
        if len(ids) < needed:
            raise UserError(
                f"{split}.bin of {name} has {len(ids):,} tokens, fewer than the {needed:,} of "
                f"block_size + 1; use more text, or --block_size={len(ids) - 1} or less"
            )
        if ids.max() >= model_config.vocab_size:
            raise UserError(
                f"{split}.bin of {name} holds token {ids.max()}, beyond its vocabulary of "
                f"{model_config.vocab_size}; prepare the dataset again"
            )


def check_resumed(resumed, model_config, tokenizer):
    """Raise UserError that names where the settings or the data contradict the checkpoint."""
    before, now = dataclasses.asdict(resumed.model_config), dataclasses.asdict(model_config)
    names = [name for name in now if now[name] != before[name] and name != "dropout"]
    if names:
        pairs = ", ".join(f"{name} {before[name]} there and {now[name]} here" for name in names)
        raise UserError(
            f"{resumed.path} is of another model: {pairs}; resume with the settings it began with"
        )
    if resumed.tokenizer not in (None, tokenizer.to_dict()):
        raise UserError(f"{resumed.path} was trained on another vocabulary than the dataset's")


def make_state(config, model_config, machine, resumed):
    """A new model and optimiser, or those of a checkpoint; hyperparameters are the settings'."""
    torch.manual_seed(config.seed)
    if resumed:
        model = ckpt.build_model(dataclasses.replace(resumed, model_config=model_config))
    else:
        model = GPT(model_config)
    model.to(machine.device)
    scaler = torch.amp.GradScaler(kind_of(machine.device), enabled=machine.dtype == "float16")
    state = State(model, make_optimizer(model, config), scaler)
    if resumed:
        ckpt.restore_optimizer(resumed, state.optimizer, scaler)
        state.step, state.best_val_loss = resumed.step, resumed.best_val_loss
    return state


def warm_up_compiler(config, machine, ids, model):
    """Make the compiler do its work, and fail if it must, on shapes as in training."""
    x, y = windows(ids, np.zeros(config.batch_size, np.int64), config.block_size, machine.device)
    try:
        with machine.autocast():
            loss = model(x, y)[1]
        loss.backward()
    finally:
        model.zero_grad(set_to_none=True)
    split_loss(model, ids[: config.block_size + 1], config, machine)


def save_checkpoints(state, val_loss, config, model_config, tokenizer):
    """Write last.pt, and ckpt.pt where validation is at its best, but nothing before step 1."""
    if state.step == 0:
        return
    best = val_loss < state.best_val_loss
    if best:
        state.best_val_loss = val_loss
    checkpoint = ckpt.Checkpoint(
        model_config=model_config,
        weights=state.model.state_dict(),
        step=state.step,
        best_val_loss=state.best_val_loss,
        config=dataclasses.asdict(config),
        optimizer=state.optimizer.state_dict(),
        scaler=state.scaler.state_dict(),
        tokenizer=tokenizer.to_dict(),
        seed=config.seed,
    )
    if best or config.always_save_checkpoint:
        ckpt.save(Path(config.out_dir, ckpt.BEST), checkpoint)
    ckpt.save(Path(config.out_dir, ckpt.LAST), checkpoint)  # after what its best_val_loss is of


# One step


def make_optimizer(model, config):
    """AdamW (Loshchilov and Hutter 2019) with weight decay on matrices and embeddings alone."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    # Fused updates exist wherever folio runs: CPUs, CUDA and mps.
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=True)


def learning_rate_at(step, config):
    """The rate of a step: linear warm-up, then a cosine from learning_rate down to min_lr."""
    if not config.decay_lr:
        return config.learning_rate
    last = config.max_iters if config.lr_decay_iters is None else config.lr_decay_iters
    low = config.learning_rate / 10 if config.min_lr is None else config.min_lr
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    if step >= last:
        return low
    way = (step - config.warmup_iters) / (last - config.warmup_iters)
    return low + (config.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * way))


def take_step(model, state, ids, rate, config, machine):
    """Update the weights once from the global batch of this step; return its mean loss.

    `model` is state.model, or its compiled wrapper over the same weights.
    """
    torch.manual_seed(dropout_seed(config.seed, state.step))
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    count = config.batch_size * config.gradient_accumulation_steps
    starts = batch_starts(config.seed, state.step, count, len(ids) - config.block_size)
    mean_loss = torch.zeros((), device=machine.device)
    for micro_batch in np.split(starts, config.gradient_accumulation_steps):
        x, y = windows(ids, micro_batch, config.block_size, machine.device)
        with machine.autocast():
            loss = model(x, y)[1] / config.gradient_accumulation_steps
        state.scaler.scale(loss).backward()
        mean_loss += loss.detach()
    if config.grad_clip:
        state.scaler.unscale_(state.optimizer)
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), config.grad_clip)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    return mean_loss


# Batches


def tokens_per_step(config):
    return config.gradient_accumulation_steps * config.batch_size * config.block_size


def batch_starts(seed, step, count, choices):
    """Where the windows of a step's global batch begin: `count` draws from range(choices).

    A pure function of its arguments, by the counter-based generator of Salmon et al. 2011: no
    state to save, and the same batch however it is cut into micro-batches.
    """
    draws = np.random.Philox(key=[seed, step]).random_raw(count)
    return (draws % np.uint64(choices)).astype(np.int64)


def dropout_seed(seed, step):
    """A seed for torch that is as good as independent between steps."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0])


def windows(ids, starts, block_size, device):
    """Inputs and targets of the windows that begin at `starts`: (B, block_size) int64 each."""
    tokens = ids[starts[:, None] + np.arange(block_size + 1)].astype(np.int64)
    tokens = torch.from_numpy(tokens).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


# Evaluation


def evaluate(model, dataset, config, machine):
    """Losses in nats per token, and of validation its perplexity and bits per byte of text."""
    train_loss = float(split_loss(model, dataset.train, config, machine))
    val_loss = float(split_loss(model, dataset.val, config, machine))
    losses = {
        "train": train_loss,
        "val": val_loss,
        "perplexity": math.exp(min(val_loss, 700)),  # a float ends at e^709
    }
    if dataset.val_bytes_per_token:
        losses["bits_per_byte"] = val_loss / math.log(2) / dataset.val_bytes_per_token
    return losses


@torch.no_grad()
def split_loss(model, ids, config, machine):
    """Mean loss over evenly spaced windows: eval_iters batches, or the whole split if it is less.

    Windows do not overlap, so of a whole split block_size - 1 tokens at most are left out. The
    last batch is filled up to the size of the others with targets that do not count.
    """
    B, T = config.batch_size, config.block_size
    count = min((len(ids) - 1) // T, config.eval_iters * B)
    starts = np.linspace(0, len(ids) - 1 - T, count).astype(np.int64)
    total = torch.zeros((), device=machine.device)
    model.eval()
    try:
        for first in range(0, count, B):
            rows = min(B, count - first)
            x, y = windows(ids, np.resize(starts[first : first + rows], B), T, machine.device)
            y[rows:] = -1
            with machine.autocast():
                total += model(x, y)[1] * rows
    finally:
        model.train()
    return total / count


# What is told and written


def print_start(config, dataset, model_config, machine):
    """Say what is about to be trained, on what, and how."""
    told_below = ("device", "dtype", "compile")
    pairs = [f"{name}={value}" for name, value in changed(config).items() if name not in told_below]
    print(f"settings: {' '.join(pairs) or 'all at their defaults'}")
    print(
        f"dataset: {config.dataset}, {len(dataset.train):,} train and {len(dataset.val):,} "
        f"validation tokens, vocabulary {dataset.tokenizer.vocab_size:,}"
    )
    print(
        f"model: {num_params(model_config):,} parameters; {config.max_iters:,} steps of "
        f"{tokens_per_step(config):,} tokens"
    )
    peak, source = machine.peak
    print(f"machine: {machine.summary}, peak {peak / 1e12:.3g} TFLOP/s ({source})")
    if config.wandb_log:
        print("wandb_log: not there yet, so the figures go to log.jsonl alone")
    sys.stdout.flush()


def evaluation_line(step, losses):
    line = f"step {step}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}"
    line += f", val perplexity {losses['perplexity']:.2f}"
    if "bits_per_byte" in losses:
        line += f", val bits per byte {losses['bits_per_byte']:.4f}"
    return line


def print_end(state, config):
    """Say where the model is and how to use it, if there is one."""
    if state.best_val_loss < math.inf:
        kept = "newest" if config.always_save_checkpoint else "best"
        path = Path(config.out_dir, ckpt.BEST)
        print(f"done; best val loss {state.best_val_loss:.4f}; the {kept} model is in {path}")
        print(f"write with it: python sample.py --out_dir={config.out_dir}")


class Report:
    """Tells of steps and evaluations: progress bar, console lines in nanoGPT's shape, log.jsonl.

    Speeds are means since the line before.
    """

    def __init__(self, config, machine, model_config, step):
        self.config, self.machine = config, machine
        self.tokens_per_step = tokens_per_step(config)
        self.flops_per_step = flops_per_token(model_config) * self.tokens_per_step
        self.seconds, self.steps = 0.0, 0  # of training since the last line
        self.evaluation_s = 0.0
        self.log = open_log(Path(config.out_dir, "log.jsonl"), append=config.init_from == "resume")
        self.bar = tqdm(  # drawn where stderr is a terminal
            total=config.max_iters, initial=step, unit="step", leave=False, disable=None
        )
        self.counted_at = time.perf_counter()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.bar.close()
        self.log.close()

    def _count_time(self):
        """Add the time since the last call to that of training, once the device is done."""
        self.machine.synchronize()
        now = time.perf_counter()
        self.seconds += now - self.counted_at
        self.counted_at = now

    @contextmanager
    def evaluating(self):
        """A context for evaluating and saving, which no step's time includes."""
        self._count_time()
        yield
        now = time.perf_counter()
        self.evaluation_s = now - self.counted_at
        self.counted_at = now

    def evaluated(self, step, losses, rate):
        self._say(evaluation_line(step, losses))
        event = {"loss": losses["val"], "lr": rate, "train_loss": losses["train"]}
        rest = {name: losses[name] for name in ("perplexity", "bits_per_byte") if name in losses}
        self._write(step, "val", step * self.tokens_per_step, **event, **rest)

    def stepped(self, step, loss, rate):
        self.bar.update()
        self.steps += 1
        if step % self.config.log_interval:
            return
        self._count_time()
        per_step = self.seconds / self.steps
        speeds = {
            "tokens_per_s": self.tokens_per_step / per_step,
            "mfu": self.flops_per_step / per_step / self.machine.peak[0],
        }
        loss = float(loss)
        self._say(
            f"iter {step}: loss {loss:.4f}, time {per_step * 1000:.2f}ms, "
            f"mfu {speeds['mfu'] * 100:.2f}%, {speeds['tokens_per_s']:,.0f} tokens/s, "
            f"{tqdm.format_interval(self._seconds_left(step + 1, per_step))} left"
        )
        self._write(step, "train", (step + 1) * self.tokens_per_step, loss=loss, lr=rate, **speeds)
        self.seconds, self.steps = 0.0, 0

    def _seconds_left(self, step, per_step):
        steps = self.config.max_iters - step
        evaluations = math.ceil(steps / self.config.eval_interval)
        return steps * per_step + evaluations * self.evaluation_s

    def _say(self, line):
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()

    def _write(self, step, split, tokens, **figures):
        event = {"step": step, "split": split, "tokens": tokens, **figures}
        event["elapsed_s"] = round(time.monotonic() - STARTED, 3)
        try:
            self.log.write(json.dumps(event) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {self.log.name}: {error.strerror or error}") from error


def open_log(path, append):
    """The log, open for lines; UserError where out_dir cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "a" if append else "w", encoding="utf-8", buffering=1)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


if __name__ == "__main__":
    run(main)
