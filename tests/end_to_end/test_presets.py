"""The presets in config/."""

import dataclasses
import json
import math
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from folio.checkpoint.format import empty_model
from folio.checkpoint.progress import Progress
from folio.cli.errors import UserError
from folio.cli.settings import load_settings
from folio.data.tokenizer import CharTokenizer, GPT2Tokenizer
from folio.distributed.world import SINGLE_PROCESS
from folio.hardware import device as device_module
from folio.hardware import memory
from folio.hardware.device import Machine
from folio.hardware.optimize import optimize_for_training
from folio.pretrained.architectures import Qwen3
from folio.training.evaluation import count_windows
from folio.training.model_size import choose_model_size, count_possible_tokens
from folio.training.setup import model_config
from prepare import MIN_BPE_CHARACTERS, bpe_vocab_size
from train import TrainConfig, learning_rate_at

pytestmark = pytest.mark.usefixtures("text_size", "card")
CONFIG = Path(__file__).parents[2] / "config"
SHAKESPEARE_CHARACTERS = CharTokenizer("".join(map(chr, range(65))))  # tiny Shakespeare has 65

CARDS = {"T4": (65, 15), "RTX 4090": (165.2, 23.6), "H100": (989, 79)}


@pytest.fixture
def card(monkeypatch):
    """A function that sets the machine: a GPU, or another peak in TFLOP/s."""

    def set_card(name="H100", tflops=None):
        peak, gib = CARDS[name]
        machine = SimpleNamespace(peak_flops=1e12 * (tflops or peak), dtype="bfloat16")
        monkeypatch.setattr(device_module, "set_up_machine", lambda *_: machine)
        monkeypatch.setattr(memory, "memory_bytes", lambda _: 2**30 * gib)

    set_card()
    return set_card


PORTABLE = str(CONFIG / "portable.py")
PRESETS = sorted(set(CONFIG.rglob("*.py")) - {Path(PORTABLE)})


@pytest.fixture(params=PRESETS, ids=lambda path: path.stem)
def preset(request, text_size):
    """The path of each preset, with a text that it accepts."""
    if request.param.stem == "gpt2_fast":
        text_size(10**9, GPT2Tokenizer.vocab_size)
    return request.param


NANOGPT_RECIPE = {"cuda": {  # for tiny Shakespeare
    "n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch_size": 64, "dropout": 0.2,
    "learning_rate": 1e-3, "max_iters": 5000, "beta2": 0.99, "warmup_iters": 100,
    "gradient_accumulation_steps": 1,
}}  # fmt: skip
NANOGPT_RECIPE["cpu"] = NANOGPT_RECIPE["cuda"] | {
    "n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12, "dropout": 0.0,
    "max_iters": 2000,
}  # fmt: skip


def load_preset(name, device="cuda", *flags):
    return load_settings(TrainConfig, [str(CONFIG / name), *flags], {"device": lambda _: device})


def count_parameters(settings, tokenizer):
    """Returns the number of parameters of the model that the settings describe."""
    return empty_model(model_config(settings, tokenizer), "meta").num_params()


def test_every_preset_loads_and_its_model_can_be_built(preset):
    for device in ("cuda", "cpu"):
        settings = load_preset(preset, device)
        assert settings.out_dir != "out" or settings.eval_only
        assert count_parameters(settings, SHAKESPEARE_CHARACTERS)
        if "shakespeare_char" in preset.stem or preset.stem == "own_text":
            fewest = 5 if preset.stem == "shakespeare_char_quick" else 8
            assert fewest <= -(-settings.max_iters // settings.eval_interval) <= 30


@pytest.mark.parametrize("flag", ["--minutes=0.1", "--eval_iters=3", "--max_iters=1", "--seed=1"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_final_evaluation_covers_at_least_as_much_text_as_others(preset, device, flag):
    settings = load_preset(preset, device, flag)
    dataset = SimpleNamespace(train=range(10**8), val=range(10**7))
    for step, steps_in_time in product((1, settings.max_iters), (0.5, 50, math.inf)):
        progress = Progress(step, steps_in_time=steps_in_time)
        run = SimpleNamespace(settings=settings, dataset=dataset, progress=progress)
        for split in ("train", "val"):
            assert 1 <= count_windows(run, split) <= count_windows(run, split, final=True)


@pytest.mark.slow
def test_the_training_forward_of_every_preset_is_one_graph(preset):
    settings = load_preset(preset, "cpu")
    config = model_config(settings, SHAKESPEARE_CHARACTERS)
    small = {"n_layer": min(config.n_layer, 2), "n_embd": 4 * config.n_head}
    small["block_size"] = min(config.block_size, 100)
    config = dataclasses.replace(config, **small)
    forward = empty_model(config).init_weights()
    forward.dtype = torch.bfloat16
    optimize_for_training(forward, None, Machine("cpu", "bfloat16", False), SINGLE_PROCESS)
    torch._dynamo.reset()  # its limit of graphs is for all models together
    compiled = torch.compile(forward, backend="eager", fullgraph=True)  # raises at a graph break
    ids = torch.zeros(2, config.block_size, dtype=torch.int64)
    loss = compiled(ids, ids, settings.train_temperature)
    loss.backward()
    assert torch.isfinite(loss)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_with_portable_every_preset_is_a_qwen3_with_as_many_tokens_per_step(preset, device):
    before, after = load_preset(preset, device), load_preset(preset, device, PORTABLE)
    assert not Qwen3().misfits(model_config(after, SHAKESPEARE_CHARACTERS))
    assert after.batch_size * after.block_size == before.batch_size * before.block_size
    assert after.block_size == (
        min(before.block_size, 256) if device == "cpu" else before.block_size
    )


@pytest.mark.parametrize("device", NANOGPT_RECIPE)
def test_the_shakespeare_preset_is_nanogpts(device):
    settings, recipe = load_preset("shakespeare_char.py", device), NANOGPT_RECIPE[device]
    assert {name: getattr(settings, name) for name in recipe} == recipe
    assert learning_rate_at(settings.max_iters, settings) == pytest.approx(1e-4)
    assert learning_rate_at(settings.max_iters - 1, settings) > 1e-4


@pytest.mark.parametrize(
    ("preset", "tokenizer", "published", "tolerance"),
    [
        ("tutorials/gpt_small.py", SHAKESPEARE_CHARACTERS, 309_185, 0.02),
        ("tutorials/lecture.py", SHAKESPEARE_CHARACTERS, 10.79e6, 0.001),
        ("train_gpt2.py", GPT2Tokenizer(), 124e6, 0.005),
    ],
)
def test_models_have_the_published_sizes(preset, tokenizer, published, tolerance):
    size = count_parameters(load_preset(preset, "cpu"), tokenizer)
    assert size == pytest.approx(published, rel=tolerance)


# Any text


def test_the_plan_follows_the_size_of_the_text(text_size, card):
    card(tflops=0.19)
    plans, passes = [], []
    for tokens in (20_000, 100_000, 600_000, 1_003_854, 10_000_000, 100_000_000):
        text_size(tokens)
        settings = load_preset("own_text.py", "cpu", "--minutes=2")
        plans.append(settings)
        passes.append(settings.max_iters * settings.tokens_per_step / tokens)
    assert plans[3].max_iters == pytest.approx(1900, rel=0.01)  # of tiny Shakespeare
    assert passes[:4] == sorted(passes[:4], reverse=True)  # less text is read more often,
    dropouts = [settings.dropout for settings in plans]  # with more dropout
    assert dropouts == sorted(dropouts, reverse=True)
    assert dropouts[0] > dropouts[3] == 0
    assert [settings.ngrams for settings in plans] == [2, 2, 2, 4, 4, 4]
    temperatures = [settings.train_temperature for settings in plans]
    assert temperatures == sorted(temperatures)
    assert 0.8 <= temperatures[0] < temperatures[-1] == 1


def test_a_text_that_is_read_less_often_has_less_dropout(text_size, card):
    card(tflops=0.19)
    text_size(220_000)
    rates = [load_preset("own_text.py", "cpu", f"--minutes={m}").dropout for m in (0.5, 1, 10)]
    assert rates == pytest.approx([0.046, 0.092, 0.132], abs=0.001)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_preset_for_any_text_suits_short_texts(text_size, device):
    for vocab_size, tokens in product((2, 50_257), (100, 20_000)):
        text_size(tokens, vocab_size)
        settings = load_preset("own_text.py", device)
        assert settings.block_size < tokens // 9  # the validation split
        assert settings.eval_interval < settings.max_iters
        assert settings.max_iters >= 10
        assert settings.gradient_accumulation_steps == 1


@pytest.mark.parametrize("val_tokens", [13, 200])
def test_a_short_validation_text_does_not_change_the_tokens_of_a_step(val_tokens, text_size):
    usual = load_preset("own_text.py", "cpu").tokens_per_step
    text_size(val_tokens=val_tokens)
    settings = load_preset("own_text.py", "cpu")
    assert model_config(settings, SHAKESPEARE_CHARACTERS).block_size < val_tokens
    assert 0.95 * usual < settings.tokens_per_step <= usual


@pytest.mark.parametrize(
    ("tokens", "num_bytes", "vocab_size", "tflops", "minutes", "layers", "ngrams"),
    [
        (135_000, 135_000, 65, 0.19, 2, 2, 2),
        (135_000, 135_000, 65, 0.19, 10, 2, 2),  # more time does not help a short text
        (10**6, 10**6, 65, 0.19, 2, 2, 4),
        (10**6, 10**6, 65, 0.37, 10, 4, 6),
        (10**6, 10**6, 65, 0.01, 2, 1, 4),
        (900_000, 2_900_000, 2048, 0.19, 2, 2, 3),
        (900_000, 2_900_000, 2048, 0.19, 10, 3, 0),
        (6_200_000, 20_000_000, 2048, 0.37, 10, 3, 3),
        (6_200_000, 20_000_000, 2048, 0.19, None, 4, 0),
        (350_000, 10**6, 2048, 0.19, 2, 2, 0),  # too few tokens for tables
        (28_000_000, 90_000_000, 2048, 989, 2, 6, 3),
        (900_000_000, 4 * 10**9, 50_257, 989, None, 12, 0),
    ],
)
def test_the_model_follows_the_text_the_time_and_the_speed(
    tokens, num_bytes, vocab_size, tflops, minutes, layers, ngrams, text_size, card
):
    card(tflops=tflops)
    text_size(tokens, vocab_size, num_bytes)
    settings = load_preset("own_text.py", "cpu", f"--minutes={minutes}")
    assert (settings.n_layer, settings.ngrams) == (layers, ngrams)


@pytest.mark.parametrize(
    ("megabytes", "minutes", "name", "width", "step_tokens", "accumulation"),
    [
        (1, 2, "H100", 256, 4096, 1),
        (30, 30, "T4", 384, 16_384, 1),
        (60, 10, "H100", 512, 32_768, 1),
        (400, None, "T4", 768, 65_536, 4),
    ],
)
def test_a_gpu_trains_the_same_models_with_full_attention(
    megabytes, minutes, name, width, step_tokens, accumulation, text_size, card
):
    card(name)
    text_size(megabytes * 10**6 // 3, 2048, megabytes * 10**6)
    settings = load_preset("own_text.py", "cuda", f"--minutes={minutes}")
    assert (settings.n_embd, settings.window) == (width, 0)
    assert settings.tokens_per_step == step_tokens
    assert settings.gradient_accumulation_steps == accumulation


@pytest.mark.parametrize("tflops", [0.01, 0.1, 1])
def test_even_a_slow_machine_makes_many_steps(tflops, text_size, card):
    card(tflops=tflops)
    text_size(6_200_000, 2048, 20_000_000)
    settings = load_preset("own_text.py", "cpu", "--minutes=2")
    model = empty_model(model_config(settings, Mock(padded_vocab_size=2048)))
    step_flops = settings.tokens_per_step * model.flops_per_token()
    assert 120 * 1e12 * tflops / 4 / step_flops > 250
    assert settings.block_size >= 128


PEAKS = {  # in FLOP/s, of the machines in docs/own-text.md
    "two laptop cores": 1e11,
    "two server cores, float32": 1.9e11,
    "two server cores, bfloat16": 3.7e11,
    "T4": 6.5e13,
    "H100": 9.89e14,
}


def describe_size(size, flops):
    """Returns the millions of parameters and the steps for a text of `size` characters."""
    vocab_size, tokens = 65, size
    if size >= MIN_BPE_CHARACTERS:
        vocab_size, tokens = bpe_vocab_size(size, 65), size // 3  # characters per token
    model = choose_model_size(tokens, size, vocab_size, flops)
    steps = min(count_possible_tokens(model, vocab_size, flops), 10 * tokens) / model.step_tokens
    return f"{model.parameters(vocab_size) / 1e6:.1f} M, {steps:,.0f}"


def test_the_guide_names_the_models_of_texts_machines_and_times():
    guide = (CONFIG.parent / "docs/own-text.md").read_text("utf-8")
    table = guide[guide.index("| machine, time") :].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    sizes = [round(1e6 * float(title.removesuffix(" MB"))) for title in rows[0][1:]]
    expected = [
        [
            f"{name}, {minutes} minutes",
            *(describe_size(size, 60 * minutes * peak) for size in sizes),
        ]
        for name, peak in PEAKS.items()
        for minutes in (2, 10)
    ]
    assert rows[2:] == expected


def test_evaluations_of_a_long_text_fit_into_the_time_of_a_slow_machine(text_size, card):
    card(tflops=0.001)
    text_size(10**7, 2048)
    settings = load_preset("own_text.py", "cpu", "--minutes=0.5")
    tokens = 2 * settings.eval_iters * settings.batch_size * settings.block_size
    flops = 2 * 12 * settings.n_layer * settings.n_embd**2 * tokens  # of forward passes
    assert flops < 0.07 * 30 * 0.001e12 / 4


def test_a_resumed_run_keeps_the_model_of_its_first_measurement(text_size, card, folder):
    for events in ([], [{"event": "start", "parameters": 1, "elapsed_s": 1}]):
        card(tflops=0.19)
        first = load_preset("own_text.py", "cpu", "--minutes=2", "--out_dir=out-a")
        if events:
            events[0]["settings"] = dataclasses.asdict(first)
            Path("out-a").mkdir()
            Path("out-a/log.jsonl").write_text(json.dumps(events[0]) + "\n")
            Path("out-a/last.pt").touch()
        card(tflops=5)
        flags = ("--minutes=10", "--out_dir=out-a", "--init_from=resume")
        resumed = load_preset("own_text.py", "cpu", *flags)
        assert (resumed.n_embd == first.n_embd == 128) == bool(events)
    assert load_preset("own_text.py", "cuda", *flags).window == 64  # moved to a GPU
    different = {n for n, v in dataclasses.asdict(first).items() if getattr(resumed, n) != v}
    assert different == {"minutes", "init_from"}
    Path("out-a/last.pt").unlink()  # killed before the first save: nothing is resumed
    assert load_preset("own_text.py", "cpu", *flags[:2], "--init_from=auto").n_embd == 256


# GPT-2


@pytest.mark.parametrize(("name", "batch_size"), [("T4", 16), ("RTX 4090", 32), ("H100", 64)])
def test_fast_gpt2_fits_the_card_and_the_corpus(name, batch_size, text_size, card):
    card(name)
    for tokens, minutes, steps, step_tokens in (
        (9 * 10**9, None, 4_959, 2**19),
        (28 * 10**6, None, 854, 2**17),
        (9 * 10**9, 4, None, {"T4": 2**16, "RTX 4090": 2**16, "H100": 2**17}[name]),
    ):
        text_size(tokens, GPT2Tokenizer.vocab_size)
        settings = load_preset("gpt2_fast.py", "cuda", f"--minutes={minutes}")
        assert settings.max_iters == (steps or round(2.6e9 / step_tokens))
        assert settings.tokens_per_step == step_tokens
        assert settings.batch_size == min(batch_size, step_tokens // 1024)


@pytest.mark.parametrize(
    ("tokens", "vocab_size", "message"),
    [(10**9, 65, "--tokenizer=gpt2"), (10**6, 50_257, "1,000,000 .* config/own_text.py")],
)
def test_fast_gpt2_names_the_preset_that_fits_another_dataset(
    tokens, vocab_size, message, text_size
):
    text_size(tokens, vocab_size)
    with pytest.raises(UserError, match=message):
        load_preset("gpt2_fast.py")


NANOGPT_PRESETS = {  # of the same names
    "finetune_shakespeare.py": {
        "eval_interval": 5, "dataset": "shakespeare", "init_from": "gpt2-xl",
        "batch_size": 1, "gradient_accumulation_steps": 32, "max_iters": 20, "learning_rate": 3e-5,
        "decay_lr": False, "wandb_log": False, "wandb_project": "shakespeare",
        "always_save_checkpoint": False,
    },
    "eval_gpt2_xl.py": {
        "batch_size": 8, "eval_iters": 500, "eval_only": True, "wandb_log": False,
        "init_from": "gpt2-xl",
    },
    "train_gpt2.py": {
        "batch_size": 12, "block_size": 1024, "gradient_accumulation_steps": 40,
        "max_iters": 600_000, "lr_decay_iters": 600_000, "eval_interval": 1000,
        "log_interval": 10, "weight_decay": 0.1, "wandb_log": True, "wandb_project": "owt",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NANOGPT_PRESETS)
def test_the_presets_for_gpt2_are_nanogpts(name):
    settings = dataclasses.asdict(load_preset(name))
    defaults = dataclasses.asdict(TrainConfig())
    changes = {key for key in settings if settings[key] != defaults[key]}
    assert {key: settings[key] for key in NANOGPT_PRESETS[name]} == NANOGPT_PRESETS[name]
    assert changes <= NANOGPT_PRESETS[name].keys() | {"out_dir", "device", "wandb_run_name"}
