"""The Hugging Face format: transformers as the reference for reading and for writing."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
import transformers
from safetensors.torch import save_file

from folio import hf, tensor_file
from folio.architectures import architecture_for
from folio.bpe import byte_characters
from folio.checkpoint import Checkpoint, Progress, build_model, load, save
from folio.errors import UserError
from folio.files import temporary_path
from folio.hf import read_pretrained, write_pretrained
from folio.tokenizers import END_OF_TEXT, BPETokenizer, CharTokenizer
from model import GPTConfig

pytestmark = [
    pytest.mark.usefixtures("folder"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
SHAPES = (
    {"n_positions": 8, "vocab_size": 37, "n_layer": 2, "n_head": 2, "n_embd": 16},
    {"n_positions": 12, "vocab_size": 11, "n_layer": 3, "n_head": 5, "n_embd": 30},
    {"n_positions": 8, "vocab_size": 37, "n_layer": 1, "n_head": 1, "n_embd": 8},
)
UNTIED = {"tie_word_embeddings": False}
ROTARY = {"position": "rotary"}
RMSNORM = {"position": "rotary", "norm": "rmsnorm"}
EXPORTS = {  # switches of a model: the architecture it is exported to
    "gpt2": (
        {},
        {"activation": "gelu_tanh"},
        {"bias": False, "activation": "relu2"},
        {"tie_weights": False, "activation": "relu"},
        {"n_layer": 3, "n_head": 5, "n_embd": 30, "block_size": 12, "vocab_size": 11},
    ),
    "starcoder2": (
        ROTARY,
        {**ROTARY, "window": 3, "activation": "gelu_tanh"},
        {**ROTARY, "window": 2, "bias": False, "tie_weights": False},
        {**ROTARY, "window": 8, "activation": "relu2"},
        {**ROTARY, "n_layer": 3, "n_head": 5, "n_embd": 30, "block_size": 12, "vocab_size": 11},
    ),
    "arcee": (
        {**RMSNORM, "activation": "relu2"},
        {**RMSNORM, "bias": False, "tie_weights": False},
        {**RMSNORM, "activation": "gelu_tanh", "bias": False},
    ),
}
every_export = pytest.mark.parametrize(
    ("kind", "changes"),
    [(kind, changes) for kind, each in EXPORTS.items() for changes in each],
    ids=str,
)
TOKENIZER = CharTokenizer("".join(map(chr, range(37))))


# Reading what transformers wrote


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


def rewrite_config(path, **changes):
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))


def rewrite_weights(path, change):
    """Replaces the tensors in a folder by change(tensors)."""
    tensors = {
        k: tensor_file.mapped(e).clone() for k, e in tensor_file.entries(path / hf.WEIGHTS).items()
    }
    save_file(change(tensors), path / hf.WEIGHTS)


def read_model(path):
    return build_model(read_pretrained(path)).eval()


def gradients_of(model, loss):
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("changes", [*SHAPES, UNTIED], ids=str)
def test_logits_loss_and_gradients_of_a_gpt2_equal_transformers(changes):
    theirs = transformers_model(**changes)
    theirs.save_pretrained("theirs")
    ours = read_model("theirs")
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


def test_built_model_uses_the_memory_of_the_weights_read():
    write_gpt2()
    checkpoint = read_pretrained("theirs")
    for name, weight in build_model(checkpoint).state_dict().items():
        assert weight.data_ptr() == checkpoint.weights[name].data_ptr()


def test_gpt2_has_the_tanh_approximation_of_gelu():
    path = write_gpt2()
    checkpoint = read_pretrained(path)
    assert checkpoint.config.activation == "gelu_tanh"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path)
    exact = build_model(replace(checkpoint, config=replace(checkpoint.config, activation="gelu")))
    idx = tiny.random_ids(exact)
    assert (exact.logits(idx) - theirs(idx).logits).abs().max() > 1e-4


def test_a_checkpoint_of_pretrained_weights_starts_at_step_0():
    path = write_gpt2()
    checkpoint = read_pretrained(str(path))
    assert (checkpoint.progress, checkpoint.settings, checkpoint.path) == (Progress(), {}, path)
    assert checkpoint.config == GPTConfig(**tiny.SMALL, activation="gelu_tanh")
    assert all(w.is_contiguous() and w.dtype == torch.float32 for w in checkpoint.weights.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_weights_become_float32(dtype):
    theirs = transformers_model().to(dtype)
    theirs.save_pretrained("theirs")
    ours = read_model("theirs")
    assert ours.lm_head.weight.dtype == torch.float32
    assert torch.equal(ours.transformer.wpe.weight, theirs.transformer.wpe.weight.float())


def test_shards_are_read_like_one_file():
    theirs = transformers_model()
    theirs.save_pretrained("one")
    theirs.save_pretrained("shards", max_shard_size="4KB")
    assert len([*Path("shards").glob("model-*.safetensors")]) > 1
    assert tiny.same(read_pretrained("shards").weights, read_pretrained("one").weights)


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


# Writing for transformers


def checkpoint_of(model):
    return Checkpoint(model.config, model.state_dict(), Progress(), {})


def export(path="ours", tokenizer=TOKENIZER, **changes):
    """Writes a random model. Returns the model and the folder."""
    model = tiny.random_model(**changes)
    write_pretrained(path, checkpoint_of(model), tokenizer)
    return model, Path(path)


@every_export
def test_exported_model_is_the_same_in_transformers(kind, changes):
    ours, path = export(**changes)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info.values())
    assert theirs.config.model_type == kind
    idx = tiny.random_ids(ours)
    torch.testing.assert_close(theirs(idx).logits, ours.logits(idx), rtol=0, atol=1e-4)
    prompt = idx[:1, :3]
    seen = torch.ones_like(prompt)
    greedy = theirs.generate(prompt, attention_mask=seen, max_length=8, do_sample=False)
    while prompt.shape[1] < 8:
        prompt = torch.cat((prompt, ours.logits(prompt)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(greedy, prompt)


@pytest.mark.parametrize("kind", EXPORTS)
def test_norms_of_tiny_embeddings_are_the_same_in_transformers(kind):
    """The norms' epsilon dominates the variance of such embeddings."""
    ours = tiny.random_model(**EXPORTS[kind][0], tie_weights=False)
    for name, parameter in ours.named_parameters():
        parameter.data *= 1e-3 if "wte" in name or "wpe" in name else 1
    write_pretrained("ours", checkpoint_of(ours), TOKENIZER)
    theirs = transformers.AutoModelForCausalLM.from_pretrained("ours")
    idx = tiny.random_ids(ours)
    torch.testing.assert_close(theirs(idx).logits, ours.logits(idx), rtol=0, atol=1e-4)


@every_export
def test_exported_folder_is_read_again_unchanged(kind, changes):
    ours, path = export(**changes)
    again = read_pretrained(path)
    assert again.config == ours.config
    assert tiny.same(again.weights, dict(ours.state_dict()))


@every_export
def test_what_transformers_saves_after_an_export_is_read_again(kind, changes):
    ours, path = export(**changes)
    transformers.AutoModelForCausalLM.from_pretrained(path).save_pretrained("again")
    again = read_pretrained("again")
    assert again.config == ours.config
    assert tiny.same(again.weights, dict(ours.state_dict()))


@pytest.mark.parametrize(
    ("changes", "switches"),
    [
        ({"qk_norm": True, "smear": 2}, "position=learned, norm=layernorm, qk_norm=True, smear=2"),
        ({"norm": "rmsnorm"}, "position=learned, norm=rmsnorm"),
        ({"window": 3}, "position=learned, norm=layernorm, window=3"),
        ({**RMSNORM, "window": 3}, "position=rotary, norm=rmsnorm, window=3"),
        ({"ngrams": 3}, "position=learned, norm=layernorm, ngrams=3"),
        ({"activation": "swiglu"}, "position=learned, norm=layernorm, activation=swiglu"),
    ],
    ids=str,
)
def test_switches_that_no_architecture_has_are_named(changes, switches):
    with pytest.raises(UserError, match=f"^no architecture for export has {switches} togeth"):
        export(**changes)
    assert not Path("ours").exists()


def test_dropout_does_not_matter_for_the_architecture():
    assert architecture_for(GPTConfig(dropout=0.2)).model_type == "gpt2"


def test_16_bit_weights_are_exported_in_16_bits():
    model = tiny.random_model()
    checkpoint = checkpoint_of(model)
    checkpoint.weights = {name: w.bfloat16() for name, w in checkpoint.weights.items()}
    write_pretrained("ours", checkpoint, TOKENIZER)
    theirs = transformers.AutoModelForCausalLM.from_pretrained("ours")
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(theirs.transformer.wpe.weight, model.transformer.wpe.weight.bfloat16())


def test_mapped_checkpoint_is_exported():
    model = tiny.random_model()
    save("ckpt.pt", checkpoint_of(model))
    write_pretrained("ours", load("ckpt.pt", optimizers=False), TOKENIZER)
    assert tiny.same(read_pretrained("ours").weights, dict(model.state_dict()))


def test_generation_ends_at_the_end_token_and_never_samples_padding():
    vocabulary = {character: i for i, character in enumerate(byte_characters()[:30])}
    end = {"content": END_OF_TEXT, "id": 30}
    definition = {"model": {"vocab": vocabulary}, "added_tokens": [end]}
    _, path = export(tokenizer=BPETokenizer(json.dumps(definition)))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert theirs.generation_config.eos_token_id == theirs.config.eos_token_id == 30
    with torch.no_grad():
        theirs.lm_head.weight.zero_()
    idx = theirs.generate(
        torch.zeros(64, 1, dtype=torch.long), do_sample=True, max_length=8, pad_token_id=0
    )
    assert 20 < idx.max() <= 30


def test_weights_of_an_export_are_aligned_and_have_the_permissions_of_the_other_files():
    _, path = export()
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1
    assert (path / hf.WEIGHTS).read_bytes()[0] % 8 == 0  # of the length of the header


def test_failing_export_keeps_the_old_folder(monkeypatch):
    _, path = export()
    before = {file.name: file.read_bytes() for file in path.iterdir()}

    def fail(file, tensors):
        file.write(b"half")
        raise UserError("the disk is full")

    monkeypatch.setattr(hf.tensor_file, "write", fail)
    with pytest.raises(UserError, match="the disk is full"):
        export(n_layer=1)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert not temporary_path(path / hf.WEIGHTS).exists()


def test_weights_of_another_shape_are_not_exported():
    model = tiny.random_model()
    checkpoint = replace(checkpoint_of(model), config=replace(model.config, n_embd=32))
    with pytest.raises(UserError, match="the weights do not fit the model: transformer.wte.weight"):
        write_pretrained("ours", checkpoint, TOKENIZER)


# Refusals


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'; folio reads gpt2, starcoder2, arcee"),
        ({"model_type": None}, "model_type is None"),
        ({"model_type": []}, r"model_type is \[\]"),
        ({"n_inner": 32}, "n_inner=32 is not supported, only 64"),
        ({"scale_attn_weights": False}, "scale_attn_weights=False is not supported"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06 is not supported, only 1e-05"),
        ({"activation_function": "silu"}, "activation_function='silu' is missing or not supported"),
        ({"n_embd": None}, "n_embd=None is missing or not supported"),
        ({"n_embd": "16"}, "n_embd='16' is missing or not supported"),
        ({"n_head": 3}, "n_embd=16 is not divisible by n_head=3"),
        ({"n_head": 0}, "n_head must be at least 1"),
        ({"n_layer": 10**12}, "says 1,000,000,000,000 layers, but there are 28 tensors"),
        ({"vocab_size": 2**62}, "describes an impossible model"),
        ({"vocab_size": 2**80}, "describes an impossible model"),
        ({"bias": False}, "says bias=false, but transformer.h.0.ln_1.bias is not zero"),
    ],
    ids=str,
)
def test_config_with_other_mathematics_is_refused(changes, reason):
    path = write_gpt2()
    rewrite_config(path, **changes)
    with pytest.raises(UserError, match=f"^theirs/config.json:? .*{reason}[^\n]*$"):
        read_pretrained(path)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("starcoder2", {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, "rope_"),
        ("starcoder2", {"rope_theta": 1e6}, "rope_theta=1000000.0"),
        ("starcoder2", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ("starcoder2", {"num_key_value_heads": 1}, "num_key_value_heads=1"),
        ("starcoder2", {"norm_epsilon": 1e-6}, "norm_epsilon"),
        ("arcee", {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05"),
        ("arcee", {"rms_norm_eps": None}, "rms_norm_eps=1e-05"),
        ("arcee", {"head_dim": 4}, "head_dim=4"),
        ("arcee", {"mlp_bias": False}, "mlp_bias=False"),
    ],
    ids=str,
)
def test_other_architectures_with_other_mathematics_are_refused(kind, changes, reason):
    _, path = export(**EXPORTS[kind][0])
    rewrite_config(path, **changes)
    with pytest.raises(UserError, match=f"^ours/config.json: {reason}.* is not supported, only"):
        read_pretrained(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: {k: v for k, v in t.items() if "wpe" not in k}, "transformer.wpe.weight is mis"),
        (lambda t: t | {"extra\n": torch.ones(1)}, r"'transformer.extra\\n' is unexpected"),
        (
            lambda t: t | {"transformer.wpe.weight": torch.ones(16, 8)},
            r"transformer.wpe.weight has shape \(16, 8\) instead of \(8, 16\)",
        ),
        (
            lambda t: t | {"transformer.h.1.mlp.c_fc.weight": torch.ones(64, 16)},
            r"transformer.h.1.mlp.c_fc.weight has shape \(64, 16\) instead of \(16, 64\)",
        ),
        (lambda t: {}, "has shape|missing|layers"),
        (lambda t: t | {"lm_head.weight": torch.ones(37, 16)}, "lm_head.weight differs"),
        (lambda t: t | {"lm_head.weight": torch.ones(3, 16)}, "lm_head.weight differs"),
    ],
)
def test_wrong_tensors_are_named(change, reason):
    path = write_gpt2()
    rewrite_weights(path, change)
    with pytest.raises(UserError, match=f"^theirs[^\n]*({reason})[^\n]*$"):
        read_pretrained(path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("length", [0, 5, 100, -1])
def test_truncated_files_are_refused(name, length):
    path = write_gpt2()
    (path / name).write_bytes((path / name).read_bytes()[:length].rstrip())
    if name == "config.json" and length == -1:
        (path / name).write_bytes((path / name).read_bytes()[:-1])
    with pytest.raises(UserError, match=f"^theirs/{name} is damaged[^\n]*$"):
        read_pretrained(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [9, 16], "data_offsets": [0, 512]},
        {"dtype": "F32", "shape": [-8, -16], "data_offsets": [0, 512]},
        {"dtype": "F32", "shape": [8, 16], "data_offsets": [512, 0]},
        {"dtype": "F32", "shape": [8, 16], "data_offsets": [0, 10**9]},
        {"dtype": "F32", "shape": [8, 16], "data_offsets": [0]},
        {"dtype": "F32", "shape": 8, "data_offsets": [0, 32]},
        {"dtype": [], "shape": [8], "data_offsets": [0, 32]},
        {"dtype": "F32", "shape": [8]},
        {"dtype": "F32", "shape": [8], "data_offsets": [0, 32], "more": 1},
        [],
        None,
    ],
    ids=str,
)
def test_headers_that_contradict_the_file_are_refused(entry):
    raw = json.dumps({"x": entry}).encode()
    Path("x").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(512))
    with pytest.raises(UserError, match="^x is damaged or no safetensors file[^\n]*$"):
        tensor_file.entries("x")


def test_weights_of_another_type_are_refused():
    path = write_gpt2()
    rewrite_weights(path, lambda tensors: tensors)
    raw = (path / hf.WEIGHTS).read_bytes()
    (path / hf.WEIGHTS).write_bytes(raw.replace(b'"F32"', b'"I32"'))
    with pytest.raises(UserError, match="model.safetensors has weights of type torch.int32"):
        read_pretrained(path)


def test_pickled_weights_are_refused_with_a_way_out():
    path = write_gpt2()
    (path / hf.WEIGHTS).rename(path / "pytorch_model.bin")
    with pytest.raises(UserError, match="could execute code; .*save_pretrained"):
        read_pretrained(path)


def test_missing_files_are_named():
    with pytest.raises(UserError, match="absent has no model.safetensors$"):
        read_pretrained("absent")
    path = write_gpt2()
    (path / "config.json").unlink()
    with pytest.raises(UserError, match="cannot read theirs/config.json: No such file"):
        read_pretrained(path)


@pytest.mark.parametrize("weight_map", [None, [], {"x": 1}, {"x": "../model.safetensors"}], ids=str)
def test_index_that_names_no_files_of_the_folder_is_refused(weight_map):
    path = write_gpt2()
    (path / hf.WEIGHTS).rename("model.safetensors")
    (path / hf.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match="index.json has no valid weight_map"):
        read_pretrained(path)


def test_missing_shard_is_named():
    transformers_model().save_pretrained("shards", max_shard_size="4KB")
    shard = sorted(Path("shards").glob("model-*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(UserError, match=f"cannot read {shard}: No such file"):
        read_pretrained("shards")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_random_damage_never_ends_in_a_traceback(name):
    path = write_gpt2()
    raw, random = (path / name).read_bytes(), np.random.default_rng(0)
    for place in random.integers(min(len(raw), 2000), size=200):
        damaged = bytearray(raw)
        damaged[place] = random.integers(256)
        (path / name).write_bytes(damaged)
        with suppress(UserError):
            read_pretrained(path)
