"""Training processes that are killed, and resumed runs that end bit-identical."""

import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
import tiny
import torch
from ranks import CONTEXT

import train
from folio.cli import files, process

SETTINGS = {"max_iters": 60, "eval_interval": 20, "checkpoint_interval": 5, "dropout": 0.2}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="SIGKILL and fork need POSIX"),
]


def run_train(folder, flags, fatal):
    """Runs train.py in this process, which is killed at `fatal`, such as ("before rename", 2)."""
    os.chdir(folder)
    for handle in (1, 2):
        os.dup2(os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), handle)
    torch.set_num_threads(1)
    counts, os_replace = Counter(), os.replace

    def count(operation):
        counts[operation] += 1
        if (operation, counts[operation]) == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def replace(*paths):
        count("before rename")
        os_replace(*paths)
        count("after rename")

    files.os.replace = replace
    sys.argv = ["train.py", *flags]
    process.run(train.main)


def start(flags, fatal=None):
    child = CONTEXT.Process(target=run_train, args=(os.getcwd(), flags, fatal))
    child.start()
    return child


def output():
    return Path("output.txt").read_text()


def assert_ends(child, status):
    child.join(60)
    assert child.exitcode == status, output()[-2000:]


def assert_ends_like_an_uninterrupted_run(flags, settings):
    assert_ends(start(flags), 0)
    train.main(tiny.flags(out_dir="out-whole", **settings))
    assert tiny.differences("out", "out-whole") == []
    assert sorted(os.listdir("out")) == [files.LOCK_FILE, "ckpt.pt", "last.pt", "log.jsonl"]


def test_run_killed_around_renames_ends_like_an_uninterrupted_one(verse):
    flags = tiny.flags(init_from="auto", **SETTINGS)
    kills = [("before rename", 1), ("before rename", 2), ("after rename", 1), ("after rename", 3)]
    for fatal in kills:
        assert_ends(start(flags, fatal), -signal.SIGKILL)
    assert_ends_like_an_uninterrupted_run(flags, SETTINGS)


@pytest.mark.campaign
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_run_stopped_at_random_times_ends_like_an_uninterrupted_one(verse, number):
    settings = SETTINGS | {"max_iters": 2000, "gradient_accumulation_steps": 2}
    flags, generator = tiny.flags(init_from="auto", **settings), random.Random(int(number))
    for _ in range(15):
        child = start(flags)
        child.join(generator.uniform(0.2, 2))
        if child.is_alive():
            os.kill(child.pid, number)
        child.join(60)
        assert child.exitcode in (0, -number, 128 + number), output()[-2000:]
    assert_ends_like_an_uninterrupted_run(flags, settings)
