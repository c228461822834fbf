"""Train a GPT on a dataset prepared by prepare.py.

    python train.py config/shakespeare_char.py
    python train.py config/shakespeare_char.py --learning_rate=3e-4 --out_dir=out-lower-lr
    python train.py config/shakespeare_char.py --init_from=resume --max_iters=8000
    python train.py config/finetune_shakespeare.py --init_from=gpt2
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py

This file has, in order: the settings, setup, the training loop, and Trainer, which holds the model
and the optimizers. Checkpoints and log.jsonl go to out_dir.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from folio.cli import process
from folio.cli.settings import load_settings, parse_arguments, setting


@dataclass(frozen=True)
class TrainConfig:
    """Train a GPT on data/<dataset>, which prepare.py creates."""

    out_dir: str = setting("out", "folder for checkpoints and log", group="Output", scope="files")
    eval_interval: int = setting(2000, "steps between evaluations", "[1, inf)")
    log_interval: int = setting(1, "steps between log lines", "[1, inf)", scope="display")
    eval_iters: int = setting(200, "evaluation batches per split, up to all of it", "[1, inf)")
    eval_only: bool = setting(False, "evaluate once and exit; write nothing", scope="files")
    always_save_checkpoint: bool = setting(False, "write ckpt.pt at every evaluation")
    checkpoint_interval: int | None = setting(
        None, "steps between saves; None: only at evaluations", "[1, inf)", scope="display"
    )
    init_from: str = setting(
        "scratch", "scratch, resume, auto (either), checkpoint, folder, hub id, gpt2", scope="files"
    )
    overwrite: bool = setting(False, "delete an earlier run; False: rename it", scope="files")
    seed: int = setting(1337, "seed of initial weights, batches and dropout", "[0, inf)")

    sample_interval: int | None = setting(
        None, "steps between samples; None: none", "[1, inf)", group="Monitoring", scope="display"
    )
    wandb_log: bool = setting(False, "log to Weights & Biases", scope="display")
    wandb_project: str = setting("owt", "project name", scope="display")
    wandb_run_name: str = setting("gpt2", "run name", scope="display")
    tensorboard: bool = setting(False, "log to out_dir/tensorboard", scope="display")

    dataset: str = setting("openwebtext", "name of the folder in data/", group="Data")
    gradient_accumulation_steps: int = setting(40, "micro-batches per step", "[1, inf)")
    batch_size: int = setting(12, "sequences per micro-batch", "[1, inf)")
    block_size: int = setting(1024, "context length in tokens", "[1, inf)")

    n_layer: int = setting(12, "transformer blocks; 0: a bigram model", "[0, inf)", group="Model")
    n_head: int = setting(12, "attention heads; must divide n_embd", "[1, inf)")
    n_embd: int = setting(768, "width of the residual stream", "[1, inf)")
    dropout: float = setting(0.0, "dropout rate; 0.1 to 0.3 for small datasets", "[0, 1)")
    bias: bool = setting(False, "biases in linear layers and layer norms")
    activation: Literal["gelu", "gelu_tanh", "relu", "relu2", "swiglu"] = setting(
        "gelu", "activation function of the MLP"
    )
    tie_weights: bool = setting(True, "share the token embedding with the output head")
    position: Literal["learned", "rotary"] = setting("learned", "position encoding")
    norm: Literal["layernorm", "rmsnorm"] = setting("layernorm", "kind of normalization")
    qk_norm: bool = setting(False, "normalize queries and keys; allows higher learning rates")
    ngrams: int = setting(0, "add embeddings of n-grams, n = 2 to this; 0: none", "[0, inf)")
    smear: int = setting(0, "preceding embeddings added to each embedding", "[0, inf)")
    window: int = setting(0, "tokens that each token attends to; 0: all", "[0, inf)")

    optimizer: Literal["adamw", "muon"] = setting(
        "adamw", "muon: Muon for the blocks' matrices, AdamW for the rest", group="Optimizer"
    )
    learning_rate: float = setting(6e-4, "peak learning rate", "[0, inf)")
    max_iters: int = setting(600_000, "optimizer steps", "[1, inf)")
    minutes: float | None = setting(None, "time budget; makes fewer steps if needed", "(0, inf)")
    stop_at: int | None = setting(None, "save and exit at this step", "[1, inf)", scope="files")
    patience: int | None = setting(None, "stop after N evaluations without improvement", "[1, inf)")
    train_temperature: float = setting(1.0, "divides the logits in training", "(0, inf)")
    teachers: str = setting("", "runs for knowledge distillation: folders, separated by commas")
    weight_decay: float = setting(0.1, "weight decay of matrices and embeddings", "[0, inf)")
    beta1: float = setting(0.9, "AdamW beta1", "[0, 1)")
    beta2: float = setting(0.95, "AdamW beta2", "[0, 1)")
    grad_clip: float = setting(1.0, "maximum gradient norm; 0: no clipping", "[0, inf)")
    decay_lr: bool = setting(True, "warmup and cosine decay; False: constant rate")
    warmup_iters: int = setting(2000, "steps of linear warmup", "[0, inf)")
    lr_decay_iters: int | None = setting(None, "last step of decay; None: max_iters", "[0, inf)")
    min_lr: float | None = setting(None, "final rate; None: learning_rate / 10", "[0, inf)")

    device: str = setting("auto", "auto, cpu, cuda[:N] or mps", group="Machine", scope="machine")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "data type of matrix products; weights stay float32"
    )
    compile: Literal["auto", "reduce-overhead", "max-autotune"] | bool = setting(
        "auto", "torch.compile; reduce-overhead and max-autotune use CUDA graphs", scope="machine"
    )
    parallel: Literal["ddp", "fsdp"] = setting(
        "ddp", "with torchrun: ddp or fsdp, which divides weights and moments", scope="machine"
    )
    activation_checkpointing: bool = setting(
        False, "recompute activations: less memory, a third slower or more", scope="machine"
    )
    backend: str = setting("nccl", "ignored: nccl on GPUs, gloo on CPUs", scope="machine")

    def __post_init__(self):
        if not self.out_dir:
            raise ValueError("out_dir must not be empty")
        if self.decay_lr and (self.min_lr or 0) > (lr := self.learning_rate):
            raise ValueError(f"min_lr={self.min_lr} must not be greater than learning_rate={lr}")

    @property
    def tokens_per_step(self):
        return self.gradient_accumulation_steps * self.batch_size * self.block_size


if __name__ == "__main__":
    process.start(parse_arguments, TrainConfig)  # --help must not wait for torch

import numpy as np
import torch

from folio.checkpoint.format import Checkpoint, Progress, load_weights
from folio.checkpoint.run_dir import RunDir
from folio.checkpoint.saving import Saver
from folio.data.batches import Batches, bytes_per_target, dropout_seed, evaluation_starts, to_device
from folio.data.dataset import Dataset, load_dataset
from folio.distributed.sharding import (
    assign,
    average_gradients,
    full_tensor,
    replicate,
    shard_model,
    unshard,
)
from folio.distributed.world import SINGLE_PROCESS, process_group
from folio.hardware.compile import compile_model
from folio.hardware.device import (
    choose_machine,
    device_type,
    read_later,
    resolve_device,
    uses_cuda_graphs,
)
from folio.hardware.kernels import use_fast_kernels
from folio.hardware.memory import (
    check_memory,
    explain_out_of_memory,
    keep_freed_memory,
    memory_advice,
    recompute_activations,
)
from folio.inference.completion import sample_text
from folio.pretrained.load import crop, load_start
from folio.training.budget import fit_to_minutes
from folio.training.distillation import Distillation, load_teachers
from folio.training.optimizers import (
    DivergenceMonitor,
    learning_rate_at,
    make_optimizers,
    restore_optimizers,
)
from folio.training.setup import check_parallel, plan_model
from folio.training.tracking import (
    evaluation_line,
    print_end,
    print_finished,
    print_start,
    recorded,
)
from model import GPT


def main(argv=None):
    settings = load_settings(TrainConfig, argv, {"device": resolve_device})
    advice = memory_advice(settings)
    with process_group(settings.device) as world, explain_out_of_memory(world.device, advice):
        run = setup(settings, world)
        if settings.eval_only:
            losses = run.trainer.evaluate(run.dataset, run.progress.step)
            print(evaluation_line(run.progress.step, losses))
            return
        fit_to_minutes(run)
        if run.progress.is_finished(run.settings):
            print_finished(run)
        else:
            train(run)


# Setup


@dataclass
class Run:
    """A training run. `dataset` has a Split per split."""

    requested: TrainConfig  # resolved for the machine
    settings: TrainConfig  # the same with the steps that fit into --minutes
    run_dir: RunDir
    dataset: Dataset
    trainer: "Trainer"
    progress: Progress
    resumed: Checkpoint | None = None


def setup(settings, world=SINGLE_PROCESS):
    """Returns the Run that the settings describe. Writes no files."""
    run_dir = RunDir(settings.out_dir)
    settings, config, dataset, *starts = world.together(plan, settings, run_dir, world)
    resumed, initial, teachers = starts
    where = resumed and resumed.progress
    world.check_same({"command": settings, "dataset": dataset.fingerprint, "checkpoint": where})
    keep_freed_memory()
    machine = choose_machine(world.device or settings.device, settings.dtype, settings.compile)
    settings = dataclasses.replace(settings, dtype=machine.dtype, compile=machine.compile)
    trainer = Trainer(config, settings, machine, world)
    print_start(settings, dataset, trainer)
    if resumed:
        trainer.load_state_dict(resumed)
    elif initial:
        world.together(crop, initial, config.block_size)
        world.together(load_weights, trainer.model, initial)
    else:
        trainer.init_weights()
    if start := resumed or initial:
        start.weights, start.optimizers = {}, {}  # the trainer has them
    dataset = to_device(dataset, machine.device)
    trainer.make_forward(dataset.train, teachers)
    progress = resumed.progress if resumed else Progress()
    return Run(settings, settings, run_dir, dataset, trainer, progress, resumed)


def plan(settings, run_dir, world):
    """Reads and checks the dataset and the checkpoints.

    Returns (settings, GPTConfig, Dataset, *load_start(…), load_teachers(…)).
    """
    check_parallel(settings, world.size)
    dataset = load_dataset(settings.dataset)
    resumed, initial = load_start(settings.init_from, run_dir)
    settings, config = plan_model(settings, dataset, resumed, initial)
    dataset.check_length(config.block_size)
    check_memory(config, settings, world.size)
    if settings.sample_interval:
        dataset.tokenizer.encode(dataset.tokenizer.start)  # raises if its files are missing
    teachers = load_teachers(settings, config, dataset.tokenizer)
    return settings, config, dataset, resumed, initial, teachers


# Training loop


def train(run):
    """Trains until max_iters, or until patience is exhausted, and saves the state along the way."""
    settings, trainer, progress = run.settings, run.trainer, run.progress
    world, batches = trainer.world, Batches(run.dataset.train, settings, trainer.world)
    with (
        process.StopSignal(world.is_launched) as stop,
        world.entered(recorded(run, stop)) as tracking,
        Saver(run, tracking) as saver,
    ):
        while True:
            lr = learning_rate_at(progress.step, settings)
            if progress.needs_evaluation(settings):
                with tracking.paused():
                    if losses := trainer.evaluate(run.dataset, progress.step, stop):
                        tracking.evaluated(progress.step, losses, lr)
                        saver.evaluated(losses["loss"])
            if stop or progress.step >= (settings.stop_at or math.inf):
                break
            done = progress.is_finished(settings)
            if settings.sample_interval and (done or progress.is_due(settings.sample_interval)):
                with tracking.paused(), unshard(trainer.model):
                    text = sample_text(trainer.model, run.dataset.tokenizer, settings.seed)
                    tracking.say(f"sample at step {progress.step}:\n{text}\n")
            if done:
                break
            loss, grad_norm = trainer.gradient(batches.at(progress.step), progress.step, stop)
            if progress.is_due(settings.log_interval):
                trainer.divergence.check()
            is_saved = progress.evaluated == progress.step
            if progress.is_due(settings.checkpoint_interval) and not is_saved:
                with tracking.paused():  # after the gradient, which save() checks
                    saver.save()
            trainer.update(grad_norm, lr)
            tracking.stepped(progress.step, loss, grad_norm, lr)
            progress.step += 1
        if not progress.is_finished(settings):
            return saver.stopped(stop)
    return print_end(run)


class Trainer:
    """The model, its optimizers and loss scaler on a machine, possibly one of several processes."""

    def __init__(self, config, settings, machine, world=SINGLE_PROCESS):
        """Weights are uninitialized until init_weights() or load_state_dict()."""
        self.settings, self.machine, self.world = settings, machine, world
        self.is_sharded = settings.parallel == "fsdp" and world.is_launched
        self.model = GPT.uninitialized(config, "meta" if self.is_sharded else machine.device)
        use_fast_kernels(self.model)
        if settings.activation_checkpointing:
            recompute_activations(self.model)
        if self.is_sharded:
            shard_model(self.model, world, machine.dtype)
        self.forward = self.model  # see make_forward()
        self.optimizers = make_optimizers(self.model, settings, world)
        enabled = machine.dtype == "float16"
        self.scaler = torch.amp.GradScaler(device_type(machine.device), enabled=enabled)
        self.divergence = DivergenceMonitor()

    def init_weights(self):
        """Draws the weights, the same on every device."""
        torch.manual_seed(self.settings.seed)
        self.model.init_weights(assign)

    def load_state_dict(self, checkpoint):
        """Loads weights, moments and loss scale; the next update sets the hyperparameters."""
        self.world.together(load_weights, self.model, checkpoint)
        self.world.together(restore_optimizers, self.optimizers, checkpoint)
        if checkpoint.scaler:
            self.scaler.load_state_dict(checkpoint.scaler)

    def state_dict(self):
        """Returns references to the state. Tensors are sharded if the model is."""
        return {
            "config": self.model.config,
            "weights": self.model.state_dict(keep_vars=True),  # tied weights are one object
            "optimizers": {name: each.state_dict() for name, each in self.optimizers.items()},
            "scaler": self.scaler.state_dict(),
        }

    def make_forward(self, split, teachers=()):
        """Sets `forward`: the model, compiled if possible, averaging gradients over processes."""
        if teachers:
            self.forward = Distillation(self.model, teachers).to(self.machine.device)
        if self.machine.compile:
            S, starts = self.settings, np.zeros(self.settings.batch_size, np.int64)
            batch = *split.windows(starts, S.block_size), S.train_temperature
            plain, self.forward = self.forward, compile_model(self.forward, self.machine, batch)
            self.world.check_same({"success of the compiler": self.forward is not plain})
        if not self.is_sharded:
            self.forward = replicate(self.forward, self.world)

    def gradient(self, micro_batches, step, stop=process.NEVER):
        """Accumulates the gradient of a step's mean loss. Returns (loss, norm), scalar tensors.

        They are of the whole batch. `stop` learns of signals that other processes have received.
        """
        torch.manual_seed(dropout_seed(self.settings.seed, step, self.world.rank))
        count = self.settings.gradient_accumulation_steps // self.world.size
        total = torch.zeros((), device=self.machine.device)
        for number, (x, y) in enumerate(micro_batches, start=1):
            average_gradients(self.forward, number == count)
            with self.machine.autocast():
                loss = self.forward(x, y, self.settings.train_temperature) / count
            self.scaler.scale(loss).backward()
            total += loss.detach()
        for optimizer in self.optimizers.values():
            self.scaler.unscale_(optimizer)
        norm = full_tensor(torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()]))
        total, stopping = self.world.sum(total, stop.was_received)
        stop.agree_later(read_later(stopping))
        mean_loss = total / self.world.size
        self.divergence.record(step, mean_loss, norm, self.scaler)
        return mean_loss, norm

    def update(self, norm, lr):
        """Clips the gradient, whose norm is given, and updates the weights."""
        if limit := self.settings.grad_clip:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), limit, norm)
        has_graphs = uses_cuda_graphs(self.machine.compile)
        set_to_none = self.is_sharded or not (self.world.is_launched or has_graphs)
        # If found_inf is 1, a step changes nothing. scaler.step() would wait for the GPU.
        found_inf = (~norm.isfinite()).float() if self.scaler.is_enabled() else None
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            optimizer.found_inf = found_inf
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        self.scaler.update()

    def evaluate(self, dataset, step, stop=process.NEVER):
        """Returns the losses of both splits, or None if a stop is requested during the evaluation.

        Keys: "train_loss", in nats per token, and of the validation split "loss", "perplexity" and
        "bits_per_byte". Raises UserError if a loss is not finite.
        """
        shares = [self.split_loss(each, stop) for each in (dataset.train, dataset.val)]
        train, val, stopping = map(float, self.world.sum(*shares, stop.was_received))
        stop.agree(stopping)
        if stop:
            return None
        if not math.isfinite(train + val):
            self.divergence.check()  # an earlier step may be the cause
            raise self.divergence.error(step, f"train loss {train:.3g}, val loss {val:.3g}")
        losses = {"train_loss": train, "loss": val, "perplexity": math.exp(min(val, 700))}
        if size := bytes_per_target(dataset, self.settings):
            losses["bits_per_byte"] = val / math.log(2) / size
        return losses

    @torch.no_grad()
    def split_loss(self, split, stop=process.NEVER):
        """Returns this process's share of the mean loss of the evaluated windows, a scalar tensor.

        Batches are padded with targets that do not count, so that all processes have as many.
        """
        B, T = self.settings.batch_size, self.settings.block_size
        starts = evaluation_starts(split, self.settings)
        rows = torch.arange(B, device=self.machine.device).unsqueeze(1)
        total = torch.zeros((), device=self.machine.device)
        self.model.eval()
        for first in range(0, len(starts), self.world.size * B):
            if stop:
                break
            mine = starts[first + self.world.rank * B :][:B]
            x, y = split.windows(np.resize(mine, B), T)
            y = y.masked_fill(rows >= len(mine), -1)
            with self.machine.autocast():
                loss = self.forward(x, y)
            if len(mine):
                total += loss * len(mine)
        self.model.train()
        return total / len(starts)


if __name__ == "__main__":
    process.run(main, has_threads=True)  # a write that a second Ctrl-C does not wait for
