"""Train a GPT on a dataset that prepare.py made; checkpoints and a log go to out_dir.

    python train.py config/shakespeare_char.py
    python train.py config/shakespeare_char.py --learning_rate=3e-4 --out_dir=out-slower
    python train.py config/shakespeare_char.py --init_from=resume --max_iters=8000

In this order: the settings, the run, its checkpoints, one step, evaluation.
"""

import dataclasses
import gc
import math
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from config import UserError, answer_early, load, setting
from safety import Claim, Interrupted, Signals, move_aside, remove, run


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
    checkpoint_interval: int | None = setting(
        None, "steps between writes of last.pt; None is at evaluations alone", bounds="[1, inf)"
    )
    init_from: Literal["scratch", "resume", "auto"] = setting(
        "scratch", "start a model; continue that in out_dir; or continue if there is one"
    )
    overwrite: bool = setting(
        False, "replace an earlier run in out_dir, which is moved to out_dir.1 otherwise"
    )
    seed: int = setting(1337, "fixes initial weights, batches and dropout", bounds="[0, inf)")

    sample_interval: int | None = setting(
        None,
        "steps between short texts that the model writes; None is never",
        bounds="[1, inf)",
        group="Looking on",
    )
    wandb_log: bool = setting(False, "send the figures to Weights & Biases, too")
    wandb_project: str = setting("owt", "the project there")
    wandb_run_name: str = setting("gpt2", "the name of the run there")
    tensorboard: bool = setting(False, "write them for TensorBoard, too, to out_dir/tensorboard")

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
    activation: Literal["gelu", "gelu_tanh", "relu", "relu2"] = setting(
        "gelu", "activation of the MLP"
    )
    tie_weights: bool = setting(True, "the output head shares the token embedding")
    position: Literal["learned", "rotary"] = setting("learned", "how a token knows where it is")
    norm: Literal["layernorm", "rmsnorm"] = setting("layernorm", "what normalises activations")
    qk_norm: bool = setting(False, "normalise queries and keys, which bears higher rates")
    zero_init: bool = setting(False, "start what ends a branch, and an untied head, at zero")
    bigrams: bool = setting(False, "embed each token with the one before it, too")
    smear: int = setting(
        0, "earlier embeddings mixed into each; 2 helps small models", bounds="[0, inf)"
    )
    window: int = setting(
        0, "tokens that attention sees, itself and those before; 0 is all", bounds="[0, inf)"
    )

    optimizer: Literal["adamw", "muon"] = setting(
        "adamw",
        "muon takes the matrices of the blocks, AdamW the rest, embeddings at five times its rate",
        group="Optimiser",
    )
    learning_rate: float = setting(6e-4, "the highest, after warm-up", bounds="[0, inf)")
    max_iters: int = setting(600_000, "steps to train", bounds="[1, inf)")
    patience: int | None = setting(
        None,
        "stop when so many times eval_interval brought no better loss; None is never",
        bounds="[1, inf)",
    )
    weight_decay: float = setting(0.1, "of matrices and embeddings", bounds="[0, inf)")
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
        if not self.out_dir:
            raise UserError("out_dir is empty: it names a folder")
        if self.decay_lr and (self.min_lr or 0) > self.learning_rate:
            raise UserError(
                f"min_lr={self.min_lr} is above learning_rate={self.learning_rate}: the rate would "
                "rise instead of decay; lower --min_lr, or leave it out of the config"
            )


if __name__ == "__main__":
    run(answer_early, TrainConfig)  # --help and misspelt flags should not wait for torch
    gc.disable()  # till run(main): imports leave nothing to collect, but collecting takes a third

import numpy as np
import torch

import checkpoint as ckpt
from batches import Batches, Split, on_device
from device import (
    choose_machine,
    compile_or_fall_back,
    explained_lack_of_memory,
    kind_of,
    memory_bytes,
    resolve_device,
)
from generation import Controls, continuations
from model import GPT, GPTConfig, flops_per_token, num_params
from optimizers import learning_rate_at, make_optimizers
from prepare import load_dataset
from report import LOG, Report, evaluation_line, less_memory, print_end, print_start
from trackers import check_packages

SHORT = 200  # tokens that the model writes at sample_interval


def main(argv=None):
    config = load(TrainConfig, sys.argv[1:] if argv is None else argv, {"device": resolve_device})
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("folio trains in one process: start it by python, not by torchrun")
    check_packages(config)
    with explained_lack_of_memory(config.device, less_memory(config)):
        resumed = load_resumed(config)
        dataset, model_config = load_fitting(config, resumed)
        if resumed and is_finished(resumed, config) and not config.eval_only:
            setting = "max_iters" if resumed.step >= config.max_iters else "patience"
            print(f"{resumed.path} is at step {resumed.step}; train on with a larger --{setting}")
        else:
            train(config, dataset, model_config, resumed)


# The run


@dataclass
class State:
    """What a run carries from step to step, and a checkpoint keeps."""

    model: GPT
    optimizers: dict[str, torch.optim.Optimizer]  # by their names: adamw, muon
    scaler: torch.amp.GradScaler  # does nothing but for float16
    went_wrong: torch.Tensor  # of the first step that did: 1, its number, loss and gradient norm
    step: int = 0  # updates made so far
    evaluated: int = -1  # the step of the last evaluation that best_val_loss knows of
    best_step: int = -1  # the step of the one that was best
    best_val_loss: float = math.inf


def train(config, dataset, model_config, resumed):
    """Train from scratch, or from a checkpoint on, to max_iters; write checkpoints and the log."""
    config, machine, dataset, state, model = made_ready(config, dataset, model_config, resumed)
    if config.eval_only:
        print(evaluation_line(state.step, evaluate(model, dataset, config, machine)))
        return
    if config.sample_interval:  # what it needs may be missing, and that is better said now
        dataset.tokenizer.decode(dataset.tokenizer.encode(dataset.tokenizer.start))
    sizes = tokens_per_step(config), flops_per_token(model_config), num_params(model_config)
    with (
        claimed_out_dir(config, resumed) as claim,
        Report(config, machine, claim, resumed, *sizes) as report,
        saved_when_stopped(state, dataset, config, report) as signals,
    ):
        with signals.held():
            make_room(config, resumed)
            if resumed:
                report.resumed(state, resumed, changes(resumed, config))
            else:
                report.started()
        train_on(model, state, dataset, config, machine, report, signals)
    print_end(config, state, Path(config.out_dir, ckpt.BEST))


def made_ready(config, dataset, model_config, resumed):
    """All that training needs: (config, machine, dataset, state, model), nothing left on auto.

    The ids of the dataset are at the device; the model is the state's or its compiled wrapper.
    """
    machine = choose_machine(config.device, config.dtype, config.compile)
    config = dataclasses.replace(config, dtype=machine.dtype, compile=machine.compile)
    print_start(config, dataset, num_params(model_config), machine, tokens_per_step(config))
    state = make_state(config, model_config, machine, resumed)
    dataset = on_device(dataset, machine.device)
    model = state.model
    if machine.compile:
        trial = partial(warm_up_compiler, config, machine, dataset.train)
        model = compile_or_fall_back(model, trial)
    return config, machine, dataset, state, model


def train_on(model, state, dataset, config, machine, report, signals):
    """The loop: evaluate and save where it is due, then make a step, until max_iters.

    `model` is state.model, or its compiled wrapper over the same weights. A signal does not come
    between what belongs together: the weights, the step's number and the log.
    """
    batches = Batches(dataset.train, config)
    while True:
        at_end = state.step >= config.max_iters
        rate = learning_rate_at(state.step, config)
        if state.evaluated < state.step and (at_end or is_due(state, config.eval_interval)):
            with report.evaluating():
                losses = evaluate(model, dataset, config, machine)
                with signals.held():
                    check_losses(losses, state, config)
                    report.evaluated(state.step, losses, rate)
                    save_evaluated(state, losses["val"], dataset, config, report)
        done = is_finished(state, config)
        if config.sample_interval and (done or is_due(state, config.sample_interval)):
            with report.paused():
                text = short_text(state.model, dataset.tokenizer, config.seed)
                report.say(f"written at step {state.step}:\n{text.strip()}\n")
        if done:
            break
        with signals.held():
            loss, norm = gradient(model, state, batches.of(state.step), config, machine)
            if is_due(state, config.log_interval):
                check_finite(state, config)
            # Only now can the weights be known to be good.
            if is_due(state, config.checkpoint_interval) and state.evaluated < state.step:
                with report.paused():
                    report.refused(save(state, [ckpt.LAST], dataset, config, report))
            update(state, norm, rate, config)
            report.stepped(state.step - 1, loss, norm, rate)


@contextmanager
def saved_when_stopped(state, dataset, config, report):
    """The Signals of the loop. Where one stops it, the step it came to is saved."""
    with Signals() as signals:
        try:
            yield signals
        except (Interrupted, OSError):  # an OSError: who read the output has left
            signals.holding = True
            if refusal := save(state, [ckpt.LAST], dataset, config, report):
                raise UserError(
                    f"stopped at step {state.step}, but {refusal}: what it learnt since the last "
                    "save is lost"
                ) from None
            if signals.received is None:
                raise
            raise Interrupted(
                signals.received,
                f"stopped at step {state.step}, kept in {Path(config.out_dir, ckpt.LAST)}; go on "
                "by the same command and --init_from=resume",
            ) from None


def is_due(state, interval):
    return bool(interval) and state.step % interval == 0


def is_finished(state, config):
    """Whether a run, as told by a State or a Checkpoint, has made all the steps it is to make."""
    since_best = state.evaluated - state.best_step
    out_of_patience = config.patience and since_best >= config.patience * config.eval_interval
    return bool(out_of_patience) or min(state.step, state.evaluated) >= config.max_iters


def load_resumed(config):
    """The checkpoint that init_from asks for; None to start from scratch."""
    path = ckpt.newest(config.out_dir)
    if config.init_from == "scratch" or (config.init_from == "auto" and not os.path.exists(path)):
        return None
    return ckpt.load(path)


def load_fitting(config, resumed):
    """The dataset and the model's shape. Raises UserError where they do not fit the settings."""
    dataset = load_dataset(config.dataset)
    model_config = make_model_config(config, dataset.tokenizer, resumed)
    if resumed:
        check_resumed(resumed, model_config, config, dataset)
    check_lengths(dataset, model_config, config.dataset)
    return dataset, model_config


def make_model_config(config, tokenizer, resumed):
    """The model's shape: the settings of the same names, and the tokenizer's vocabulary."""
    names = {field.name for field in dataclasses.fields(GPTConfig)} - {"vocab_size"}
    size = tokenizer.vocab_size
    if resumed and resumed.fits(tokenizer):
        size = resumed.model_config.vocab_size
    elif tokenizer.kind == "gpt2":
        size += -size % 64  # GPUs multiply faster so, and nanoGPT does it
    try:
        return GPTConfig(vocab_size=size, **{name: getattr(config, name) for name in names})
    except ValueError as error:
        raise UserError(str(error)) from error


def check_lengths(dataset, model_config, name):
    """Raise UserError where a split is too short for the context."""
    needed = model_config.block_size + 1
    for split in ("train", "val"):
        ids = getattr(dataset, split)
        if len(ids) < needed:
            raise UserError(
                f"{split}.bin of {name} has {len(ids):,} tokens, fewer than the {needed:,} of "
                f"block_size + 1; use more text, or --block_size={len(ids) - 1} or less"
            )


def check_resumed(resumed, model_config, config, dataset):
    """Raise UserError that names all in which the settings or the data contradict the checkpoint.

    Whatever is not named here may change: rates, intervals, batches, the machine.
    """
    before, now = dataclasses.asdict(resumed.model_config), dataclasses.asdict(model_config)
    before["optimizer"] = resumed.config.get("optimizer", "adamw")  # nanoGPT's, always
    now["optimizer"] = config.optimizer
    wrong = [
        f"{name} {before[name]} there and {now[name]} here"
        for name in now
        if now[name] != before[name] and name != "dropout"
    ]
    if resumed.tokenizer not in (None, dataset.tokenizer.to_dict()):
        wrong.append("another vocabulary")
    name = resumed.config.get("dataset", config.dataset)
    same = resumed.data == dataset.fingerprint if resumed.data else name == config.dataset
    if not same:
        wrong.append(f"other data: {name} there and {config.dataset} as it is here")
    if wrong:
        raise UserError(
            f"{resumed.path} does not go with these settings: {'; '.join(wrong)}; resume with "
            "those it began with, or start anew in another --out_dir"
        )


def changes(resumed, config):
    """{name: (before, now)} of the settings that both runs have and that differ."""
    now = dataclasses.asdict(config)
    names = now.keys() & resumed.config.keys() - {"init_from", "overwrite", "out_dir"}
    pairs = {name: (resumed.config[name], now[name]) for name in now if name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@contextmanager
def claimed_out_dir(config, resumed):
    """out_dir, for this run alone to write to, with nothing in it changed yet."""
    with Claim(config.out_dir) as claim:
        stamp = ckpt.stamp_of(ckpt.newest(config.out_dir))
        if config.init_from != "scratch" and stamp != (resumed.stamp if resumed else None):
            raise UserError(f"another training wrote to {config.out_dir} just now: start once more")
        yield claim


def make_room(config, resumed):
    """Take an earlier run in out_dir out of the way, unless it is resumed."""
    files = (ckpt.BEST, ckpt.LAST, LOG)
    if not resumed and not config.overwrite:
        aside = move_aside(config.out_dir, files)
        if aside:
            print(
                f"the earlier run in {config.out_dir} is now in {aside}; another time "
                "--init_from=resume would go on with it, and --overwrite=True replace it"
            )
    names = [] if resumed else list(files)
    remove(Path(config.out_dir, name) for name in names + [f"{name}.tmp" for name in files])


def make_state(config, model_config, machine, resumed):
    """A new model and optimiser, or those of a checkpoint; hyperparameters are the settings'."""
    check_memory(model_config, config)
    torch.manual_seed(config.seed)
    if resumed:
        model = ckpt.build_model(dataclasses.replace(resumed, model_config=model_config))
    else:
        model = GPT(model_config)
    model.to(machine.device)
    scaler = torch.amp.GradScaler(kind_of(machine.device), enabled=machine.dtype == "float16")
    went_wrong = torch.zeros(4, device=machine.device)
    state = State(model, make_optimizers(model, config), scaler, went_wrong)
    if resumed:
        ckpt.restore_optimizers(resumed, state.optimizers, scaler)
        for name in ("step", "evaluated", "best_step", "best_val_loss"):
            setattr(state, name, getattr(resumed, name))
        resumed.weights, resumed.optimizers = {}, {}  # gigabytes, now the model's own
    return state


def check_memory(model_config, config):
    """Raise UserError where the weights with gradients and moments, or a batch, cannot fit."""
    B, T = config.batch_size, config.block_size
    model = 16 * num_params(model_config)
    needed = (
        model
        + 2 * B * T * model_config.vocab_size
        + 16 * B * T * config.gradient_accumulation_steps
    )
    there = memory_bytes(config.device)
    if there and needed > there:
        advice = less_memory(config) if model < there else "lower --n_layer or --n_embd"
        raise UserError(
            f"this takes more than {needed >> 30:,} GiB of memory, and {config.device} has "
            f"{there >> 30:,}: {advice}"
        )


def warm_up_compiler(config, machine, split, model):
    """Make the compiler do its work, and fail if it must, on shapes as in training."""
    x, y = split.windows(np.zeros(config.batch_size, np.int64), config.block_size)
    try:
        with machine.autocast():
            loss = model(x, y)[1]
        loss.backward()
    finally:
        model.zero_grad(set_to_none=True)
    split_loss(model, Split(split.ids[: config.block_size + 1], machine.device), config, machine)


# Checkpoints


def save_evaluated(state, val_loss, dataset, config, report):
    """Write last.pt and, where validation is at its best, ckpt.pt with it.

    Where the disk refuses, training goes on, unless it is about to begin or to end.
    """
    state.evaluated, best_before = state.step, (state.best_val_loss, state.best_step)
    is_best = val_loss < state.best_val_loss
    if is_best:
        state.best_val_loss, state.best_step = val_loss, state.step
    names = [ckpt.BEST] * (is_best or config.always_save_checkpoint) + [ckpt.LAST]
    if refusal := save(state, names, dataset, config, report):
        state.best_val_loss, state.best_step = best_before  # those of the file that is there
        if state.step == 0 or is_finished(state, config):
            raise refusal
        report.refused(refusal)


def save(state, names, dataset, config, report):
    """Write the state to files of out_dir; return the UserError where the disk refuses, or None.

    The log goes first: where the disk takes both, a run that is resumed misses none of its lines.
    Raises UserError where a step went wrong, so that nothing of it is kept.
    """
    check_finite(state, config)
    checkpoint = ckpt.Checkpoint(
        model_config=state.model.config,
        weights=state.model.state_dict(),
        step=state.step,
        best_val_loss=state.best_val_loss,
        config=dataclasses.asdict(config),
        optimizers={name: each.state_dict() for name, each in state.optimizers.items()},
        scaler=state.scaler.state_dict(),
        tokenizer=dataset.tokenizer.to_dict(),
        seed=config.seed,
        evaluated=state.evaluated,
        best_step=state.best_step,
        elapsed_s=report.elapsed_s(),
        data=dataset.fingerprint,
    )
    report.log.flush(durable=True)
    try:
        report.claim.check()
        ckpt.save([Path(config.out_dir, name) for name in names], checkpoint)
    except UserError as refusal:
        return refusal
    return None


# One step


def gradient(model, state, micro_batches, config, machine):
    """Put the gradient of a step's global batch, of its mean loss, into the parameters.

    Returns that loss and the gradient's norm, tensors of no dimension on the device; keeps in
    `state` whether they are finite numbers, and changes nothing else.
    """
    torch.manual_seed(dropout_seed(config.seed, state.step))
    mean_loss = torch.zeros((), device=machine.device)
    for x, y in micro_batches:
        with machine.autocast():
            loss = model(x, y)[1] / config.gradient_accumulation_steps
        state.scaler.scale(loss).backward()
        mean_loss += loss.detach()
    for optimizer in state.optimizers.values():
        state.scaler.unscale_(optimizer)
    norm = torch.nn.utils.get_total_norm([p.grad for p in state.model.parameters()])
    note_if_wrong(state, mean_loss, norm)
    return mean_loss, norm


def update(state, norm, rate, config):
    """Change the weights by the gradient, of that norm, that they hold."""
    if config.grad_clip:
        parameters = state.model.parameters()
        torch.nn.utils.clip_grads_with_norm_(parameters, config.grad_clip, norm)
    for optimizer in state.optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = rate * group["rate"]
        state.scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
    state.scaler.update()
    state.step += 1


def note_if_wrong(state, loss, norm):
    """Keep the first loss or gradient norm that is no finite number, without waiting for either.

    A gradient that overflows in float16 only because the scaler enlarged it is the scaler's to
    skip; it does so until the scale is 1, and to read that scale is to wait.
    """
    enlarged = state.scaler.is_enabled() and state.scaler.get_scale() > 1
    good = torch.isfinite(loss if enlarged else loss + norm)
    now = torch.stack((torch.ones_like(loss), torch.full_like(loss, state.step), loss, norm))
    is_first = (state.went_wrong[0] == 0) & ~good
    state.went_wrong = torch.where(is_first, now, state.went_wrong)


def check_finite(state, config):
    """Raise UserError where a step so far had a loss or a gradient that is no finite number."""
    wrong, step, loss, norm = state.went_wrong.tolist()
    if wrong:
        raise went_wrong(int(step), f"loss {loss:.3g} and gradient norm {norm:.3g}", config)


def check_losses(losses, state, config):
    """Raise UserError where an evaluation's losses are no finite numbers."""
    check_finite(state, config)  # which would be the cause
    if not math.isfinite(losses["train"] + losses["val"]):
        about = f"train loss {losses['train']:.3g} and val loss {losses['val']:.3g} at evaluation"
        raise went_wrong(state.step, about, config)


def went_wrong(step, about, config):
    return UserError(
        f"training went wrong at step {step}: {about}, learning rate "
        f"{learning_rate_at(step, config):.3g}; nothing of it was saved: try a lower "
        "--learning_rate, a longer --warmup_iters or --grad_clip=1, anew or by --init_from=resume"
    )


@torch.no_grad()
def short_text(model, tokenizer, seed):
    """A text that the model writes as it is now."""
    controls = Controls(temperature=0.8, top_k=200)
    prompt, stride = (
        tokenizer.encode(tokenizer.start).tolist(),
        max(1, model.config.block_size // 2),
    )
    model.eval()
    try:
        drawn = continuations(
            model, [prompt], [seed], controls, SHORT, stride, limit=tokenizer.vocab_size
        )
        return tokenizer.decode([int(ids) for ids, _ in drawn])
    finally:
        model.train()


def tokens_per_step(config):
    return config.gradient_accumulation_steps * config.batch_size * config.block_size


def dropout_seed(seed, step):
    """A seed for torch that is as good as independent between steps."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0])


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
def split_loss(model, split, config, machine):
    """Mean loss over evenly spaced windows: eval_iters batches, or the whole split if it is less.

    Windows do not overlap, so of a whole split block_size - 1 tokens at most are left out. The
    last batch is filled up to the size of the others with targets that do not count.
    """
    B, T = config.batch_size, config.block_size
    count = min((len(split) - 1) // T, config.eval_iters * B)
    starts = np.linspace(0, len(split) - 1 - T, count).astype(np.int64)
    total = torch.zeros((), device=machine.device)
    model.eval()
    try:
        for first in range(0, count, B):
            rows = min(B, count - first)
            x, y = split.windows(np.resize(starts[first : first + rows], B), T)
            y[rows:] = -1
            with machine.autocast():
                total += model(x, y)[1] * rows
    finally:
        model.train()
    return total / count


if __name__ == "__main__":
    run(main)
