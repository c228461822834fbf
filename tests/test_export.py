"""Tests of tools/export.py: models and runs as Hugging Face folders, read by transformers."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils

import prepare
import sample
import train
from folio import tokenizers
from folio.checkpoint import Checkpoint, Progress, build_model
from folio.errors import UserError
from folio.hf import read_pretrained
from folio.run_dir import RunDir
from folio.tokenizers import CharTokenizer
from tools import export

TOKENIZER = CharTokenizer("".join(map(chr, range(37))))
GPT2 = (
    {},
    {"activation": "gelu_tanh", "dropout": 0.2},
    {"bias": False, "activation": "relu2"},
    {"tie_weights": False, "activation": "relu"},
    {"n_layer": 3, "n_head": 5, "n_embd": 30, "block_size": 12, "vocab_size": 37},
)
OWN = (
    tiny.SWITCHES,
    {"n_layer": 0},
    {"position": "rotary", "bias": False},
    {"norm": "rmsnorm"},
    {"qk_norm": True},
    {"activation": "swiglu", "tie_weights": False},
    {"ngrams": 4},
    {"smear": 2, "n_layer": 0},
    {"window": 3},
)
every_model = pytest.mark.parametrize("changes", [*GPT2, *OWN], ids=str)
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


def write(model, folder="ours", tokenizer=TOKENIZER, **options):
    saved = tokenizer.to_dict()
    checkpoint = Checkpoint(model.config, model.state_dict(), Progress(), {}, tokenizer=saved)
    export.export(checkpoint, folder, **options)


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


def content(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


# Models


@every_model
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
    for folder in ("ours", "again"):
        again = read_pretrained(folder)
        assert replace(again.config, dropout=ours.config.dropout) == ours.config
        assert tiny.same(again.weights, dict(ours.state_dict()))
    torch.testing.assert_close(load("again")(idx).logits, theirs(idx).logits, rtol=0, atol=0)


@pytest.mark.parametrize("changes", [{"position": "rotary"}, tiny.SWITCHES], ids=str)
def test_loss_and_gradients_of_a_model_with_its_own_code(changes):
    ours, theirs = exported(**changes)
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


@pytest.mark.parametrize("changes", [{}, {"position": "rotary"}], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_are_written_in_the_dtype(changes, dtype):
    ours = tiny.random_model(**changes)
    expected = {k: w.to(getattr(torch, dtype)).float() for k, w in ours.state_dict().items()}
    write(ours, dtype=dtype)
    assert load("ours").dtype == getattr(torch, dtype)
    again = read_pretrained("ours").weights
    assert tiny.same(again, expected)
    assert again["lm_head.weight"] is again["transformer.wte.weight"]


@pytest.mark.slow
def test_generation_ends_at_the_end_token_and_never_samples_padding(gpt2):
    ours = tiny.random_model(position="rotary", vocab_size=50304, n_embd=4, tie_weights=False)
    with torch.no_grad():
        ours.lm_head.weight[:50257] = 0  # the others have random weights
    write(ours, tokenizer=gpt2)
    theirs = load("ours")
    assert theirs.generation_config.eos_token_id == theirs.config.eos_token_id == 50256
    prompt = torch.zeros(64, 1, dtype=torch.long)
    assert theirs.generate(prompt, do_sample=True, max_length=8).max() < 50257


# Runs


@pytest.fixture
def run(verse):
    """A short run in out/."""
    train.main(tiny.flags())
    return RunDir("out")


def export_run(**settings):
    export.main([f"--{name}={value}" for name, value in ({"to": "exported"} | settings).items()])
    return Path("exported")


USER = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
prompt = tokenizer(sys.argv[2], return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=5, do_sample=False)[0]))
"""


@pytest.mark.slow
def test_an_export_of_all_switches_works_without_the_repository(verse, capsys):
    """Outside of the repository, in prepare.py, in train.py and in sample.py."""
    train.main(tiny.flags(**tiny.SWITCHES))
    capsys.readouterr()
    folder = export_run()
    out = capsys.readouterr().out
    size = build_model(RunDir("out").load_best()).num_params()
    assert out.startswith(f"wrote exported: a model with its own code, {size:,} parameters, ")
    assert "from_pretrained('exported', trust_remote_code=True)" in out
    assert out.count("\n") == 1
    environment = os.environ | {"HF_MODULES_CACHE": str(Path("modules").absolute())}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-c", USER, "exported", "sum"]
    text = subprocess.check_output(command, env=environment, text=True)
    capsys.readouterr()
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


def test_an_export_is_read_back(run, capsys):
    capsys.readouterr()
    folder, saved = export_run(), run.load_best()
    assert capsys.readouterr().out.startswith("wrote exported: GPT2LMHeadModel, ")
    again = read_pretrained(folder)
    assert again.tokenizer == saved.tokenizer
    assert tiny.same(again.weights, saved.weights)
    text = AutoTokenizer.from_pretrained(folder)("sum")["input_ids"]
    assert text == tokenizers.from_dict(saved.tokenizer).encode("sum").tolist()


def test_an_earlier_export_is_replaced(run):
    write(tiny.random_model(position="rotary"), "exported")
    names = content("exported").keys()
    assert names == export.EXPORTED
    folder = export_run()
    assert content(folder).keys() == names - {"model.py", "modeling_folio.py"}
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    before = content(folder)
    (folder / "tokenizer.json.tmp").mkdir()  # writing fails
    with pytest.raises(UserError, match="^[^\n]*exported[^\n]*$"):
        export_run(dtype="float16")
    (folder / "tokenizer.json.tmp").rmdir()
    assert content(folder) == before


def test_other_files_are_not_touched(run):
    folder = Path("exported")
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="notes.txt"):
        export_run()
    assert content(folder) == {"notes.txt": b"mine"}
    with pytest.raises(UserError, match="verse.txt: Not a directory"):
        export_run(to="verse.txt")


def test_weights_that_overflow_are_refused(run):
    checkpoint = torch.load(run.best, weights_only=True)
    checkpoint["model"]["transformer.wte.weight"][0, 0] = 1e5
    torch.save(checkpoint, run.best)
    with pytest.raises(UserError, match="transformer.wte.weight is not finite in float16"):
        export_run(dtype="float16")
    assert not Path("exported").exists()
    export_run(dtype="bfloat16")


def test_weights_of_another_shape_are_not_exported():
    model = tiny.random_model()
    checkpoint = Checkpoint(replace(model.config, n_embd=32), model.state_dict(), Progress(), {})
    checkpoint.tokenizer = TOKENIZER.to_dict()
    with pytest.raises(UserError, match="transformer.wte.weight"):
        export.export(checkpoint, "ours")
    assert not Path("ours").exists()


def test_nanogpt_runs_are_exported(folder):
    size = tiny.write_nanogpt_dataset()
    model = tiny.write_nanogpt_checkpoint(size)
    again = read_pretrained(export_run())
    assert torch.equal(again.weights["transformer.wte.weight"], model.transformer.wte.weight)
    assert tokenizers.from_dict(again.tokenizer).vocab_size == size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--to=FOLDER"),
        (["--to=exported"], "out/ckpt.pt"),
        (["--to=exported", "--dtype=int8"], "--dtype"),
    ],
)
def test_mistakes_are_user_errors(arguments, message):
    with pytest.raises(UserError, match=message):
        export.main(arguments)
