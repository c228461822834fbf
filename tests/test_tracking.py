"""Tests of folio/tracking.py: the console, log.jsonl, and the progress bar."""

import errno
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import tiny

import train
from folio import tracking
from folio.checkpoint import Progress
from folio.device import Machine, choose_machine
from folio.dist import ALONE
from folio.process import SIGPIPE, StopSignal
from folio.run_dir import RunDir
from model import GPT, GPTConfig

TRAIN = str(Path(train.__file__))


def test_console_lines_have_nanogpts_format(verse, capsys):
    train.main(tiny.flags())
    out, err = capsys.readouterr()
    steps = re.findall(r"^step (\d+): train loss (\d+\.\d{4}), val loss (\d+\.\d{4})", out, re.M)
    iters = re.findall(
        r"^iter (\d+): loss (\d+\.\d{4}), time (\d+\.\d\d)ms, mfu (\d+\.\d\d)%", out, re.M
    )
    assert [int(step) for step, *_ in steps] == [0, 3, 6]
    assert [int(step) for step, *_ in iters] == [0, 1, 2, 3, 4, 5]
    assert "|" not in out + err  # no progress bar outside a terminal


def test_start_prints_changed_settings_data_model_and_machine(verse, capsys):
    train.main(tiny.flags(learning_rate=0.02))
    settings, data, model, machine = capsys.readouterr().out.splitlines()[:4]
    assert settings.startswith("settings: ")
    assert " learning_rate=0.02 " in settings
    assert "weight_decay" not in settings
    assert data == "dataset: verse, 1,458 training and 162 validation tokens, vocabulary 24"
    assert re.fullmatch(r"model: 3,\d{3} parameters; 6 steps of 32 tokens", model)
    assert re.fullmatch(
        r"machine: cpu \(.*\), float32 \(as set\), not compiled \(as set\), peak .* TFLOP/s .*",
        machine,
    )


def test_log_has_a_line_for_each_event(verse):
    train.main(tiny.flags(log_interval=2))
    events = tiny.log_events()
    assert [(e["step"], e["split"]) for e in events] == [
        (0, "start"), (0, "val"), (0, "train"), (2, "train"), (3, "val"), (4, "train"), (6, "val"),
    ]  # fmt: skip
    common = {"step", "split", "loss", "lr", "tokens", "elapsed_s"}
    assert events[0]["settings"]["log_interval"] == 2
    assert "out_dir" not in events[0]["settings"]
    assert set(events[2]) == common | {"tokens_per_s", "mfu", "grad_norm"}
    assert set(events[-1]) == common | {"train_loss", "perplexity", "bits_per_byte"}
    assert events[-1]["tokens"] == 6 * 4 * 8


def test_elapsed_time_continues_after_resuming(verse):
    train.main(tiny.flags(max_iters=3))
    before = tiny.saved("last.pt")["elapsed_s"]
    train.main(tiny.flags(init_from="resume"))
    events = tiny.log_events()
    times = [event["elapsed_s"] for event in events]
    assert times == sorted(times)
    assert times[-1] > before + times[0]


@pytest.fixture
def run(folder):
    """As much of a train.Run as Tracking reads."""
    (folder / "out").mkdir()
    settings = tiny.settings(log_interval=2, eval_interval=10, max_iters=20)
    return SimpleNamespace(
        requested=settings,
        settings=settings,
        run_dir=RunDir("out"),
        learner=SimpleNamespace(
            world=ALONE,
            machine=choose_machine("cpu", "float32", False),
            model=GPT.uninitialized(GPTConfig(**tiny.SMALL), "meta"),
        ),
        progress=Progress(),
        resumed=None,
    )


def test_speed_excludes_pauses_and_time_left_includes_them(run, monkeypatch, capsys):
    peak = run.learner.machine.peak[0]  # measured with the real clock
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(tracking.time, "perf_counter", lambda: clock.now)
    with StopSignal() as stop, tracking.Tracking(run, stop) as tracker:
        with tracker.paused():
            clock.now += 1000  # the first evaluation
        for step in range(3):
            clock.now += 4
            tracker.stepped(step, 2.5, float("inf"), lr=0.1)
            with tracker.paused():
                clock.now += 10
    first, second = tiny.log_events()
    assert (first["step"], second["step"]) == (0, 2)
    assert first["tokens_per_s"] == second["tokens_per_s"] == 8  # 32 per step of 4 s
    flops = run.learner.model.flops_per_token()
    assert second["mfu"] == pytest.approx(flops * 8 / peak)
    assert (second["tokens"], second["grad_norm"]) == (96, None)
    # 17 steps of 32 / 3 s: three steps of 4 s with two pauses of 10 s so far
    assert capsys.readouterr().out.splitlines()[-1].endswith(", 8 tokens/s, 03:01 left")


def test_perplexity_of_a_diverged_run_is_short():
    losses = {"train_loss": 900.0, "loss": 900.0, "perplexity": math.exp(700)}
    assert tracking.evaluation_line(3, losses).endswith("val perplexity 1.0142e+304")


def test_mfu_is_omitted_if_the_peak_is_not_credible(run, monkeypatch, capsys):
    monkeypatch.setattr(Machine, "peak", (1.0, "measured while the machine was busy"))
    with StopSignal() as stop, tracking.Tracking(run, stop) as tracker:
        tracker.stepped(0, 2.5, 1.0, lr=0.1)
    assert tiny.log_events()[0]["mfu"] is None
    assert "mfu" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "requested"), [(errno.EPIPE, SIGPIPE), (errno.ENOSPC, None), (errno.EIO, None)]
)
def test_output_error_loses_a_line_and_stops_only_without_a_reader(
    run, monkeypatch, number, requested
):
    with StopSignal() as stop, tracking.Tracking(run, stop) as tracker:
        error = OSError(number, os.strerror(number))
        monkeypatch.setattr(tracking.tqdm, "write", Mock(side_effect=error))
        tracker.say("line")
    assert stop.number == requested


def show_on_terminal(command, size=(24, 100)):
    """Returns what a command shows on a terminal of the given lines and columns."""
    pty = pytest.importorskip("pty")
    reader, terminal = pty.openpty()
    pytest.importorskip("termios").tcsetwinsize(terminal, size)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    shown = b""
    try:
        while piece := os.read(reader, 4096):
            shown += piece
    except OSError:  # Linux reports a closed terminal so
        pass
    os.close(reader)
    assert process.wait() == 0
    return shown.decode()


@pytest.mark.slow
def test_progress_bar_replaces_step_lines_on_a_terminal(verse):
    command = [sys.executable, TRAIN, *tiny.flags(max_iters=400, eval_interval=400)]
    shown = show_on_terminal(command)
    assert "iter " not in shown
    assert re.search(r"step \d+/400, loss [\d.]+, [\d,]+ tokens/s, \d\d:\d\d left \|", shown)
    assert "step 400: train loss" in shown


@pytest.mark.slow
def test_terminal_of_unknown_size_shows_step_lines(verse):
    command = [sys.executable, TRAIN, *tiny.flags(max_iters=20, eval_interval=20)]
    shown = show_on_terminal(command, size=(0, 0))
    assert len(re.findall(r"^iter \d+: loss", shown, re.M)) == 20
