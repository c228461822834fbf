"""Tests of tools/export.py: exported runs in transformers and in the scripts."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import tiny
import torch

import prepare
import sample
import train
from folio.data.dataset import load_tokenizer
from folio.data.tokenizer import BPETokenizer, ByteTokenizer
from folio.pretrained.huggingface import read_pretrained
from tools import export

USER = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
prompt = tokenizer(sys.argv[2], return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=5, do_sample=False)[0]))
"""


def export_run():
    export.main(["--out_dir=out"])
    return Path("exported")


@pytest.mark.slow
def test_an_export_of_all_switches_works_without_the_repository(verse, capsys):
    """Outside of the repository, in prepare.py, in train.py and in sample.py."""
    train.main(tiny.flags(**tiny.SWITCHES))
    capsys.readouterr()
    folder = export_run()
    assert capsys.readouterr().out.startswith("wrote exported: FolioForCausalLM of out/ckpt.pt: ")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", USER, "exported", "sum"]
    text = subprocess.check_output(command, env=environment, text=True)
    flags = ["--start=sum", "--temperature=0", "--num_samples=1", "--max_new_tokens=5"]
    for source in ("--out_dir=out", "--init_from=exported"):
        sample.main([*flags, source, "--device=cpu", "--dtype=float32"])
        assert text == capsys.readouterr().out.partition("---")[0]
    (folder / "model.py").write_text("raise SystemExit")  # is not executed
    prepare.main(["--input=verse.txt", "--dataset=again", f"--tokenizer={folder}"])
    assert Path("data/again/train.bin").read_bytes() == Path("data/verse/train.bin").read_bytes()
    loss = tiny.load()["best_val_loss"]
    settings = {name: value for name, value in tiny.SETTINGS.items() if name not in tiny.SHAPE}
    settings |= {"out_dir": "out-b", "dataset": "again", "init_from": "exported"}
    train.main([f"--{name}={value}" for name, value in settings.items()])
    assert tiny.log_events("out-b")[1]["loss"] == pytest.approx(loss)


def test_nanogpt_runs_are_exported(folder):
    model = tiny.write_nanogpt_checkpoint(tiny.write_nanogpt_dataset())
    again = read_pretrained(export_run())
    assert tiny.equal(again.weights, model.state_dict())
    assert again.tokenizer == load_tokenizer("verse").to_dict()


@pytest.mark.parametrize("tie_weights", [True, False])
def test_ids_that_are_not_tokens_are_left_out(folder, monkeypatch, tie_weights):
    monkeypatch.setattr(ByteTokenizer, "padded_vocab_size", 320)
    tiny.write_checkpoint("out/ckpt.pt", ByteTokenizer(), tie_weights=tie_weights)
    weights, exported = tiny.load()["model"], read_pretrained(export_run())
    for name in ("transformer.wte.weight", "lm_head.weight"):
        assert torch.equal(exported.weights[name], weights[name][:256])


def export_file(*flags):
    """Exports to verse.gguf. Returns the metadata."""
    from gguf import GGUFReader

    export.main(["--out_dir=out", "--to=verse.gguf", *flags])
    return {name: field.contents() for name, field in GGUFReader("verse.gguf").fields.items()}


def test_a_gguf_file_ends_texts_at_the_rarest_character(verse, capsys):
    tiny.write_checkpoint("out/ckpt.pt", verse.tokenizer, **tiny.QWEN3, dataset="verse")
    fields = export_file()
    rarest = Counter(map(int, verse.train)).most_common()[-1][1]
    end = fields["tokenizer.ggml.eos_token_id"]
    assert (verse.train == end).sum() == rarest
    output = capsys.readouterr().out
    assert f"{verse.tokenizer.decode([end])!r}" in output
    assert f", {rarest} of {len(verse.train):,} training tokens" in output
    assert "ollama create verse -f verse.Modelfile" in output
    assert "--context-shift" in output
    modelfile = Path("verse.Modelfile").read_text()
    assert modelfile.startswith("FROM ./verse.gguf\n")
    assert "PARAMETER temperature 0.8\n" in modelfile
    assert "stop" not in modelfile


def test_an_end_token_is_a_stop_text(folder, capsys):
    tokenizer = BPETokenizer.from_texts(["a text"], 300)
    tiny.write_checkpoint("out/ckpt.pt", tokenizer, **tiny.QWEN3)
    assert export_file("--dtype=float16")["tokenizer.ggml.eos_token_id"] == tokenizer.end
    assert 'PARAMETER stop "<|endoftext|>"\n' in Path("verse.Modelfile").read_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--to=old.gguf"], "old.gguf exists"),
        (["--to=new.gguf"], "new.Modelfile exists"),
        (["--to=full"], "full exists and is not empty"),
        (["--to=folder", "--dtype=q8_0"], "--to=NAME.gguf"),
        (["--to=a.gguf", "--own_code=True"], "omit --own_code"),
        (["--to=b.gguf"], "data/verse/train.bin is missing"),
        (["--to=old.gguf/"], "old.gguf exists"),
    ],
)
def test_mistakes_are_reported_and_change_nothing(folder, flags, words):
    tiny.write_checkpoint("out/ckpt.pt", ByteTokenizer(), **tiny.QWEN3, dataset="verse")
    Path("full").mkdir()
    for name in ("old.gguf", "new.Modelfile", "full/notes.txt"):
        Path(name).write_text("mine")
    before = tiny.contents()
    assert words in tiny.error_of(export.main, ["--out_dir=out", *flags])
    assert tiny.contents() == before


def test_the_rarest_character_is_that_of_the_model(verse):
    tiny.write_checkpoint("out/ckpt.pt", ByteTokenizer(), **tiny.QWEN3, dataset="verse")
    message = tiny.error_of(export.main, ["--out_dir=out", "--to=verse.gguf"])
    assert "data/verse is not the text that the model was trained on" in message
    train.main(tiny.flags(max_iters=1, **tiny.QWEN3))
    tiny.prepare_verse(text=tiny.VERSE * 30)
    assert "verse is not the text" in tiny.error_of(export.main, ["--out_dir=out", "--to=a.gguf"])


def test_a_full_disk_leaves_no_file(verse, limit_files):
    tiny.write_checkpoint("out/ckpt.pt", verse.tokenizer, **tiny.QWEN3, dataset="verse")
    before = tiny.contents()
    limit_files(1000)
    message = tiny.error_of(export.main, ["--out_dir=out", "--to=verse.gguf"])
    assert message.startswith("cannot write verse.gguf")
    limit_files(8000)  # enough for the header
    message = tiny.error_of(export.main, ["--out_dir=out", "--to=verse.gguf"])
    assert "verse.gguf.tmp: the disk is full (" in message
    assert tiny.contents() == before


def test_learned_positions_end_with_the_context(verse, capsys):
    tiny.write_checkpoint("out/ckpt.pt", verse.tokenizer, dataset="verse")
    export.main(["--out_dir=out", "--to=-my verse.gguf"])
    assert "num_predict 4\n" in Path("-my verse.Modelfile").read_text()
    output = capsys.readouterr().out
    assert "--context-shift" not in output
    assert "ollama create my-verse -f '-my verse.Modelfile'" in output


@pytest.mark.slow
def test_a_changed_model_py_is_exported_with_its_code(folder):
    """Blocks with the norms behind have the parameters of GPT-2."""
    root = Path(export.__file__).parents[1]
    for name in ("folio", "tools"):
        shutil.copytree(root / name, name)
    shutil.copy(root / "sample.py", ".")
    code = (root / "model.py").read_text()
    code = code.replace("x = x + self.attn(self.ln_1(x), ", "x = self.ln_1(x + self.attn(x, ")
    changed = code.replace(
        "rotation, attend)\n        return x +", "rotation, attend))\n        return x +"
    )
    Path("model.py").write_text(changed)
    tiny.write_checkpoint("out/ckpt.pt", ByteTokenizer())
    command = [sys.executable, "-m", "tools.export", "--out_dir=out", "--to=exported"]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "GPT2LMHeadModel computes other logits than model.py" in refused.stderr
    subprocess.check_call([*command, "--own_code=True"])
    assert Path("exported/model.py").read_text() == changed
