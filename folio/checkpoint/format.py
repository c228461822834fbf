"""The format of a checkpoint file, folio's and nanoGPT's.

nanoGPT's keys are model, optimizer, model_args, iter_num, best_val_loss and config. folio adds
format, muon, scaler, tokenizer, data, log_bytes, and the rest of Progress.
`optimizer` is AdamW's state, `muon` Muon's. `model_args` omits options that nanoGPT lacks if they
have their default values, so that nanoGPT can read folio's checkpoints of such models.
"""

import dataclasses
import math
import pickle
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from folio.cli.errors import UserError, cause_of, os_error
from folio.cli.files import write_atomically
from folio.distributed.sharding import assign
from folio.hardware.kernels import use_fast_kernels
from folio.hardware.memory import is_out_of_memory
from model import GPT, GPTConfig

FORMAT_VERSION = 1
PROGRESS_KEYS = {"step": "iter_num", "evaluated_at": "evaluated"}
OPTIMIZER_KEYS = {"adamw": "optimizer", "muon": "muon"}
TOKENS_PER_STEP = ("gradient_accumulation_steps", "batch_size", "block_size")
OPTIONAL_KEYS = ("scaler", "tokenizer", "data", "log_bytes")  # not in nanoGPT's files
NANOGPT_ARGS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")


@dataclass
class Progress:
    """The progress of a training run."""

    step: int = 0  # updates made
    tokens: int = 0  # trained on
    evaluated_at: float = -1.0  # clock of the last recorded evaluation; see folio/training/run.py
    evaluated_step: int = 0  # and its step
    best_step: int = -1  # step of the best evaluation
    best_val_loss: float = math.inf  # nats per token
    evaluations_since_best: int = 0
    elapsed_s: float = 0.0  # wall time of the earlier processes of the run

    def add_step(self, tokens):
        self.step += 1
        self.tokens += tokens

    def record(self, val_loss, clock):
        """Adds the evaluation that began at `clock`. Returns whether it is the best."""
        self.evaluated_at, self.evaluated_step = clock, self.step
        self.evaluations_since_best += 1
        is_best = val_loss < self.best_val_loss
        if is_best:
            self.best_step, self.best_val_loss = self.step, val_loss
            self.evaluations_since_best = 0
        return is_best

    def is_patience_exhausted(self, settings):
        return bool(settings.patience) and self.evaluations_since_best >= settings.patience

    def is_finished(self, settings):
        """Whether the evaluation at the end is made, or patience is exhausted."""
        return self.evaluated_at >= settings.max_iters or self.is_patience_exhausted(settings)


@dataclass
class Checkpoint:
    """A training run at one step, as plain data and tensors."""

    config: GPTConfig
    weights: dict  # GPT.state_dict()
    progress: Progress
    settings: dict  # of the run
    optimizers: dict = field(default_factory=dict)  # {name: its state_dict()}
    scaler: dict | None = None  # loss scaler, for float16
    tokenizer: dict | None = None  # tokenizer.to_dict(); None in nanoGPT's
    data: dict | None = None  # Dataset.fingerprint; None in nanoGPT's
    log_bytes: int | None = None  # length of log.jsonl when this was saved
    path: Path | None = None  # of the file it was read from

    @property
    def summary(self):
        """The path and, after the first step, the step."""
        step = self.progress.step
        return f"{self.path}: step {step}" if step else str(self.path)


# Writing


def save_checkpoint(path, checkpoint):
    """Writes a checkpoint atomically. Raises UserError if writing fails."""
    defaults, model_args = GPTConfig(), {}
    for name, value in dataclasses.asdict(checkpoint.config).items():
        if name in NANOGPT_ARGS or value != getattr(defaults, name):
            model_args[name] = value
    content = {
        "format": FORMAT_VERSION,
        "model": checkpoint.weights,
        **dict.fromkeys(OPTIMIZER_KEYS.values()),
        # A KeyError means that a new optimizer needs a key in OPTIMIZER_KEYS.
        **{OPTIMIZER_KEYS[name]: state for name, state in checkpoint.optimizers.items()},
        "model_args": model_args,
        "config": checkpoint.settings,
        **{name: getattr(checkpoint, name) for name in OPTIONAL_KEYS},
    }
    for name, value in dataclasses.asdict(checkpoint.progress).items():
        content[PROGRESS_KEYS.get(name, name)] = value
    with write_atomically(path) as [file]:
        try:
            torch.save(content, file.name)  # an error of a file object would abort the process
        except RuntimeError as error:  # torch does not say why
            cause = cause_of(error)
            raise UserError(f"cannot write {path}; is the disk full? ({cause})") from error


# Reading


def load_checkpoint(path, optimizers=True):
    """Reads a checkpoint, with tensors on the CPU. Nothing in the file is executed.

    The file is read once to verify its checksums. With optimizers=False, tensors are then mapped
    from the file, and the optimizer state is ignored. Raises UserError if the file cannot be read,
    is damaged, not a checkpoint, or from a later version.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load verifies no checksums
            # torch would take compressed tensors, as other archivers write them, for their values.
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise UserError(f"{path} is compressed: unzip it, and zip it again with zip -0")
            damaged_name = archive.testzip()
            if damaged_name is not None:
                raise zipfile.BadZipFile(f"the checksum of {damaged_name} is wrong")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=not optimizers)
        checkpoint = _parse(content, Path(path))
    except UserError:
        raise
    except OSError as error:
        raise os_error("read", path, error) from error
    except Exception as error:  # the content may be anything
        if is_out_of_memory(error):
            raise
        reason = cause_of(error)
        if isinstance(error, pickle.UnpicklingError):  # torch's message suggests executing it
            reason = "it contains more than plain data and tensors; nothing was executed"
        raise UserError(f"{path} is damaged or not a checkpoint of a GPT ({reason})") from error
    if not optimizers:
        checkpoint.optimizers = {}
    return checkpoint


def _parse(content, path):
    """Returns the Checkpoint that a file of folio or nanoGPT contains."""
    if content.get("format", FORMAT_VERSION) > FORMAT_VERSION:
        raise UserError(f"{path} is from a later version of folio (format {content['format']})")
    step, settings = int(content["iter_num"]), content["config"]
    tokens_per_step = math.prod(settings.get(name, 0) for name in TOKENS_PER_STEP)  # nanoGPT's
    evaluated = float(content.get("evaluated", step))  # nanoGPT saves after an evaluation
    weights = {}
    for name, tensor in content["model"].items():
        if not name.endswith(".attn.bias"):  # a mask, which nanoGPT stored before PyTorch 2
            weights[name.removeprefix("_orig_mod.")] = tensor  # nanoGPT saves a compiled model
    optimizers = {n: content[key] for n, key in OPTIMIZER_KEYS.items() if content.get(key)}
    return Checkpoint(
        config=match_head(GPTConfig(**content["model_args"]), weights),
        weights=weights,
        progress=Progress(
            step=step,
            tokens=int(content.get("tokens", step * tokens_per_step)),
            evaluated_at=evaluated,
            evaluated_step=int(content.get("evaluated_step", evaluated)),
            best_step=int(content.get("best_step", evaluated)),
            best_val_loss=float(content["best_val_loss"]),  # a tensor in nanoGPT's
            evaluations_since_best=int(content.get("evaluations_since_best", 0)),
            elapsed_s=float(content.get("elapsed_s", 0.0)),
        ),
        settings=settings,
        optimizers=optimizers,
        path=path,
        **{name: content.get(name) for name in OPTIONAL_KEYS},
    )


def match_head(config, weights):
    """Returns the GPTConfig of weights: without tied weights if they have a head of their own."""
    head, embedding = (weights.get(name) for name in ("lm_head.weight", "transformer.wte.weight"))
    if not config.tie_weights or head is None or embedding is None:
        return config
    return dataclasses.replace(config, tie_weights=torch.equal(head, embedding))


# Use


def empty_model(config, device="cpu"):
    """Returns a GPT with uninitialized weights on a device."""
    with torch.device(device):
        return GPT(config)


def build_model(checkpoint):
    """Returns the checkpoint's GPT on the CPU. They share memory; see load_weights."""
    model = empty_model(checkpoint.config)
    use_fast_kernels(model)
    load_weights(model, checkpoint)
    return model


def load_weights(model, checkpoint):
    """Sets the parameters of a GPT to a checkpoint's weights.

    They share memory if dtype and device match. A sharded model copies this process's shard.
    Raises UserError if the names or shapes differ.
    """
    parameters, weights = model.state_dict(keep_vars=True), checkpoint.weights
    for name in parameters | weights:
        parameter, weight = parameters.get(name), weights.get(name)
        if getattr(parameter, "shape", None) != getattr(weight, "shape", None):
            raise UserError(
                f"{checkpoint.path}: the weights do not fit the model: {name!r}. If an earlier "
                "version of folio made this file, use that version or train again"
            )
    for name, parameter in parameters.items():
        assign(parameter, weights[name])
