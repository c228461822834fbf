"""tools.bench and its parts, on commands that print lines of training and on small models."""

import os
import re
import sys
from pathlib import Path

import pytest
import tiny
import torch

import train
from folio.checkpoint import Checkpoint, Progress
from folio.errors import UserError
from folio.size import flops_per_token, num_params
from model import GPTConfig
from tools import bench, count, measure, roofline, transformers_sample

TRAINING = """
import sys, time
print("step 0: train loss 4.2000, val loss 4.1000")
for i in range(0, 60, 5):
    print(f"iter {i}: loss 3.1000, time {100 + i if i >= 10 else 9000}.50ms, mfu -100.00%")
print("step 30: train loss 2.0000, val loss 1.9000")
time.sleep(0.3)
print("step 60: train loss 1.0000, val loss 2.5000")
sys.stdout.flush()
if sys.argv[1] == "3":
    sys.stderr.buffer.write(b"no caf\\xe9")
    sys.exit(3)
"""
SAMPLES_LINE = "1,234 tokens in 2.00 s, 617 tokens/s; first token after 1.25 s"


@pytest.fixture
def scripts(folder, monkeypatch):
    """A folder with another command and a train.py that print TRAINING, in place of folio's."""
    monkeypatch.setattr(bench, "ROOT", Path())
    for name in ("other.py", "train.py"):
        Path(name).write_text(TRAINING)


def test_lines_of_a_nanogpt_training_are_read(scripts):
    values = measure.measure([sys.executable, "other.py", "0"], ".")
    figures = measure.figures(values, target=3.0)
    assert figures["step_ms"] == 133.0  # median of 110.5, 115.5, ..., 155.5
    assert figures["val_loss"] == 1.9
    assert 0 < figures["to_target_s"] < figures["seconds"] - 0.2  # the first of the two
    assert 0.004 < figures["memory_gib"] < 4
    assert "tokens_per_s" not in figures
    assert "to_target_s" not in measure.figures(values, target=1.8)


def test_line_of_sample_py_is_read():
    figures = measure.figures(measure.read([(3.0, SAMPLES_LINE)], ["sample.py"]))
    assert figures == {"tokens_per_s": 617.0, "first_s": 1.25, "last_s": 3.0}


@pytest.mark.parametrize(("flags", "rate"), [(["--max_new_tokens=100"], 50.0), ([], 250.0)])
def test_sampling_speed_is_estimated_from_times_between_texts(flags, rate):
    lines = [(seconds, measure.SEPARATOR) for seconds in (5.0, 7.0, 9.0)]
    figures = measure.figures(measure.read(lines, ["sample.py", *flags]))
    assert figures["tokens_per_s"] == rate


def test_interrupting_a_measurement_ends_the_command(folder, monkeypatch):
    Path("endless.py").write_text(
        "import os, signal, time; print(os.getpid())\nos.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(600)"
    )
    started, popen = [], measure.subprocess.Popen

    def record(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        return started[0]

    monkeypatch.setattr(measure.subprocess, "Popen", record)
    with pytest.raises(KeyboardInterrupt):
        measure.measure([sys.executable, "endless.py"], ".")
    with pytest.raises(ProcessLookupError):
        os.kill(started[0].pid, 0)


def test_figures_are_medians_of_alternating_runs(folder, monkeypatch, capsys):
    order, values = [], {"folio": iter([10.0, 30.0, 20.0]), "other": iter([100.0, 90.0, 80.0])}

    def fake(command, folder):
        order.append("other" if command == ["other"] else "folio")
        ms = next(values[order[-1]])
        return {"step_ms": [(ms, ms)], "val_loss": [(ms, 1.5)]}

    monkeypatch.setattr(bench, "measure", fake)
    bench.main(["--target=1.6", "--vs=other", "--", "config/a.py"])
    assert order == ["other", "folio"] * 3
    *_, head, _, other, folio, ratios = capsys.readouterr().out.splitlines()
    assert re.match(r"\| +\| ms/step \| s to target \| best val loss \|", head)
    assert re.match(r"\| folio +\| +20.00 \| +20.0 \| +1.5000 \|", folio)
    assert re.match(r"\| other +\| +90.00 \| +90.0 \| +1.5000 \|", other)
    assert re.match(r"\| folio / other \| +0.222 \|", ratios)  # 20 / 90


def test_sampling_is_compared_with_any_command(scripts, capsys):
    Path("sample.py").write_text(f"print({SAMPLES_LINE!r})")
    vs = f"{sys.executable} -c 'print(1)'"
    bench.main(["--script=sample", "--runs=1", f"--vs={vs}", "--", "--seed=3"])
    out = capsys.readouterr().out
    assert "folio: sample.py --seed=3\n" in out
    assert re.search(r"^\| +\| tokens/s \| s to first token \| s to last line \| whole", out, re.M)
    assert re.search(r"^\| folio +\| +617 \| +1.25 \|", out, re.M)
    assert re.search(r"^\| other +\| +\| +\|", out, re.M)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vs=no-such-command"], "cannot run no-such-command"),
        (["--vs= "], "--vs must not be empty"),
        (["--vs=python 'open"], "--vs is not a command: No closing quotation: python 'open"),
        ([f"--vs={sys.executable} other.py 0", "--vs_dir=nowhere"], "in nowhere"),
        ([f"--vs={sys.executable} other.py 3"], "ended with status 3: .* loss 2.5000 / no caf"),
    ],
)
def test_mistakes_are_reported_before_the_first_run(scripts, capfd, flags, message):
    with pytest.raises(UserError, match=message):
        bench.main([*flags, "--", "0"])
    assert "run 1" not in capfd.readouterr().out
    assert {each.name for each in Path().iterdir()} == {"other.py", "train.py"}


@pytest.mark.slow
def test_measuring_train_py_reports_every_figure(verse, capsys):
    bench.main(["--runs=1", "--target=9", "--", *tiny.flags(max_iters=30, eval_interval=30)])
    assert not Path("out").exists()
    header, _, row = capsys.readouterr().out.splitlines()[-3:]
    headings = {cell.strip() for cell in header.split("|")[2:-1]}
    assert headings == {heading for heading, _ in bench.COLUMNS.values()} - {"s to first token"}
    assert all(cell.strip() for cell in row.split("|")[1:-1])


def test_profile_of_training_prints_operations_and_bound(verse, capsys, monkeypatch):
    monkeypatch.setattr(roofline, "STEPS", 2)
    bench.main(["--profile", "--", *tiny.flags(optimizer="muon")])
    out = capsys.readouterr().out
    for words in ("a step takes ", "aten::mm ", "GFLOP in matrix products at "):
        assert words in out
    assert not Path("out").exists()


def test_profile_of_sampling_prints_operations_and_bound(verse, capsys, monkeypatch):
    monkeypatch.setattr(roofline, "bandwidth_of", lambda machine: 1e9)
    train.main(tiny.flags(max_iters=3))
    flags = ["--device=cpu", "--dtype=float32", "--num_samples=3", "--max_new_tokens=12"]
    bench.main(["--profile", "--script=sample", "--", *flags])
    out = capsys.readouterr().out
    weights = 12 * 16 * 16 + 24 * 16
    assert "a step takes " in out
    assert "aten::" in out
    assert f"lower bound: {4 * weights / 1e6:.4g} MB of weights, read at 1 GB/s: " in out


@pytest.mark.parametrize("changes", tiny.SHAPES, ids=str)
def test_parts_add_up_to_the_counts_of_the_model(changes):
    config = GPTConfig(**(tiny.SMALL | changes))
    parameters, flops = (sum(part[i] for part in count.parts(config)) for i in (2, 3))
    assert parameters == num_params(config)
    assert 3 * flops == pytest.approx(flops_per_token(config), abs=3)


def test_counts_are_printed_with_and_without_a_dataset(folder, capsys):
    Path("preset.py").write_text("n_layer, n_embd = 1, 12")
    bench.main(["--count", "--", *tiny.flags(dataset="none")])
    config = GPTConfig(**tiny.SHAPE, bias=False)
    out = capsys.readouterr().out
    assert "V = 50,304 (gpt2 tokenizer)" in out
    assert f" {num_params(config):,} |" in out
    tiny.prepare_verse()
    bench.main(["--count", "preset.py", "--", "--dataset=verse"])
    assert "V = 24 (char tokenizer)" in capsys.readouterr().out


@pytest.mark.parametrize("bias", [True, False])
def test_transformers_model_has_the_same_logits(bias):
    model = tiny.random_model(bias=bias)
    checkpoint = Checkpoint(model.config, model.state_dict(), Progress(), settings={})
    idx = tiny.random_ids(model)
    logits = transformers_sample.make_gpt2(checkpoint)(idx).logits
    assert torch.allclose(logits, model.logits(idx), atol=1e-5)


def test_transformers_sample_prints_its_speed(verse, capsys):
    train.main(tiny.flags(max_iters=3))
    transformers_sample.main(["--device=cpu", "--num_samples=2", "--max_new_tokens=20"])
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("40 tokens in ")
    assert measure.read([(1.0, line)], [])["tokens_per_s"]


@pytest.mark.parametrize("changes", [{"position": "rotary"}, {"window": 3}], ids=str)
def test_transformers_sample_refuses_other_models(changes):
    model = tiny.random_model(**changes)
    checkpoint = Checkpoint(model.config, model.state_dict(), Progress(), {}, path=Path("a.pt"))
    with pytest.raises(UserError, match=r"a\.pt is not a plain GPT-2"):
        transformers_sample.make_gpt2(checkpoint)


def test_only_sampling_can_be_profiled():
    with pytest.raises(UserError, match="--profile measures sampling: remove --score"):
        bench.main(["--profile", "--script=sample", "--", "--score=verse.txt"])
