"""Train a GPT on a dataset prepared by prepare.py.

    python train.py config/shakespeare_char.py
    python train.py config/shakespeare_char.py --learning_rate=3e-4 --out_dir=out-lower-lr
    python train.py config/shakespeare_char.py --init_from=resume --max_iters=8000
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py

This file has, in order: the settings, what a run is made of, the training loop, a step and its
learning rate. Checkpoints and log.jsonl go to out_dir.
"""

import math
from dataclasses import dataclass
from typing import Literal

from folio.cli import process
from folio.cli.settings import load_settings, setting


# setting(default, explanation, bounds); `affects`: what depends on it, by default the results.
@dataclass(frozen=True)
class TrainConfig:
    """Train a GPT on data/<dataset>, which prepare.py creates."""

    out_dir: str = setting("out", "folder of the run", group="Output", affects="files")
    eval_interval: int = setting(2000, "steps between evaluations", "[1, inf)")
    log_interval: int = setting(1, "steps between log lines", "[1, inf)", affects="display")
    eval_iters: int | None = setting(
        None, "batches per evaluation; None: 5% of the time, more at the end", "[1, inf)"
    )
    eval_only: bool = setting(False, "evaluate once and exit; write nothing", affects="files")
    always_save_checkpoint: bool = setting(False, "write ckpt.pt at each evaluation, best or not")
    keep_checkpoints: bool = setting(False, "also keep ckpt-STEP.pt of each", affects="display")
    checkpoint_interval: int | None = setting(
        None, "steps between saves; None: only at evaluations", "[1, inf)", affects="display"
    )
    init_from: str = setting(
        "scratch", "scratch, resume, auto (either), or a file, folder or hub id", affects="files"
    )
    overwrite: bool = setting(False, "delete an earlier run; False: move it", affects="files")
    seed: int = setting(1337, "seed of initial weights, batches and dropout", "[0, inf)")

    sample_interval: int | None = setting(
        None, "steps between samples; None: none", "[1, inf)", group="Monitoring", affects="display"
    )
    wandb_log: bool = setting(False, "log to Weights & Biases", affects="display")
    wandb_project: str = setting("owt", "project name", affects="display")
    wandb_run_name: str = setting("gpt2", "run name", affects="display")

    dataset: str = setting("openwebtext", "name of the folder in data/", group="Data")
    gradient_accumulation_steps: int = setting(40, "micro-batches per step, in total", "[1, inf)")
    batch_size: int = setting(12, "sequences per micro-batch", "[1, inf)")
    block_size: int = setting(1024, "context length in tokens", "[1, inf)")

    n_layer: int = setting(12, "transformer blocks; 0: no attention", "[0, 10000]", group="Model")
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
    ngrams: int = setting(0, "add embeddings of n-grams, n = 2 to this; 0: none", "[0, 10000]")
    ngram_rows: int = setting(32_771, "most rows of a table of n-grams", "[1, inf)")
    smear: int = setting(0, "preceding embeddings added to each embedding", "[0, inf)")
    window: int = setting(0, "tokens that each token attends to; 0: all", "[0, inf)")

    optimizer: Literal["adamw", "muon"] = setting(
        "adamw", "muon: Muon for the blocks' matrices, AdamW for the rest", group="Optimizer"
    )
    learning_rate: float = setting(6e-4, "peak learning rate", "[0, 1e6]")
    max_iters: int = setting(600_000, "optimizer steps", "[1, inf)")
    minutes: float | None = setting(None, "time limit, if max_iters take longer", "(0, 1e6]")
    stop_at: int | None = setting(None, "save and exit at this step", "[1, inf)", affects="files")
    patience: int | None = setting(None, "stop after N evaluations without improvement", "[1, inf)")
    train_temperature: float = setting(
        1.0, "softmax temperature of the training loss; ignored with --teachers", "(0, inf)"
    )
    teachers: str = setting("", "runs for knowledge distillation: folders, separated by commas")
    weight_decay: float = setting(0.1, "weight decay of matrices and embeddings", "[0, inf)")
    beta1: float = setting(0.9, "AdamW beta1", "[0, 1)")
    beta2: float = setting(0.95, "AdamW beta2", "[0, 1)")
    grad_clip: float = setting(1.0, "maximum gradient norm; 0: no clipping", "[0, inf)")
    decay_lr: bool = setting(True, "warmup and decay; False: constant rate")
    lr_decay_start: float | None = setting(
        None, "linear decay from this part of lr_decay_iters on; None: cosine decay", "[0, 1)"
    )
    warmup_iters: int = setting(2000, "steps of linear warmup", "[0, inf)")
    momentum_warmup_iters: int = setting(0, "steps of warmup of Muon's momentum", "[0, inf)")
    lr_decay_iters: int | None = setting(None, "last step of decay; None: max_iters", "[0, inf)")
    min_lr: float | None = setting(None, "final rate; None: learning_rate / 10", "[0, inf)")

    device: str = setting("auto", "auto, cpu, cuda[:N] or mps", group="Machine", affects="machine")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "data type of activations; weights stay float32"
    )
    compile: Literal["auto", "max-autotune"] | bool = setting(
        "auto", "torch.compile; auto: on a GPU, except for short steps", affects="machine"
    )
    parallel: Literal["ddp", "fsdp"] = setting(
        "ddp", "with torchrun: ddp or fsdp, which divides weights and moments", affects="machine"
    )
    activation_checkpointing: bool = setting(False, "less memory, but slower", affects="machine")
    backend: str = setting("nccl", "ignored: nccl on GPUs, gloo on CPUs", affects="machine")

    def __post_init__(self):
        lr, min_lr = self.learning_rate, self.min_lr
        if self.decay_lr and min_lr is not None and min_lr > lr:
            raise ValueError(f"min_lr={min_lr} must not be greater than learning_rate={lr}")

    @property
    def tokens_per_step(self):
        return self.gradient_accumulation_steps * self.batch_size * self.block_size

    @property
    def has_final_evaluation(self):
        """Whether the best model, in ckpt.pt, is evaluated at the end over more text."""
        return not (self.eval_iters or self.always_save_checkpoint)


# Handles --help and reports wrong flags before the slow imports. main() parses again.
process.start(__name__, TrainConfig)

import torch
from torch.nn.parallel import DistributedDataParallel

from folio.data.batches import dropout_seed
from folio.data.dataset import load_dataset
from folio.distributed.world import process_group, replicate, set_gradient_sync, shard_model
from folio.hardware.device import resolve_device
from folio.hardware.optimize import CudaGraph, optimize_for_training
from folio.inference.completion import sample_text
from folio.training.distillation import add_teachers
from folio.training.evaluation import evaluate, format_losses, is_evaluation_due
from folio.training.optimizers import clip_gradients, load_optimizers, make_optimizers, momentum_at
from folio.training.run import Run, lock_run, open_log
from folio.training.setup import MEMORY_ADVICE, choose_machine, choose_model, load_start
from model import GPT


def main(argv=None):
    settings = load_settings(TrainConfig, argv, {"device": resolve_device})
    with process_group(settings.device) as world, lock_run(settings, world):
        run = make_run(world.share_settings(settings), world)
        if settings.eval_only:
            print(format_losses(run.progress.step, evaluate(run, final=True)))
        else:
            train(run)
        del run  # freeing DDP after its process group can wait forever


def make_run(settings, world) -> Run:
    """Returns the Run that the settings describe. Reads files, but writes none.

    Raises UserError, in all processes, if settings, text, checkpoint and machine do not fit.
    """
    print(f"settings: {settings.command_line or 'defaults'}")
    with world.share_errors():
        # The text, as the token ids that prepare.py has written.
        dataset = load_dataset(settings.dataset)
        print(f"dataset: {dataset.summary}")

        # A run to resume, a trained model to start from, or None for random weights.
        checkpoint = load_start(settings)
        resumed = checkpoint if settings.init_from in ("resume", "auto") else None

        # The architecture, which a checkpoint determines: flags that contradict it are errors.
        settings, config = choose_model(settings, dataset, checkpoint)

        # The device, and whether its bfloat16, the compiler or a CUDA graph make steps faster.
        machine = choose_machine(settings, config, world)
        dataset = dataset.to(machine.device)
    inputs = {"the content of the dataset": dataset.fingerprint, "dtype": machine.dtype}
    world.check_same(inputs | {"the checkpoint": checkpoint and checkpoint.progress})

    # Weights are float32 and drawn on the CPU, so that a seed means the same on every machine.
    model = GPT(config)
    start = checkpoint.summary if checkpoint else "random weights"
    if not settings.eval_only:
        start += f"; {settings.max_iters:,} steps of {settings.tokens_per_step:,} tokens"
    processes = f"{world.size} processes ({settings.parallel}), each on " if world.size > 1 else ""
    print(f"model: {model.num_params():,} parameters, from {start}")
    print(f"machine: {processes}{machine.summary}, {machine.peak_summary}", flush=True)
    if checkpoint:
        with world.share_errors():
            checkpoint.load_into(model)
    else:
        torch.manual_seed(settings.seed)
        model.init_weights()
    model.dtype = machine.torch_dtype  # of activations
    if settings.parallel == "fsdp" and world.is_launched:
        shard_model(model, world)  # moves it, too: each process keeps some rows of every weight
    else:
        model.to(machine.device)

    # A resumed run continues with its moments, so that its losses do not show that it stopped.
    optimizers = make_optimizers(model, settings, world)
    scaler = torch.amp.GradScaler(machine.kind, enabled=machine.dtype == "float16")
    with world.share_errors():
        if resumed:
            load_optimizers(optimizers, scaler, resumed)
        # loss_fn(x, y, temperature) is the model, or wraps it; its forward pass returns the loss.
        loss_fn = add_teachers(model, settings, dataset.tokenizer)
    # Changes it in place. The compiler runs here, on the first batch, and not in the first step.
    x, y = dataset.train.batch(settings.seed, 0, settings.batch_size, settings.block_size)
    batch = x, y, settings.train_temperature
    optimize_for_training(loss_fn, batch, machine, world, settings.activation_checkpointing)
    loss_fn = replicate(loss_fn, world)  # with several processes, DDP
    return Run(settings, dataset, machine, world, model, loss_fn, optimizers, scaler, resumed)


def train(run: Run):
    """Trains until the schedule ends, patience is exhausted, stop_at or a stop signal."""
    settings, progress = run.settings, run.progress
    # Here, Ctrl-C raises nothing: is_stopped() becomes true, and the loop saves the state and ends.
    with run.stop_signal, open_log(run) as log:
        while True:
            # The learning rate, evaluations and the end follow schedule_step. It is the step, but
            # with --minutes it can be ahead, and reaches max_iters when the time is over.
            step, schedule_step = progress.step, run.schedule_step()
            lr = learning_rate_at(schedule_step, settings)

            # The state goes to ckpt.pt if it is the best, else to last.pt. Pauses are not steps.
            if is_evaluation_due(run, schedule_step):
                with run.timer.pause():
                    if losses := evaluate(run):  # None after a stop signal
                        run.check_finite(train_loss=losses["train_loss"], val_loss=losses["loss"])
                        is_best = progress.record(losses, schedule_step)
                        log.evaluation(losses, lr)
                        run.save(best=is_best or settings.always_save_checkpoint)
            elif run.is_save_due():  # by checkpoint_interval
                with run.timer.pause():
                    run.save()
            if progress.is_finished(settings):
                break
            if run.is_stopped() or step >= (settings.stop_at or math.inf):
                run.save_and_stop()
                return
            if settings.sample_interval and step % settings.sample_interval == 0:
                print_sample(run, log)

            loss, grad_norm = train_step(run, step, lr)
            if loss is not None:  # no stop signal between two micro-batches
                log.count_step()
                if step % settings.log_interval == 0:
                    loss, grad_norm = float(loss), float(grad_norm)  # waits for the device
                    run.check_step(loss, grad_norm)
                    log.step(loss, grad_norm, lr)
                if message := run.thread_tuner.check():  # fewer if others use the cores
                    log.say(message)
                progress.add_step(settings.tokens_per_step)

        if settings.sample_interval:
            print_sample(run, log)
        if settings.has_final_evaluation:  # over more text, so that the loss is less noisy
            run.load_best_weights()  # possibly those of an earlier step
            losses = evaluate(run, final=True)
            if not losses:  # a stop signal; a resumed run evaluates again
                run.save_and_stop()  # raises Interrupted
            log.final_evaluation(losses)
        log.end()


def print_sample(run: Run, log):
    """Prints a text that the model generates."""
    with run.timer.pause():
        text = sample_text(run.model, run.dataset.tokenizer, run.settings.seed)
        log.say(f"sample at step {run.progress.step}:\n{text}\n")


def micro_batches(run: Run, step):
    """Yields this process's micro-batches of a step: inputs and targets, (B, T) int64 each.

    The micro-batches of a run are numbered, and the seed and the number determine the text of each.
    So a resumed run continues with the right one, and any number of processes trains on the same.
    """
    settings, count = run.settings, run.micro_batches_per_process
    first = (step * run.world.size + run.world.rank) * count
    for number in range(first, first + count):  # a GPU computes one while the next one is read
        B, T = settings.batch_size, settings.block_size
        yield run.dataset.train.batch(settings.seed, number, B, T)


def train_step(run: Run, step, lr):
    """Makes one step. Returns the mean loss of its micro-batches, and the gradient's norm or None.

    Both are scalar tensors and cover all processes. They are not read here, because reading waits
    for a GPU. After a stop signal, the loss is None, and no weight has changed.
    """
    settings, batches = run.settings, micro_batches(run, step)
    if settings.dropout:  # a resumed run drops the same elements
        torch.manual_seed(dropout_seed(settings.seed, step, run.world.rank))
    for name, optimizer in run.optimizers.items():
        for group in optimizer.param_groups:
            group["lr"].fill_(lr * group["lr_scale"])  # a tensor, for CUDA graphs
            if name == "muon":
                group["momentum"] = momentum_at(step, settings)
    if not run.machine.cuda_graph:
        needs_norm = settings.grad_clip or step % settings.log_interval == 0  # it takes time
        return update_weights(run, batches, needs_norm)
    # Launching the kernels of a short step one by one would take longer than running them.
    run.graph = run.graph or CudaGraph(lambda x, y: update_weights(run, [(x, y)]))
    return run.graph(*next(batches))  # the only one; see setup.graph_flops


def update_weights(run: Run, batches, needs_norm=True):
    """Makes one step with the optimizers' learning rates. Returns the same as train_step."""
    settings, scaler, count = run.settings, run.scaler, run.micro_batches_per_process

    # Forward and backward: the gradient of the mean loss. Those of DDP are views of its buffers.
    for optimizer in run.optimizers.values():
        optimizer.zero_grad(set_to_none=not isinstance(run.loss_fn, DistributedDataParallel))
    loss = torch.zeros((), device=run.machine.device)
    for number, (x, y) in enumerate(batches, start=1):
        if number > 1 and run.is_stopped():
            return None, None
        # With several processes, the last backward pass averages the gradients over them.
        set_gradient_sync(run.loss_fn, number == count)
        micro_loss = run.loss_fn(x, y, settings.train_temperature) / count
        scaler.scale(micro_loss).backward()  # the scale is 1, except in float16
        loss += micro_loss.detach()

    # Clip the gradient and update the weights.
    for optimizer in run.optimizers.values():
        scaler.unscale_(optimizer)
    grad_norm = clip_gradients(run.model, settings.grad_clip) if needs_norm else None
    for optimizer in run.optimizers.values():
        scaler.step(optimizer)  # does nothing if a gradient has overflowed in float16
    scaler.update()
    return run.world.sum(loss) / run.world.size, grad_norm


def learning_rate_at(step, settings):
    """Returns the learning rate: linear warmup, then cosine decay to min_lr.

    With lr_decay_start, the rate is constant until then, and the decay is linear (Hägele et al.
    2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations").
    `step` is a float if --minutes ends the run before max_iters; see Run.schedule_step.
    """
    if not settings.decay_lr:
        return settings.learning_rate
    end = settings.max_iters if settings.lr_decay_iters is None else settings.lr_decay_iters
    low = settings.learning_rate / 10 if settings.min_lr is None else settings.min_lr
    if step < settings.warmup_iters:
        return settings.learning_rate * (step + 1) / (settings.warmup_iters + 1)
    if step >= end:
        return low
    start = max(settings.warmup_iters, (settings.lr_decay_start or 0.0) * end)
    fraction = max(0.0, step - start) / (end - start)
    if settings.lr_decay_start is not None:
        return low + (settings.learning_rate - low) * (1 - fraction)
    return low + (settings.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * fraction))


if __name__ == "__main__":
    process.run(main, MEMORY_ADVICE)
