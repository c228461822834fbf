"""What a run trains: the model's configuration, and whether it can continue a checkpoint."""

import dataclasses

from folio import tokenizers
from folio.errors import UserError
from model import GPTConfig


def model_config(settings, tokenizer, resumed=None):
    """Returns the GPTConfig for the settings and the tokenizer's vocabulary."""
    names = {field.name for field in dataclasses.fields(GPTConfig)} - {"vocab_size"}
    vocab_size = tokenizer.padded_vocab_size
    if resumed and tokenizers.fits(tokenizer, resumed.config.vocab_size):
        vocab_size = resumed.config.vocab_size
    try:
        return GPTConfig(vocab_size=vocab_size, **{name: getattr(settings, name) for name in names})
    except ValueError as error:
        raise UserError(str(error)) from error


def check_resumable(checkpoint, config, settings, dataset):
    """Raises a UserError that names every difference in model, optimizer, tokenizer or data.

    Other settings may change, such as dropout, learning rates, intervals, batch size and machine.

    Args:
        config: the GPTConfig that the settings describe.
        settings: a TrainConfig.
    """
    before, now = dataclasses.asdict(checkpoint.config), dataclasses.asdict(config)
    before["optimizer"] = checkpoint.settings.get("optimizer", "adamw")  # nanoGPT has no other
    now["optimizer"] = settings.optimizer
    wrong = [
        f"{name} is {before[name]} in the checkpoint and {now[name]} in the settings"
        for name in now
        if now[name] != before[name] and name != "dropout"
    ]
    if checkpoint.tokenizer not in (None, dataset.tokenizer.to_dict()):
        before, now = tokenizers.from_dict(checkpoint.tokenizer).name, dataset.tokenizer.name
        now = f"another {now}" if now == before else now
        wrong.append(f"the tokenizer is {before} in the checkpoint and {now} in the dataset")
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
