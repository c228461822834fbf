"""The format of a checkpoint file, folio's and nanoGPT's.

nanoGPT's keys are model, optimizer, model_args, iter_num, best_val_loss and config. folio adds
format, version, muon, scaler, tokenizer, start, data, and the rest of Progress.
`version` is the version of folio that wrote the file, and is not read. `optimizer` is AdamW's
state, `muon` Muon's. `model_args` omits options that nanoGPT lacks if they have their default
values, so that nanoGPT can read folio's checkpoints of such models.
"""

import dataclasses
import math
import pickle
import re
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from folio import __version__
from folio.checkpoint.progress import Progress
from folio.cli.errors import UserError, as_user_error, cause_of, check_types, is_out_of_memory
from folio.cli.files import check_lfs, write_atomically
from folio.distributed.world import is_sharded, shard_like
from folio.hardware.optimize import use_fast_kernels
from model import GPT, GPTConfig

FORMAT_VERSION = 1
PROGRESS_KEYS = {"step": "iter_num", "evaluated_schedule_step": "evaluated"}
OPTIMIZER_KEYS = {"adamw": "optimizer", "muon": "muon"}
TOKENS_PER_STEP = ("gradient_accumulation_steps", "batch_size", "block_size")
OPTIONAL_KEYS = ("scaler", "tokenizer", "start", "data")  # not in nanoGPT's files
CONTENT_TYPES = {  # beside Progress; NoneType: it may be missing, as in nanoGPT's files
    **dict.fromkeys(("model", "model_args"), dict),
    **dict.fromkeys(("config", "optimizer", "muon", "scaler", "tokenizer", "data"), dict | None),
    "format": int | None,
    "start": str | None,
}
PLAIN_TYPES = str | int | float | None  # of settings; a bool is an int
PREFIXES = re.compile(r"^((module|_orig_mod)\.)+")  # of models that are compiled or distributed
HARMLESS_MODULES = ("argparse.", "numpy.")  # of objects in checkpoints of nanoGPT's forks
EMBEDDING_WEIGHT, HEAD_WEIGHT = "transformer.wte.weight", "lm_head.weight"
NANOGPT_ARGS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")


@dataclass
class Checkpoint:
    """A training run at one step, as plain data and tensors."""

    config: GPTConfig
    weights: dict  # GPT.state_dict()
    progress: Progress = field(default_factory=Progress)
    settings: dict = field(default_factory=dict)  # of the run
    optimizers: dict = field(default_factory=dict)  # {name: its state_dict()}
    scaler: dict | None = None  # loss scaler, for float16
    tokenizer: dict | None = None  # tokenizer.to_dict(); None in nanoGPT's
    start: str | None = None  # tokenizer.start for the dataset
    data: dict | None = None  # Dataset.fingerprint; None in nanoGPT's
    path: Path | None = None  # of the file it was read from

    @property
    def summary(self):
        """The path and, after the first step, the step."""
        step = self.progress.step
        return f"{self.path}: step {step}" if step else str(self.path)

    @torch.no_grad()
    def load_into(self, model: GPT):
        """Sets the parameters of a GPT, sharded or not, to the weights, and drops these.

        They share memory if their dtype and device are the same.
        """
        for name, parameter in model.state_dict(keep_vars=True).items():
            if is_sharded(parameter):
                parameter.copy_(shard_like(parameter, self.weights[name]))
            else:
                parameter.data = self.weights[name].to(parameter).contiguous()
        self.weights = {}


# Writing


def save_checkpoint(path, checkpoint: Checkpoint):
    """Writes a checkpoint atomically. Raises UserError if writing fails."""
    model_args, defaults = dataclasses.asdict(checkpoint.config), dataclasses.asdict(GPTConfig())
    for name in model_args.keys() - set(NANOGPT_ARGS):
        if model_args[name] == defaults[name]:
            del model_args[name]
    content = {
        "format": FORMAT_VERSION,
        "version": __version__,
        "model": checkpoint.weights,
        **dict.fromkeys(OPTIMIZER_KEYS.values()),
        **{OPTIMIZER_KEYS[name]: state for name, state in checkpoint.optimizers.items()},
        "model_args": model_args,
        "config": checkpoint.settings,
        **{name: getattr(checkpoint, name) for name in OPTIONAL_KEYS},
    }
    for name, value in dataclasses.asdict(checkpoint.progress).items():
        content[PROGRESS_KEYS.get(name, name)] = value
    full_disk = as_user_error(f"cannot write {path}; is the disk full?", RuntimeError)
    with write_atomically(path) as [file], full_disk:
        torch.save(content, file.name)  # an error of a file object would abort the process


# Reading


def load_checkpoint(path, optimizers=True) -> Checkpoint:
    """Reads a checkpoint, with tensors on the CPU. Nothing in the file is executed.

    The file is read once to verify its checksums. With optimizers=False, tensors are then mapped
    from the file, and the optimizer state is ignored. Raises UserError if the file cannot be read,
    is damaged, not a checkpoint, or from a later version.
    """
    path = Path(path)
    content = _read(path, mapped=not optimizers)
    args = ", ".join(NANOGPT_ARGS)
    refusal = f"{path} is not a checkpoint of a GPT, a dict with 'model' and 'model_args' ({args})"
    check_types(content, CONTENT_TYPES, refusal)
    content = {key: value for key, value in content.items() if value is not None}
    if content.get("format", FORMAT_VERSION) > FORMAT_VERSION:
        raise UserError(f"{path} is from a later version of folio (format {content['format']})")
    settings = content.get("config", {}).items()
    content["config"] = {name: value for name, value in settings if isinstance(value, PLAIN_TYPES)}
    weights = {}
    for name, tensor in content["model"].items():
        name = PREFIXES.sub("", str(name))
        if not name.endswith(".attn.bias"):  # a mask, which nanoGPT stored before PyTorch 2
            weights[name] = tensor
    keys = OPTIMIZER_KEYS if optimizers else {}
    return Checkpoint(
        config=_parse_config(content["model_args"], weights, path),
        weights=weights,
        progress=_parse_progress(content, path),
        settings=content["config"],
        optimizers={name: content[key] for name, key in keys.items() if content.get(key)},
        path=path,
        **{name: content[name] for name in OPTIONAL_KEYS if name in content},
    )


def _read(path, mapped):
    """Returns the content of a file of torch.save, a ZIP archive since torch 1.6."""
    if not check_lfs(path).startswith(b"PK"):
        files = "a file of torch.save since torch 1.6, such as a run's ckpt.pt"
        raise UserError(f"{path} is not a checkpoint: give {files}, or a Hugging Face folder")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged_name = archive.testzip()
            is_stored = all(not info.compress_type for info in archive.infolist())
        if damaged_name:  # torch.load verifies no checksums
            raise zipfile.BadZipFile(f"the checksum of {damaged_name} is wrong")
        mapped = mapped and is_stored  # compressed bytes would be mapped as tensors
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # the content may be anything
        if is_out_of_memory(error):
            raise
        advice = "copy or download it again, or remove it if the run has another checkpoint"
        reason = f"{cause_of(error)}; {advice}"
        if isinstance(error, pickle.UnpicklingError):  # torch's message suggests executing it
            match = re.search(r"GLOBAL (\S+)", str(error))
            name = match[1] if match else "objects"
            reason = f"it contains {name}, not only plain data and tensors; nothing was executed"
            if name.startswith(HARMLESS_MODULES):
                reason += "; docs/from-nanogpt.md has code that converts it"
        raise UserError(f"{path} is damaged or not a checkpoint of a GPT ({reason})") from error


def _parse_progress(content, path):
    """Returns the Progress in a file. What nanoGPT's files lack follows from the step."""
    settings, values = content["config"], {}
    with as_user_error(f"{path}: its progress is damaged", ArithmeticError, TypeError, ValueError):
        step = int(content.get("iter_num", 0))
        defaults = {"best_step": step, "evaluated_step": step}  # nanoGPT saves after an evaluation
        defaults["tokens"] = step * math.prod(settings.get(name, 0) for name in TOKENS_PER_STEP)
        for name, default in dataclasses.asdict(Progress()).items():
            value = content.get(PROGRESS_KEYS.get(name, name), defaults.get(name, default))
            values[name] = type(default)(value)  # nanoGPT's loss is a tensor
            if values[name] != default and not 0 <= values[name] < 2**63:
                raise ValueError(f"{name} is {values[name]}")
    return Progress(**values)


def _parse_config(args, weights, path):
    """Returns the GPTConfig for the model_args of a file. Raises UserError if they do not fit."""
    known = {field.name for field in dataclasses.fields(GPTConfig)}
    args = {name: value for name, value in args.items() if value is not None}
    for name, value in args.items():
        if value and name not in known:
            raise UserError(f"{path}: model_args has {name}={value!r}, which this GPT lacks")
    args.setdefault("bias", any(name.endswith(".bias") for name in weights))
    with as_user_error(f"{path}: model_args", ArithmeticError, TypeError, ValueError):
        if EMBEDDING_WEIGHT in weights:
            args.setdefault("vocab_size", len(weights[EMBEDDING_WEIGHT]))
        config = GPTConfig(**{name: value for name, value in args.items() if name in known})
    return match_weights(config, weights, path)


def match_weights(config: GPTConfig, weights, path) -> GPTConfig:
    """Returns the GPTConfig of weights: without tied weights if they have a head of their own.

    Raises UserError unless they are those of the config, before a large model is built.
    """
    num_layers = min(config.n_layer, len(weights))  # if there are more, some lack weights
    shape = dataclasses.replace(config, n_layer=num_layers)
    parameters = empty_model(shape, "meta").state_dict()  # without values
    for name in parameters | weights:
        saved, own = (dense_shape(tensors.get(name)) for tensors in (weights, parameters))
        if saved != own:
            difference = f"{name!r} is {saved} in the file, {own} in the model"
            raise UserError(f"{path}: the weights do not fit the model: {difference}")
    is_tied = config.tie_weights and torch.equal(weights[HEAD_WEIGHT], weights[EMBEDDING_WEIGHT])
    return dataclasses.replace(config, tie_weights=is_tied)


def empty_model(config: GPTConfig, device="cpu") -> GPT:
    """Returns a GPT with uninitialized weights on a device."""
    with torch.device(device):
        return GPT(config)


def build_model(checkpoint: Checkpoint) -> GPT:
    """Returns the checkpoint's GPT on the CPU. See Checkpoint.load_into."""
    model = empty_model(checkpoint.config)
    use_fast_kernels(model)
    checkpoint.load_into(model)
    return model


def dense_shape(value):
    """Returns the shape of a dense tensor of floats, not expanded to more values than it has."""
    if value is None:
        return "missing"
    is_dense = isinstance(value, torch.Tensor) and value.layout == torch.strided
    if is_dense and value.is_floating_point() and value.nbytes <= value.untyped_storage().nbytes():
        return tuple(value.shape)
    return "not a dense tensor of floats"
