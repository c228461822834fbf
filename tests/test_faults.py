"""Runs in processes of their own that are killed or signaled: they resume and end bit-identical."""

import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import tiny
import torch
from ranks import CONTEXT

import train
from folio import files, process

SETTINGS = {"max_iters": 60, "eval_interval": 20, "checkpoint_interval": 5, "dropout": 0.2}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="SIGKILL and fork need POSIX"),
]


def run_train(folder, flags, fatal, pause_s):
    """Runs train.py in this process.

    Args:
        fatal: (operation, count) at which the process kills itself, or None.
        pause_s: time between writing and renaming a checkpoint.
    """
    os.chdir(folder)
    for handle in (1, 2):
        os.dup2(os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), handle)
    torch.set_num_threads(1)
    counts, real = Counter(), os.replace

    def count(operation):
        counts[operation] += 1
        if (operation, counts[operation]) == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def replace(*paths):
        time.sleep(pause_s)
        count("before rename")
        real(*paths)
        count("after rename")

    files.os.replace = replace
    sys.argv = ["train.py", *flags]
    process.run(train.main, has_threads=True)  # as train.py does


def start(flags, fatal=None, pause_s=0):
    child = CONTEXT.Process(target=run_train, args=(os.getcwd(), flags, fatal, pause_s))
    child.start()
    return child


def output():
    return Path("output.txt").read_text()


def assert_ends(child, status):
    child.join(60)
    assert child.exitcode == status, output()[-2000:]


def assert_ends_like_uninterrupted_run(flags):
    train.main(tiny.flags(out_dir="out-whole", **SETTINGS))
    assert_ends(start(flags), 0)
    assert tiny.differences("out", "out-whole") == []
    assert sorted(os.listdir("out")) == [files.LOCK, "ckpt.pt", "last.pt", "log.jsonl"]


def test_run_killed_around_renames_ends_like_an_uninterrupted_one(verse):
    flags = tiny.flags(init_from="auto", **SETTINGS)
    for fatal in (
        *(("before rename", number) for number in (1, 2)),
        *(("after rename", number) for number in (1, 3)),
    ):
        assert_ends(start(flags, fatal), -signal.SIGKILL)
    assert_ends_like_uninterrupted_run(flags)


def test_second_ctrl_c_exits_during_a_write_and_keeps_the_files_whole(verse):
    train.main(tiny.flags(stop_at=3, **SETTINGS))
    flags = tiny.flags(init_from="resume", **SETTINGS)
    before = Path("out/last.pt").read_bytes()
    child = start(flags, pause_s=5)  # in the save at step 5
    deadline = time.monotonic() + 60
    while not Path("out/last.pt.tmp").exists():
        assert time.monotonic() < deadline, output()[-2000:]
        time.sleep(0.005)
    for number in (1, 2):
        os.kill(child.pid, signal.SIGINT)
        time.sleep(0.1 * number)
    assert_ends(child, 128 + signal.SIGINT)
    assert output().endswith("train.py: interrupted immediately\n")
    assert Path("out/last.pt").read_bytes() == before
    assert_ends_like_uninterrupted_run(flags)
