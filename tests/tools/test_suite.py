"""tools.bench.suite: its commands, and a part at toy size."""

import json
import shlex
from pathlib import Path
from statistics import median

import pytest
import tiny

from folio.cli.errors import UserError
from folio.cli.settings import ROOT, load_settings
from folio.data.tokenizer import GPT2Tokenizer
from folio.hardware.device import resolve_device
from sample import SampleConfig
from tools.bench import suite
from train import TrainConfig

NANOGPT = [  # what a stand-in for its train.py prints
    "tokens per iteration will be: 160",
    "step 0: train loss 4.2000, val loss 4.1000",
    "iter 10: loss 3.1000, time 20.00ms, mfu 10.00%",
]


@pytest.mark.usefixtures("folder")
def test_the_settings_of_all_commands_are_valid(capsys, text_size):
    text_size(10**8, GPT2Tokenizer.vocab_size)  # presets read it
    suite.main(["--dry_run=True", f"--parts={','.join(suite.PARTS)}"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(len(row) - 2 for rows in suite.PARTS.values() for row in rows)
    resolvers = {"device": resolve_device}
    for line in lines:
        for script, config in (("train.py", TrainConfig), ("sample.py", SampleConfig)):
            _, is_folio, arguments = line.partition(str(ROOT / script))
            if is_folio:
                load_settings(config, shlex.split(arguments), resolvers)
    assert next(iter(suite.TABLE["gpu"])) == "tests"  # they come first


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
    last = capsys.readouterr().out.splitlines()[-1]
    step = f"{median(run['step_ms'] for run in runs):.2f}"
    assert [cell.strip() for cell in last.split("|")[1:4]] == ["a step", step, "20.00"]
    assert json.loads(Path("out-suite/runs.json").read_text())[commit][command] == runs
    suite.main(["--parts=step", "--minutes=1e-9"])
    assert "no time left for step: a step" in capsys.readouterr().out
    with pytest.raises(UserError, match="--parts has 'none'"):
        suite.main(["--parts=none"])
