"""The format of a checkpoint file, folio's and nanoGPT's.

nanoGPT's keys are model, optimizer, model_args, iter_num, best_val_loss and config. folio adds
format, muon, scaler, evaluated, best_step, elapsed_s, fitted_iters, tokenizer, data and log_bytes.
`optimizer` is AdamW's state, `muon` Muon's. `model_args` omits options that nanoGPT lacks if they
have their default values, so that nanoGPT can read folio's checkpoints of such models.

If weights and moments are in a folder, `folder` is its name, and the file has tensors without data
(on the meta device) in their place.
"""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch

from folio.errors import UserError, cause_of
from folio.files import Sink, replacing
from folio.kernels import use_fast_kernels
from folio.sharding import assign, local
from folio.storage import check_folder, read_file, read_folder
from model import GPT, GPTConfig

FORMAT = 2  # that of a file that refers to a folder of tensors; others have format 1
OPTIMIZER_KEYS = {"adamw": "optimizer", "muon": "muon"}
OPTIONAL = ("scaler", "tokenizer", "data", "log_bytes")  # not in nanoGPT's files
NANOGPT_ARGS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
PREFIX = "_orig_mod."  # torch.compile's, in nanoGPT's checkpoints
MASK = ".attn.bias"  # the causal mask, which nanoGPT stored before PyTorch 2
RENAMED = {  # names in earlier versions of folio: names now
    "transformer.bigrams.weight": "transformer.context.ngrams.2.weight",
    "transformer.context.bigrams.weight": "transformer.context.ngrams.2.weight",
    "transformer.smear.weight": "transformer.context.smear.weight",
}


@dataclass
class Progress:
    """The progress of a training run."""

    step: int = 0  # updates made
    evaluated: int = -1  # step of the last recorded evaluation
    best_step: int = -1  # step of the best evaluation
    best_val_loss: float = math.inf  # nats per token
    elapsed_s: float = 0.0  # wall time of all processes of the run
    fitted_iters: int | None = None  # max_iters that fits into the time budget, if there is one

    def record(self, val_loss):
        """Adds the evaluation at this step. Returns whether it is the best."""
        self.evaluated, is_best = self.step, val_loss < self.best_val_loss
        if is_best:
            self.best_step, self.best_val_loss = self.step, val_loss
        return is_best

    def forget_best(self):
        """Makes the next evaluation the best, because the file of the best one is gone."""
        self.evaluated, self.best_step, self.best_val_loss = -1, -1, math.inf

    def is_due(self, interval):
        """Whether an action with an interval in steps (None: never) is due."""
        return bool(interval) and self.step % interval == 0

    def needs_evaluation(self, settings):
        due = self.is_due(settings.eval_interval) or self.step >= settings.max_iters
        return due and self.evaluated < self.step

    def is_finished(self, settings):
        """Whether max_iters is reached and evaluated, or patience is exhausted."""
        since_best = self.evaluated - self.best_step
        if settings.patience and since_best >= settings.patience * settings.eval_interval:
            return True
        return min(self.step, self.evaluated) >= settings.max_iters


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
    folder: Path | None = None  # of the tensors that are on the meta device here

    @property
    def summary(self):
        """The path and, after an evaluation, the step and the best loss."""
        step, loss = self.progress.step, self.progress.best_val_loss
        best = f": step {step}, best val loss {loss:.4f}" if math.isfinite(loss) else ""
        return f"{self.path}{best}"


# Writing


def save(path, checkpoint, canceled=None):
    """Writes a checkpoint atomically. Raises UserError if writing fails.

    Args:
        canceled: a threading.Event; if another thread sets it, writing fails.
    """
    plain = {
        "format": FORMAT if checkpoint.folder else 1,
        "folder": checkpoint.folder and checkpoint.folder.name,
        "model": checkpoint.weights,
        **{key: checkpoint.optimizers.get(name) for name, key in OPTIMIZER_KEYS.items()},
        "model_args": _model_args(checkpoint.config),
        "iter_num": checkpoint.progress.step,
        "config": checkpoint.settings,
        **{name: getattr(checkpoint, name) for name in OPTIONAL},
    }
    plain |= {k: v for k, v in dataclasses.asdict(checkpoint.progress).items() if k != "step"}
    with replacing(path) as [file]:
        try:
            torch.save(plain, Sink(file, canceled))
        except RuntimeError as error:  # torch hides a full disk or Ctrl-C behind its own error
            raise error.__context__ or error from None


def _model_args(config):
    defaults = GPTConfig()
    return {
        name: value
        for name, value in dataclasses.asdict(config).items()
        if name in NANOGPT_ARGS or value != getattr(defaults, name)
    }


# Reading


def load(path, optimizers=True):
    """Reads a checkpoint, with tensors on the CPU. Nothing in the file is executed.

    With optimizers=False, weights are mapped from the file instead of read, and the optimizer
    state, two thirds of the file, is left out. Tensors in a folder are not read until load_weights,
    read_weights and restore_optimizers. Raises FileNotFoundError, or UserError if the file or
    folder is damaged, not a checkpoint, or from a later version.
    """
    plain = read_file(path, mapped=not optimizers)
    try:
        checkpoint = _from_plain(plain, Path(path))
    except UserError:
        raise
    except Exception as error:  # the content may be anything
        raise UserError(f"{path} is not a checkpoint of a GPT ({cause_of(error)})") from error
    if checkpoint.folder:
        check_folder(checkpoint.folder)
    if not optimizers:
        checkpoint.optimizers = {}
    return checkpoint


def _from_plain(plain, path):
    """Returns the Checkpoint in a file of this version, an earlier version or nanoGPT."""
    if plain.get("format", FORMAT) > FORMAT:
        raise UserError(f"{path} is from a later version of folio (format {plain['format']})")
    json.dumps([plain["config"], *map(plain.get, ("tokenizer", "data"))])  # raises unless plain
    args = dict(plain["model_args"])
    args.pop("zero_init", None)  # of earlier versions; without effect on a trained model
    args |= {"ngrams": 2} if args.pop("bigrams", False) else {}
    step = int(plain["iter_num"])
    evaluated = int(plain.get("evaluated", step))  # nanoGPT saves after an evaluation
    if step < 0:
        raise ValueError(f"step {step}")
    return Checkpoint(
        config=GPTConfig(**args),
        weights=_renamed(plain["model"]),
        progress=Progress(
            step=step,
            evaluated=evaluated,
            best_step=int(plain.get("best_step", evaluated)),
            best_val_loss=float(plain["best_val_loss"]),  # a tensor in nanoGPT's
            elapsed_s=float(plain.get("elapsed_s", 0.0)),
            fitted_iters=int(plain.get("fitted_iters") or 0) or None,
        ),
        settings=dict(plain["config"]),
        optimizers={name: plain[key] for name, key in OPTIMIZER_KEYS.items() if plain.get(key)},
        path=path,
        folder=path.parent / Path(plain["folder"]).name if plain.get("folder") else None,
        **{name: plain.get(name) for name in OPTIONAL},
    )


def _renamed(weights):
    plain = {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()}
    return {RENAMED.get(n, n): tensor for n, tensor in plain.items() if not n.endswith(MASK)}


# Use


def build_model(checkpoint):
    """Returns the checkpoint's GPT on the CPU, which shares its weights. See load_weights."""
    model = GPT.uninitialized(checkpoint.config)
    use_fast_kernels(model)
    load_weights(model, checkpoint)
    return model


def load_weights(model, checkpoint):
    """Makes a model use a checkpoint's weights, without a copy if dtype and device allow.

    Weights in a folder are read into the model; if it is sharded, only this process's share.
    Raises UserError if they do not fit or are not finite.
    """
    parameters, weights = model.state_dict(keep_vars=True), checkpoint.weights
    for name in parameters | weights:
        expected, found = (getattr(each.get(name), "shape", None) for each in (parameters, weights))
        if expected != found:
            reason = f"{name!r} is missing or unexpected"
            if expected and found:
                reason = f"{name!r} has shape {tuple(found)} instead of {tuple(expected)}"
            raise UserError(f"{checkpoint.path}: the weights do not fit the model: {reason}")
    weights = weights | _read_stored(checkpoint, parameters)
    try:
        for name, parameter in parameters.items():
            assign(parameter, weights[name])
    except (RuntimeError, TypeError) as error:  # a tensor that is sparse, or of another kind
        reason = f"the weights do not fit the model: {cause_of(error)}"
        raise UserError(f"{checkpoint.path}: {reason}") from error
    used = (local(weights[name]) for name, _ in model.named_parameters())  # tied weights once
    extremes = (torch.stack(weight.aminmax()) for weight in used if len(weight))  # NaN if any is
    if not all(each.isfinite().all() for each in extremes):
        raise UserError(f"{checkpoint.path} has weights that are not finite: the run diverged")


def read_weights(checkpoint, names):
    """Reads the named weights to the CPU if they are in a folder. Raises UserError."""
    if checkpoint.folder:
        weights = checkpoint.weights
        targets = {name: torch.empty_like(weights[name], device="cpu") for name in names}
        checkpoint.weights = weights | _read_stored(checkpoint, targets)


def _read_stored(checkpoint, targets):
    """Reads the weights that are in a folder into {name: tensor}. Returns those read."""
    if not checkpoint.folder:
        return {}
    stored = {k: t.detach() for k, t in targets.items() if checkpoint.weights[k].is_meta}
    if stored:
        read_folder(checkpoint.folder, {"weights": stored})
    return stored
