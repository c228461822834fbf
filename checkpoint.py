"""Checkpoints: the one place that knows their keys, folio's and nanoGPT's.

nanoGPT's keys are model, optimizer, model_args, iter_num, best_val_loss and config; folio adds
format, muon, tokenizer, seed, scaler, evaluated, best_step, elapsed_s and data. `optimizer` is
AdamW's state, `muon` that of Muon where it trains. `model_args` leaves out what nanoGPT does not
know wherever it has nanoGPT's value, so that nanoGPT reads folio's checkpoints of such models, too.
"""

import dataclasses
import math
import os
import reprlib
import stat
import warnings
from contextlib import suppress
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

from config import UserError, nearest
from device import is_out_of_memory
from model import GPT, GPTConfig, num_params
from safety import cause_of, refusal, replacing
from untrusted import check_archive

FORMAT = 1
OPTIMIZER_KEYS = {"adamw": "optimizer", "muon": "muon"}
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}  # shaped like weights
BEST, LAST = "ckpt.pt", "last.pt"  # the best on validation, and the newest
PLAIN = (str, int, float, type(None))
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
NANOGPT_ARGS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")


@dataclasses.dataclass
class Checkpoint:
    """A training run at one step, in plain data and tensors."""

    model_config: GPTConfig
    weights: dict  # GPT.state_dict()
    step: int  # updates made so far
    best_val_loss: float
    config: dict  # the settings of the run
    optimizers: dict = dataclasses.field(default_factory=dict)  # {name: its state_dict()}
    scaler: dict | None = None  # of the loss scaler that float16 needs
    tokenizer: dict | None = None  # tokenizer.to_dict(); nanoGPT's checkpoints have none
    seed: int | None = None
    evaluated: int = -1  # the step of the last evaluation that best_val_loss knows of
    best_step: int = -1  # the step of the one that was best
    elapsed_s: float = 0.0  # seconds that the run has taken so far
    data: dict | None = None  # Dataset.fingerprint
    path: Path | None = None  # where it was read from
    stamp: tuple | None = None  # of the file, then

    def fits(self, tokenizer):
        """Whether the model's vocabulary is the tokenizer's, as it is or rounded up to 64s."""
        size = tokenizer.vocab_size
        return self.model_config.vocab_size in (size, size + -size % 64)


def save(paths, checkpoint):
    """Write a checkpoint to each path, or to none. Raises UserError where the disk refuses."""
    plain = {
        "format": FORMAT,
        "model": checkpoint.weights,
        **{key: checkpoint.optimizers.get(name) for name, key in OPTIMIZER_KEYS.items()},
        "model_args": _model_args(checkpoint.model_config),
        "iter_num": checkpoint.step,
        "best_val_loss": checkpoint.best_val_loss,
        "config": checkpoint.config,
        "tokenizer": checkpoint.tokenizer,
        "seed": checkpoint.seed,
        "scaler": checkpoint.scaler,
        "evaluated": checkpoint.evaluated,
        "best_step": checkpoint.best_step,
        "elapsed_s": checkpoint.elapsed_s,
        "data": checkpoint.data,
    }
    with replacing(*paths) as files:
        try:
            for file in files:
                torch.save(plain, file)
        except RuntimeError as error:  # torch's, of a half archive, hides a full disk or Ctrl-C
            raise error.__context__ or error from None


def _model_args(config):
    args = dataclasses.asdict(config)
    default = dataclasses.asdict(GPTConfig())
    return {k: v for k, v in args.items() if k in NANOGPT_ARGS or v != default[k]}


def load(path, optimizers=True):
    """Read a checkpoint, tensors on the CPU; nothing in the file is run.

    Two thirds of it are the optimisers' state, which is left out if they are not wanted. Raises
    UserError where there is none, or the file is damaged, foreign or from a later folio.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for
            raise OSError("it is no regular file")
        with open(path, "rb") as file:
            plain = _read(file, path, mapped=not optimizers)
            checkpoint = _from_plain(plain, path, stamp=stamp_of(file.fileno()))
            if not optimizers:
                checkpoint.optimizers = {}
                # What is mapped would change, or be gone, with the file.
                checkpoint.weights = {k: v.clone() for k, v in checkpoint.weights.items()}
            return checkpoint
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint {path}{_hint(path)}") from None
    except OSError as error:
        raise refusal("read", path, error) from error


def stamp_of(file):
    """What tells two states of a file (path or handle) apart; None where it is gone."""
    with suppress(FileNotFoundError):
        now = os.stat(file)
        return now.st_ino, now.st_size, now.st_mtime_ns
    return None


def _read(file, path, mapped):
    try:
        check_archive(file)
        return _load_plain(file, mapped)
    except Exception as error:  # a damaged or hostile file fails in many ways, OSError too
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"{path} is damaged or not a checkpoint ({cause_of(error)}){_other(path)}"
        ) from error


def _other(path):
    """The way on where last.pt is of no use: the best state, if there is one."""
    best = Path(path).with_name(BEST)
    return f"; with {path} moved away, {best} is used" if best.exists() and path != best else ""


def _load_plain(file, mapped):
    file.seek(0)
    name = f"/proc/self/fd/{file.fileno()}"  # of the file that was checked; torch maps by name
    mapped = mapped and os.path.exists(name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(
                name if mapped else file, map_location="cpu", weights_only=True, mmap=mapped
            )
    except Exception as error:  # whose words are long, and advise to run what is in the file
        if is_out_of_memory(error):
            raise
        raise ValueError("it is more than plain data and tensors; nothing in it was run") from error


def _from_plain(plain, path, stamp):
    try:
        if plain.get("format", FORMAT) > FORMAT:
            raise UserError(f"{path} was written by a later folio (format {plain['format']})")
        evaluated = plain.get("evaluated", int(plain["iter_num"]))  # nanoGPT saves after it
        checkpoint = Checkpoint(
            model_config=_model_config(plain["model_args"]),
            weights=_plain_names(plain["model"]),
            step=int(plain["iter_num"]),
            best_val_loss=float(plain["best_val_loss"]),
            config=dict(plain["config"]),
            optimizers={
                name: plain[key]
                for name, key in OPTIMIZER_KEYS.items()
                if plain.get(key) is not None
            },
            scaler=plain.get("scaler"),
            tokenizer=plain.get("tokenizer"),
            seed=plain.get("seed"),
            evaluated=evaluated,
            best_step=plain.get("best_step", evaluated),
            elapsed_s=float(plain.get("elapsed_s", 0)),
            data=plain.get("data"),
            path=path,
            stamp=stamp,
        )
        _check(checkpoint)
        return checkpoint
    except UserError:
        raise
    except Exception as error:  # the content may be anything at all
        raise UserError(
            f"{path} is not a checkpoint that folio knows ({cause_of(error)})"
        ) from error


def _model_config(args):
    for field in dataclasses.fields(GPTConfig):
        value = args.get(field.name, field.default)
        kinds = (int, float) if field.name == "dropout" else (type(field.default),)
        if type(value) not in kinds:
            raise ValueError(f"its {field.name} is {reprlib.repr(value)}")
    return GPTConfig(**args)


def _check(checkpoint):
    """Raise ValueError where its parts contradict each other, before any is used."""
    for part in (checkpoint.config, checkpoint.data, checkpoint.tokenizer, checkpoint.scaler):
        if not all(isinstance(value, PLAIN) for value in (part or {}).values()):
            raise ValueError("it has more than plain data where they belong")
    _check_weights(checkpoint)
    steps = (checkpoint.step, checkpoint.evaluated, checkpoint.best_step, -1)
    in_order = all(type(step) is int for step in steps) and steps == tuple(sorted(steps))[::-1]
    if not in_order or checkpoint.step < 0 or math.isnan(checkpoint.best_val_loss):
        raise ValueError(
            f"its steps are {', '.join(map(str, steps[:3]))}, its validation loss "
            f"{checkpoint.best_val_loss}"
        )
    if not 0 <= checkpoint.elapsed_s < math.inf:
        raise ValueError(f"it has taken {checkpoint.elapsed_s} seconds")
    if type(checkpoint.config.get("dataset", "")) is not str:
        raise ValueError("its dataset has no name")


def _check_weights(checkpoint):
    """Raise ValueError unless the weights are tensors with data, as many as the model has."""
    names = set(checkpoint.weights)
    if checkpoint.model_config.tie_weights:
        names.discard("lm_head.weight")  # it is wte
    weights = [checkpoint.weights[name] for name in names]
    if not all(isinstance(w, torch.Tensor) and w.dtype in FLOATS for w in weights):
        raise ValueError("its weights are no real numbers")
    storages = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in weights}
    if sum(w.numel() * w.element_size() for w in weights) > sum(storages.values()):
        raise ValueError("it has tensors without their data")
    count = sum(w.numel() for w in weights)
    if count != (needed := num_params(checkpoint.model_config)):
        raise ValueError(f"it has {count:,} weights, and its model {needed:,}")


def _plain_names(weights):
    """Weights without torch.compile's prefix and without the mask that old nanoGPTs stored."""
    names = {name: name.removeprefix("_orig_mod.") for name in weights}
    return {new: weights[old] for old, new in names.items() if not new.endswith(".attn.bias")}


def _hint(path):
    """The way on where a checkpoint is missing: other runs at hand, or a first one."""
    if path.with_name(LAST).exists():
        return f", only {LAST}: no evaluation was the best so far"
    runs = set()
    with suppress(OSError):
        runs = {str(found.parent) for found in Path().glob(f"*/{BEST}")} - {str(path.parent)}
    if not runs:
        return "; train one first: python train.py config/shakespeare_char.py"
    return nearest(str(path.parent), runs, f"; runs at hand: {', '.join(sorted(runs))}")


def newest(out_dir):
    """The path of the state to resume from: last.pt, else ckpt.pt."""
    last = Path(out_dir, LAST)
    return last if os.path.exists(last) else Path(out_dir, BEST)


class _Undrawn(TorchFunctionMode):
    """While it lasts, no random numbers are drawn into tensors, which others are to fill."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.__name__.endswith(("normal_", "uniform_")):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def build_model(checkpoint):
    """The GPT of a checkpoint, on the CPU. Raises UserError where its weights do not fit."""
    weights = checkpoint.weights.values()
    if not all(each.sum().isfinite() or each.isfinite().all() for each in weights):  # fast, or sure
        raise UserError(
            f"{checkpoint.path} has weights that are no finite numbers, of a training gone wrong"
            f"{_other(checkpoint.path)}"
        )
    try:
        with _Undrawn():
            model = GPT(checkpoint.model_config)
        model.load_state_dict(checkpoint.weights)
        return model
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError(f"{checkpoint.path}: the weights do not fit the model: {reason}") from error


def restore_optimizers(checkpoint, optimizers, scaler):
    """Put a checkpoint's moments and loss scale into {name: optimiser} and a scaler like its own.

    Weight decay and betas stay those of the optimisers; the learning rate is the last step's.
    Raises UserError where the state belongs to others, or to other parameters.
    """
    saved = checkpoint.optimizers
    if not saved:
        raise UserError(f"{checkpoint.path} has no optimiser's state to go on from")
    try:
        if saved.keys() != optimizers.keys():
            raise ValueError(f"it is that of {' and '.join(saved)}")
        for name, optimizer in optimizers.items():
            _restore(name, optimizer, saved[name], begun=checkpoint.step > 0)
        if checkpoint.scaler:
            scaler.load_state_dict(checkpoint.scaler)
    except Exception as error:  # the content may be anything at all
        raise UserError(
            f"{checkpoint.path}: the optimiser's state does not fit: {cause_of(error)}"
        ) from error


def _restore(name, optimizer, saved, begun):
    if begun or saved["state"]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        _check_moments(saved["state"], parameters, name)
    optimizer.load_state_dict(optimizer.state_dict() | {"state": saved["state"]})
    for group, before in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group["lr"] = float(before["lr"])


def _check_moments(moments, parameters, name):
    """Raise where moments are not an optimiser's of the parameters; it would crash by some."""
    if moments.keys() != set(range(len(parameters))):
        raise ValueError("it is that of other parameters")
    for index, parameter in enumerate(parameters):
        shapes = dict.fromkeys(MOMENTS[name], parameter.shape)
        if name == "adamw":
            shapes["step"] = ()
        if moments[index].keys() != shapes.keys():
            raise ValueError("it is that of another optimiser")
        for key, tensor in moments[index].items():
            fits = tensor.shape == shapes[key] and tensor.is_contiguous()
            if not fits or not tensor.isfinite().all():
                raise ValueError("its moments have other shapes, or are no finite numbers")
