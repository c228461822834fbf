"""tools.bench --gpu_suite at toy size, on a CPU. Commands run in this process, which is faster."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import sample
import train
from folio.dataset import load_dataset
from folio.errors import UserError
from tools import bench, gpu_parts, gpu_suite, measure

TOY = {
    "device": "cpu", "dtype": "float32", "compile": False, "n_layer": 1, "n_head": 2, "n_embd": 24,
    "block_size": 8, "batch_size": 2, "gradient_accumulation_steps": 1, "max_iters": 12,
    "eval_interval": 6, "eval_iters": 1,
}  # fmt: skip
MAINS = {"train.py": train.main, "sample.py": sample.main, "tools.bench": bench.main}
NANOGPT = {
    "train.py": [
        "step 0: train loss 4.2000, val loss 4.1000",
        "iter 10: loss 3.1000, time 20.00ms, mfu 10.00%",
    ],
    "sample.py": [measure.SEPARATOR] * 3,
}


class Commands:
    """Runs folio's commands in this process, in place of tools.measure.measure."""

    def __init__(self, capsys):
        self.capsys, self.names, self.failing = capsys, [], ()

    def measure(self, command, folder):
        _, script, *flags = command[2:] if command[0] == "env" else command
        if script == "-m":
            script, *flags = flags
        name = Path(script).name
        self.names.append(name)
        if name in self.failing:
            raise UserError(f"{name} failed")
        if Path(folder).name == "nanoGPT":
            lines = NANOGPT[name]
        elif name == "pytest":
            lines = ["7 passed, 3 skipped in 1.00s"]
        else:
            self.capsys.readouterr()
            flags = [flag for flag in flags if not flag.startswith("--compile")]  # takes a minute
            MAINS[name](flags if name != "train.py" else [*flags, "--compile=False"])
            lines = "".join(self.capsys.readouterr()).splitlines()
        return measure.read([(2.0 * i, line) for i, line in enumerate(lines)], command)


@pytest.fixture
def commands(verse, capsys, monkeypatch):
    """The commands, in a folder with a dataset and the scripts of nanoGPT."""
    shutil.copytree("data/verse", "data/shakespeare_char")
    Path("nanoGPT").mkdir()
    Path("nanoGPT/configurator.py").touch()
    commands = Commands(capsys)
    monkeypatch.setattr(gpu_suite, "measure", commands.measure)
    monkeypatch.setattr(gpu_parts, "NEW_TOKENS", 3)
    monkeypatch.setattr(gpu_parts, "XL", ["--activation_checkpointing=True"])
    return commands


def run(*flags, more=()):
    toy = [f"--{name}={value}" for name, value in TOY.items()]
    bench.main(["--gpu_suite", "--vs_dir=nanoGPT", *flags, "--", *toy, *more])


def figures(name):
    return json.loads(Path(f"out-gpu-suite/{name}.json").read_text())["figures"]


def test_every_part_runs_at_toy_size(commands, capsys):
    run()
    for name in ("speed-folio-12", "speed-folio-64", "speed-nanogpt-32"):
        assert figures(name).keys() >= {"step_ms", "tokens_per_s", "mfu"}
    assert figures("speed-nanogpt-32")["tokens_per_s"] == pytest.approx(2 * 8 / 0.02)
    for name in ("curve-folio", "curve-nanogpt", "fast", "fast-cached", "fast-eager", "lecture"):
        assert figures(name)["val_loss"] > 0
    for name in ("folio", "folio-compiled", "nanogpt", "124M-1", "124M-64"):
        assert figures(f"sampling-{name}")["tokens_per_s"] > 0
    for name in ("124M-256", "1.5B"):
        assert figures(f"memory-{name}").keys() >= {"estimated_mib", "peak_mib"}
    assert not Path("out-gpu-suite/memory-124M-192.json").exists()  # the largest that fits
    for name in gpu_parts.CANDIDATES:
        assert figures(f"candidate-{name}")["tokens_per_s"] > 0
    assert load_dataset("random_unpadded").tokenizer.padded_vocab_size == gpu_suite.GPT2_TOKENS
    assert figures("tests").items() >= {"passed": 7, "skipped": 3}.items()
    out = capsys.readouterr().out
    assert "| sampling-124M-64 " in out
    assert bench.where() in out


def test_measurements_that_exist_are_not_repeated(commands):
    commands.failing = ("sample.py",)
    with pytest.raises(UserError, match="sample.py failed"):
        run("--parts=curve,sampling")
    assert commands.names == ["train.py", "train.py", "sample.py"]
    commands.failing = ()
    run("--parts=curve,sampling")
    assert commands.names.count("train.py") == 2
    assert figures("sampling-folio")
    run("--parts=curve", more=["--max_iters=13"])
    assert commands.names.count("train.py") == 4


def test_smaller_batches_are_tried_if_a_large_one_does_not_fit(commands, capsys):
    commands.failing = ("tools.bench",)
    with pytest.raises(UserError):  # 1.5B, which must fit
        run("--parts=memory")
    assert commands.names == ["tools.bench"] * 5
    assert "memory-124M-256: tools.bench failed\n" in capsys.readouterr().out
    assert list(Path("out-gpu-suite").iterdir()) == []


def test_nanogpt_gets_the_same_tokens(commands, verse):
    run("--parts=tests")
    folder = Path("nanoGPT/data/shakespeare_char")
    assert np.fromfile(folder / "val.bin", np.uint16).tolist() == verse.val.tolist()
    meta = pickle.loads((folder / "meta.pkl").read_bytes())
    assert verse.tokenizer.decode(verse.train[:9]) == "".join(
        meta["itos"][i] for i in verse.train[:9]
    )
    assert all(meta["stoi"][c] == i for i, c in meta["itos"].items())
    assert meta["vocab_size"] == len(meta["itos"])


def test_the_speed_model_is_gpt2_with_the_published_flops(tmp_path):
    _, options = gpu_parts.Parts(tmp_path, ()).speed_of(32)
    assert options["flops"] == pytest.approx(855e6, rel=0.001)
    assert options["tokens"] == 192 * 1024
    _, options = gpu_parts.Parts(tmp_path, ("--batch_size=4",)).speed_of(32)
    assert options["tokens"] == 4 * 6 * 1024


def test_arguments_do_not_undo_what_a_candidate_changes(tmp_path):
    parts = gpu_parts.Parts(tmp_path, ("--compile=False", "--n_head=2"))
    commands = {each.name: each.command for each in parts.candidates()}
    assert commands["candidate-124M-6-heads"][-2:] == ("--n_head=2", "--n_head=6")
    assert commands["candidate-small-autotune"][-1] == "--compile=max-autotune"
    assert commands["candidate-small-default"][-1] == "--n_head=2"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--parts=speed,speeed"], "--parts has 'speeed'; the parts are speed, curve"),
        (["--vs_dir=."], "--vs_dir=. is not a copy of nanoGPT"),
        (["--memory", "--count"], "use only one of --memory --count --gpu_suite"),
    ],
)
def test_mistakes_are_reported(commands, flags, message):
    with pytest.raises(UserError, match=message):
        run(*flags)
    assert not Path("out-gpu-suite").exists()


def test_the_suite_needs_a_gpu_unless_a_device_is_given(commands, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="needs a GPU; to try it on a CPU, add -- --device=cpu"):
        bench.main(["--gpu_suite", "--vs_dir=nanoGPT"])


def test_parts_without_the_suite_are_a_mistake():
    with pytest.raises(UserError, match="--parts needs --gpu_suite"):
        bench.main(["--parts=speed"])
