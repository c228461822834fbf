"""Train a GPT on a dataset prepared by prepare.py.

    python train.py config/shakespeare_char.py
    python train.py config/shakespeare_char.py --learning_rate=3e-4 --out_dir=out-lower-lr
    python train.py config/shakespeare_char.py --init_from=resume --max_iters=8000
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py

This file has, in order: the settings, the training loop, and Trainer, which holds the model and the
optimizers. Checkpoints and log.jsonl go to out_dir.
"""

import math
import signal
import time
from dataclasses import dataclass
from typing import Literal

from folio.cli import process
from folio.cli.settings import load_settings, parse_arguments, setting


# setting(default, explanation, bounds); `scope` says what a setting is for (folio/cli/settings.py).
@dataclass(frozen=True)
class TrainConfig:
    """Train a GPT on data/<dataset>, which prepare.py creates."""

    out_dir: str = setting("out", "folder for checkpoints and log", group="Output", scope="files")
    eval_interval: int = setting(2000, "steps between evaluations", "[1, inf)")
    log_interval: int = setting(1, "steps between log lines", "[1, inf)", scope="display")
    eval_iters: int | None = setting(
        None, "batches per evaluation; None: 5% of the time, more at the end", "[1, inf)"
    )
    eval_only: bool = setting(False, "evaluate once and exit; write nothing", scope="files")
    always_save_checkpoint: bool = setting(False, "write ckpt.pt at every evaluation")
    checkpoint_interval: int | None = setting(
        None, "steps between saves; None: only at evaluations", "[1, inf)", scope="display"
    )
    init_from: str = setting(
        "scratch", "scratch, resume, auto (either), or weights: file, folder, hub id", scope="files"
    )
    overwrite: bool = setting(False, "delete an earlier run; False: move it", scope="files")
    seed: int = setting(1337, "seed of initial weights, batches and dropout", "[0, inf)")

    sample_interval: int | None = setting(
        None, "steps between samples; None: none", "[1, inf)", group="Monitoring", scope="display"
    )
    wandb_log: bool = setting(False, "log to Weights & Biases", scope="display")
    wandb_project: str = setting("owt", "project name", scope="display")
    wandb_run_name: str = setting("gpt2", "run name", scope="display")
    tensorboard: bool = setting(False, "log to out_dir/tensorboard", scope="display")

    dataset: str = setting("openwebtext", "name of the folder in data/", group="Data")
    gradient_accumulation_steps: int = setting(
        40, "micro-batches per step, in all processes", "[1, inf)"
    )
    batch_size: int = setting(12, "sequences per micro-batch", "[1, inf)")
    block_size: int = setting(1024, "context length in tokens", "[1, inf)")

    n_layer: int = setting(12, "transformer blocks; 0: no attention", "[0, inf)", group="Model")
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
    minutes: float | None = setting(None, "time budget; makes fewer steps if needed", "(0, 1e6]")
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
        lr, min_lr = self.learning_rate, self.min_lr
        if self.decay_lr and min_lr is not None and min_lr > lr:
            raise ValueError(f"min_lr={min_lr} must not be greater than learning_rate={lr}")

    @property
    def tokens_per_step(self):
        return self.gradient_accumulation_steps * self.batch_size * self.block_size


if __name__ == "__main__":
    # Answers --help and reports wrong flags before the slow imports. main() parses again.
    process.start(parse_arguments, TrainConfig)

import numpy as np
import torch

from folio.checkpoint.format import Progress, load_weights
from folio.checkpoint.saving import Saver
from folio.cli.errors import UserError
from folio.data.batches import (
    Batches,
    bytes_per_target,
    dropout_seed,
    evaluation_iters,
    evaluation_starts,
)
from folio.distributed.sharding import full_tensor, set_gradient_averaging
from folio.distributed.world import SharedFlag, process_group
from folio.hardware.device import device_type, resolve_device, uses_cuda_graphs
from folio.hardware.memory import explain_out_of_memory
from folio.inference.completion import sample_text
from folio.training.budget import TimeBudget, start_budget
from folio.training.optimizers import make_optimizers, restore_optimizers
from folio.training.setup import MEMORY_ADVICE, make_forward, make_model, make_plan
from folio.training.tracking import Tracking, format_losses, print_end, print_finished, print_start


def main(argv=None):
    settings = load_settings(TrainConfig, argv, {"device": resolve_device})
    with (
        process_group(settings.device) as world,
        explain_out_of_memory(world.device, MEMORY_ADVICE),
    ):
        plan = make_plan(settings, world)  # reads and checks the inputs; writes nothing
        print_start(plan)
        trainer = Trainer(plan)
        if settings.eval_only:
            print(format_losses(trainer.progress.step, trainer.evaluate(is_final=True)))
            return
        start_budget(trainer)  # with --minutes
        if trainer.progress.is_finished(settings):
            print_finished(trainer)
        else:
            train(trainer)


def train(trainer):
    """Trains until max_iters, until patience is exhausted, or until a stop is requested."""
    with trainer.stop_signal, Tracking(trainer) as tracking:
        saver = Saver(trainer, tracking)
        try:
            run_steps(trainer, tracking, saver)
            loss = evaluate_best(trainer, tracking)
        except process.StopRequested as request:  # the weights are those of the last step
            saver.save_and_stop(request.signal_number)  # None: at --stop_at
            return
    print_end(trainer, loss)


def run_steps(trainer, tracking, saver):
    """The training loop. Raises StopRequested if it ends before the run is finished."""
    settings, plan, progress = trainer.settings, trainer.plan, trainer.progress
    batches = Batches(plan.dataset.train, settings, plan.world)  # a function of seed and step
    budget = TimeBudget(trainer, tracking)  # of --minutes
    while True:
        step = progress.step
        lr = learning_rate_at(progress.position, settings)

        if progress.is_evaluation_due(settings):
            with tracking.exclude_time():
                losses = trainer.evaluate()
                tracking.log_evaluation(step, losses, lr)
                saver.save_evaluation(losses["loss"])  # records it; writes ckpt.pt or last.pt

        interval = settings.checkpoint_interval
        if interval and step % interval == 0 and saver.saved_step != step:
            with tracking.exclude_time():
                saver.save()  # to last.pt

        is_finished = progress.is_finished(settings)  # all steps are made, or patience exhausted
        if settings.stop_at is not None and step >= settings.stop_at and not is_finished:
            raise process.StopRequested(trainer.stop_signal.number)
        if settings.sample_interval and (is_finished or step % settings.sample_interval == 0):
            with tracking.exclude_time():
                text = sample_text(trainer.model, plan.dataset.tokenizer, settings.seed)
                tracking.say(f"sample at step {step}:\n{text}\n")
        if is_finished:
            return

        budget.adapt()
        loss, grad_norm = trainer.forward_backward(batches.at(step), step)  # or StopRequested
        if step % settings.log_interval == 0:
            trainer.check_step(loss, grad_norm)  # raises UserError if the run diverged
        trainer.clip_and_step(grad_norm, lr)
        progress.advance(settings)
        tracking.log_step(step, loss, grad_norm, lr)


def evaluate_best(trainer, tracking):
    """Returns the validation loss of the best model; without eval_iters, over more text."""
    progress, settings = trainer.progress, trainer.settings
    if settings.eval_iters or settings.always_save_checkpoint:  # which may not keep the best model
        return progress.best_val_loss
    if progress.best_step < progress.step:
        best = trainer.world.call_together(trainer.plan.run_dir.load_best)
        trainer.world.call_together(load_weights, trainer.model, best)
    losses = trainer.evaluate(is_final=True)
    tracking.log_final_evaluation(losses)
    return losses["loss"]


def learning_rate_at(position, settings):
    """Returns the learning rate: linear warmup, then cosine decay to min_lr.

    `position` is the step, unless --minutes makes fewer steps than max_iters; see Progress.
    """
    if not settings.decay_lr:
        return settings.learning_rate
    end = settings.max_iters if settings.lr_decay_iters is None else settings.lr_decay_iters
    low = settings.learning_rate / 10 if settings.min_lr is None else settings.min_lr
    if position < settings.warmup_iters:
        return settings.learning_rate * (position + 1) / (settings.warmup_iters + 1)
    if position >= end:
        return low
    fraction = (position - settings.warmup_iters) / (end - settings.warmup_iters)
    return low + (settings.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * fraction))


class Trainer:
    """A run's model, optimizers, loss scaler and progress, and the methods that update them."""

    def __init__(self, plan):
        """Starts with a new state, or with that of plan.resumed."""
        self.plan, self.settings = plan, plan.settings
        self.world, self.machine = plan.world, plan.machine
        self.model = make_model(plan)
        self.optimizers = make_optimizers(self.model, self.settings, self.world)
        enabled = self.machine.dtype == "float16"
        self.scaler = torch.amp.GradScaler(device_type(self.machine.device), enabled=enabled)
        self.progress = Progress()
        if plan.resumed:
            self.world.call_together(restore_optimizers, self.optimizers, plan.resumed)
            plan.resumed.optimizers = {}  # the optimizers have them
            if plan.resumed.scaler:
                self.scaler.load_state_dict(plan.resumed.scaler)
            self.progress = plan.resumed.progress
        self.forward = make_forward(self.model, plan)  # the model, compiled and distributed
        self.stop_signal = process.StopSignal("stopping after this micro-batch")
        self.stop_flag = SharedFlag(self.world)

    def elapsed_s(self):
        """Returns the seconds that the run has taken, including earlier processes."""
        return round(self.progress.elapsed_s + time.monotonic() - process.STARTED, 3)

    def state_dict(self):
        """Returns references to the state. Tensors are sharded if the model is."""
        return {
            "config": self.model.config,
            "weights": self.model.state_dict(keep_vars=True),  # tied weights are one object
            "optimizers": {name: opt.state_dict() for name, opt in self.optimizers.items()},
            "scaler": self.scaler.state_dict(),
        }

    def loss(self, x, y, temperature=1.0):
        """Returns the mean loss of a micro-batch, a scalar tensor. x, y: (B, T) int64.

        Raises StopRequested if any process has received a stop signal. A run reacts to signals only
        here, so it stops between two micro-batches, with the weights of the last complete step.
        """
        if self.stop_flag.any(bool(self.stop_signal)):
            raise process.StopRequested(self.stop_signal.number or signal.SIGTERM)
        with self.machine.autocast():
            return self.forward(x, y, temperature)

    def forward_backward(self, micro_batches, step):
        """Accumulates the gradient of a step's mean loss over its micro-batches.

        Returns (loss, grad_norm), scalar tensors, of all processes together. The norm takes time,
        so it is None if neither clipping nor the loss scaler nor a log line needs it.
        """
        if self.settings.dropout:
            torch.manual_seed(dropout_seed(self.settings.seed, step, self.world.rank))
        count = self.settings.gradient_accumulation_steps // self.world.size
        total = torch.zeros((), device=self.machine.device)
        for number, (x, y) in enumerate(micro_batches, start=1):
            set_gradient_averaging(self.forward, number == count)  # only in the last micro-batch
            loss = self.loss(x, y, self.settings.train_temperature) / count
            self.scaler.scale(loss).backward()
            total += loss.detach()
        for optimizer in self.optimizers.values():
            self.scaler.unscale_(optimizer)
        grad_norm, is_logged = None, step % self.settings.log_interval == 0
        if self.settings.grad_clip or self.scaler.is_enabled() or is_logged:
            gradients = [parameter.grad for parameter in self.model.parameters()]
            grad_norm = full_tensor(torch.nn.utils.get_total_norm(gradients))
        return self.world.sum(total) / self.world.size, grad_norm

    def check_step(self, loss, grad_norm):
        """Raises UserError if the loss or the norm is not finite. Waits for the device."""
        # While the loss scale can be reduced, an overflow only skips the step.
        can_skip = self.scaler.get_scale() > 1
        if not math.isfinite(loss if can_skip else loss + grad_norm):
            raise self.divergence_error(f"loss {loss:.3g}, gradient norm {grad_norm:.3g}")

    def check_weights(self):
        """Raises UserError if a weight is not finite. Waits for the device."""
        norm = full_tensor(torch.nn.utils.get_total_norm(self.model.state_dict().values()))
        if not math.isfinite(norm):
            raise self.divergence_error(f"norm of the weights {norm:.3g}")

    def divergence_error(self, values):
        """Returns the UserError for a run that diverged; one of `values` is not finite."""
        return UserError(
            f"training diverged at step {self.progress.step} or shortly before: {values}. The last "
            "save is older. Lower --learning_rate, increase --warmup_iters or set --grad_clip=1"
        )

    def clip_and_step(self, grad_norm, lr):
        """Clips the gradient, updates the weights and zeroes the gradient."""
        if self.settings.grad_clip:
            parameters = self.model.parameters()
            torch.nn.utils.clip_grads_with_norm_(parameters, self.settings.grad_clip, grad_norm)
        # In place of scaler.step(), which would wait for the GPU: fused AdamW and Muon change
        # nothing if their found_inf is 1.
        found_inf = (~grad_norm.isfinite()).float() if self.scaler.is_enabled() else None
        # DDP and CUDA graphs keep their gradient tensors.
        has_ddp = self.world.is_launched and not self.plan.is_sharded
        keep = has_ddp or uses_cuda_graphs(self.machine.compile)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            optimizer.found_inf = found_inf
            optimizer.step()
            optimizer.zero_grad(set_to_none=not keep)
        self.scaler.update()

    def evaluate(self, is_final=False):
        """Returns the losses of both splits; see evaluation_iters.

        Keys: "train_loss", in nats per token, and of the validation split "loss", "perplexity" and
        "bits_per_byte". Raises UserError if a loss is not finite.
        """
        dataset = self.plan.dataset
        train_iters, val_iters = evaluation_iters(self.settings, is_final)
        train_loss = self.split_loss(dataset.train, train_iters)
        loss = self.split_loss(dataset.val, val_iters)
        train_loss, loss = float(train_loss), float(loss)  # waits for a GPU only once
        if not math.isfinite(train_loss + loss):
            raise self.divergence_error(f"train loss {train_loss:.3g}, val loss {loss:.3g}")
        losses = {"train_loss": train_loss, "loss": loss, "perplexity": math.exp(min(loss, 700))}
        if target_bytes := bytes_per_target(dataset, self.settings, val_iters):
            losses["bits_per_byte"] = loss / math.log(2) / target_bytes
        return losses

    @torch.no_grad()
    def split_loss(self, split, iters):
        """Returns the mean loss over at most `iters` batches of a split, a scalar tensor.

        The processes of a run share the windows. All compute the same number of batches, so the
        last ones are filled with repeated windows, whose targets are ignored.
        """
        B, T = self.settings.batch_size, self.settings.block_size
        starts = evaluation_starts(split, self.settings, iters)
        rows = torch.arange(B, device=self.machine.device).unsqueeze(1)
        total = torch.zeros((), device=self.machine.device)
        self.model.eval()
        for first in range(0, len(starts), self.world.size * B):
            own_starts = starts[first + self.world.rank * B :][:B]
            x, y = split.windows(np.resize(own_starts, B), T)  # repeats them up to B
            loss = self.loss(x, y.masked_fill(rows >= len(own_starts), -1))
            if len(own_starts):
                total += loss * len(own_starts)
        self.model.train()
        return self.world.sum(total) / len(starts)


if __name__ == "__main__":
    process.run(main)
