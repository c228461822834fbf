"""Checks of a run's inputs: that settings, text, checkpoint and machine fit. They write nothing."""

import dataclasses

from folio.checkpoint.format import Checkpoint, empty_model
from folio.checkpoint.run_dir import RunDir
from folio.cli.errors import UserError, as_user_error
from folio.cli.settings import changed_settings
from folio.data.dataset import Dataset
from folio.data.tokenizer import Tokenizer
from folio.distributed.world import World
from folio.hardware.device import Machine, set_up_machine
from folio.hardware.memory import memory_bytes
from folio.pretrained.load import RESUME_NAMES, checkpoint_tokenizer, load_initial
from model import GPTConfig

# A checkpoint determines these settings. Dropout may differ, and vocab_size is not a setting.
MODEL_SETTINGS = {field.name for field in dataclasses.fields(GPTConfig)} - {"vocab_size", "dropout"}
MEMORY_ADVICE = (
    "halve --batch_size and double --gradient_accumulation_steps for the same tokens per step, use "
    "--activation_checkpointing=True, or decrease --block_size, --n_layer or --n_embd"
)


def load_start(settings) -> Checkpoint | None:
    """Returns the Checkpoint that a run continues or starts from; None for random weights."""
    checkpoint = None
    if settings.init_from in RESUME_NAMES:
        is_required = settings.init_from == "resume"
        checkpoint = RunDir(settings.out_dir).load_newest(is_required)
    elif settings.init_from != "scratch":
        checkpoint = load_initial(settings.init_from)
    if settings.eval_only and not checkpoint:
        print("random weights are evaluated; for a trained model, add --init_from=resume")
    return checkpoint


def choose_model(settings, dataset: Dataset, checkpoint: Checkpoint | None = None):
    """Returns (settings, GPTConfig) of a run that starts from a Checkpoint or from random weights.

    The model is the checkpoint's, except for settings that were given. When resuming, other
    settings may change, such as dropout, learning rates, intervals, batch size and machine.
    Learned positions of the checkpoint are cropped. Raises a UserError that names every difference
    in model, tokenizer, optimizer or data, or if the text is too short.
    """
    if checkpoint:
        names = MODEL_SETTINGS - changed_settings(settings).keys()
        values = {name: getattr(checkpoint.config, name) for name in names}
        settings = dataclasses.replace(settings, **values)
    config = model_config(settings, dataset.tokenizer, checkpoint)
    if checkpoint:
        _check_checkpoint(checkpoint, config, settings, dataset)
        if config.position == "learned":  # a view would be saved with all its storage
            rows = checkpoint.weights["transformer.wpe.weight"][: config.block_size]
            checkpoint.weights["transformer.wpe.weight"] = rows.clone()
    dataset.check_length(config.block_size)
    return settings, config


def _check_checkpoint(checkpoint, config, settings, dataset):
    """Raises UserError if a run cannot continue or start from a checkpoint."""
    if settings.init_from in RESUME_NAMES:
        free = {"dropout"}
        advice = "resume with the run's own settings, or start a new run in a different --out_dir"
    else:
        free, old_size = {"dropout", "optimizer", "dataset"}, checkpoint.config.block_size
        tokenizer = checkpoint.path if checkpoint.path.exists() else "gpt2"  # of the hub's models
        advice = f"use the checkpoint's values, and prepare the text with --tokenizer={tokenizer}"
        if config.position == "rotary" or config.block_size <= old_size:
            free.add("block_size")
        else:
            advice = f"learned positions cannot grow (rotary ones can): {advice}"
    if differences := _differences(checkpoint, config, settings, dataset, free):
        text = "; ".join(differences)
        raise UserError(f"{checkpoint.path} does not match the settings: {text}; {advice}")


def model_config(settings, tokenizer: Tokenizer, checkpoint=None) -> GPTConfig:
    """Returns the GPTConfig for the settings and the tokenizer's vocabulary."""
    names = MODEL_SETTINGS | {"dropout"}
    vocab_size = tokenizer.padded_vocab_size
    if checkpoint and tokenizer.fits(checkpoint.config.vocab_size):
        vocab_size = checkpoint.config.vocab_size
    with as_user_error("the settings do not describe a valid model", ValueError):
        return GPTConfig(vocab_size=vocab_size, **{name: getattr(settings, name) for name in names})


def _differences(checkpoint, config, settings, dataset, free):
    """Returns the differences from a checkpoint as texts, except in the `free` settings."""
    saved = {"optimizer": "adamw", "dataset": settings.dataset} | checkpoint.settings  # nanoGPT's
    old_values = dataclasses.asdict(checkpoint.config) | {"optimizer": saved["optimizer"]}
    values = dataclasses.asdict(config) | {"optimizer": settings.optimizer}
    differences = [
        f"{name} is {old_values[name]} in the checkpoint and {values[name]} in the settings"
        for name in values
        if values[name] != old_values[name] and name not in free
    ]
    if checkpoint.tokenizer not in (None, dataset.tokenizer.to_dict()):
        old, new = checkpoint_tokenizer(checkpoint).name, dataset.tokenizer.name
        new = f"a different {new}" if new == old else new
        differences.append(f"the tokenizer is {old} in the checkpoint and {new} in the dataset")
    old, new = saved["dataset"], settings.dataset
    has_changed = checkpoint.data != dataset.fingerprint if checkpoint.data else old != new
    if has_changed and "dataset" not in free:
        differences.append(f"dataset {new} has different content from {old} of the checkpoint")
    return differences


def choose_machine(settings, config: GPTConfig, world: World) -> Machine:
    """Returns the Machine of a run. Raises UserError if the model or its steps do not fit it."""
    shape = empty_model(config, "meta")  # without values
    device, step_flops = world.device or settings.device, graph_flops(shape, settings, world)
    machine = set_up_machine(device, settings.dtype, settings.compile, step_flops)
    check_parallel(settings, machine, world)
    check_memory(shape, settings, machine, world)
    return machine


def graph_flops(model, settings, world):
    """Returns the FLOPs of a step if it can be a CUDA graph, else None.

    It cannot be one with several processes (they communicate), several micro-batches (a run can
    stop between them), activation checkpointing (it reads the state of the random generator) or a
    momentum that changes (it is a Python number).
    """
    is_single = settings.gradient_accumulation_steps == 1 and not world.is_launched
    if not is_single or settings.activation_checkpointing or settings.momentum_warmup_iters:
        return None
    return model.flops_per_token() * settings.tokens_per_step


def check_parallel(settings, machine: Machine, world: World):
    """Raises UserError if the processes cannot share the work of a step equally."""
    count, size = settings.gradient_accumulation_steps, world.size
    if count % size:
        name, new = "gradient_accumulation_steps", -(-count // size) * size
        raise UserError(f"{name}={count} cannot be divided by {size} processes: use --{name}={new}")
    if settings.parallel == "fsdp" and world.is_launched and machine.dtype == "float16":
        raise UserError("parallel=fsdp has no float16: use bfloat16, float32 or --parallel=ddp")


def check_memory(model, settings, machine: Machine, world):
    """Raises UserError if the least that steps need exceeds the memory of one device."""
    available = memory_bytes(machine.device)
    is_sharded = settings.parallel == "fsdp" and world.is_launched
    if not available or settings.eval_only or is_sharded:
        return
    config, tokens = model.config, settings.batch_size * settings.block_size
    # At least the input of a block, query, key, value, result of attention and 4 C hidden values.
    per_block = config.n_embd * (1 if settings.activation_checkpointing else 9)
    values = tokens * (config.vocab_size + config.n_layer * per_block)
    activations, weights = values * machine.torch_dtype.itemsize, 4 * model.num_params()
    copies = 2 if settings.optimizer == "muon" else 3  # with one moment; AdamW has two
    needed = copies * weights + max(weights, activations)  # which gradients replace
    if needed > available:
        advice = MEMORY_ADVICE if activations > weights else "decrease --n_layer or --n_embd"
        least, most = (f"{size / 2**30:,.1f} GiB" for size in (needed, available))
        cause = f"the model needs more than {least} of memory, but {machine.device} has {most}"
        raise UserError(f"{cause}: {advice}")
