"""Tests of tools/export.py: exported runs in transformers and in the scripts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

import prepare
import sample
import train
from folio.data.dataset import load_tokenizer
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
