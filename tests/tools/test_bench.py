"""tools.bench on commands that print lines of training, and on small models; its suite."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import tiny

import train
from folio.cli.errors import UserError
from folio.cli.settings import ROOT, load_settings
from folio.data.tokenizer import GPT2Tokenizer
from folio.hardware.device import resolve_device
from sample import SampleConfig
from tools.bench import __main__ as bench
from tools.bench import suite
from tools.bench.measure import FORMATS, make_row, measure_alternately, read_figures

NANOGPT = """tokens per iteration will be: 1,330
step 0: train loss 4.2000, val loss 4.1000
iter 5: loss 3.1000, time 9000.50ms, mfu -100.00%
iter 10: loss 3.1000, time 110.50ms, mfu -100.00%
iter 15: loss 3.1000, time 155.50ms, mfu -100.00%
step 30: train loss 2.0000, val loss 1.9000
step 60: train loss 1.0000, val loss 2.5000
"""
FINAL = """step 5: train loss 2.0, val loss 1.5
final evaluation of the best model, step 5: train loss 2.0, val loss 1.75
"""
MODDED = "step:0/40 val_loss:10.82 train_time:0.000s\nstep:40/40 val_loss:5.28125 train_time:"
SAMPLE = "1,000 tokens in 2.00 s, 500 tokens/s; first token 0.25 s after the start"


@pytest.mark.parametrize(
    ("output", "figures"),
    [
        (NANOGPT, {"step_ms": 133, "tokens_per_step": 1330, "tokens_per_s": 1e4, "val_loss": 1.9}),
        (FINAL, {"val_loss": 1.75}),
        (MODDED, {"val_loss": 5.28125}),
        (SAMPLE, {"tokens_per_s": 500}),
    ],
)
def test_what_programs_print_is_read(output, figures):
    assert read_figures(output) == pytest.approx(figures)


@pytest.mark.usefixtures("folder")
def test_a_failure_is_reported_at_once(capfd):
    code = "import sys; print(1, flush=True); sys.stderr.buffer.write(b'no caf\\xe9'); sys.exit(3)"
    Path("other.py").write_text(code)
    with pytest.raises(UserError, match="status 3: 1 / no caf"):
        bench.main([f"--vs={sys.executable} other.py", "--", "0"])
    assert "run 1" not in capfd.readouterr().out


def test_figures_are_medians_of_alternating_runs(capsys):
    runs = {
        "other": [{"step_ms": ms, "seconds": 3.0} for ms in (100.0, 90.0, 80.0)],
        "folio": [{"step_ms": 10.0, "seconds": 1.0}, {"step_ms": 30.0}, {"step_ms": 20.0}],
    }
    assert measure_alternately(runs, 3, list.__getitem__) == runs
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in lines] == ["other:", "folio:"] * 3
    assert make_row("a step", "step_ms", runs) == ["a step", "20.00", "90.00", "0.222"]


@pytest.mark.slow
def test_training_is_measured_and_profiled(verse, capsys):
    flags = tiny.flags(max_iters=30, eval_interval=30, optimizer="muon")
    bench.main(["--runs=1", f"--vs={sys.executable} -c 'print(1)'", "--", *flags])
    rows = [line.split("|")[1:] for line in capsys.readouterr().out.splitlines()[-len(FORMATS) :]]
    rows = [[cell.strip() for cell in row] for row in rows]
    assert [name for name, *_ in rows] == list(FORMATS)
    for name, folio, other, *_ in rows:  # the other prints nothing that is read
        if name not in ("compile_s", "gpu_memory_gib"):
            assert float(folio.replace(",", "")) > 0
        assert (not other) == (name != "seconds")
    bench.main(["--profile", "--", *flags])
    assert not Path("out").exists()
    out = capsys.readouterr().out
    assert re.search(r"^a step takes [\d.]+ ms", out, re.M)
    assert re.search(r"^ +aten::mm +[\d.]+% ", out, re.M)
    with pytest.raises(UserError, match="--script=train only"):
        bench.main(["--profile", "--script=sample"])


# The suite


@pytest.mark.usefixtures("folder")
def test_the_settings_of_all_commands_are_valid(text_size):
    text_size(10**8, GPT2Tokenizer.vocab_size)  # presets read it
    templates = [text for rows in suite.PARTS.values() for _, _, *texts in rows for text in texts]
    resolvers = {"device": resolve_device}
    for line in [suite.expand(template, "../nanoGPT") for template in templates]:
        for script, config in (("train.py", train.TrainConfig), ("sample.py", SampleConfig)):
            _, is_folio, arguments = line.partition(str(ROOT / script))
            if is_folio:
                load_settings(config, shlex.split(arguments), resolvers)
    assert next(iter(suite.TABLE["gpu"])) == "tests"  # they come first


@pytest.mark.usefixtures("folder")
def test_rows_are_measured_and_only_failed_commands_are_repeated(capsys, monkeypatch):
    row = ["a step", "step_ms", "{python} folio.py", "{python} other.py"]
    monkeypatch.setitem(suite.PARTS, "step", [row])
    succeeds, fails = f"print({NANOGPT!r})", "raise SystemExit(3)"
    cases = [(succeeds, fails, "133.00"), (fails, succeeds, "133.00 133.00 1.000")]
    for folio, other, cells in cases:
        Path("folio.py").write_text(folio)
        Path("other.py").write_text(other)
        suite.main(["--parts=step", "--runs=2"])
        out = capsys.readouterr().out
        assert out.splitlines()[-1].replace("|", "").split() == f"a step {cells}".split()
        assert ("ended with status 3" in out) == (other == fails)
    [commands] = json.loads(Path("out-suite/runs.json").read_text()).values()
    assert [len(runs) for runs in commands.values()] == [2, 2]
    suite.main(["--parts=step", "--minutes=1e-9"])
    assert "no time left for step: a step" in capsys.readouterr().out
    with pytest.raises(UserError, match="--parts has 'none'"):
        suite.main(["--parts=none"])
