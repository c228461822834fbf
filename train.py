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


# setting(default, explanation, bounds); `affects` says what depends on it (folio/cli/settings.py).
@dataclass(frozen=True)
class TrainConfig:
    """Train a GPT on data/<dataset>, which prepare.py creates."""

    out_dir: str = setting("out", "folder for checkpoints and log", group="Output", affects="files")
    eval_interval: int = setting(2000, "steps between evaluations", "[1, inf)")
    log_interval: int = setting(1, "steps between log lines", "[1, inf)", affects="display")
    eval_iters: int | None = setting(None, "batches per evaluation; None: 5% of time", "[1, inf)")
    eval_only: bool = setting(False, "evaluate once and exit; write nothing", affects="files")
    always_save_checkpoint: bool = setting(False, "write ckpt.pt at every evaluation")
    keep_checkpoints: bool = setting(
        False, "keep each evaluation's ckpt-STEP.pt", affects="display"
    )
    checkpoint_interval: int | None = setting(
        None, "steps between saves; None: only at evaluations", "[1, inf)", affects="display"
    )
    init_from: str = setting(
        "scratch",
        "scratch, resume, auto (either), or weights: file, folder, hub id",
        affects="files",
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
    ngrams: int = setting(0, "add embeddings of n-grams, n = 2 to this; 0: none", "[0, inf)")
    ngram_rows: int = setting(32_771, "most rows of a table of n-grams", "[1, inf)")
    smear: int = setting(0, "preceding embeddings added to each embedding", "[0, inf)")
    window: int = setting(0, "tokens that each token attends to; 0: all", "[0, inf)")

    optimizer: Literal["adamw", "muon"] = setting(
        "adamw", "muon: Muon for the blocks' matrices, AdamW for the rest", group="Optimizer"
    )
    learning_rate: float = setting(6e-4, "peak learning rate", "[0, inf)")
    max_iters: int = setting(600_000, "optimizer steps", "[1, inf)")
    minutes: float | None = setting(None, "time limit, if max_iters take longer", "(0, 1e6]")
    stop_at: int | None = setting(None, "save and exit at this step", "[1, inf)", affects="files")
    patience: int | None = setting(None, "stop after N evaluations without improvement", "[1, inf)")
    train_temperature: float = setting(
        1.0, "divides the logits in training, except with teachers", "(0, inf)"
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


# Answers --help and reports wrong flags before the slow imports. main() parses again.
process.start(__name__, TrainConfig)

import torch

from folio.checkpoint.format import empty_model, load_weights
from folio.data.batches import Batches, dropout_seed
from folio.distributed.sharding import (
    assign,
    clip_gradients,
    replicate,
    set_gradient_sync,
    shard_model,
    unshard,
)
from folio.distributed.world import process_group
from folio.hardware.compile import CudaGraph, compile_model, run_compiler
from folio.hardware.device import DTYPES, SharedCores, device_type, resolve_device
from folio.hardware.kernels import use_fast_kernels
from folio.hardware.memory import keep_freed_memory, recompute_activations
from folio.inference.completion import sample_text
from folio.training.distillation import Distillation
from folio.training.evaluation import evaluate, is_evaluation_due
from folio.training.messages import format_losses, print_end, print_finished, print_start
from folio.training.muon import momentum_at
from folio.training.optimizers import make_optimizers, restore_optimizers
from folio.training.run import Run, open_log
from folio.training.setup import make_plan


def main(argv=None):
    settings = load_settings(TrainConfig, argv, {"device": resolve_device})
    with process_group(settings.device) as world:
        plan = make_plan(settings, world)  # reads and checks the inputs; writes nothing
        print_start(plan)
        run = make_run(plan)
        if settings.eval_only:
            # over as much text as a final evaluation
            print(format_losses(run.progress.step, evaluate(run, settings.max_iters)))
        elif run.world.from_main(run.run_dir.is_complete(run.progress, settings)):
            print_finished(run)
        else:
            train(run)
        del run  # freeing DDP after its process group can wait forever


def make_run(plan):
    """Returns a Run with what a Plan describes: a model, new or loaded, and how to train it."""
    settings, world, machine = plan.settings, plan.world, plan.machine
    keep_freed_memory()
    model = empty_model(plan.config, "meta" if plan.is_sharded else machine.device)
    model.dtype = DTYPES[machine.dtype]  # of activations; weights are float32
    # With FSDP, those for a GPU would keep products of weights that are not sharded.
    use_fast_kernels(model, not plan.is_sharded and device_type(machine.device) == "cuda")
    if plan.is_sharded:
        shard_model(model, world, machine.dtype)
    if start := plan.resumed or plan.initial:
        world.call_together(load_weights, model, start)
        start.weights = {}  # the model has them
    else:
        torch.manual_seed(settings.seed)
        model.init_weights(assign)

    optimizers = make_optimizers(model, settings, world)
    scaler = torch.amp.GradScaler(device_type(machine.device), enabled=machine.dtype == "float16")
    if plan.resumed:
        world.call_together(restore_optimizers, optimizers, plan.resumed)
        plan.resumed.optimizers = {}  # the optimizers have them
        if plan.resumed.scaler:
            scaler.load_state_dict(plan.resumed.scaler)

    forward = model  # forward(x, y, temperature) returns the loss
    if plan.teachers:
        forward = Distillation(model, [t.to(machine.device, model.dtype) for t in plan.teachers])
    is_compiled = machine.compile and compile_model(forward, machine)
    if settings.activation_checkpointing:
        recompute_activations(model)
    if machine.compile:
        x, y = next(Batches(plan.dataset.train, settings, world).at(0))
        batch = x, y, settings.train_temperature
        is_compiled = is_compiled and run_compiler(forward, model, batch)
        if not all(world.gather(is_compiled)):  # it can fail on one machine only
            torch.compiler.set_stance("force_eager")
    if not plan.is_sharded:
        forward = replicate(forward, world)  # with several processes, DDP
    return Run(plan, model, optimizers, scaler, forward)


def train(run):
    """Trains until the clock reaches max_iters, patience is exhausted, stop_at or a stop signal."""
    settings, progress = run.settings, run.progress
    batches = Batches(run.dataset.train, settings, run.world)  # a function of the seed and the step
    cores = SharedCores(run.machine)  # fewer threads while other programs use the cores
    with run.stop_signal, open_log(run) as log:  # in it, Ctrl-C only sets run.is_stopped()
        while True:
            step, clock = progress.step, run.clock()  # equal, unless --minutes ends the run early
            lr = learning_rate_at(clock, settings)

            # Between two steps: evaluate, save, stop, sample, end. Pauses are not training time.
            if is_evaluation_due(run, clock):
                with run.timer.pause():
                    if losses := evaluate(run):  # None after a stop signal
                        run.check_finite(train_loss=losses["train_loss"], val_loss=losses["loss"])
                        is_best = progress.record(losses, clock)
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

            loss, grad_norm = train_step(run, batches.at(step), step, lr)
            if loss is not None:  # no stop signal between two micro-batches
                log.count_step()
                if step % settings.log_interval == 0:
                    loss, grad_norm = float(loss), float(grad_norm)  # waits for the device
                    run.check_step(loss, grad_norm)
                    log.step(loss, grad_norm, lr)
                if message := cores.check():
                    log.say(message)
                progress.add_step(settings.tokens_per_step)

        if settings.sample_interval:
            print_sample(run, log)
        loss = progress.best_val_loss
        if settings.has_final_evaluation:
            run.load_best_weights()
            losses = evaluate(run, step)  # over more text
            if not losses:  # a stop signal; a resumed run evaluates again
                run.save_and_stop()
                return
            log.final_evaluation(losses)
            loss = losses["loss"]
    print_end(run, loss)


def print_sample(run, log):
    """Prints a text that the model generates."""
    with run.timer.pause(), unshard(run.model):
        text = sample_text(run.model, run.dataset.tokenizer, run.settings.seed)
        log.say(f"sample at step {run.progress.step}:\n{text}\n")


def train_step(run, micro_batches, step, lr):
    """Makes one step. Returns the mean loss of its micro-batches, and the gradient's norm or None.

    Both are scalar tensors and cover all processes. They are not read here, because reading waits
    for a GPU. After a stop signal, the loss is None, and no weight has changed.
    """
    settings = run.settings
    if settings.dropout:
        torch.manual_seed(dropout_seed(settings.seed, step, run.world.rank))
    for name, optimizer in run.optimizers.items():
        for group in optimizer.param_groups:
            group["lr"].fill_(lr * group["lr_scale"])  # a tensor, for CUDA graphs
            if name == "muon":
                group["momentum"] = momentum_at(step, settings)
    if not run.machine.cuda_graph:
        needs_norm = settings.grad_clip or step % settings.log_interval == 0  # it takes time
        return update_weights(run, micro_batches, needs_norm)
    run.graph = run.graph or CudaGraph(lambda x, y: update_weights(run, [(x, y)]))
    return run.graph(*next(iter(micro_batches)))


def update_weights(run, micro_batches, needs_norm=True):
    """Makes one step with the optimizers' learning rates. Returns the same as train_step."""
    settings, scaler = run.settings, run.scaler
    count = settings.gradient_accumulation_steps // run.world.size  # micro-batches of this process

    # Forward and backward: the gradient of the mean loss.
    run.model.zero_grad(set_to_none=run.can_free_gradients)
    loss = torch.zeros((), device=run.machine.device)
    for number, (x, y) in enumerate(micro_batches, start=1):
        if number > 1 and run.is_stopped():
            return None, None
        # With several processes, the last backward pass averages the gradients over them.
        set_gradient_sync(run.forward, number == count)
        micro_loss = run.forward(x, y, settings.train_temperature) / count
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


def learning_rate_at(clock, settings):
    """Returns the learning rate: linear warmup, then cosine decay to min_lr.

    With lr_decay_start, the rate is constant until then, and the decay is linear (Hägele et al.
    2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations").
    `clock` is the step, unless --minutes ends the run before max_iters; see Run.clock.
    """
    if not settings.decay_lr:
        return settings.learning_rate
    end = settings.max_iters if settings.lr_decay_iters is None else settings.lr_decay_iters
    low = settings.learning_rate / 10 if settings.min_lr is None else settings.min_lr
    if clock < settings.warmup_iters:
        return settings.learning_rate * (clock + 1) / (settings.warmup_iters + 1)
    if clock >= end:
        return low
    start = max(settings.warmup_iters, (settings.lr_decay_start or 0.0) * end)
    fraction = max(0.0, clock - start) / (end - start)
    if settings.lr_decay_start is not None:
        return low + (settings.learning_rate - low) * (1 - fraction)
    return low + (settings.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * fraction))


MEMORY_ADVICE = (
    "halve --batch_size and double --gradient_accumulation_steps for the same tokens per step, use "
    "--activation_checkpointing=True, or decrease --block_size, --n_layer or --n_embd"
)

if __name__ == "__main__":
    process.run(main, MEMORY_ADVICE)
