"""Tests of tools/export.py: a run as a Hugging Face folder."""

from pathlib import Path

import pytest
import tiny
import torch
from safetensors import safe_open

import train
from folio import hf, tokenizers
from folio.completion import load_trained
from folio.errors import UserError
from folio.generate import generate
from folio.run_dir import RunDir
from folio.sampling import Controls
from folio.size import num_params
from tools import export

PROMPT, COUNT = "sum", 5  # fill block_size


@pytest.fixture
def run(verse):
    """A short run in out/."""
    train.main(tiny.flags())
    return RunDir("out")


def export_run(**settings):
    export.main([f"--{name}={value}" for name, value in ({"to": "exported"} | settings).items()])
    return Path("exported")


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_transformers_continues_a_prompt_alike(run):
    transformers = pytest.importorskip("transformers")
    folder, trained = export_run(), load_trained(run.load_best())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    theirs = model.generate(**prompt, max_new_tokens=COUNT, do_sample=False)[0]
    ids = trained.tokenizer.encode(PROMPT).tolist()
    ours = [int(i) for i, _ in generate(trained.model, [ids], [0], Controls(temperature=0), COUNT)]
    assert tokenizer.decode(theirs) == PROMPT + trained.tokenizer.decode(ours)


def test_an_export_is_read_back(run, capsys):
    capsys.readouterr()
    folder, saved = export_run(), run.load_best()
    out = capsys.readouterr().out
    assert out.startswith(
        f"wrote exported: GPT2LMHeadModel, {num_params(saved.config):,} parameters, "
    )
    assert out.count("\n") == 1
    again = hf.read_pretrained(folder)
    assert again.tokenizer == saved.tokenizer
    assert again.weights.keys() <= saved.weights.keys()
    assert all(torch.equal(weight, saved.weights[name]) for name, weight in again.weights.items())


def test_an_earlier_export_is_replaced(run):
    folder = export_run(dtype="float16")
    half = content(folder)
    export_run()
    assert content(folder).keys() == half.keys() == export.EXPORTED
    assert len(content(folder)["model.safetensors"]) > 1.5 * len(half["model.safetensors"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_are_written_in_the_dtype(run, dtype):
    with safe_open(export_run(dtype=dtype) / "model.safetensors", "pt") as file:
        dtypes = {file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    assert dtypes == {getattr(torch, dtype)}


def test_other_files_are_not_touched(run):
    folder = Path("exported")
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="exported contains notes.txt, which is not part of an"):
        export_run()
    assert content(folder) == {"notes.txt": b"mine"}
    with pytest.raises(UserError, match="cannot read verse.txt: Not a directory"):
        export_run(to="verse.txt")


def test_weights_that_overflow_are_refused(run):
    checkpoint = torch.load(run.best, weights_only=True)
    checkpoint["model"]["transformer.wte.weight"][0, 0] = 1e5
    torch.save(checkpoint, run.best)
    with pytest.raises(UserError, match="transformer.wte.weight is not finite in float16"):
        export_run(dtype="float16")
    assert not Path("exported").exists()
    export_run(dtype="bfloat16")


def test_nanogpt_runs_are_exported(folder):
    size = tiny.write_nanogpt_dataset()
    model = tiny.write_nanogpt_checkpoint(size)
    again = hf.read_pretrained(export_run())
    assert torch.equal(again.weights["transformer.wte.weight"], model.transformer.wte.weight)
    assert tokenizers.from_dict(again.tokenizer).vocab_size == size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "specify the folder to write: --to=FOLDER"),
        (["--to=exported"], "there is no checkpoint out/ckpt.pt"),
        (["--to=exported", "--dtype=int8"], "--dtype must be float32, float16 or bfloat16"),
    ],
)
def test_mistakes_are_user_errors(folder, arguments, message):
    with pytest.raises(UserError, match=message):
        export.main(arguments)
