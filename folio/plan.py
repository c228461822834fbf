"""What a run trains: the model's configuration, and whether it can start from a checkpoint."""

import dataclasses

from folio import tokenizers
from folio.device import resolve_dtype, uses_cuda_graphs
from folio.errors import UserError
from folio.settings import changed
from model import GPTConfig

# A checkpoint determines these settings; dropout is free, and vocab_size is not a setting.
MODEL_SETTINGS = {field.name for field in dataclasses.fields(GPTConfig)} - {"vocab_size", "dropout"}


def plan_model(settings, dataset, resumed=None, initial=None):
    """Returns (settings, GPTConfig) of a run that resumes or starts from a Checkpoint, or neither.

    Raises UserError if the settings do not fit the checkpoint.
    """
    settings = with_model_of(resumed or initial, settings)
    config = model_config(settings, dataset.tokenizer, resumed or initial)
    if resumed:
        check_resumable(resumed, config, settings, dataset)
    elif initial:
        check_initial(initial, config, dataset)
    return settings, config


def check_parallel(settings, size):
    """Raises UserError if `size` processes cannot share the work of a step equally."""
    count, batch_size = settings.gradient_accumulation_steps, settings.batch_size
    if count % size:
        near = sorted({max(count // size, 1) * size, (count // size + 1) * size})
        advice = " or ".join(f"--gradient_accumulation_steps={each}" for each in near)
        if size > count and not count * batch_size % size:
            smaller = count * batch_size // size
            advice += f" (with --batch_size={smaller} for the same tokens per step)"
        raise UserError(
            f"gradient_accumulation_steps={count} cannot be divided by {size} processes: "
            f"use {advice}"
        )
    if settings.parallel == "fsdp" and uses_cuda_graphs(settings.compile):
        raise UserError("parallel=fsdp has no CUDA graphs: use --compile=True or --parallel=ddp")
    dtype = resolve_dtype(settings.dtype, settings.device)
    if settings.parallel == "fsdp" and dtype == "float16" and size > 1:
        raise UserError("parallel=fsdp has no float16: use bfloat16, float32 or --parallel=ddp")


def with_model_of(checkpoint, settings):
    """Returns the settings, with a checkpoint's model where they have their default values.

    `checkpoint` may be None.
    """
    if not checkpoint:
        return settings
    names = MODEL_SETTINGS - changed(settings).keys()
    return dataclasses.replace(settings, **{n: getattr(checkpoint.config, n) for n in names})


def model_config(settings, tokenizer, checkpoint=None):
    """Returns the GPTConfig for the settings and the tokenizer's vocabulary."""
    names = MODEL_SETTINGS | {"dropout"}
    vocab_size = tokenizer.padded_vocab_size
    if checkpoint and tokenizers.fits(tokenizer, checkpoint.config.vocab_size):
        vocab_size = checkpoint.config.vocab_size
    try:
        return GPTConfig(vocab_size=vocab_size, **{name: getattr(settings, name) for name in names})
    except ValueError as error:
        raise UserError(str(error)) from error


def check_initial(checkpoint, config, dataset):
    """Raises a UserError that names every difference in model and tokenizer from a checkpoint.

    Learned positions can be fewer than the checkpoint's, rotary positions also more.
    """
    free = {"dropout"}
    if config.position == "rotary" or config.block_size < checkpoint.config.block_size:
        free.add("block_size")
    wrong = _differences(checkpoint, config, dataset, free)
    if wrong:
        raise UserError(
            f"{checkpoint.path} cannot be trained further: {'; '.join(wrong)}; omit the model's "
            f"settings, and prepare the text with --tokenizer={checkpoint.path}"
        )


def check_resumable(checkpoint, config, settings, dataset):
    """Raises a UserError that names every difference in model, optimizer, tokenizer or data.

    Other settings may change, such as dropout, learning rates, intervals, batch size and machine.

    Args:
        config: the GPTConfig that the settings describe.
        settings: a TrainConfig.
    """
    wrong = _differences(checkpoint, config, dataset, {"dropout"})
    before = checkpoint.settings.get("optimizer", "adamw")  # nanoGPT has no other
    if before != settings.optimizer:
        now = settings.optimizer
        wrong.append(f"optimizer is {before} in the checkpoint and {now} in the settings")
    name, now = checkpoint.settings.get("dataset", settings.dataset), settings.dataset
    same_content = checkpoint.data == dataset.fingerprint if checkpoint.data else name == now
    if not same_content and name == now:
        wrong.append(f"the content of dataset {name} has changed")
    elif not same_content:
        wrong.append(f"dataset is {name} in the checkpoint and {now} in the settings")
    if wrong:
        raise UserError(
            f"{checkpoint.path} does not match the settings: {'; '.join(wrong)}; resume with the "
            "run's own settings, or start a new run in another --out_dir"
        )


def _differences(checkpoint, config, dataset, free):
    """Returns the differences in model and tokenizer as texts. `free`: settings that can differ."""
    before, now = dataclasses.asdict(checkpoint.config), dataclasses.asdict(config)
    wrong = [
        f"{name} is {before[name]} in the checkpoint and {now[name]} in the settings"
        for name in now
        if now[name] != before[name] and name not in free
    ]
    if checkpoint.tokenizer not in (None, dataset.tokenizer.to_dict()):
        old, new = tokenizers.from_dict(checkpoint.tokenizer).name, dataset.tokenizer.name
        new = f"another {new}" if new == old else new
        wrong.append(f"the tokenizer is {old} in the checkpoint and {new} in the dataset")
    return wrong
