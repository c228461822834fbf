"""Folders in Hugging Face's format, read and written, compared with transformers."""

import json
import multiprocessing
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from folio.checkpoint.format import build_model
from folio.checkpoint.progress import Progress
from folio.cli.errors import UserError
from folio.data.tokenizer import BPETokenizer, ByteTokenizer
from folio.pretrained.architectures import ARCHITECTURES, GPT2, Qwen3
from folio.pretrained.huggingface import (
    CONFIG_FILE,
    EMBEDDING_WEIGHT,
    HEAD_WEIGHT,
    WEIGHTS_FILE,
    read_pretrained,
)
from folio.pretrained.load import checkpoint_tokenizer
from model import Block, GPTConfig

pytestmark = [
    pytest.mark.usefixtures("folder"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
SHAPE = {"n_positions": 8, "vocab_size": 37, "n_layer": 2, "n_head": 2, "n_embd": 16}
OTHER = {"n_positions": 12, "n_layer": 3, "n_head": 5, "n_embd": 30, "tie_word_embeddings": False}


@pytest.fixture
def transformers():
    """The module, imported here because it is slow."""
    import transformers

    return transformers


def transformers_model(**changes):
    """Returns a GPT-2 of transformers with random weights, norms and biases too.

    The norms' epsilon changes the logits, because the embeddings are small.
    """
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(**(SHAPE | changes))
    model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5 if parameter.dim() == 1 else 0.2)
    model.transformer.wpe.weight.data *= 0.01
    if not config.tie_word_embeddings:
        model.transformer.wte.weight.data *= 0.01
    return model


def save(model, path="theirs", **options):
    """Writes a model of transformers, and a tokenizer. Returns the folder."""
    model.save_pretrained(path, **options)
    Path(path, "tokenizer.json").write_text(ByteTokenizer().to_definition())
    return Path(path)


def assert_refused(path, words):
    """Asserts that loading ends with one line that names the folder and matches the words."""
    with pytest.raises(UserError, match=f"^[^\n]*{path}[^\n]*{words}[^\n]*$"):
        build_model(read_pretrained(path))


# Reading what transformers wrote


def relative_error(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize(
    "changes",
    [
        SHAPE,
        OTHER,
        {"activation_function": "gelu", "n_layer": 1, "n_head": 1},
        {"activation_function": "relu", "n_head": 3, "n_embd": 48, "tie_word_embeddings": False},
    ],
    ids=str,
)
def test_logits_and_loss_of_a_gpt2_equal_transformers(changes):
    theirs = transformers_model(**changes)
    ours = build_model(read_pretrained(save(theirs))).eval()
    idx = tiny.random_ids(ours)
    expected = theirs(idx, labels=idx)
    assert relative_error(ours.logits(idx), expected.logits) < 1e-5
    targets = torch.nn.functional.pad(idx[:, 1:], (0, 1), value=-1)
    assert relative_error(ours(idx, targets), expected.loss) < 1e-5


def test_a_checkpoint_of_pretrained_weights_starts_at_step_0():
    path = save(transformers_model().bfloat16())
    checkpoint = read_pretrained(str(path))
    assert (checkpoint.progress, checkpoint.settings, checkpoint.path) == (Progress(), {}, path)
    assert checkpoint.config == GPTConfig(**tiny.SMALL, activation="gelu_tanh")
    assert checkpoint.tokenizer == {"kind": "byte"}
    weights = checkpoint.weights
    assert all(w.is_contiguous() and w.dtype == torch.float32 for w in weights.values())
    for name, weight in build_model(checkpoint).state_dict().items():
        assert weight.data_ptr() == weights[name].data_ptr()  # no copy


def test_names_in_older_files_are_known():
    path = save(transformers_model())
    before = read_pretrained(path).weights
    tensors = load_file(path / WEIGHTS_FILE)
    older = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    older |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.1.attn.masked_bias": torch.tensor([-1e4])}
    save_file(older | {HEAD_WEIGHT: before[EMBEDDING_WEIGHT].clone()}, path / WEIGHTS_FILE)
    assert tiny.equal(read_pretrained(path).weights, before)


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def test_a_file_has_either_of_two_tied_weights(architecture):
    model = tiny.random_model(**(tiny.QWEN3 if architecture.model_type == "qwen3" else {}))
    tiny.export(model, ByteTokenizer(), "ours", architecture)
    path = Path("ours", WEIGHTS_FILE)
    tensors, shared = load_file(path), model.state_dict()[EMBEDDING_WEIGHT]
    tensors = {name: tensor for name, tensor in tensors.items() if not torch.equal(tensor, shared)}
    save_file(tensors | architecture.to_tensors({HEAD_WEIGHT: shared}, model.config), path)
    assert tiny.equal(build_model(read_pretrained("ours")).state_dict(), model.state_dict())


def test_an_own_head_is_read_whatever_the_config_says():
    path = save(transformers_model())
    head = torch.randn(37, 16)
    save_file(load_file(path / WEIGHTS_FILE) | {HEAD_WEIGHT: head}, path / WEIGHTS_FILE)
    model = build_model(read_pretrained(path))
    assert torch.equal(model.lm_head.weight, head)
    assert not torch.equal(model.transformer.wte.weight, head)


# Refusals

FOREIGN = Qwen3().to_fields(GPTConfig(**tiny.SMALL))  # with a change, not folio's


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, "llama"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06"),
        ({"n_positions": "8"}, "describes no supported model"),
        ({"n_head": 3}, "n_head=3"),
        ({"model_type": "folio", **asdict(GPTConfig()), "position": "absolute"}, "absolute"),
        (FOREIGN | {"num_key_value_heads": 1}, "num_key_value_heads=1, not 2"),
        (FOREIGN | {"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06"),
        (FOREIGN | {"rope_parameters": {"rope_theta": 1e6}}, "rope_theta"),
        (FOREIGN | {"rope_scaling": {"factor": 2.0}}, "rope_scaling"),
        ({"model_type": "qwen3"}, "is missing"),
    ],
)
def test_config_of_an_unknown_model_is_refused(changes, words):
    path = save(transformers_model())
    config = json.loads((path / CONFIG_FILE).read_text()) | changes
    (path / CONFIG_FILE).write_text(json.dumps(config))
    assert_refused(path, f"{CONFIG_FILE}.*{words}")


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_damaged_and_missing_files_are_refused(name):
    path = save(transformers_model())
    content = (path / name).read_bytes().rstrip()
    for damaged, words in (
        (content[:-2], name),
        (b"[" * 10**5, name),
        (tiny.LFS_POINTER, f"{name}.*git lfs pull"),
    ):
        (path / name).write_bytes(damaged)
        assert_refused(path, words)
    (path / name).unlink()
    assert_refused(path, name)


# Writing

GPT2_MODELS = (
    {},
    {"activation": "gelu_tanh", "dropout": 0.2},
    {"bias": False, "activation": "relu2"},
    {"tie_weights": False, "activation": "relu"},
    {"n_layer": 3, "n_head": 5, "n_embd": 30, "block_size": 12},
    {"n_layer": 0},
)
QWEN3 = (
    tiny.QWEN3,
    tiny.QWEN3 | {"tie_weights": False, "dropout": 0.2},
    tiny.QWEN3 | {"n_layer": 3, "n_head": 5, "n_embd": 30, "block_size": 12},
)
OWN = (
    tiny.SWITCHES,
    {"position": "rotary", "bias": False},
    {"norm": "rmsnorm", "activation": "swiglu"},
    tiny.QWEN3 | {"window": 3},
    {"smear": 2, "n_layer": 0},
)
CLASSES = {
    "GPT2LMHeadModel": GPT2_MODELS,
    "Qwen3ForCausalLM": QWEN3,
    "FolioForCausalLM": OWN,
}


def exported(**changes):
    """Exports a random model. Returns it, and the model that transformers reads."""
    ours = tiny.random_model(**changes)
    tiny.export(ours, ByteTokenizer())
    return ours, load("exported")


def load(folder):
    from transformers import AutoModelForCausalLM

    theirs, info = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True
    )
    assert not any(info.values())
    return theirs


def greedy(model, ids, count):
    """Returns ids, (B, T), and `count` more, with the last block_size tokens as context."""
    for _ in range(count):
        logits = model.logits(ids[:, -model.config.block_size :])
        ids = torch.cat((ids, logits[:, -1:].argmax(-1)), dim=1)
    return ids


@pytest.mark.parametrize(
    ("changes", "name"),
    [(changes, name) for name, group in CLASSES.items() for changes in group],
    ids=str,
)
def test_the_model_is_the_same_in_transformers_and_when_it_is_read_back(changes, name):
    ours, theirs = exported(**changes)
    assert type(theirs).__name__ == name
    idx, is_own = tiny.random_ids(ours), name == "FolioForCausalLM"
    atol = 0 if is_own else 1e-4
    torch.testing.assert_close(theirs(idx).logits, ours.logits(idx), rtol=0, atol=atol)
    prompt = idx[:, :3]
    longest = 13 if is_own else ours.config.block_size  # where the context of the others ends
    for cached in (True, False):
        ids = theirs.generate(prompt, max_length=longest, do_sample=False, use_cache=cached)
        assert torch.equal(ids, greedy(ours, prompt, longest - 3))
    theirs.save_pretrained("again")
    shutil.copy("exported/tokenizer.json", "again")
    for folder in ("exported", "again"):
        again = read_pretrained(folder)
        assert replace(again.config, dropout=ours.config.dropout) == ours.config
        assert tiny.equal(again.weights, dict(ours.state_dict()))
    assert torch.equal(load("again")(idx).logits, theirs(idx).logits)


@pytest.mark.parametrize("start", ["", "\n"])
def test_a_folder_knows_how_texts_begin(start):
    tokenizer = BPETokenizer.from_texts(["Shall I compare thee"], 260)
    tokenizer.start = start
    tiny.export(tiny.random_model(vocab_size=tokenizer.vocab_size), tokenizer)
    assert checkpoint_tokenizer(read_pretrained("exported")).start == start


def test_a_new_model_with_its_own_code_is_initialized_and_tied(transformers):
    ours, theirs = exported(position="rotary", tie_weights=True)
    new = transformers.AutoModelForCausalLM.from_config(theirs.config, trust_remote_code=True)
    assert new.gpt.lm_head.weight is new.gpt.transformer.wte.weight
    assert 0.015 < new.gpt.transformer.wte.weight.std() < 0.025
    assert torch.equal(new.gpt.rotary.cos, ours.rotary.cos)


def test_loss_beams_and_padding_of_a_model_with_its_own_code():
    ours, theirs = exported(**tiny.SWITCHES)
    idx = tiny.random_ids(ours)
    labels = idx.masked_fill(idx == idx[0, 0], -100)
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-1)
    expected = ours(idx, targets.clamp(min=-1))
    torch.testing.assert_close(theirs(idx, labels=labels).loss, expected)
    beams = {"num_beams": 3, "do_sample": False, "max_length": 13}
    with_cache = theirs.generate(idx[:, :3], **beams)
    assert torch.equal(with_cache, theirs.generate(idx[:, :3], use_cache=False, **beams))
    seen = torch.ones_like(idx)
    seen[0, 5:] = 0
    logits = theirs(idx, attention_mask=seen).logits
    assert torch.equal(logits[0, :5], ours.logits(idx[:, :5])[0])
    with pytest.raises(ValueError, match="padding on the left"):
        theirs.generate(idx[:, :3], attention_mask=torch.tensor([[0, 1, 1]] * 3))


@pytest.mark.parametrize("position", ["learned", "rotary"])
def test_generation_ends_at_the_end_token(position):
    tokenizer = BPETokenizer.from_texts(["a text"], vocab_size=300)
    tiny.export(tiny.random_model(vocab_size=300, position=position), tokenizer)
    assert load("exported").generation_config.eos_token_id == tokenizer.end is not None


@pytest.mark.parametrize(
    "changes", [tiny.SWITCHES | {"ngrams": 0}, tiny.QWEN3], ids=["own", "qwen3"]
)
def test_what_other_libraries_use_of_a_class(changes):
    ours, theirs = exported(**changes)
    idx = tiny.random_ids(ours)
    logits = ours.logits(idx)
    output = theirs(idx, output_hidden_states=True, logits_to_keep=1, use_cache=False)
    torch.testing.assert_close(output.logits, logits[:, -1:])
    kept = theirs(idx, logits_to_keep=torch.tensor([0, 5])).logits
    torch.testing.assert_close(kept, logits[:, [0, 5]])
    states = output.hidden_states
    assert len(states) == ours.config.n_layer + 1
    torch.testing.assert_close(theirs.get_output_embeddings()(states[-1]), logits)
    if changes is tiny.QWEN3:
        torch.testing.assert_close(states[0], theirs.get_input_embeddings()(idx))
    assert torch.equal(theirs.get_input_embeddings().weight, ours.transformer.wte.weight)
    theirs.resize_token_embeddings(40)
    assert theirs(torch.full((1, 3), 39)).logits.shape == (1, 3, 40)


@pytest.mark.parametrize(
    ("name", "value"),
    [("inputs_embeds", torch.zeros(3, 8, 16)), ("output_attentions", True), ("return_dict", False)],
)
def test_arguments_without_an_implementation_are_refused(name, value):
    ours, theirs = exported(**tiny.SWITCHES)
    with pytest.raises(ValueError, match=f"do not support {name}="):
        theirs(tiny.random_ids(ours), **{name: value})


def test_generation_returns_hidden_states():
    ours, theirs = exported(**tiny.SWITCHES)
    options = {"max_length": 6, "return_dict_in_generate": True, "output_hidden_states": True}
    states = theirs.generate(tiny.random_ids(ours)[:, :3], **options).hidden_states
    assert [len(layers) for layers in states] == [3, 3, 3]


def test_an_embedding_that_tables_depend_on_is_not_replaced():
    _, theirs = exported(**tiny.SWITCHES)
    with pytest.raises(ValueError, match="n-grams"):
        theirs.resize_token_embeddings(40)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "layer"),
    [(tiny.SWITCHES, "c_attn"), (tiny.QWEN3, "q_proj"), ({}, "c_attn")],
    ids=["own", "qwen3", "gpt2"],
)
def test_lora_of_peft_lowers_the_loss(changes, layer):
    peft = pytest.importorskip("peft")
    ours, theirs = exported(**changes)
    idx = tiny.random_ids(ours)
    config = peft.LoraConfig(target_modules=[layer], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(theirs, config)
    optimizer, losses = torch.optim.AdamW(adapted.parameters(), 1e-2), []
    for _ in range(10):
        losses.append(adapted(input_ids=idx, labels=idx).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [tiny.SWITCHES, tiny.QWEN3], ids=["own", "qwen3"])
def test_a_pipeline_generates_text(changes, transformers):
    ours, theirs = exported(**changes, vocab_size=256)
    tokenizer = transformers.AutoTokenizer.from_pretrained("exported", trust_remote_code=True)
    pipeline = transformers.pipeline("text-generation", model=theirs, tokenizer=tokenizer)
    [result] = pipeline("ab", max_new_tokens=5, do_sample=False)
    ids = greedy(ours, torch.tensor([[97, 98]]), 5)
    assert result["generated_text"] == ByteTokenizer().decode(ids[0])


def test_trained_norms_of_queries_are_refused():
    exported(**tiny.QWEN3)
    path = Path("exported")
    name = "model.layers.0.self_attn.q_norm.weight"
    save_file(load_file(path / WEIGHTS_FILE) | {name: torch.full((8,), 2.0)}, path / WEIGHTS_FILE)
    assert_refused("exported", name)


@pytest.mark.parametrize("changes", [{}, tiny.QWEN3], ids=["gpt2", "qwen3"])
def test_a_changed_model_is_not_written_as_another_one(changes, monkeypatch):
    monkeypatch.setattr(Block, "forward", tiny.post_norm)
    with pytest.raises(UserError, match="other logits than model.py.*--own_code=True$"):
        exported(**changes)
    assert not list(Path().iterdir())


def test_a_change_of_shapes_is_reported_in_a_line(monkeypatch):
    monkeypatch.setattr(GPT2, "to_fields", lambda *_: {**SHAPE, "model_type": "gpt2", "n_embd": 8})
    with pytest.raises(UserError, match="^the weights do not fit GPT2LMHeadModel[^\n]*$"):
        exported()


def test_an_export_that_was_killed_is_repeated(monkeypatch):
    def kill(*args):
        os._exit(9)

    with monkeypatch.context() as patch:
        patch.setattr("folio.pretrained.huggingface.check_logits", kill)
        process = multiprocessing.get_context("fork").Process(target=exported)
        process.start()
        process.join()
    assert process.exitcode == 9
    assert not Path("exported").exists()
    tiny.export(tiny.random_model(), ByteTokenizer())
    assert (Path("exported") / CONFIG_FILE).is_file()


def test_an_export_to_a_link_fills_the_folder(folder):
    Path("disk/exports").mkdir(parents=True)
    Path("exported").symlink_to("disk/exports")
    tiny.export(tiny.random_model(), ByteTokenizer())
    assert Path("disk/exports", CONFIG_FILE).is_file()


def test_a_full_disk_leaves_no_folder(limit_files):
    limit_files(1000)
    with pytest.raises(UserError, match="^cannot write"):
        tiny.export(tiny.random_model(), ByteTokenizer())
    assert not list(Path().iterdir())


def test_existing_files_are_not_touched():
    Path("notes.txt").write_text("mine")
    for folder in (".", "notes.txt"):
        with pytest.raises(UserError, match=f"^[^\n]*{folder}[^\n]*$"):
            tiny.export(tiny.random_model(), ByteTokenizer(), folder)
    assert [(path.name, path.read_text()) for path in Path().iterdir()] == [("notes.txt", "mine")]
