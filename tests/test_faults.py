"""Kill -9 at random moments: whatever is killed is resumed, and ends to the bit as if it had not.

Each training is a process of its own, forked from a server that has torch imported already. Half of
the kills come from outside, after a random time; half strike inside a write, in the midst of the
bytes, between the bytes and the rename, or right after it.
"""

import io
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

import checkpoint as ckpt
import safety
import train

KILLS = 50
LENGTHY = {"max_iters": 400, "eval_interval": 20, "checkpoint_interval": 5, "dropout": 0.2}
SETTINGS = [
    LENGTHY | {"dtype": "float32", "gradient_accumulation_steps": 2},
    LENGTHY | {"dtype": "bfloat16"},
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="kill -9 and fork are POSIX's"),
]


class SlowFile(io.FileIO):
    """A file that is written piece by piece, with a pause after each."""

    pause_s = 0.001
    fatal_piece = None  # count of the piece after which the process is killed
    pieces = 0

    def write(self, data):
        data = memoryview(data)[:4096]
        written = super().write(data)
        SlowFile.pieces += 1
        if SlowFile.pieces == self.fatal_piece:
            kill_myself()
        time.sleep(self.pause_s)
        return written


def kill_myself():
    os.kill(os.getpid(), signal.SIGKILL)


def slow_writes(fatal_piece=None, fatal_rename=None):
    """Have what safety.py writes be written slowly; die at a piece, or before or after a rename."""
    SlowFile.fatal_piece = fatal_piece
    real, renames = os.replace, []

    def replace(*paths):
        renames.append(paths)
        if len(renames) == fatal_rename:
            kill_myself()
        real(*paths)
        if len(renames) == -(fatal_rename or 0):
            kill_myself()

    safety.open = lambda path, mode: io.BufferedWriter(SlowFile(path, mode), 4096)
    safety.os.replace = replace


def run_train(folder, flags, slow=True, **faults):
    """What a process of its own does: train.py, with writes that take their time, or are fatal."""
    os.chdir(folder)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    if slow:
        slow_writes(**faults)
    sys.argv = ["train.py", *flags]
    safety.run(train.main)


@pytest.fixture(scope="module")
def server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train", "test_faults"])
    with pytest.MonkeyPatch.context() as patch:  # Python 3.11's server takes no sys.path over
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        context.Process(target=int).start()
    return context


def begin(server, folder, flags, **faults):
    process = server.Process(target=run_train, args=(str(folder), flags), kwargs=faults)
    process.start()
    return process


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.prepare_verse()
    return tmp_path


def states_of_a_whole_run(monkeypatch, settings):
    """Train without a stop; every state it had before a step, by step."""
    states = {}
    save = ckpt.save

    def keep_too(paths, checkpoint):
        save(paths, checkpoint)
        states[checkpoint.step] = tiny.saved(ckpt.LAST, paths[-1].parent)

    with monkeypatch.context() as patch:
        patch.setattr(ckpt, "save", keep_too)
        train.main(tiny.flags(out_dir="out-whole", **settings | {"checkpoint_interval": 1}))
    log = Path("out-whole/log.jsonl")  # to be that of the runs that are killed
    interval = f'"checkpoint_interval": {settings["checkpoint_interval"]},'
    log.write_text(log.read_text().replace('"checkpoint_interval": 1,', interval, 1))
    return states


def assert_whole(states, out_dir="out"):
    """What a kill left is a state of the whole run, to the bit, and the log reaches it."""
    if not Path(out_dir, ckpt.LAST).exists():
        return 0
    last = tiny.saved(ckpt.LAST, out_dir)
    step = last["iter_num"]
    expected = dict(states[step])
    if last["evaluated"] < expected["evaluated"]:  # a signal came before the evaluation
        before = ("evaluated", "best_step", "best_val_loss")
        expected |= {key: states[step - 1][key] for key in before}
    assert [key for key in tiny.STATE if not tiny.same(last[key], expected[key])] == []
    if Path(out_dir, ckpt.BEST).exists():
        assert ckpt.load(Path(out_dir, ckpt.BEST)).step <= step + 20
    return step


def faults_of(random, kill):
    """Every other kill strikes inside a write: at a piece, before a rename, or after one."""
    if kill % 2:
        return {}
    if kill % 6:
        return {"fatal_piece": int(random.integers(1, 200))}
    return {"fatal_rename": int(random.choice([-4, -3, -2, -1, 1, 2, 3, 4]))}


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings["dtype"])
def test_a_run_that_is_killed_again_and_again_loses_nothing(server, folder, monkeypatch, settings):
    states = states_of_a_whole_run(monkeypatch, settings)
    random = np.random.default_rng(settings["dtype"] == "bfloat16")
    flags = tiny.flags(init_from="auto", **settings)
    inside = 0
    for kill in range(KILLS // len(SETTINGS)):
        process = begin(server, folder, flags, **faults_of(random, kill))
        process.join(random.uniform(0.05, 0.8) if kill % 2 else 20)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, Path("output.txt").read_text()[-2000:]
        inside += any(Path("out").glob("*.tmp"))
        step = assert_whole(states)
    print(f"{KILLS // len(SETTINGS)} kills, {inside} inside a write, the last at step {step}")
    assert inside
    assert_ends_well(server, folder, flags)


def assert_ends_well(server, folder, flags):
    """Undisturbed, the run comes to its end, and to that of the whole one."""
    process = begin(server, folder, flags, slow=False)
    process.join()
    assert process.exitcode == 0, Path("output.txt").read_text()[-2000:]
    assert tiny.differences("out", "out-whole") == []
    assert sorted(os.listdir("out")) == ["ckpt.pt", "last.pt", "log.jsonl"]


def test_a_run_that_is_asked_to_stop_again_and_again_loses_nothing(server, folder, monkeypatch):
    states = states_of_a_whole_run(monkeypatch, SETTINGS[0])
    random = np.random.default_rng(3)
    flags = tiny.flags(init_from="auto", **SETTINGS[0])
    for number, status in [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)] * 4:
        process = begin(server, folder, flags)
        while not Path("out", safety.LOCK).exists():
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.5))
        os.kill(process.pid, number)
        process.join(20)
        assert process.exitcode == status, Path("output.txt").read_text()[-3000:]
        assert not any(Path("out").glob("*.tmp"))
        assert_whole(states)
        assert Path("output.txt").read_text().splitlines()[-1].startswith("train.py: ")
    assert_ends_well(server, folder, flags)


def test_a_second_ctrl_c_is_obeyed_at_once_and_leaves_whole_files(server, folder, monkeypatch):
    states = states_of_a_whole_run(monkeypatch, SETTINGS[0])
    random = np.random.default_rng(4)
    flags = tiny.flags(init_from="auto", **SETTINGS[0])
    for _ in range(6):
        process = begin(server, folder, flags)
        while not Path("out", safety.LOCK).exists():
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.5))
        os.kill(process.pid, signal.SIGINT)
        time.sleep(random.uniform(0, 0.02))
        os.kill(process.pid, signal.SIGINT)
        process.join(20)
        assert process.exitcode == 130, Path("output.txt").read_text()[-3000:]
        assert not any(Path("out").glob("*.tmp"))
        assert_whole(states)
    assert_ends_well(server, folder, flags)
