"""tools.bench.suite: its commands, and a part at toy size; the other engines of tools.bench."""

import json
import shutil
from pathlib import Path

import pytest
import tiny

import sample
import train
from folio.cli.errors import UserError
from folio.cli.settings import ROOT, load_settings
from sample import SampleConfig
from tools import export
from tools.bench import engines, suite
from train import TrainConfig

NANOGPT = [  # what a stand-in for its train.py prints
    "tokens per iteration will be: 160",
    "step 0: train loss 4.2000, val loss 4.1000",
    "iter 10: loss 3.1000, time 20.00ms, mfu 10.00%",
]
CONFIGS = {"train.py": TrainConfig, "sample.py": SampleConfig, "engines": engines.EngineConfig}


@pytest.mark.usefixtures("verse")
def test_every_command_has_valid_settings(text_size):
    shutil.move("data/verse", "data/shakespeare_char")
    checked = set()
    for rows in suite.PARTS.values():
        for _, _, *templates in rows:
            for template in templates:
                command = suite.expand(template, "nanoGPT").split()
                names = [word.removeprefix(f"{ROOT}/") for word in command]
                names = [name.removeprefix("tools.bench.") for name in names]
                script = next((name for name in names if name in CONFIGS), None)
                if script and "nanoGPT" not in command:
                    arguments = command[names.index(script) + 1 :]
                    resolvers = {"device": lambda _: "cuda"} if script != "engines" else {}
                    load_settings(CONFIGS[script], arguments, resolvers)
                    checked.add(script)
    assert checked == CONFIGS.keys()


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
    [[command, runs]] = saved.items()
    assert len(runs) == 2
    assert "train.py" in command

    Path("nanoGPT/train.py").write_text("\n".join(f"print({line!r})" for line in NANOGPT))
    suite.main(arguments)
    *table, _, last = capsys.readouterr().out.splitlines()
    step = f"{json.loads(last)['medians']['step: a step'][0]:.2f}"
    assert [cell.strip() for cell in table[-1].split("|")[1:4]] == ["a step", step, "20.00"]
    assert json.loads(Path("out-suite/runs.json").read_text())[command] == runs
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
