"""tools.bench.gpu_suite: its commands, and a part at toy size on a CPU."""

import json
import shutil
from pathlib import Path

import pytest
import tiny

from folio.cli.settings import ROOT, load_settings
from folio.data.dataset import load_dataset
from sample import SampleConfig
from tools.bench import gpu_suite
from train import TrainConfig

NANOGPT = [  # what a stand-in for its train.py prints
    "tokens per iteration will be: 160",
    "step 0: train loss 4.2000, val loss 4.1000",
    "iter 10: loss 3.1000, time 20.00ms, mfu 10.00%",
]
TOY = " ".join(tiny.flags(dataset="shakespeare_char", max_iters=12, eval_interval=6))


@pytest.fixture
def nanogpt(verse):
    """The folder of nanoGPT, in one with a dataset. Its train.py fails."""
    shutil.move("data/verse", "data/shakespeare_char")
    folder = Path("nanoGPT")
    Path(folder, "data").mkdir(parents=True)
    (folder / "train.py").write_text("raise SystemExit(3)")
    return folder


def test_every_command_has_valid_settings(nanogpt, text_size):
    config_of_script = {f"{ROOT}/train.py": TrainConfig, f"{ROOT}/sample.py": SampleConfig}
    checked = 0
    for measurements in gpu_suite.PARTS.values():
        for name, template in measurements.items():
            command = gpu_suite.build_command(name, template, nanogpt)
            assert not any("{" in word for word in command)
            for index, word in enumerate(command):
                if config := config_of_script.get(word):
                    load_settings(config, command[index + 1 :], {"device": lambda _: "cuda"})
                    checked += 1
    assert checked > 12


@pytest.mark.slow
def test_a_part_is_measured_and_only_failed_commands_are_repeated(nanogpt, capsys, monkeypatch):
    curve = gpu_suite.PARTS["curve"] | {"curve-folio": f"{gpu_suite.TRAIN} {TOY}"}
    monkeypatch.setitem(gpu_suite.PARTS, "curve", curve)
    flags = ["--vs_dir=nanoGPT", "--parts=curve"]
    gpu_suite.main(flags)
    out = capsys.readouterr().out
    assert "curve-nanogpt: env -C nanoGPT " in out
    assert " ended with status 3" in out
    result, failed = (Path(f"out-gpu-suite/curve-{name}.json") for name in ("folio", "nanogpt"))
    written_ns = result.stat().st_mtime_ns
    assert json.loads(result.read_text())["figures"].keys() >= {"val_loss", "tokens_per_s"}
    assert not failed.exists()

    (nanogpt / "train.py").write_text("\n".join(f"print({line!r})" for line in NANOGPT))
    gpu_suite.main(flags)
    assert result.stat().st_mtime_ns == written_ns
    assert json.loads(failed.read_text())["figures"]["tokens_per_s"] == 8000
    assert "| curve-nanogpt | " in capsys.readouterr().out
    tokens = load_dataset("random_tokens").train
    assert 50_000 < max(tokens) < 50_304
    assert (nanogpt / "data/random_tokens/train.bin").read_bytes() == tokens.tobytes()
