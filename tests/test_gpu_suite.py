"""tools.gpu_suite at toy size, on a CPU. Commands run in this process, which is faster."""

import json
import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import sample
import train
from folio.dataset import load_dataset
from folio.errors import UserError
from tools import bench, gpu_suite

TOY = {
    "device": "cpu", "dtype": "float32", "compile": False, "n_layer": 1, "n_head": 2, "n_embd": 24,
    "block_size": 8, "batch_size": 2, "gradient_accumulation_steps": 1, "max_iters": 12,
    "eval_interval": 6, "eval_iters": 1,
}  # fmt: skip
MAINS = {"train.py": train.main, "sample.py": sample.main}
NANOGPT = {  # stand-ins for its scripts
    "configurator.py": [],
    "train.py": [
        "tokens per iteration will be: 160",
        "step 0: train loss 4.2000, val loss 4.1000",
        "iter 10: loss 3.1000, time 20.00ms, mfu 10.00%",
    ],
    "sample.py": [bench.SEPARATOR] * 3,
}


class Commands:
    """Runs folio's commands in this process, in place of tools.bench.measure."""

    def __init__(self, capsys):
        self.capsys, self.names, self.failing = capsys, [], ""

    def measure(self, command):
        if "-C" in command:  # nanoGPT
            self.names.append("nanoGPT")
            return bench.measure(command)
        script, *flags = command[command.index(sys.executable) + 1 :]
        self.names.append(name := Path(script).name)
        if name == self.failing:
            raise UserError(f"{name} failed")
        if name not in MAINS:
            return bench.read_values([(2.0, "7 passed, 3 skipped in 1.00s")], command)
        self.capsys.readouterr()
        if name == "sample.py":  # --compile takes a minute
            flags = [flag for flag in flags if not flag.startswith(("--compile", "--max_new"))]
            flags.append("--max_new_tokens=3")
        MAINS[name](flags)
        lines = "".join(self.capsys.readouterr()).splitlines()
        return bench.read_values([(2.0 * i, line) for i, line in enumerate(lines)], command)


@pytest.fixture
def commands(verse, capsys, monkeypatch):
    """The commands, in a folder with a dataset and stand-ins for nanoGPT's scripts."""
    shutil.copytree("data/verse", "data/shakespeare_char")
    Path("nanoGPT").mkdir()
    for name, lines in NANOGPT.items():
        Path("nanoGPT", name).write_text("\n".join(f"print({line!r})" for line in lines))
    commands = Commands(capsys)
    monkeypatch.setattr(gpu_suite, "measure", commands.measure)
    vocabularies = {"random_tokens": 304, "random_unpadded": 257}  # smaller
    monkeypatch.setattr(gpu_suite, "VOCABULARIES", vocabularies)
    return commands


def run(*flags, **settings):
    toy = [f"--{name}={value}" for name, value in (TOY | settings).items()]
    gpu_suite.main(["--vs_dir=nanoGPT", *flags, "--", *toy])


def figures(name):
    return json.loads(Path(f"out-gpu-suite/{name}.json").read_text())["figures"]


@pytest.mark.slow
def test_every_part_runs_at_toy_size(commands, verse, capsys):
    run()
    for part, measurements in gpu_suite.PARTS.items():
        for name in measurements:
            assert figures(name)["last_s"] >= 0, f"{part}: {name}"
    assert figures("speed-nanogpt-32")["tokens_per_s"] == pytest.approx(160 / 0.02)
    assert "mfu" not in figures("speed-nanogpt-32")
    for name in ("speed-folio-12", "small-eager", "sampling-124M-64-compile", "sampling-nanogpt"):
        assert figures(name)["tokens_per_s"] > 0
    for name in ("curve-folio", "curve-nanogpt", "fast-cached", "lecture"):
        assert figures(name)["val_loss"] > 0
    assert figures("tests").items() >= {"passed": 7, "skipped": 3}.items()
    assert load_dataset("random_unpadded").tokenizer.padded_vocab_size == 257
    out = capsys.readouterr().out
    assert "| sampling-124M-64 " in out
    assert bench.where() in out
    folder = Path("nanoGPT/data/shakespeare_char")
    assert np.fromfile(folder / "val.bin", np.uint16).tolist() == verse.val.tolist()
    meta = pickle.loads((folder / "meta.pkl").read_bytes())
    text = verse.tokenizer.decode(verse.train[:9])
    assert text == "".join(meta["itos"][i] for i in verse.train[:9])
    assert [meta["stoi"][character] for character in text] == verse.train[:9].tolist()


def test_a_failing_command_is_reported_and_only_that_is_repeated(commands, capsys):
    commands.failing = "sample.py"
    run("--parts=curve,sampling")
    assert "sampling-124M-1: sample.py failed\n" in capsys.readouterr().out
    assert not Path("out-gpu-suite/sampling-folio.json").exists()
    commands.names, commands.failing = [], ""
    run("--parts=curve,sampling")
    assert set(commands.names) == {"sample.py"}
    commands.names = []
    run("--parts=curve", max_iters=13)
    assert commands.names == ["train.py", "nanoGPT"]


def test_the_peak_of_a_gpus_memory_is_read_from_the_log(tmp_path):
    log = tmp_path / "log.jsonl"
    assert gpu_suite.peak_memory_gib(log) is None
    log.write_text('{"step": 0}\n{"peak_memory_gib": 2.5}\n{"peak_memory_gib": 1.5}\n')
    assert gpu_suite.peak_memory_gib(log) == 2.5


@pytest.mark.parametrize(
    ("flag", "value"), [("--parts=speed,speeed", "'speeed'"), ("--vs_dir=.", "--vs_dir=.")]
)
def test_mistakes_are_reported(commands, flag, value):
    with pytest.raises(UserError, match=value):
        run(flag)
    assert not Path("out-gpu-suite").exists()
