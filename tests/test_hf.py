"""Tests of folio/hf.py: folders that transformers wrote, and damaged ones.

tests/test_export.py reads exports of folio.
"""

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file, save_file

from folio import hf
from folio.checkpoint import Progress, build_model
from folio.errors import UserError
from folio.hf import read_pretrained
from model import GPTConfig

pytestmark = [
    pytest.mark.usefixtures("folder"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
SHAPES = (
    {"n_positions": 8, "vocab_size": 37, "n_layer": 2, "n_head": 2, "n_embd": 16},
    {"n_positions": 12, "vocab_size": 11, "n_layer": 3, "n_head": 5, "n_embd": 30},
)
UNTIED = {"tie_word_embeddings": False}


def transformers_model(**changes):
    """Returns a GPT-2 of transformers with random weights, norms and biases too."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(**(SHAPES[0] | changes))
    model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5 if parameter.dim() == 1 else 0.2)
    return model


def write_gpt2(path="theirs", **changes):
    transformers_model(**changes).save_pretrained(path)
    return Path(path)


def write_own(path="own", **changes):
    """Writes a model as folio exports it, without its code."""
    model = tiny.random_model(**changes)
    Path(path).mkdir()
    save_file(
        {hf.PREFIX + name: w for name, w in model.state_dict().items() if name != hf.HEAD},
        Path(path, hf.WEIGHTS),
    )
    values = {"model_type": "folio"} | asdict(model.config)
    Path(path, hf.CONFIG).write_text(json.dumps(values))
    return Path(path)


def rewrite_config(path, **changes):
    config = json.loads((path / hf.CONFIG).read_text()) | changes
    (path / hf.CONFIG).write_text(json.dumps(config))


def rewrite_weights(path, change):
    """Replaces the tensors in a folder by change(tensors)."""
    save_file(change(load_file(path / hf.WEIGHTS)), path / hf.WEIGHTS)


def refused(path, *words):
    """Whether reading ends with one line that has these words."""
    with pytest.raises(UserError) as caught:
        read_pretrained(path)
    line = str(caught.value)
    return "\n" not in line and all(word in line for word in words)


# Reading what transformers wrote


def gradients_of(model, loss):
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("changes", [*SHAPES, UNTIED], ids=str)
def test_logits_loss_and_gradients_of_a_gpt2_equal_transformers(changes):
    theirs = transformers_model(**changes)
    theirs.save_pretrained("theirs")
    ours = build_model(read_pretrained("theirs")).eval()
    idx = tiny.random_ids(ours)
    expected = theirs(idx, labels=idx)
    torch.testing.assert_close(ours.logits(idx), expected.logits, rtol=0, atol=1e-4)
    targets = torch.nn.functional.pad(idx[:, 1:], (0, 1), value=-1)
    loss = ours(idx, targets)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=0)
    wanted = gradients_of(theirs, expected.loss)
    for name, gradient in gradients_of(ours, loss).items():
        is_matrix = name.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight"))
        same = wanted[name].t() if is_matrix else wanted[name]
        torch.testing.assert_close(gradient, same, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_of_pretrained_weights_starts_at_step_0():
    path = write_gpt2()
    checkpoint = read_pretrained(str(path))
    assert (checkpoint.progress, checkpoint.settings, checkpoint.path) == (Progress(), {}, path)
    assert checkpoint.config == GPTConfig(**tiny.SMALL, activation="gelu_tanh")
    assert all(w.is_contiguous() and w.dtype == torch.float32 for w in checkpoint.weights.values())
    for name, weight in build_model(checkpoint).state_dict().items():
        assert weight.data_ptr() == checkpoint.weights[name].data_ptr()  # no copy


def test_shards_are_read_like_one_file():
    theirs = transformers_model()
    theirs.save_pretrained("one")
    theirs.save_pretrained("shards", max_shard_size="4KB")
    shards = sorted(Path("shards").glob("model-*.safetensors"))
    assert len(shards) > 1
    assert tiny.same(read_pretrained("shards").weights, read_pretrained("one").weights)
    shards[0].unlink()
    assert refused("shards", str(shards[0]), "No such file")


def without_prefix(tensors):
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


def with_masks(tensors):
    masks = {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.1.attn.masked_bias": torch.tensor([-1e4])}
    return without_prefix(tensors) | masks


def with_head(tensors):
    return tensors | {"lm_head.weight": tensors["transformer.wte.weight"].clone()}


@pytest.mark.parametrize("change", [without_prefix, with_masks, with_head])
def test_names_in_older_files_are_known(change):
    path = write_gpt2()
    before = read_pretrained(path).weights
    rewrite_weights(path, change)
    assert tiny.same(read_pretrained(path).weights, before)


# Refusals


@pytest.mark.parametrize(
    ("write", "changes", "words"),
    [
        (write_gpt2, {"model_type": "llama"}, "'llama'; folio reads gpt2 and folio"),
        (write_gpt2, {"model_type": []}, "model_type is []"),
        (write_gpt2, {"n_inner": 32}, "n_inner=32 is not supported, only 64"),
        (write_gpt2, {"scale_attn_weights": False}, "scale_attn_weights=False"),
        (write_gpt2, {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06"),
        (write_gpt2, {"activation_function": "silu"}, "activation_function='silu'"),
        (write_gpt2, {"n_embd": None}, "n_embd=None"),
        (write_gpt2, {"n_positions": "8"}, "n_positions='8'"),
        (write_gpt2, {"n_head": 3}, "n_embd=16 is not divisible by n_head=3"),
        (write_gpt2, {"n_layer": 10**12}, "1,000,000,000,000 layers, but there are 28 tensors"),
        (write_gpt2, {"vocab_size": 2**62}, "impossible"),
        (write_gpt2, {"vocab_size": 2**80}, "impossible"),
        (write_gpt2, {"bias": False}, "transformer.h.0.attn.c_attn.bias"),
        (write_own, {"position": "absolute"}, "absolute"),
        (write_own, {"window": "3"}, "window='3'"),
        (write_own, {"position": "rotary"}, "transformer.wpe.weight"),
        (write_own, {"ngrams": 2}, "transformer.context.ngrams.2.weight', which is missing"),
    ],
)
def test_config_of_another_model_is_refused(write, changes, words):
    path = write()
    rewrite_config(path, **changes)
    assert refused(path, str(path), "config.json", words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: {k: v for k, v in t.items() if "wpe" not in k}, ["transformer.wpe.weight"]),
        (lambda t: t | {"extra\n": torch.ones(1)}, [r"'transformer.extra\n'"]),
        (lambda t: t | {"transformer.wpe.weight": torch.ones(16, 8)}, ["transformer.wpe.weight"]),
        (lambda t: {}, ["0 tensors"]),
        (lambda t: t | {"lm_head.weight": torch.ones(37, 16)}, ["lm_head.weight"]),
        (lambda t: t | {"lm_head.weight": torch.ones(3, 16)}, ["lm_head.weight"]),
        (lambda t: {k: v.int() for k, v in t.items()}, ["torch.int32"]),
    ],
)
def test_wrong_tensors_are_named(change, words):
    path = write_gpt2()
    rewrite_weights(path, change)
    assert refused(path, "theirs", *words)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("length", [0, 5, 100, -2])
def test_truncated_files_are_refused(name, length):
    path = write_gpt2()
    (path / name).write_bytes((path / name).read_bytes().rstrip()[:length])
    assert refused(path, f"theirs/{name} is damaged")


def test_missing_and_pickled_weights_are_refused_with_a_fix():
    assert refused("absent", "absent has no model.safetensors")
    path = write_gpt2()
    (path / hf.CONFIG).rename("config.json")
    assert refused(path, "theirs/config.json: No such file")
    (path / hf.WEIGHTS).rename(path / "pytorch_model.bin")
    assert refused(path, "could execute code", "save_pretrained")


@pytest.mark.parametrize("weight_map", [None, {"x": 1}, {"x": "../model.safetensors"}], ids=str)
def test_index_that_names_no_files_of_the_folder_is_refused(weight_map):
    path = write_gpt2()
    (path / hf.WEIGHTS).rename("model.safetensors")
    (path / hf.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert refused(path, hf.INDEX, "weight_map")


@pytest.mark.campaign
@pytest.mark.parametrize("write", [write_gpt2, write_own])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_random_damage_never_ends_in_a_traceback(write, name):
    path = write()
    raw, random = (path / name).read_bytes(), np.random.default_rng(0)
    for place in random.integers(min(len(raw), 2000), size=200):
        damaged = bytearray(raw)
        damaged[place] = random.integers(256)
        (path / name).write_bytes(damaged)
        with suppress(UserError):
            read_pretrained(path)
