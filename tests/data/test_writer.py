"""Tests of folio/data/writer.py: what is left of a dataset after errors and kills."""

import errno
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from folio.cli.errors import UserError
from folio.cli.files import LOCK_FILE
from folio.data.dataset import load_dataset
from folio.data.tokenizer import ByteTokenizer
from folio.data.writer import open_writer

pytestmark = pytest.mark.usefixtures("folder")
FOLDER = Path("data/own")
IDS = {"train": np.arange(35) * 7 % 256, "val": np.arange(12)}


class Killed(BaseException):
    pass


def write(ids_of=IDS):
    with open_writer(FOLDER, ByteTokenizer()) as writer:
        for split, ids in ids_of.items():
            writer.append(split, ids, len(ids))
        return writer.finish("own.txt", "5a")


def write_old():
    """Writes another dataset of the same size."""
    write({split: ids[::-1] for split, ids in IDS.items()})


def contents():
    return {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.name != LOCK_FILE}


def kill_at(number, monkeypatch):
    """Lets the process "die" at a change of files: it and all later ones raise Killed."""
    calls = []

    def wrapped(function):
        def call(*args, **kwargs):
            calls.append(function)
            if len(calls) > number:
                raise Killed
            return None if function is os.fsync else function(*args, **kwargs)

        return call

    for name in ("fsync", "replace", "unlink"):
        monkeypatch.setattr(os, name, wrapped(getattr(os, name)))
    return calls


def state():
    """Returns "old", "new", or "refused"."""
    try:
        data = load_dataset("own")
    except UserError:
        return "refused"
    splits = [data.train.tolist(), data.val.tolist()]
    assert splits in ([[*ids][::step] for ids in IDS.values()] for step in (1, -1))
    return "new" if splits[0] == IDS["train"].tolist() else "old"


def test_a_kill_leaves_the_old_dataset_the_new_one_or_an_error(monkeypatch):
    write()
    new_contents, states = contents(), []
    with monkeypatch.context() as patch:
        calls = kill_at(10**6, patch)
        write()
    for number in range(len(calls)):
        write_old()
        with monkeypatch.context() as patch, suppress(Killed):
            kill_at(number, patch)
            write()
        states.append(state())
    assert states == sorted(states, key=["old", "refused", "new"].index)
    assert {"old", "refused", "new"} == set(states)
    write()
    assert contents() == new_contents  # and no temporary files


def test_a_full_disk_or_a_split_of_one_token_leaves_the_old_dataset(monkeypatch):
    write_old()
    old_contents = contents()
    with pytest.raises(UserError, match="own.txt .* 36 bytes .* 1 tokens for val.bin"):
        write(IDS | {"val": np.arange(1)})
    assert contents() == old_contents

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="data/own.*: No space left on device$"):
        write()
    assert contents() == old_contents
