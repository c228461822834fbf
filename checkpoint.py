"""Checkpoints: the one place that knows their keys, folio's and nanoGPT's.

nanoGPT's keys are model, optimizer, model_args, iter_num, best_val_loss and config; folio adds
format, tokenizer, seed and scaler. `model_args` leaves out what nanoGPT does not know wherever it
has nanoGPT's value, so that nanoGPT reads folio's checkpoints of such models, too.
"""

import dataclasses
from pathlib import Path

import torch

from config import UserError, nearest, replacing
from model import GPT, GPTConfig

FORMAT = 1
BEST, LAST = "ckpt.pt", "last.pt"  # the best on validation, and the newest
NANOGPT_ARGS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")


@dataclasses.dataclass
class Checkpoint:
    """A training run at one step, in plain data and tensors."""

    model_config: GPTConfig
    weights: dict  # GPT.state_dict()
    step: int  # updates made so far
    best_val_loss: float
    config: dict  # the settings of the run
    optimizer: dict | None = None
    scaler: dict | None = None  # of the loss scaler that float16 needs
    tokenizer: dict | None = None  # tokenizer.to_dict(); nanoGPT's checkpoints have none
    seed: int | None = None
    path: Path | None = None  # where it was read from

    def fits(self, tokenizer):
        """Whether the model's vocabulary is the tokenizer's, as it is or rounded up to 64s."""
        size = tokenizer.vocab_size
        return self.model_config.vocab_size in (size, size + -size % 64)


def save(path, checkpoint):
    """Write a checkpoint whole or not at all. Raises UserError where the disk refuses."""
    plain = {
        "format": FORMAT,
        "model": checkpoint.weights,
        "optimizer": checkpoint.optimizer,
        "model_args": _model_args(checkpoint.model_config),
        "iter_num": checkpoint.step,
        "best_val_loss": checkpoint.best_val_loss,
        "config": checkpoint.config,
        "tokenizer": checkpoint.tokenizer,
        "seed": checkpoint.seed,
        "scaler": checkpoint.scaler,
    }
    with replacing(path) as file:
        try:
            torch.save(plain, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch hides a full disk behind its own
                raise error.__context__ from error
            raise


def _model_args(config):
    args = dataclasses.asdict(config)
    default = dataclasses.asdict(GPTConfig())
    return {k: v for k, v in args.items() if k in NANOGPT_ARGS or v != default[k]}


def load(path):
    """Read a checkpoint, tensors on the CPU; nothing in the file is run.

    Raises UserError where there is none, or the file is damaged, foreign or from a later folio.
    """
    path = Path(path)
    try:
        plain = _read(path)
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint {path}{_hint(path)}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        return _from_plain(plain, path)
    except UserError:
        raise
    except Exception as error:  # the content may be anything at all
        raise UserError(f"{path} is not a checkpoint that folio knows ({error})") from error


def _read(path):
    with open(path, "rb") as file:
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged or hostile file fails in many ways, OSError too
            cause = type(error).__name__
            raise UserError(f"{path} is damaged or not a checkpoint ({cause})") from error


def _from_plain(plain, path):
    if plain.get("format", FORMAT) > FORMAT:
        raise UserError(f"{path} was written by a later folio (format {plain['format']})")
    return Checkpoint(
        model_config=GPTConfig(**plain["model_args"]),
        weights=_plain_names(plain["model"]),
        step=int(plain["iter_num"]),
        best_val_loss=float(plain["best_val_loss"]),
        config=dict(plain["config"]),
        optimizer=plain.get("optimizer"),
        scaler=plain.get("scaler"),
        tokenizer=plain.get("tokenizer"),
        seed=plain.get("seed"),
        path=path,
    )


def _plain_names(weights):
    """Weights without torch.compile's prefix and without the mask that old nanoGPTs stored."""
    names = {name: name.removeprefix("_orig_mod.") for name in weights}
    return {new: weights[old] for old, new in names.items() if not new.endswith(".attn.bias")}


def _hint(path):
    """The way on where a checkpoint is missing: other runs at hand, or a first one."""
    if path.with_name(LAST).exists():
        return f", only {LAST}: no evaluation was the best so far"
    runs = {str(found.parent) for found in Path().glob(f"*/{BEST}")} - {str(path.parent)}
    if not runs:
        return "; train one first: python train.py config/shakespeare_char.py"
    return nearest(str(path.parent), runs, f"; runs at hand: {', '.join(sorted(runs))}")


def newest(out_dir):
    """The path of the state to resume from: last.pt, else ckpt.pt."""
    last = Path(out_dir, LAST)
    return last if last.exists() else Path(out_dir, BEST)


def build_model(checkpoint):
    """The GPT of a checkpoint, on the CPU. Raises UserError where its weights do not fit."""
    try:
        model = GPT(checkpoint.model_config)
        model.load_state_dict(checkpoint.weights)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError(f"{checkpoint.path}: the weights do not fit the model: {reason}") from error
    return model


def restore_optimizer(checkpoint, optimizer, scaler):
    """Put a checkpoint's moments and loss scale into an optimiser and a scaler like its own.

    Learning rate, weight decay and betas stay those of `optimizer`. Raises UserError where the
    state belongs to other parameters.
    """
    if checkpoint.optimizer is None:
        raise UserError(f"{checkpoint.path} has no optimiser's state to go on from")
    try:
        state = {"state": checkpoint.optimizer["state"]}
        optimizer.load_state_dict(optimizer.state_dict() | state)
        for parameter, moments in optimizer.state.items():
            if moments["exp_avg"].shape != parameter.shape:
                raise ValueError("its moments have other shapes")
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(
            f"{checkpoint.path}: the optimiser's state does not fit: {error}"
        ) from error
    if checkpoint.scaler:
        scaler.load_state_dict(checkpoint.scaler)
