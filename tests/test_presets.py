"""The presets in config/."""

import re
from pathlib import Path

import pytest
import torch

from folio.optim import learning_rate_at
from folio.plan import model_config
from folio.settings import load
from folio.tokenizers import CharTokenizer, GPT2Tokenizer
from model import GPT, num_params
from train import TrainConfig

CONFIG = Path(__file__).parent.parent / "config"
CHARACTERS = CharTokenizer("".join(map(chr, range(65))))  # as many as tiny Shakespeare has

NANOGPT_ON_A_GPU = {
    "n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch_size": 64, "dropout": 0.2,
    "learning_rate": 1e-3, "max_iters": 5000, "beta2": 0.99, "warmup_iters": 100,
    "gradient_accumulation_steps": 1,
}  # fmt: skip
NANOGPT_ON_A_CPU = NANOGPT_ON_A_GPU | {
    "n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12, "dropout": 0.0,
    "max_iters": 2000,
}  # fmt: skip


def load_preset(name, device="cuda"):
    return load(TrainConfig, [str(CONFIG / name)], {"device": lambda _: device})


@pytest.mark.parametrize(
    ("device", "recipe"), [("cuda", NANOGPT_ON_A_GPU), ("cpu", NANOGPT_ON_A_CPU)]
)
def test_the_shakespeare_preset_is_nanogpts(device, recipe):
    settings = load_preset("shakespeare_char.py", device)
    assert {name: getattr(settings, name) for name in recipe} == recipe
    assert learning_rate_at(settings.max_iters, settings) == pytest.approx(1e-4)
    assert learning_rate_at(settings.max_iters - 1, settings) > 1e-4


@pytest.mark.parametrize(("device", "place"), [("cuda", 0), ("cpu", 1)])
def test_the_fast_preset_has_the_stated_number_of_parameters(device, place):
    config = model_config(load_preset("shakespeare_char_fast.py", device), CHARACTERS)
    source = (CONFIG / "shakespeare_char_fast.py").read_text(encoding="utf-8")
    stated = re.findall(r"([\d.]+) (?:M|million) parameters", source)[place]
    assert f"{num_params(config) / 1e6:.1f}" == stated
    x = torch.zeros((1, config.block_size), dtype=torch.int64)
    assert torch.isfinite(GPT(config)(x, x))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("preset", ["shakespeare_char.py", "shakespeare_char_fast.py"])
def test_the_shakespeare_presets_evaluate_at_least_eight_times(preset, device):
    settings = load_preset(preset, device)
    assert 8 <= -(-settings.max_iters // settings.eval_interval) <= 30


@pytest.mark.parametrize("preset", sorted(CONFIG.rglob("*.py")), ids=lambda path: path.stem)
def test_every_preset_loads(preset):
    assert load_preset(preset).out_dir != "out"


@pytest.mark.parametrize(
    ("tutorial", "tokenizer", "published", "tolerance"),
    [
        ("gpt_small", CHARACTERS, 309_185, 0.02),
        ("lecture", CHARACTERS, 10.79e6, 0.001),
        ("gpt2_124m", GPT2Tokenizer(), 163e6, 0.001),
    ],
)
def test_the_tutorials_have_the_published_sizes(tutorial, tokenizer, published, tolerance):
    settings = load_preset(f"tutorials/{tutorial}.py", "cpu")
    config = model_config(settings, tokenizer)
    assert num_params(config) == pytest.approx(published, rel=tolerance)
