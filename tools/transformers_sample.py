"""transformers' generate with a checkpoint of folio, to measure beside sample.py.

    python -m tools.bench --script=sample --vs="python -m tools.transformers_sample" -- --seed=1

It takes sample.py's flags of the same names. A full context loses its older half at once, as
sample.py has it, since transformers has no rule of its own for that.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import checkpoint as ckpt
from config import STARTED, UserError, load, setting
from device import DTYPES, resolve_device
from safety import run


@dataclass(frozen=True)
class PeerConfig:
    """Draw texts with transformers from a checkpoint of a plain GPT-2."""

    out_dir: str = setting("out", "the folder that train.py wrote")
    num_samples: int = setting(10, "texts, in one batch", bounds="[1, inf)")
    max_new_tokens: int = setting(500, "length of each", bounds="[1, inf)")
    temperature: float = setting(0.8, "of the softmax", bounds="(0, inf)")
    top_k: int = setting(200, "likeliest tokens to draw from", bounds="[1, inf)")
    seed: int = setting(1337, "of all texts together")
    device: str = setting("auto", "auto, cpu, cuda, cuda:N or mps")
    dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", "of the weights")


def main(argv=None):
    config = load(PeerConfig, sys.argv[1:] if argv is None else argv, {"device": resolve_device})
    torch.manual_seed(config.seed)
    model = gpt2_of(ckpt.load(Path(config.out_dir, ckpt.BEST), optimizers=False))
    model = model.to(config.device, DTYPES[config.dtype])
    ids = torch.zeros(config.num_samples, 1, dtype=torch.int64, device=config.device)
    extend(model, ids, 1, config)  # the first call takes longer, and is not counted
    first, start = time.monotonic() - STARTED, time.monotonic()
    left = config.max_new_tokens
    while left:
        if ids.shape[1] == model.config.n_positions:
            ids = ids[:, -(model.config.n_positions // 2) :]
        count = min(left, model.config.n_positions - ids.shape[1])
        ids, left = extend(model, ids, count, config), left - count
    ids.cpu()  # waits for the device
    seconds, tokens = time.monotonic() - start, config.num_samples * config.max_new_tokens
    print(
        f"{tokens:,} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s; the first after "
        f"{first:.2f} s"
    )


def extend(model, ids, count, config):
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=True,
        temperature=config.temperature,
        top_k=config.top_k,
        pad_token_id=0,
    )


def gpt2_of(checkpoint):
    """The GPT2LMHeadModel with a checkpoint's weights. Raises UserError where it is no GPT-2."""
    shape = checkpoint.model_config
    if (shape.position, shape.norm, shape.tie_weights) != ("learned", "layernorm", True):
        raise UserError(f"{checkpoint.path} is no plain GPT-2")
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=shape.vocab_size,
            n_positions=shape.block_size,
            n_embd=shape.n_embd,
            n_layer=shape.n_layer,
            n_head=shape.n_head,
            activation_function={"gelu_tanh": "gelu_new"}.get(shape.activation, shape.activation),
            bos_token_id=0,
            eos_token_id=None,
        )
    )
    weights = {}
    for name, tensor in model.state_dict().items():
        weights[name] = torch.zeros_like(tensor)  # biases that the checkpoint may lack
        if name in checkpoint.weights:
            given = checkpoint.weights[name]
            weights[name] = given.T if _transposed(name) else given
    model.load_state_dict(weights)
    return model.eval()


def _transposed(name):
    """Whether transformers keeps a weight as (in, out)."""
    return name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


if __name__ == "__main__":
    run(main)
