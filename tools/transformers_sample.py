"""Generate text from a checkpoint with transformers, for a comparison with sample.py.

    python -m tools.bench --script=sample --vs="python -m tools.transformers_sample" -- --seed=1

Uses out_dir, num_samples, max_new_tokens, temperature, top_k, device and dtype of sample.py. When
the context is full, its older half is dropped, as in sample.py; transformers has no rule for that.
"""

import time
from functools import partial

from folio import process

if __name__ == "__main__":
    process.start(lambda: None)  # from now on, a signal ends the script without a traceback

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from folio.device import DTYPES, resolve_device, resolve_dtype
from folio.errors import UserError
from folio.run_dir import RunDir
from folio.settings import load
from model import GPTConfig
from sample import SampleConfig

SHARED = ("vocab_size", "n_layer", "n_head", "n_embd")  # names of settings in both libraries
SUPPORTED = (*SHARED, "block_size", "dropout", "bias")
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # transformers has (in, out)


def main(argv=None):
    settings = load(SampleConfig, argv, {"device": resolve_device})
    checkpoint = RunDir(settings.out_dir).load_best()
    model = make_gpt2(checkpoint)
    dtype = resolve_dtype(settings.dtype, settings.device)
    model = model.to(settings.device, DTYPES[dtype])
    controls = {"temperature": settings.temperature, "top_k": settings.top_k}
    extend = partial(model.generate, do_sample=True, **controls)
    ids = torch.zeros(settings.num_samples, 1, dtype=torch.int64, device=settings.device)
    extend(ids, max_new_tokens=1)  # a warmup
    start, left, size = time.monotonic(), settings.max_new_tokens, model.config.n_positions
    while left:
        ids = ids if ids.shape[1] < size else ids[:, -(size // 2) :]
        count = min(left, size - ids.shape[1])
        ids = extend(ids, max_new_tokens=count)
        left -= count
    ids.cpu()  # waits for the device
    seconds, tokens = time.monotonic() - start, settings.num_samples * settings.max_new_tokens
    print(f"{tokens:,} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s")


def make_gpt2(checkpoint):
    """Returns a GPT2LMHeadModel with a checkpoint's weights. Raises UserError for other models."""
    config = checkpoint.config
    if config != GPTConfig(**{name: getattr(config, name) for name in SUPPORTED}):
        raise UserError(f"{checkpoint.path} is not a plain GPT-2")
    sizes = {name: getattr(config, name) for name in SHARED}
    tokens = {"bos_token_id": None, "eos_token_id": None}
    model = GPT2LMHeadModel(
        GPT2Config(n_positions=config.block_size, activation_function="gelu", **sizes, **tokens)
    )
    weights = {
        name: weight.T if name.endswith(TRANSPOSED) else weight
        for name, weight in checkpoint.weights.items()
    }
    model.load_state_dict(weights, strict=False)  # biases stay 0 if it has none
    return model.eval()


if __name__ == "__main__":
    process.run(main)
