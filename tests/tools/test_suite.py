"""tools.bench.suite: its commands, and a part at toy size; the other engines of tools.bench."""

import json
from pathlib import Path

import pytest
import tiny

import sample
import train
from folio.cli.errors import UserError
from folio.data.tokenizer import GPT2Tokenizer
from tools import export
from tools.bench import engines, suite

NANOGPT = [  # what a stand-in for its train.py prints
    "tokens per iteration will be: 160",
    "step 0: train loss 4.2000, val loss 4.1000",
    "iter 10: loss 3.1000, time 20.00ms, mfu 10.00%",
]


@pytest.mark.usefixtures("folder")
def test_a_dry_run_prints_all_commands_and_finds_an_invalid_setting(capsys, monkeypatch, text_size):
    text_size(10**8, GPT2Tokenizer.vocab_size)  # presets read it
    suite.main(["--dry_run=True", f"--parts={','.join(suite.PARTS)}"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(len(row) - 2 for rows in suite.PARTS.values() for row in rows)
    assert "pytest" in next(line for line in lines if line.startswith("tests: "))
    assert next(iter(suite.TABLE["gpu"])) == "tests"  # they come first
    names = [(part, row[0]) for part, rows in suite.PARTS.items() for row in rows]
    assert len(names) == len(set(names))  # the keys of the last line
    assert not Path("out-suite").exists()
    monkeypatch.setitem(suite.PARTS, "step", [["a step", "step_ms", "{train} --n_layer=-1"]])
    with pytest.raises(UserError, match="n_layer"):
        suite.main(["--dry_run=True", "--parts=step"])


@pytest.mark.slow
def test_rows_are_measured_and_only_failed_commands_are_repeated(verse, capsys, monkeypatch):
    flags = " ".join(tiny.flags(max_iters=12, eval_interval=6, out_dir="toy"))
    row = ["a step", "step_ms", f"{{train}} {flags}", "{nanogpt_train} config/a.py"]
    monkeypatch.setitem(suite.PARTS, "step", [row])
    Path("nanoGPT").mkdir()
    Path("nanoGPT/train.py").write_text("raise SystemExit(3)")
    arguments = ["--vs_dir=nanoGPT", "--parts=step", "--runs=2"]
    suite.main(arguments)
    out = capsys.readouterr().out
    assert " ended with status 3" in out
    assert "| failed |" in out
    saved = json.loads(Path("out-suite/runs.json").read_text())
    [[commit, commands]] = saved.items()
    [[command, runs]] = commands.items()
    assert len(runs) == 2
    assert "train.py" in command

    Path("nanoGPT/train.py").write_text("\n".join(f"print({line!r})" for line in NANOGPT))
    suite.main(arguments)
    *table, _, last = capsys.readouterr().out.splitlines()
    step = f"{json.loads(last)['medians']['step: a step'][0]:.2f}"
    assert [cell.strip() for cell in table[-1].split("|")[1:4]] == ["a step", step, "20.00"]
    assert json.loads(Path("out-suite/runs.json").read_text())[commit][command] == runs
    suite.main(["--parts=step", "--minutes=1e-9"])
    assert "no time left for step: a step" in capsys.readouterr().out
    with pytest.raises(UserError, match="--parts has 'none'"):
        suite.main(["--parts=none"])


@pytest.mark.slow
@pytest.mark.parametrize("engine", engines.PACKAGES)
def test_engines_generate_the_greedy_text_of_sample(engine, verse, capsys):
    for package in engines.PACKAGES[engine].split():
        pytest.importorskip(package.replace("-cpp-python", "_cpp"))
    shape = {"n_embd": 32, "n_head": 2, "block_size": 16, "bias": True}
    train.main(tiny.flags(**shape, activation="gelu_tanh", max_iters=60))
    export.main(["--out_dir=out", "--to=hf"])
    capsys.readouterr()
    sample.main(["--temperature=0", "--max_new_tokens=40", "--num_samples=1", "--json"])
    expected = json.loads(capsys.readouterr().out)["ids"]
    flags = [f"--engine={engine}", "--model=hf", "--num_samples=2", "--max_new_tokens=40"]
    engines.main([*flags, "--greedy=True"])
    ids, speed = capsys.readouterr().out.splitlines()[-2:]
    assert json.loads(ids) == [expected] * 2
    assert speed.startswith("80 tokens in ")


def test_a_missing_engine_or_model_is_named(folder, monkeypatch):
    with pytest.raises(UserError, match="there is no hf.config.json"):
        engines.main(["--model=hf"])
    Path("hf").mkdir()
    Path("hf/config.json").write_text("{}")
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install llama-cpp-python gguf"):
        engines.main(["--engine=llama.cpp", "--model=hf"])
