"""The optimizers of a run, their state in checkpoints, and gradient clipping."""

import torch
from torch import nn

from folio.checkpoint.format import Checkpoint, dense_shape
from folio.cli.errors import UserError, check_types
from folio.distributed.world import SINGLE_PROCESS, World, full_tensor, shard_like
from folio.training.muon import MOMENTUM, Muon
from model import GPT

STATE_NAMES = {"adamw": ("step", "exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}
EMBEDDING_LR_SCALE = 10.0  # chosen empirically


def make_optimizers(model: GPT, settings, world: World = SINGLE_PROCESS):
    """Returns {"adamw": AdamW}, or {"adamw": AdamW, "muon": Muon} for optimizer="muon".

    Biases and the weights of norms are not decayed (Loshchilov and Hutter 2019). Each parameter
    group has an `lr_scale`, a factor for the learning rate of a step, and an `lr`, a scalar tensor
    on the model's device, so that a CUDA graph of a step can read it. Frozen ones are left out.
    """
    decay, device = settings.weight_decay, model.transformer.wte.weight.device
    trained = [p for p in model.parameters() if p.requires_grad]
    vectors = [p for p in trained if p.dim() < 2]
    matrices = [p for p in trained if p.dim() >= 2]
    tables, hidden = [], []  # Muon takes the matrices of the blocks, AdamW the tables and the rest
    if settings.optimizer == "muon" and model.config.n_layer:
        in_tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
        in_blocks = set(model.transformer.h.parameters())
        tables = [p for p in matrices if p in in_tables]
        hidden = [p for p in matrices if p in in_blocks]
    others = [p for p in matrices if p not in {*tables, *hidden}]
    groups = [
        {"params": others, "weight_decay": decay, "lr_scale": 1.0},
        {"params": vectors, "weight_decay": 0.0, "lr_scale": 1.0},
    ]
    if tables:
        groups.append({"params": tables, "weight_decay": decay, "lr_scale": EMBEDDING_LR_SCALE})
    for group in groups:
        group["lr"] = torch.zeros((), device=device)
    betas, capturable = (settings.beta1, settings.beta2), device.type == "cuda"
    adamw = torch.optim.AdamW(groups, betas=betas, fused=True, capturable=capturable)
    optimizers: dict[str, torch.optim.Optimizer] = {"adamw": adamw}
    if hidden:
        dtype = torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float32
        lr = torch.zeros((), device=device)
        optimizers["muon"] = Muon(hidden, lr, decay, dtype=dtype, world=world)
    for optimizer in optimizers.values():
        optimizer.register_step_pre_hook(fill_gradients)
    return optimizers


def fill_gradients(optimizer, *_):
    """Sets the gradients of parameters that the loss does not depend on to zero."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def momentum_at(step, settings):
    """Returns Muon's momentum: a linear warmup from 0.85 to 0.95, then constant.

    Early in training, gradients change quickly, so that earlier ones should count less (Jordan et
    al. 2024, https://github.com/KellerJordan/modded-nanogpt, record 9).
    """
    warmup = settings.momentum_warmup_iters
    return MOMENTUM if step >= warmup else MOMENTUM - 0.1 * (1 - step / warmup)


def clip_gradients(model, max_norm):
    """Clips the gradient, if max_norm is not 0. Returns its norm before that, a scalar tensor."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = full_tensor(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
    if max_norm:
        # After an overflow in float16, NaN must not spread to the gradients of other optimizers.
        finite = norm.nan_to_num(torch.inf)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, finite)
    return norm


def load_optimizers(optimizers, scaler, checkpoint: Checkpoint):
    """Loads a checkpoint's moments, learning rates and loss scale, and drops the moments.

    Keeps other hyperparameters. Raises UserError if the state is of other optimizers or parameters.
    """
    if not checkpoint.optimizers:
        raise UserError(f"{checkpoint.path} has no optimizer state to resume from")
    refusal = f"cannot resume from {checkpoint.path}, whose optimizer state does not fit"
    check_types(checkpoint.optimizers, dict.fromkeys(optimizers, dict), refusal)
    for name, optimizer in optimizers.items():
        _restore(optimizer, checkpoint.optimizers[name], STATE_NAMES[name], refusal)
    checkpoint.optimizers = {}
    if checkpoint.scaler:
        scaler.load_state_dict(checkpoint.scaler)


def _restore(optimizer, saved, names, refusal):
    """Loads a state_dict of full tensors, which has `names` for each parameter."""
    check_types(saved, {"state": dict, "param_groups": list}, refusal)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    has_groups = len(saved["param_groups"]) == len(optimizer.param_groups)
    if len(saved["state"]) not in (0, len(parameters)) or not has_groups:  # 0: before a step
        raise UserError(f"{refusal}: it belongs to other parameters")
    state = {}
    for number, parameter in enumerate(parameters if saved["state"] else ()):
        tensors = saved["state"].get(number)
        check_types(tensors, dict.fromkeys(names, torch.Tensor), refusal)
        state[number] = dict(tensors)
        for name in names:
            if dense_shape(tensors[name]) != (() if name == "step" else parameter.shape):
                raise UserError(f"{refusal}: it belongs to parameters of other shapes")
            if name != "step":
                state[number][name] = shard_like(parameter, tensors[name].contiguous())
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        check_types(saved_group, {"lr": int | float | torch.Tensor}, refusal)
        group["lr"].fill_(saved_group["lr"])  # in case the state is saved before the next step
