"""Tests of writing in folio/hf.py, and of tools/export.py: models and runs in transformers."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
import transformers
from transformers import AutoModelForCausalLM, dynamic_module_utils

import prepare
import sample
import train
from folio.checkpoint import Checkpoint, Progress
from folio.dataset import load_tokenizer
from folio.errors import UserError
from folio.hf import read_pretrained, write_pretrained
from folio.tokenizers import BPETokenizer, CharTokenizer
from tools import export

TOKENIZER = CharTokenizer("".join(map(chr, range(37))))
GPT2 = (
    {},
    {"activation": "gelu_tanh", "dropout": 0.2},
    {"bias": False, "activation": "relu2"},
    {"tie_weights": False, "activation": "relu"},
    {"n_layer": 3, "n_head": 5, "n_embd": 30, "block_size": 12},
    {"n_layer": 0},
)
OWN = (
    tiny.SWITCHES,
    {"position": "rotary", "bias": False},
    {"norm": "rmsnorm", "qk_norm": True},
    {"activation": "swiglu"},
    {"ngrams": 4},
    {"smear": 2, "n_layer": 0},
    {"window": 3},
)
pytestmark = [
    pytest.mark.usefixtures("folder"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _modules(tmp_path_factory):
    """transformers copies the code of a model to a folder before it imports it."""
    with pytest.MonkeyPatch.context() as patch:
        cache = str(tmp_path_factory.mktemp("modules"))
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", cache)
        yield


def write(model, folder="ours", tokenizer=TOKENIZER):
    checkpoint = Checkpoint(model.config, model.state_dict(), Progress(), {})
    write_pretrained(folder, checkpoint, tokenizer)


def exported(folder="ours", **changes):
    """Exports a random model. Returns it, and the model that transformers reads."""
    ours = tiny.random_model(**changes)
    write(ours, folder)
    return ours, load(folder)


def load(folder):
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


# Models


@pytest.mark.parametrize("changes", [*GPT2, *OWN], ids=str)
def test_the_model_is_the_same_in_transformers_and_when_it_is_read_back(changes):
    ours, theirs = exported(**changes)
    is_gpt2 = changes in GPT2
    assert isinstance(theirs, transformers.GPT2LMHeadModel) == is_gpt2
    idx = tiny.random_ids(ours)
    atol = 1e-4 if is_gpt2 else 0
    torch.testing.assert_close(theirs(idx).logits, ours.logits(idx), rtol=0, atol=atol)
    prompt = idx[:, :3]
    longest = ours.config.block_size if is_gpt2 else 13  # GPT-2's context ends there
    for cached in (True, False):
        ids = theirs.generate(prompt, max_length=longest, do_sample=False, use_cache=cached)
        assert torch.equal(ids, greedy(ours, prompt, longest - 3))
    theirs.save_pretrained("again")
    shutil.copy("ours/tokenizer.json", "again")
    for folder in ("ours", "again"):
        again = read_pretrained(folder)
        assert replace(again.config, dropout=ours.config.dropout) == ours.config
        assert tiny.same(again.weights, dict(ours.state_dict()))
    assert torch.equal(load("again")(idx).logits, theirs(idx).logits)


def test_loss_and_gradients_of_a_model_with_its_own_code():
    ours, theirs = exported(**tiny.SWITCHES)
    idx = tiny.random_ids(ours)
    labels = idx.masked_fill(idx == idx[0, 0], -100)
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-1)
    loss, expected = theirs(idx, labels=labels).loss, ours(idx, targets.clamp(min=-1))
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(theirs.gpt.get_parameter(name).grad, parameter.grad)


def test_a_new_model_with_its_own_code_is_initialized_and_tied():
    ours, theirs = exported(position="rotary", tie_weights=True)
    new = AutoModelForCausalLM.from_config(theirs.config, trust_remote_code=True)
    assert new.gpt.lm_head.weight is new.gpt.transformer.wte.weight
    assert 0.015 < new.gpt.transformer.wte.weight.std() < 0.025
    assert torch.equal(new.gpt.cos, ours.cos)


def test_beams_and_padding_of_a_model_with_its_own_code():
    ours, theirs = exported(**tiny.SWITCHES)
    idx = tiny.random_ids(ours)
    beams = {"num_beams": 3, "do_sample": False, "max_length": 13}
    with_cache = theirs.generate(idx[:, :3], **beams)
    assert torch.equal(with_cache, theirs.generate(idx[:, :3], use_cache=False, **beams))
    seen = torch.ones_like(idx)
    seen[0, 5:] = 0
    logits = theirs(idx, attention_mask=seen).logits
    assert torch.equal(logits[0, :5], ours.logits(idx[:, :5])[0])
    with pytest.raises(ValueError, match="padding on the left"):
        theirs.generate(idx[:, :3], attention_mask=torch.tensor([[0, 1, 1]] * 3))


def test_norms_of_tiny_embeddings_are_the_same_in_transformers():
    """The norms' epsilon dominates the variance of such embeddings."""
    ours = tiny.random_model(tie_weights=False)
    for name, parameter in ours.named_parameters():
        parameter.data *= 1e-3 if "wte" in name or "wpe" in name else 1
    write(ours)
    idx = tiny.random_ids(ours)
    torch.testing.assert_close(load("ours")(idx).logits, ours.logits(idx), rtol=0, atol=1e-4)


# Runs


USER = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
prompt = tokenizer(sys.argv[2], return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=5, do_sample=False)[0]))
"""


def export_run():
    export.main(["--out_dir=out", "--to=exported"])
    return Path("exported")


@pytest.mark.slow
def test_an_export_of_all_switches_works_without_the_repository(verse, capsys):
    """Outside of the repository, in prepare.py, in train.py and in sample.py."""
    train.main(tiny.flags(**tiny.SWITCHES))
    capsys.readouterr()
    folder = export_run()
    assert capsys.readouterr().out.startswith("wrote exported: FolioForCausalLM of out/ckpt.pt: ")
    environment = os.environ | {"HF_MODULES_CACHE": str(Path("modules").absolute())}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-c", USER, "exported", "sum"]
    text = subprocess.check_output(command, env=environment, text=True)
    flags = ["--start=sum", "--temperature=0", "--num_samples=1", "--max_new_tokens=5"]
    for source in ("--out_dir=out", "--init_from=exported"):
        sample.main([*flags, source, "--device=cpu", "--dtype=float32"])
        assert text == capsys.readouterr().out.partition("---")[0]
    (folder / "model.py").write_text("raise SystemExit")  # is not executed
    prepare.main(["--input=verse.txt", "--dataset=again", f"--tokenizer={folder}"])
    assert Path("data/again/train.bin").read_bytes() == Path("data/verse/train.bin").read_bytes()
    loss = tiny.saved()["best_val_loss"]
    known = {name: value for name, value in tiny.SETTINGS.items() if name not in tiny.SHAPE}
    settings = known | {"out_dir": "out-b", "dataset": "again", "init_from": "exported"}
    train.main([f"--{name}={value}" for name, value in settings.items()])
    assert tiny.log_events("out-b")[1]["loss"] == pytest.approx(loss)


def test_nanogpt_runs_are_exported(folder):
    model = tiny.write_nanogpt_checkpoint(tiny.write_nanogpt_dataset())
    again = read_pretrained(export_run())
    assert tiny.same(again.weights, model.state_dict())
    assert again.tokenizer == load_tokenizer("verse").to_dict()


def test_generation_ends_at_the_end_token(folder):
    tokenizer = BPETokenizer.train(["a text"], vocab_size=300)
    write(tiny.random_model(vocab_size=tokenizer.vocab_size), tokenizer=tokenizer)
    assert load("ours").generation_config.eos_token_id == tokenizer.end is not None


# Refusals


def test_weights_of_another_shape_are_not_exported():
    model = tiny.random_model()
    model.config = replace(model.config, n_embd=32)
    with pytest.raises(UserError, match="transformer.wte.weight"):
        write(model)
    assert not Path("ours").exists()


def test_existing_files_are_not_touched():
    Path("notes.txt").write_text("mine")
    for folder in (".", "notes.txt"):
        with pytest.raises(UserError, match=f"^[^\n]*{folder}[^\n]*$"):
            write(tiny.random_model(), folder)
    assert [path.name for path in Path().iterdir()] == ["notes.txt"]
    assert Path("notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"), [([], "--to=FOLDER"), (["--to=exported"], "out/ckpt.pt")]
)
def test_mistakes_are_user_errors(arguments, message):
    with pytest.raises(UserError, match=message):
        export.main(arguments)
