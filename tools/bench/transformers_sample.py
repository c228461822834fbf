"""Generate text with transformers, for a comparison with sample.py.

    python -m tools.export --out_dir=out --to=out-hf
    python -m tools.bench --script=sample \
        --vs="python -m tools.bench.transformers_sample --init_from=out-hf" -- --out_dir=out

Uses num_samples, max_new_tokens, temperature, top_k, device and dtype of sample.py. When the
context is full, its older half is dropped, as in sample.py; transformers has no rule for that.
"""

import time

import torch
from transformers import AutoModelForCausalLM

from folio.cli import process
from folio.cli.errors import foreign_errors
from folio.cli.settings import load_settings
from folio.hardware.device import DTYPES, resolve_device, resolve_dtype
from sample import SampleConfig


def main(argv=None):
    settings = load_settings(SampleConfig, argv, {"device": resolve_device})
    dtype = DTYPES[resolve_dtype(settings.dtype, settings.device)]
    with foreign_errors(f"--init_from={settings.init_from} has no model", OSError, ValueError):
        model = AutoModelForCausalLM.from_pretrained(settings.init_from, dtype=dtype)
    model = model.to(settings.device)
    controls = {"temperature": settings.temperature, "top_k": settings.top_k}
    model.generation_config.update(do_sample=True, eos_token_id=None, **controls)
    ids = torch.zeros(settings.num_samples, 1, dtype=torch.int64, device=settings.device)
    model.generate(ids, max_new_tokens=1)  # a warmup
    start = time.monotonic()
    remaining = settings.max_new_tokens
    context = model.config.max_position_embeddings
    while remaining:
        if ids.shape[1] >= context:
            ids = ids[:, -(context // 2) :]
        count = min(remaining, context - ids.shape[1])
        ids = model.generate(ids, max_new_tokens=count)
        remaining -= count
    ids.cpu()  # waits for the device
    seconds = time.monotonic() - start
    tokens = settings.num_samples * settings.max_new_tokens
    print(f"{tokens:,} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s")


if __name__ == "__main__":
    process.run(main)
