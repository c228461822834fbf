"""What a run trains: the model's configuration, a check of resuming, and steps in a time budget."""

import copy
import dataclasses
import time
from statistics import median

from folio import tokenizers
from folio.batches import Batches
from folio.errors import UserError
from model import GPTConfig

STEP_COUNTS = ("max_iters", "eval_interval", "warmup_iters", "lr_decay_iters")
WARMUP_STEPS, MEASURED_STEPS = 5, 20
BACKWARD = 2  # time of a backward pass, in forward passes


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
        wrong.append("the vocabulary differs from the dataset's")
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


# Time budget


def fit_to_minutes(settings, learner, dataset, resumed=None):
    """Returns the settings, with fewer steps if training would take more than `minutes`.

    All step counts are reduced in proportion. A resumed run keeps its step counts, unless `minutes`
    has changed: its results must not depend on the speed of the machine at that moment.

    Args:
        learner: a train.Learner that is ready to train.
        resumed: the Checkpoint from which the learner was loaded.
    """
    if resumed and resumed.settings.get("minutes") == settings.minutes:
        return with_steps_of(resumed.settings, settings)
    step_s = seconds_per_step(settings, learner, dataset)
    tokens = sum(evaluated_tokens(split, settings) for split in (dataset.train, dataset.val))
    evaluation_s = step_s * tokens / settings.tokens_per_step / (1 + BACKWARD)
    count = settings.max_iters // settings.eval_interval + 1
    steps = int((60 * settings.minutes - count * evaluation_s) / step_s)
    if steps < count:
        raise UserError(
            f"a step takes {step_s:.2g} s and an evaluation {evaluation_s:.2g} s: use more than "
            f"--minutes={settings.minutes:g} for {count} evaluations and as many steps"
        )
    fitted = with_steps(min(steps, settings.max_iters), settings)
    needed = (fitted.max_iters * step_s + count * evaluation_s) / 60
    print(f"time: about {needed:.2g} minutes for {fitted.max_iters:,} steps", flush=True)
    return fitted


def with_steps(max_iters, settings):
    """Returns the settings with all step counts changed in proportion to max_iters."""
    counts = {name: getattr(settings, name) for name in STEP_COUNTS}
    share = max_iters / settings.max_iters
    counts = {name: steps and max(1, int(share * steps)) for name, steps in counts.items()}
    return dataclasses.replace(settings, **counts | {"max_iters": max_iters})


def with_steps_of(before, settings):
    """Returns settings with the step counts of the dict `before`, if they have been reduced."""
    if before["max_iters"] >= settings.max_iters:
        return settings
    return dataclasses.replace(settings, **{name: before[name] for name in STEP_COUNTS})


def seconds_per_step(settings, learner, dataset):
    """Returns the median time of a training step. The learner's state does not change."""
    batches = Batches(dataset.train, settings)
    states = copy.deepcopy([each.state_dict() for each in learner.optimizers.values()])
    scaler, seconds = learner.scaler.state_dict(), []
    for step in range(WARMUP_STEPS + MEASURED_STEPS):
        start = time.perf_counter()
        _, norm = learner.gradient(batches.at(step), step)
        learner.update(norm, lr=0.0)  # does not change the weights
        learner.machine.synchronize()
        seconds.append(time.perf_counter() - start)
    for optimizer, state in zip(learner.optimizers.values(), states, strict=True):
        optimizer.load_state_dict(state)
    learner.scaler.load_state_dict(scaler)
    learner.divergence.check()
    return median(seconds[WARMUP_STEPS:])


def evaluated_tokens(split, settings):
    """Returns how many tokens of a split an evaluation reads."""
    return min(len(split), settings.eval_iters * settings.batch_size * settings.block_size)
