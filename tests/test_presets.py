"""The presets in config/."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from folio.optim import learning_rate_at
from folio.plan import model_config
from folio.settings import load
from folio.size import num_params
from folio.tokenizers import CharTokenizer, GPT2Tokenizer
from model import GPT
from train import TrainConfig

pytestmark = pytest.mark.usefixtures("text_size")
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


def load_preset(name, device="cuda", *flags):
    return load(TrainConfig, [str(CONFIG / name), *flags], {"device": lambda _: device})


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


@pytest.mark.parametrize(("device", "max_iters"), [("cuda", 1800), ("cpu", 1900)])
def test_tiny_shakespeare_is_one_point_of_the_preset_for_any_text(device, max_iters):
    fast, own = (
        dataclasses.asdict(load_preset(name, device))
        for name in ("shakespeare_char_fast.py", "own_text.py")
    )
    assert own["max_iters"] == pytest.approx(max_iters, rel=0.01)
    different = {name for name in fast if fast[name] != own[name]}
    expected = {"out_dir", "dataset", "minutes", "max_iters", "eval_interval", "eval_iters"}
    assert different <= expected


def test_less_text_is_read_more_often_with_more_dropout(text_size):
    sizes, found = [20_000, 100_000, 1_000_000, 10_000_000], []
    for tokens in sizes:
        text_size(tokens)
        found.append(load_preset("own_text.py", "cpu"))
    steps = [each.max_iters * each.tokens_per_step for each in found]
    passes = [tokens / size for tokens, size in zip(steps, sizes, strict=True)]
    assert passes == sorted(passes, reverse=True)
    dropouts = [each.dropout for each in found]
    assert dropouts == sorted(dropouts, reverse=True)
    assert dropouts[0] > dropouts[2] >= dropouts[3] == 0


def test_tokens_that_occur_seldom_are_read_less_often(text_size):
    steps = []
    for vocab_size in (65, 512, 2048):
        text_size(38_000, vocab_size)
        steps.append(load_preset("own_text.py", "cpu").max_iters)
    assert steps[0] == steps[1] > 2 * steps[2]


def test_more_text_has_longer_n_grams_and_a_temperature_closer_to_one(text_size):
    found = []
    for tokens in (20_000, 600_000, 1_003_854, 100_000_000):
        text_size(tokens)
        found.append(load_preset("own_text.py", "cpu"))
    assert [each.ngrams for each in found] == [2, 2, 4, 4]
    temperatures = [each.train_temperature for each in found]
    assert temperatures == sorted(temperatures)
    assert 0.8 <= temperatures[0] < temperatures[-1] == 1


def test_a_large_vocabulary_has_no_table_of_pairs(text_size):
    assert load_preset("own_text.py", "cpu").ngrams
    text_size(vocab_size=3000)
    assert not load_preset("own_text.py", "cpu").ngrams


@pytest.mark.parametrize("tokens", [100, 1_000, 20_000])
@pytest.mark.parametrize("vocab_size", [2, 65, 50_257])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_preset_for_any_text_suits_short_texts(text_size, device, vocab_size, tokens):
    text_size(tokens, vocab_size)
    settings = load_preset("own_text.py", device)
    assert settings.block_size < tokens // 9  # the validation split
    assert settings.eval_interval < settings.max_iters


def test_the_time_budget_has_a_default_and_can_be_removed():
    flags = ([], ["--minutes=5"], ["--minutes=None"])
    assert [load_preset("own_text.py", "cpu", *each).minutes for each in flags] == [2, 5, None]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(
    "preset", ["shakespeare_char.py", "shakespeare_char_fast.py", "own_text.py"]
)
def test_the_shakespeare_presets_evaluate_at_least_eight_times(preset, device):
    settings = load_preset(preset, device)
    assert 8 <= -(-settings.max_iters // settings.eval_interval) <= 30


@pytest.mark.parametrize("preset", sorted(CONFIG.rglob("*.py")), ids=lambda path: path.stem)
def test_every_preset_loads(preset):
    settings = load_preset(preset)
    assert settings.out_dir != "out" or settings.eval_only


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


# GPT-2

NANOGPT_EVAL = "batch_size = 8\neval_iters = 500\neval_only = True\nwandb_log = False\n"
NANOGPT_FILES = {  # nanoGPT's presets of the same names, without comments
    "eval_gpt2.py": NANOGPT_EVAL + "init_from = 'gpt2'",
    "eval_gpt2_medium.py": NANOGPT_EVAL + "init_from = 'gpt2-medium'",
    "eval_gpt2_large.py": NANOGPT_EVAL + "init_from = 'gpt2-large'",
    "eval_gpt2_xl.py": NANOGPT_EVAL + "init_from = 'gpt2-xl'",
    "finetune_shakespeare.py": """
import time
out_dir = 'out-shakespeare'
eval_interval = 5
eval_iters = 40
wandb_log = False
wandb_project = 'shakespeare'
wandb_run_name = 'ft-' + str(time.time())
dataset = 'shakespeare'
init_from = 'gpt2-xl'
always_save_checkpoint = False
batch_size = 1
gradient_accumulation_steps = 32
max_iters = 20
learning_rate = 3e-5
decay_lr = False
""",
    "train_gpt2.py": """
wandb_log = True
wandb_project = 'owt'
wandb_run_name='gpt2-124M'
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8
max_iters = 600000
lr_decay_iters = 600000
eval_interval = 1000
eval_iters = 200
log_interval = 10
weight_decay = 1e-1
""",
}


@pytest.mark.parametrize("name", NANOGPT_FILES)
def test_the_presets_for_gpt2_are_nanogpts(name, tmp_path):
    theirs = tmp_path / name
    theirs.write_text(NANOGPT_FILES[name])
    theirs, ours = (dataclasses.asdict(load_preset(path)) for path in (theirs, name))
    different = {key for key in ours if ours[key] != theirs[key]}
    assert different <= {"wandb_run_name", "out_dir"}


def test_the_gpt2_preset_has_half_a_million_tokens_per_step():
    settings = load_preset("train_gpt2.py")
    assert settings.tokens_per_step == 491_520
    assert round(num_params(model_config(settings, GPT2Tokenizer())) / 1e6) == 124
