"""What a run needs before its first step: its plan, read and checked, and the model to train.

`make_plan` reads the dataset and the checkpoints, and checks that they fit the settings and the
machine. It writes nothing. train.py builds what the plan describes.
"""

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any

from folio.checkpoint.format import Checkpoint, empty_model
from folio.checkpoint.run_dir import RunDir
from folio.cli.errors import UserError, foreign_errors
from folio.cli.settings import changed_settings
from folio.data.batches import to_device
from folio.data.dataset import Dataset, load_dataset
from folio.distributed.world import SINGLE_PROCESS, World
from folio.hardware.device import Machine, choose_machine
from folio.hardware.memory import memory_bytes
from folio.pretrained.load import checkpoint_tokenizer, crop, load_start
from folio.training.distillation import load_teachers
from model import GPTConfig

# A checkpoint determines these settings. Dropout may differ, and vocab_size is not a setting.
MODEL_SETTINGS = {field.name for field in dataclasses.fields(GPTConfig)} - {"vocab_size", "dropout"}


@dataclass
class Plan:
    """What a run does."""

    settings: Any  # a TrainConfig, with device, dtype, compile and parallel resolved
    config: GPTConfig
    dataset: Dataset  # whose train and val are Splits on the machine's device
    machine: Machine
    run_dir: RunDir
    world: World = SINGLE_PROCESS
    resumed: Checkpoint | None = None  # the run continues this one
    initial: Checkpoint | None = None  # or starts with the weights of this one
    teachers: list = dataclasses.field(default_factory=list)  # GPTs, for distillation
    arguments: list = dataclasses.field(default_factory=list)  # of parse_arguments

    @property
    def is_sharded(self):
        return self.settings.parallel == "fsdp"


def make_plan(settings, world=SINGLE_PROCESS):
    """Returns the Plan of a run. Reads files, but writes none.

    Raises UserError, in all processes, if the settings, the dataset, the checkpoints and the
    machine do not fit together.
    """
    plan = world.call_together(_make_plan, settings, world)
    plan.arguments = settings.parsed_arguments
    values = dataclasses.asdict(plan.settings)
    del values["wandb_run_name"]  # only rank 0 uses it; nanoGPT's contains the time
    values["content of the dataset"] = plan.dataset.fingerprint
    values["checkpoint"] = plan.resumed and plan.resumed.progress
    world.check_same(values)
    return plan


def _make_plan(settings, world):
    run_dir = RunDir(settings.out_dir)
    dataset = load_dataset(settings.dataset)
    resumed, initial = load_start(settings.init_from, run_dir)
    settings, config = plan_model(settings, dataset, resumed, initial)
    device, step_flops = world.device or settings.device, graph_flops(config, settings, world)
    machine = choose_machine(device, settings.dtype, settings.compile, step_flops)
    parallel = settings.parallel if world.is_launched else "ddp"  # fsdp shards over processes
    resolved = {"dtype": machine.dtype, "compile": machine.compile, "parallel": parallel}
    settings = dataclasses.replace(settings, **resolved)
    check_parallel(settings, world.size)
    dataset.check_length(config.block_size)
    check_memory(config, settings)
    if initial:
        crop(initial, config.block_size)
    teachers = load_teachers(settings, config, dataset.tokenizer)
    dataset = to_device(dataset, machine.device)
    return Plan(settings, config, dataset, machine, run_dir, world, resumed, initial, teachers)


# Model


def plan_model(settings, dataset, resumed=None, initial=None):
    """Returns (settings, GPTConfig) of a run that resumes or starts from a Checkpoint, or neither.

    The model is the checkpoint's, except for settings that were given. When resuming, other
    settings may change, such as dropout, learning rates, intervals, batch size and machine.
    Raises a UserError that names every difference in model, tokenizer, optimizer or data.
    """
    checkpoint = resumed or initial
    if checkpoint:
        names = MODEL_SETTINGS - changed_settings(settings).keys()
        values = {name: getattr(checkpoint.config, name) for name in names}
        settings = dataclasses.replace(settings, **values)
    config = model_config(settings, dataset.tokenizer, checkpoint)
    if not checkpoint:
        return settings, config
    if resumed:
        free = {"dropout"}
        advice = "resume with the run's own settings, or start a new run in another --out_dir"
    else:
        free, old_size = {"dropout", "optimizer", "dataset"}, initial.config.block_size
        tokenizer = initial.path if initial.path.exists() else "gpt2"  # of models on the hub
        advice = f"use the checkpoint's values, and prepare the text with --tokenizer={tokenizer}"
        if config.position == "rotary" or config.block_size <= old_size:
            free.add("block_size")
        else:
            advice = f"learned positions cannot grow (rotary ones can): {advice}"
    if differences := _differences(checkpoint, config, settings, dataset, free):
        text = "; ".join(differences)
        raise UserError(f"{checkpoint.path} does not match the settings: {text}; {advice}")
    return settings, config


def model_config(settings, tokenizer, checkpoint=None):
    """Returns the GPTConfig for the settings and the tokenizer's vocabulary."""
    names = MODEL_SETTINGS | {"dropout"}
    vocab_size = tokenizer.padded_vocab_size
    if checkpoint and tokenizer.fits(checkpoint.config.vocab_size):
        vocab_size = checkpoint.config.vocab_size
    with foreign_errors("the settings describe no model", ValueError):
        return GPTConfig(vocab_size=vocab_size, **{name: getattr(settings, name) for name in names})


def _differences(checkpoint, config, settings, dataset, free):
    """Returns the differences from a checkpoint as texts, except in the `free` settings."""
    saved = {"optimizer": "adamw", "dataset": settings.dataset} | checkpoint.settings  # nanoGPT's
    old = dataclasses.asdict(checkpoint.config) | {"optimizer": saved["optimizer"]}
    new = dataclasses.asdict(config) | {"optimizer": settings.optimizer}
    differences = [
        f"{name} is {old[name]} in the checkpoint and {new[name]} in the settings"
        for name in new
        if new[name] != old[name] and name not in free
    ]
    if checkpoint.tokenizer not in (None, dataset.tokenizer.to_dict()):
        old, new = checkpoint_tokenizer(checkpoint).name, dataset.tokenizer.name
        new = f"another {new}" if new == old else new
        differences.append(f"the tokenizer is {old} in the checkpoint and {new} in the dataset")
    old, new = saved["dataset"], settings.dataset
    has_changed = checkpoint.data != dataset.fingerprint if checkpoint.data else old != new
    if has_changed and "dataset" not in free:
        differences.append(f"dataset {new} has other content than {old} of the checkpoint")
    return differences


@cache
def model_shape(config):
    """Returns a GPT without values, on the meta device, whose sizes can be counted."""
    return empty_model(config, "meta")


# Machine


def graph_flops(config, settings, world):
    """Returns the FLOPs of a step if it can be a CUDA graph, else None.

    It cannot be one with several processes (they communicate), several micro-batches (a run can
    stop between them), activation checkpointing (it reads the state of the random generator) or a
    momentum that changes (it is a Python number).
    """
    is_single = settings.gradient_accumulation_steps == 1 and not world.is_launched
    if not is_single or settings.activation_checkpointing or settings.momentum_warmup_iters:
        return None
    return model_shape(config).flops_per_token() * settings.tokens_per_step


def check_parallel(settings, size):
    """Raises UserError if `size` processes cannot share the work of a step equally."""
    count = settings.gradient_accumulation_steps
    if count % size:
        raise UserError(
            f"gradient_accumulation_steps={count} cannot be divided by {size} processes: use "
            f"--gradient_accumulation_steps={-(-count // size) * size}"
        )
    if settings.parallel == "fsdp" and settings.dtype == "float16":
        raise UserError("parallel=fsdp has no float16: use bfloat16, float32 or --parallel=ddp")


def check_memory(config, settings):
    """Raises UserError if weights, gradients and moments exceed the memory of one device.

    AdamW has two moments per parameter, Muon one. Activations are not counted.
    """
    available = memory_bytes(settings.device)
    if not available or settings.eval_only or settings.parallel == "fsdp":
        return
    values = 3 if settings.optimizer == "muon" else 4
    needed = 4 * values * model_shape(config).num_params()
    if needed > available:
        raise UserError(
            f"the model needs more than {needed / 2**30:,.1f} GiB of memory, but {settings.device} "
            f"has {available / 2**30:,.1f} GiB: decrease --n_layer or --n_embd"
        )
