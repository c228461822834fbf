"""tools.bench, on commands that print what a training would, and on a small training."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import tiny
import torch

import train
from checkpoint import Checkpoint
from config import UserError
from model import GPTConfig, flops_per_token, num_params
from tools import bench, count, roofline, transformers_sample
from tools.transformers_sample import gpt2_of

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


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "ROOT", Path())
    for name in ("other.py", "train.py"):
        Path(name).write_text(TRAINING)
    return tmp_path


def other(status=0):
    return f"{sys.executable} other.py {status}"


def test_a_training_is_read_by_nanogpts_lines():
    measured = bench.measure([sys.executable, "other.py", "0"], ".")
    figures = measured.summary(target=3.0)
    assert figures["step_ms"] == 132.5 + 0.5  # the median of 110.5, 115.5 … 155.5
    assert figures["val_loss"] == 1.9
    assert 0 < figures["to_target_s"] < figures["seconds"] - 0.2  # at the first of the two
    assert 0.004 < figures["memory_gib"] < 4  # no Python is smaller
    assert figures["tokens_per_s"] is None
    assert measured.summary(target=1.8)["to_target_s"] is None


def test_a_sampling_is_read_by_what_it_says():
    line = "1,234 tokens in 2.00 s, 617 tokens/s; the first after 1.25 s"
    Path("other.py").write_text(f"print('text'); print('---------------'); print('{line}')")
    measured = bench.measure([sys.executable, "other.py"], ".")
    measured.rate_texts(length=100)
    figures = measured.summary(target=None)
    assert (figures["tokens_per_s"], figures["first_s"]) == (617.0, 1.25)
    assert 0 < figures["last_s"] <= figures["seconds"]


def test_texts_that_come_one_by_one_tell_the_rate():
    measured = bench.Measured(texts=[5.0, 7.0, 9.0])
    measured.rate_texts(length=100)
    assert measured.tokens_per_s == [50.0]


def test_a_sampling_may_be_measured_beside_any_command(monkeypatch, capsys):
    Path("sample.py").write_text("print('9 tokens in 1.00 s, 9 tokens/s; the first after 0.50 s')")
    vs = f"{sys.executable} -c 'print(1)' --max_new_tokens=7"
    bench.main(["--script=sample", "--runs=1", f"--vs={vs}", "--", "--seed=3"])
    out = capsys.readouterr().out
    assert "folio: sample.py --seed=3\n" in out
    headings, _, folio, other, ratio = out.splitlines()[-5:]
    assert headings.startswith("| | tokens/s | s to first token | s to last line | whole process")
    assert folio.startswith("| folio | 9 | 0.50 | ")
    assert other.startswith("| other |  |  | ")
    assert ratio.startswith("| folio / other |  |  | ")


@pytest.mark.parametrize(("command", "length"), [("a --max_new_tokens=7", 7), ("a", 500)])
def test_the_length_of_texts_is_that_of_the_command(command, length, monkeypatch):
    found = []
    monkeypatch.setattr(bench.Measured, "rate_texts", lambda self, length: found.append(length))
    monkeypatch.setattr(bench, "measure", lambda *_: bench.Measured())
    bench.main(["--script=sample", "--runs=1", f"--vs={command}", "--"])
    assert found == [length, 500]


def test_figures_are_medians_of_runs_in_turn(monkeypatch, capsys):
    order = []
    values = {"folio": iter([10.0, 30.0, 20.0]), "other": iter([100.0, 90.0, 80.0])}

    def measure(command, folder):
        name = "other" if command == ["other"] else "folio"
        order.append(name)
        ms = next(values[name])
        return bench.Measured(
            seconds=2 * ms, memory_gib=1.0, step_ms=[ms], evaluations=[(ms, 5, 1.5)]
        )

    monkeypatch.setattr(bench, "measure", measure)
    bench.main(["--target=1.6", "--vs=other", "--json=out.json", "--", "config/a.py"])
    assert order == ["other", "folio"] * 3
    written = json.loads(Path("out.json").read_text())
    assert written["medians"]["folio"]["step_ms"] == 20.0
    assert written["medians"]["other"]["to_target_s"] == 90.0
    assert len(written["runs"]["other"]) == 3
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| folio / other | 0.222 |")  # 20 / 90


def test_a_figure_that_one_run_lacks_has_no_median():
    runs = [bench.Measured(step_ms=[5.0], evaluations=[(1.0, 9, loss)]) for loss in (1.0, 2.0)]
    medians = bench.medians_of(runs, target=1.5)
    assert medians["step_ms"] == 5.0
    assert medians["to_target_s"] is None


def test_each_run_is_alone_in_a_folder_that_goes(monkeypatch):
    commands = []

    def measure(command, folder):
        commands.append(command)
        return bench.Measured(step_ms=[1.0])

    monkeypatch.setattr(bench, "measure", measure)
    bench.main(["--runs=2", "--", "--init_from=auto", "--out_dir=mine"])
    folders = {command[-3] for command in commands}
    assert len(folders) == 2
    assert not any(Path(each.removeprefix("--out_dir=")).exists() for each in folders)
    assert all(command[-2:] == ["--init_from=scratch", "--overwrite=True"] for command in commands)


def test_what_stops_a_measurement_stops_the_command(monkeypatch):
    Path("endless.py").write_text("import os, time; print(os.getpid()); time.sleep(600)")
    seen = []

    def stop(_, line, seconds):
        seen.append(int(line))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.Measured, "read", stop)
    with pytest.raises(KeyboardInterrupt):
        bench.measure([sys.executable, "endless.py"], ".")
    with pytest.raises(ProcessLookupError):
        os.kill(seen[0], 0)


def test_a_measurement_needs_no_git(monkeypatch):
    assert bench.commit() == "unknown"  # here is no repository
    monkeypatch.setenv("PATH", "")
    assert bench.commit() == "unknown"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vs=no-such-command"], "cannot run no-such-command"),
        ([f"--vs={other()}", "--vs_dir=nowhere"], "in nowhere"),
        (["--vs_dir=nowhere"], "--vs_dir is the folder for --vs, which is not given"),
        (["--vs="], "--vs is empty"),
        (["--vs='a"], "--vs='a: No closing quotation"),
        ([f"--vs={other(3)}"], "ended with status 3: .* / step 60: .* val loss 2.5000 / no caf"),
        (["--vs=echo hello"], "echo hello printed no line of a training: hello"),
        (["--json=."], "--json=. names no file"),
        (["--json=nowhere/out.json"], "cannot write nowhere/out.json"),
        (["--json="], "--json= names no file"),
        (["--profile", "--runs=2"], "--profile is another measurement"),
        (["config/a.py"], "come after a lone --"),
        (["--run=3"], "unknown setting --run; did you mean runs"),
        (["--runs=0"], "runs must lie in"),
    ],
)
def test_mistakes_are_answered_in_one_line_before_anything_is_measured(capfd, flags, message):
    with pytest.raises(UserError, match=message) as caught:
        bench.main([*flags, "--", "0"])
    assert "\n" not in str(caught.value)
    assert "run 1" not in capfd.readouterr().out
    assert {each.name for each in Path().iterdir()} == {"other.py", "train.py"}


@pytest.mark.slow
def test_a_measurement_leaves_no_run_behind(verse, capsys, monkeypatch):
    monkeypatch.setattr(bench, "ROOT", Path(tiny.__file__).parent.parent)
    bench.main(["--runs=1", "--target=9", "--", *tiny.flags(max_iters=30, eval_interval=30)])
    assert not Path("out").exists()
    figures = capsys.readouterr().out.splitlines()[-1]
    assert figures.startswith("| folio | ")
    assert " |  | " not in figures  # every figure is there


def test_a_profile_tells_operations_and_limits(verse, capsys, monkeypatch):
    monkeypatch.setattr(roofline, "bandwidth", lambda *_: 1e9)
    bench.main(["--profile=True", "--", *tiny.flags(optimizer="muon")])
    out = capsys.readouterr().out
    for words in ("| aten::mm | ", "| all matrix products | ", "GFLOP in products", "GB/s"):
        assert words in out
    assert not Path("out").exists()


def test_a_profile_of_sampling_tells_operations_and_the_limit(verse, capsys, monkeypatch):
    monkeypatch.setattr(roofline, "read_bandwidth", lambda *_: 1e9)
    train.main(tiny.flags(max_iters=3))
    capsys.readouterr()
    flags = ["--device=cpu", "--dtype=float32", "--num_samples=3", "--max_new_tokens=12"]
    bench.main(["--profile", "--script=sample", "--", *flags])
    out = capsys.readouterr().out
    weights = 12 * 16 * 16 + 24 * 16
    assert "3 texts of 12 tokens: a step takes " in out
    assert f"at best: {4 * weights / 1e6:.4g} MB of weights, read at 1 GB/s: " in out
    assert "| all matrix products | " in out


def test_a_profile_refuses_what_training_refuses(verse):
    with pytest.raises(UserError, match="fewer than the 5,001 of block_size"):
        bench.main(["--profile=True", "--", *tiny.flags(block_size=5000)])


@pytest.mark.parametrize("changes", [{}, {"bias": False, "activation": "gelu_tanh"}], ids=str)
def test_the_model_given_to_transformers_is_the_same(changes):
    model = tiny.random_model(**changes)
    weights = model.state_dict()
    theirs = gpt2_of(Checkpoint(model.config, weights, 0, 1.0, {}))
    idx = tiny.random_ids(model)
    expected = model(idx)[0][:, -1]
    assert torch.allclose(theirs(idx).logits[:, -1], expected, atol=1e-5)


def test_transformers_draw_as_many_tokens_and_say_so(verse, capsys):
    train.main(tiny.flags(max_iters=3))
    transformers_sample.main(["--device=cpu", "--num_samples=2", "--max_new_tokens=20"])
    measured = bench.Measured()
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("40 tokens in ")
    measured.read(line, 1.0)
    assert measured.tokens_per_s
    assert measured.first_s


def test_transformers_are_given_no_model_that_is_no_gpt2(verse):
    train.main(tiny.flags(max_iters=3, position="rotary"))
    with pytest.raises(UserError, match="out/ckpt.pt is no plain GPT-2"):
        transformers_sample.main([])


@pytest.mark.parametrize("changes", tiny.SHAPES, ids=str)
def test_parts_add_up_to_the_counts_of_the_model(changes):
    shape = GPTConfig(**(tiny.SMALL | changes))
    parameters, flops = (sum(part[i] for part in count.parts(shape)) for i in (2, 3))
    assert parameters == num_params(shape)
    assert 3 * flops == pytest.approx(flops_per_token(shape), abs=3)


def test_counts_are_printed_with_and_without_a_dataset(folder, capsys):
    flags = [each for each in tiny.flags(block_size=16, n_embd=32) if "dataset" not in each]
    bench.main(["--count", *flags, "--dataset=some_char"])
    out = capsys.readouterr().out
    assert "V = 65 (supposed, as data/some_char is not there)" in out
    shape = GPTConfig(block_size=16, vocab_size=65, n_layer=1, n_head=2, n_embd=32, bias=False)
    assert f" {num_params(shape):,} |" in out
    assert re.findall(r"^\| +(\d+) \|", out, re.M) == ["8", "16", "32", "64"]
    tiny.prepare_verse()
    bench.main(["--count", *flags, "--dataset=verse"])
    assert "V = 24 (verse)" in capsys.readouterr().out


def test_counting_comes_first():
    with pytest.raises(UserError, match="--count comes first"):
        bench.main(["--runs=2", "--count", "--", "x"])
