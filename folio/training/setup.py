"""What a run trains: the model's configuration, and whether it can start from a checkpoint."""

import dataclasses

from folio.cli.errors import UserError
from folio.cli.settings import changed_settings
from folio.data.tokenizer import from_dict
from folio.hardware.device import resolve_dtype, uses_cuda_graphs
from model import GPTConfig

# A checkpoint determines these settings; dropout is free, and vocab_size is not a setting.
MODEL_SETTINGS = {field.name for field in dataclasses.fields(GPTConfig)} - {"vocab_size", "dropout"}


def plan_model(settings, dataset, resumed=None, initial=None):
    """Returns (settings, GPTConfig) of a run that resumes or starts from a Checkpoint, or neither.

    The model is the checkpoint's where the settings have their default values. When resuming,
    other settings may change, such as dropout, learning rates, intervals, batch size and machine.
    Raises a UserError that names every difference in model, tokenizer, optimizer or data.
    """
    checkpoint = resumed or initial
    if checkpoint:
        names = MODEL_SETTINGS - changed_settings(settings).keys()
        values = {name: getattr(checkpoint.config, name) for name in names}
        settings = dataclasses.replace(settings, **values)
    config = model_config(settings, dataset.tokenizer, checkpoint)
    wrong, advice = [], None
    if resumed:
        wrong = _differences(resumed, config, dataset, {"dropout"})
        wrong += _differences_of_runs(resumed, settings, dataset)
        advice = "resume with the run's own settings, or start a new run in another --out_dir"
    elif initial:
        free, old_size = {"dropout"}, initial.config.block_size
        if config.position == "rotary" or config.block_size < old_size:  # learned: only fewer
            free.add("block_size")
        wrong = _differences(initial, config, dataset, free)
        advice = "omit the model's settings, and prepare the text with "
        advice += f"--tokenizer={initial.path}"
    if wrong:
        what = "; ".join(wrong)
        raise UserError(f"{checkpoint.path} does not match the settings: {what}; {advice}")
    return settings, config


def check_parallel(settings, size):
    """Raises UserError if `size` processes cannot share the work of a step equally."""
    count = settings.gradient_accumulation_steps
    if count % size:
        raise UserError(
            f"gradient_accumulation_steps={count} cannot be divided by {size} processes: use "
            f"--gradient_accumulation_steps={-(-count // size) * size}"
        )
    if settings.parallel == "fsdp" and uses_cuda_graphs(settings.compile):
        raise UserError("parallel=fsdp has no CUDA graphs: use --compile=True or --parallel=ddp")
    dtype = resolve_dtype(settings.dtype, settings.device)
    if settings.parallel == "fsdp" and dtype == "float16" and size > 1:
        raise UserError("parallel=fsdp has no float16: use bfloat16, float32 or --parallel=ddp")


def model_config(settings, tokenizer, checkpoint=None):
    """Returns the GPTConfig for the settings and the tokenizer's vocabulary."""
    names = MODEL_SETTINGS | {"dropout"}
    vocab_size = tokenizer.padded_vocab_size
    if checkpoint and tokenizer.fits(checkpoint.config.vocab_size):
        vocab_size = checkpoint.config.vocab_size
    try:
        return GPTConfig(vocab_size=vocab_size, **{name: getattr(settings, name) for name in names})
    except ValueError as error:
        raise UserError(str(error)) from error


def _differences_of_runs(checkpoint, settings, dataset):
    """Returns the differences in optimizer and data as texts."""
    saved, wrong = checkpoint.settings, []
    before, now = saved.get("optimizer", "adamw"), settings.optimizer  # nanoGPT has no other
    if before != now:
        wrong.append(f"optimizer is {before} in the checkpoint and {now} in the settings")
    before, now = saved.get("dataset", settings.dataset), settings.dataset
    has_changed = checkpoint.data != dataset.fingerprint if checkpoint.data else before != now
    if has_changed:
        wrong.append(f"dataset {now} has other content than {before} of the checkpoint")
    return wrong


def _differences(checkpoint, config, dataset, free):
    """Returns the differences in model and tokenizer as texts. `free`: settings that can differ."""
    before, now = dataclasses.asdict(checkpoint.config), dataclasses.asdict(config)
    wrong = [
        f"{name} is {before[name]} in the checkpoint and {now[name]} in the settings"
        for name in now
        if now[name] != before[name] and name not in free
    ]
    if checkpoint.tokenizer not in (None, dataset.tokenizer.to_dict()):
        old, new = from_dict(checkpoint.tokenizer).name, dataset.tokenizer.name
        new = f"another {new}" if new == old else new
        wrong.append(f"the tokenizer is {old} in the checkpoint and {new} in the dataset")
    return wrong
