"""tools.bench, on commands that print what a training would, and on a small training."""

import json
import sys
from pathlib import Path

import pytest
import tiny

from config import UserError
from tools import bench, roofline

TRAINING = """
import sys, time
print("step 0: train loss 4.2000, val loss 4.1000")
for i in range(0, 60, 5):
    print(f"iter {i}: loss 3.1000, time {100 + i if i >= 10 else 9000}.50ms, mfu -100.00%")
print("step 30: train loss 2.0000, val loss 1.9000", flush=True)
time.sleep(0.3)
print("step 60: train loss 1.0000, val loss 2.5000")
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("other.py").write_text(TRAINING)
    return tmp_path


def other(status=0):
    return f"{sys.executable} other.py {status}"


def test_a_training_is_read_by_nanogpts_lines():
    measured = bench.measure([sys.executable, "other.py", "0"], ".")
    figures = measured.summary(target=2.0)
    assert figures["step_ms"] == 132.5 + 0.5  # the median of 110.5, 115.5 … 155.5
    assert figures["val_loss"] == 1.9
    assert 0 < figures["to_target_s"] < figures["seconds"] - 0.2
    assert figures["memory_gib"] > 0
    assert figures["tokens_per_s"] is None
    assert measured.summary(target=1.8)["to_target_s"] is None


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
    assert order == ["folio", "other"] * 3
    written = json.loads(Path("out.json").read_text())
    assert written["medians"]["folio"]["step_ms"] == 20.0
    assert written["medians"]["other"]["to_target_s"] == 90.0
    assert len(written["runs"]["other"]) == 3
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| folio / other | 0.222 |")  # 20 / 90


def test_a_command_that_fails_ends_it_with_its_last_words():
    with pytest.raises(UserError, match=r"other.py 3 failed: .* / step 60: .* val loss 2.5000"):
        bench.measure([sys.executable, "other.py", "3"], ".")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--vs=no-such-command", "cannot run no-such-command"),
        ("--vs_dir=nowhere", "in nowhere"),
        ("--run=3", "unknown setting --run; did you mean runs"),
        ("--runs=0", "runs must lie in"),
    ],
)
def test_mistakes_are_answered_in_one_line(monkeypatch, flag, message):
    monkeypatch.setattr(bench, "ROOT", Path())
    Path("train.py").write_text(TRAINING)
    flags = [flag] if flag.startswith("--vs=") else [f"--vs={other()}", flag]
    with pytest.raises(UserError, match=message) as caught:
        bench.main([*flags, "--", "0"])
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_measurement_leaves_no_run_behind(verse, capsys):
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
