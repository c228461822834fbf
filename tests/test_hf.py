"""Tests of folio/hf.py: reading folders that transformers wrote, and wrong ones.

tests/test_export.py has the tests of writing.
"""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file, save_file

from folio import hf, tokenizer_files
from folio.checkpoint import Progress, build_model
from folio.errors import UserError
from folio.hf import read_pretrained
from folio.tokenizers import ByteTokenizer
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


def save(model, path="theirs", **options):
    """Writes a model of transformers, and a tokenizer. Returns the folder."""
    model.save_pretrained(path, **options)
    for name, text in tokenizer_files.contents(ByteTokenizer()).items():
        Path(path, name).write_text(text, encoding="utf-8")
    return Path(path)


def rewrite_config(path, **changes):
    config = json.loads((path / hf.CONFIG).read_text()) | changes
    (path / hf.CONFIG).write_text(json.dumps(config))


def rewrite_weights(path, change):
    """Replaces the tensors in a folder by change(tensors)."""
    save_file(change(load_file(path / hf.WEIGHTS)), path / hf.WEIGHTS)


def refused(path, *words):
    """Whether loading ends with one line that has these words."""
    with pytest.raises(UserError) as caught:
        build_model(read_pretrained(path))
    line = str(caught.value)
    return "\n" not in line and all(word in line for word in words)


# Reading what transformers wrote


@pytest.mark.parametrize("changes", [*SHAPES, UNTIED], ids=str)
def test_logits_loss_and_gradients_of_a_gpt2_equal_transformers(changes):
    theirs = transformers_model(**changes)
    ours = build_model(read_pretrained(save(theirs))).eval()
    idx = tiny.random_ids(ours)
    expected = theirs(idx, labels=idx)
    torch.testing.assert_close(ours.logits(idx), expected.logits, rtol=0, atol=1e-4)
    targets = torch.nn.functional.pad(idx[:, 1:], (0, 1), value=-1)
    loss = ours(idx, targets)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=0)
    expected.loss.backward()
    loss.backward()
    for name, parameter in ours.named_parameters():
        wanted = theirs.get_parameter(name).grad
        wanted = wanted.t() if name.endswith(hf.GPT2_TRANSPOSED) else wanted
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_of_pretrained_weights_starts_at_step_0():
    path = save(transformers_model())
    checkpoint = read_pretrained(str(path))
    assert (checkpoint.progress, checkpoint.settings, checkpoint.path) == (Progress(), {}, path)
    assert checkpoint.config == GPTConfig(**tiny.SMALL, activation="gelu_tanh")
    assert checkpoint.tokenizer == {"kind": "byte"}
    assert all(w.is_contiguous() and w.dtype == torch.float32 for w in checkpoint.weights.values())
    for name, weight in build_model(checkpoint).state_dict().items():
        assert weight.data_ptr() == checkpoint.weights[name].data_ptr()  # no copy


def test_shards_are_read_like_one_file():
    theirs = transformers_model()
    one, path = save(theirs, "one"), save(theirs, "shards", max_shard_size="4KB")
    shards = sorted(path.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert tiny.same(read_pretrained(path).weights, read_pretrained(one).weights)
    shards[0].unlink()
    assert refused(path, "shards", "No such file")


def without_prefix(tensors):
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


def with_masks(tensors):
    masks = {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.1.attn.masked_bias": torch.tensor([-1e4])}
    return without_prefix(tensors) | masks


def with_head(tensors):
    return tensors | {hf.HEAD: tensors[hf.EMBEDDING].clone()}


def as_bfloat16(tensors):
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


@pytest.mark.parametrize("change", [without_prefix, with_masks, with_head, as_bfloat16])
def test_other_names_and_types_of_tensors(change):
    path = save(transformers_model())
    before = read_pretrained(path).weights
    expected = {n: w.bfloat16().float() for n, w in before.items()}
    rewrite_weights(path, change)
    after = read_pretrained(path).weights
    assert tiny.same(after, expected if change is as_bfloat16 else before)


# Refusals


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, "'llama'"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({"activation_function": "silu"}, "silu"),
        ({"n_positions": "8"}, "str"),
        ({"n_head": 3}, "n_head=3"),
        ({"model_type": "folio", **asdict(GPTConfig()), "position": "absolute"}, "absolute"),
    ],
)
def test_config_of_another_model_is_refused(changes, words):
    path = save(transformers_model())
    rewrite_config(path, **changes)
    assert refused(path, f"{path}/{hf.CONFIG}", words)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: {k: v for k, v in t.items() if "wpe" not in k},
        lambda t: t | {"transformer.wpe.weight": torch.ones(16, 8)},
        lambda t: t | {"transformer.wpe.weight.more": torch.ones(1)},
    ],
)
def test_wrong_tensors_are_named(change):
    path = save(transformers_model())
    rewrite_weights(path, change)
    assert refused(path, str(path), "transformer.wpe.weight")


@pytest.mark.parametrize("name", [hf.CONFIG, hf.WEIGHTS])
def test_truncated_files_are_refused(name):
    path = save(transformers_model())
    (path / name).write_bytes((path / name).read_bytes().rstrip()[:-2])
    assert refused(path, str(path))


def test_missing_and_pickled_weights_are_refused():
    assert refused("absent", "absent/config.json")
    path = save(transformers_model())
    (path / hf.WEIGHTS).rename(path / "pytorch_model.bin")
    assert refused(path, hf.WEIGHTS, "could execute code", "save_pretrained")
