"""Runs in processes of their own that are killed or signaled: they resume and end bit-identical.

Kills strike either at random times or inside writes. `pytest -m campaign` runs the long tests.
"""

import io
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

import train
from folio import files, process
from folio.checkpoint import Progress
from folio.run_dir import RunDir

SETTINGS = {"max_iters": 60, "eval_interval": 20, "checkpoint_interval": 5, "dropout": 0.2}
LONG = SETTINGS | {"max_iters": 1000}
FATAL = {}  # {operation: the count at which the process kills itself}
COUNTS = Counter()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="SIGKILL and fork need POSIX"),
]


def count(operation):
    COUNTS[operation] += 1
    if COUNTS[operation] == FATAL.get(operation):
        os.kill(os.getpid(), signal.SIGKILL)


class SlowFile(io.FileIO):
    """A file that is written in pieces, with a pause after each."""

    def write(self, data):
        written = super().write(memoryview(data)[:4096])
        count("piece")
        time.sleep(0.001)
        return written


def run_train(folder, flags, fatal):
    """Runs train.py in this process, with slow writes that may be fatal."""
    os.chdir(folder)
    for handle in (1, 2):
        os.dup2(os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), handle)
    torch.set_num_threads(1)
    real = os.replace

    def replace(*paths):
        count("before rename")
        real(*paths)
        count("after rename")

    files.open = lambda path, mode: io.BufferedWriter(SlowFile(path, mode), 4096)
    files.os.replace = replace
    FATAL.update(fatal)
    sys.argv = ["train.py", *flags]
    process.run(train.main)


@pytest.fixture(scope="module")
def server():
    """A multiprocessing context whose processes have imported torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train", "test_faults", "torch._dynamo"])
    with pytest.MonkeyPatch.context() as patch:  # the server of Python 3.11 ignores sys.path
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        context.Process(target=int).start()
    return context


def start(server, flags, **fatal):
    child = server.Process(target=run_train, args=(os.getcwd(), flags, fatal))
    child.start()
    return child


def output():
    return Path("output.txt").read_text() if Path("output.txt").exists() else ""


def uninterrupted_states(monkeypatch, settings):
    """Trains in out-whole. Returns the content of last.pt before each step."""
    states, real = {-1: asdict(Progress())}, RunDir.save

    def save(run, checkpoint, best):
        error = real(run, checkpoint, best)
        states[checkpoint.progress.step] = tiny.saved("last.pt", run.folder)
        return error

    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "save", save)
        train.main(tiny.flags(out_dir="out-whole", **settings | {"checkpoint_interval": 1}))
    log = Path("out-whole/log.jsonl")  # whose settings are compared, too
    interval = f'"checkpoint_interval": {settings["checkpoint_interval"]},'
    log.write_text(log.read_text().replace('"checkpoint_interval": 1,', interval, 1))
    return states


def assert_state_of(states):
    """Asserts that last.pt equals a state of the uninterrupted run, and ckpt.pt is not older."""
    if not Path("out/last.pt").exists():
        return
    last = tiny.saved("last.pt")
    step, expected = last["iter_num"], dict(states[last["iter_num"]])
    if last["evaluated"] < expected["evaluated"]:  # stopped before the evaluation
        before = ("evaluated", "best_step", "best_val_loss")
        expected |= {key: states[step - 1][key] for key in before}
    assert [key for key in tiny.STATE if not tiny.same(last[key], expected[key])] == []
    if last["best_step"] >= 0:
        best = RunDir("out").load_best().progress.step
        assert last["best_step"] <= best <= step + SETTINGS["eval_interval"]


def assert_killed(child, states):
    child.join()
    assert child.exitcode == -signal.SIGKILL, output()[-2000:]
    assert_state_of(states)


def assert_ends_like_uninterrupted_run(server, flags):
    child = start(server, flags)
    child.join()
    assert child.exitcode == 0, output()[-2000:]
    assert tiny.differences("out", "out-whole") == []
    assert sorted(os.listdir("out")) == [files.LOCK, "ckpt.pt", "last.pt", "log.jsonl"]


def test_run_killed_inside_writes_ends_like_an_uninterrupted_one(server, verse, monkeypatch):
    states = uninterrupted_states(monkeypatch, SETTINGS)
    flags = tiny.flags(init_from="auto", **SETTINGS)
    for fatal in (
        *({"before rename": number} for number in (1, 2)),
        *({"after rename": number} for number in (1, 3)),
        *({"piece": number} for number in (3, 40)),
    ):
        assert_killed(start(server, flags, **fatal), states)
    assert_ends_like_uninterrupted_run(server, flags)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "changes", [{"gradient_accumulation_steps": 2}, {"dtype": "bfloat16"}], ids=str
)
def test_run_killed_at_random_ends_like_an_uninterrupted_one(server, verse, monkeypatch, changes):
    states = uninterrupted_states(monkeypatch, LONG | changes)
    random = np.random.default_rng(0)
    flags = tiny.flags(init_from="auto", **LONG | changes)
    for _ in range(15):
        operation = random.choice(["piece", "piece", "before rename", "after rename"])
        number = int(random.integers(1, 200 if operation == "piece" else 5))
        assert_killed(start(server, flags, **{operation: number}), states)
        child = start(server, flags)
        child.join(random.uniform(0.05, 0.8))
        child.kill()
        assert_killed(child, states)
    assert_ends_like_uninterrupted_run(server, flags)


@pytest.mark.campaign
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_run_stopped_at_random_ends_like_an_uninterrupted_one(server, verse, monkeypatch, number):
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("the signal is ignored, as under nohup")
    states = uninterrupted_states(monkeypatch, LONG)
    random = np.random.default_rng(number)
    flags = tiny.flags(init_from="auto", **LONG)
    for runs in range(12):
        child = start(server, flags)
        while output().count("machine: ") == runs:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.3))
        os.kill(child.pid, number)
        if runs % 2:  # a second SIGINT ends a save
            time.sleep(random.uniform(0, 0.02))
            os.kill(child.pid, number)
        child.join(20)
        assert child.exitcode == 128 + number, output()[-2000:]
        assert output().splitlines()[-1].startswith("train.py: ")
        assert not list(Path("out").glob("*.tmp"))
        assert_state_of(states)
    assert_ends_like_uninterrupted_run(server, flags)
