"""Tests of folio/dataset_writer.py: shards, continuing after a kill, full disks."""

import errno
import io
import itertools
import json
import os
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from folio import files, split_writer
from folio.dataset import load_dataset
from folio.dataset_writer import JOURNAL, DatasetWriter, unfinished
from folio.errors import UserError
from folio.files import LOCK
from folio.split_writer import SplitWriter, joined_crc
from folio.tokenizers import ByteTokenizer, CharTokenizer

pytestmark = pytest.mark.usefixtures("folder", "small_shards")
FOLDER, KEY = Path("data/own"), {"sources": [["a.txt", 7]], "tokenizer": "byte"}
IDS = {"train": np.arange(35) * 7 % 256, "val": np.arange(12)}
CUTS = (0, 4, 9, 10, 11, 30, 35)  # between the calls of append; the ends of shards are among them


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(split_writer, "SHARD_TOKENS", 10)


def write(key=KEY, commits=(2, 4, 6)):
    """Writes data/own from IDS, or continues. `commits`: calls of append before each commit."""
    resumed = unfinished(FOLDER, key)
    tokenizer = resumed.tokenizer if resumed else ByteTokenizer()
    with DatasetWriter(FOLDER, tokenizer, key, resumed) as writer:
        for count in range(resumed.position["count"] if resumed else 0, len(CUTS) - 1):
            part = slice(CUTS[count], CUTS[count + 1])
            for split, ids in IDS.items():
                writer.append(split, ids[part], len(ids[part]))
            if count + 1 in commits:
                writer.commit({"count": count + 1})
        return writer.finish("own.txt", "5a")


def contents():
    return {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.name != LOCK}


def test_files_and_meta_of_shards():
    meta = write()
    raw = {split: ids.astype("<u2").tobytes() for split, ids in IDS.items()}
    found = contents()
    assert json.loads(found.pop("meta.json")) == meta
    assert found == {
        f"{split}_{n:05}.bin": raw[split][20 * n : 20 * n + 20]
        for split, count in (("train", 4), ("val", 2))
        for n in range(count)
    }
    assert meta["format"] == 2
    assert meta["val"] == {
        "tokens": 12,
        "bytes": 12,
        "crc32": zlib.crc32(raw["val"]),
        "shards": [
            {"tokens": 10, "crc32": zlib.crc32(raw["val"][:20])},
            {"tokens": 2, "crc32": zlib.crc32(raw["val"][20:])},
        ],
    }
    data = load_dataset("own")
    assert data.fingerprint == {split: zlib.crc32(raw[split]) for split in raw}
    assert data.train[:].tolist() == IDS["train"].tolist()


def test_a_split_that_fits_in_a_file_has_no_shards(monkeypatch):
    monkeypatch.setattr(split_writer, "SHARD_TOKENS", 12)
    assert "shards" not in write()["val"]
    assert (FOLDER / "val.bin").stat().st_size == 24


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.lists(st.integers(0, 35)), st.sampled_from([np.uint8, np.int32, np.uint64]))
def test_the_files_do_not_depend_on_the_calls_of_append(cuts, dtype):
    write()
    expected = contents()
    with DatasetWriter(FOLDER, ByteTokenizer(), KEY) as writer:
        for first, last in itertools.pairwise([0, *sorted(cuts), 35]):
            for split, ids in IDS.items():
                part = ids[first:last].astype(dtype)
                writer.append(split, part, len(part))
        writer.finish("own.txt", "5a")
    assert contents() == expected


@given(st.binary(), st.binary())
def test_joined_crc_is_that_of_the_concatenation(first, second):
    joined = joined_crc(zlib.crc32(first), zlib.crc32(second), len(second))
    assert joined == zlib.crc32(first + second)


# Kills


class Killed(BaseException):
    pass


def kill_at(number, monkeypatch):
    """Lets the process "die" at an operation on files: it and all later ones raise Killed.

    Returns a function that returns how many there were.
    """
    calls = []

    def wrapped(function):
        def call(*args, **kwargs):
            calls.append(function)
            if len(calls) > number:
                raise Killed
            return None if function is os.fsync else function(*args, **kwargs)

        return call

    operations = [(os, "fsync"), (os, "replace"), (os, "unlink"), (SplitWriter, "append")]
    for owner, name in operations:
        monkeypatch.setattr(owner, name, wrapped(getattr(owner, name)))
    for module in (files, split_writer):
        monkeypatch.setattr(module, "open", wrapped(open), raising=False)
    return lambda: len(calls)


def write_old(sharded):
    """Writes another dataset of nearly the same size."""
    with DatasetWriter(FOLDER, ByteTokenizer(), "old") as writer:
        for split, ids in IDS.items():
            writer.append(split, ids[: None if sharded else 9][::-1], len(ids))
        writer.finish("old.txt", "01")


def state():
    """Returns "old", "new", or "refused"."""
    try:
        data = load_dataset("own")
    except UserError:
        return "refused"
    ids = data.train[:].tolist()
    assert ids in (IDS["train"].tolist(), IDS["train"][::-1].tolist(), IDS["train"][8::-1].tolist())
    return "new" if ids == IDS["train"].tolist() else "old"


@pytest.mark.parametrize("commits", [(2, 4, 6), ()])
@pytest.mark.parametrize("sharded", [True, False])
def test_a_kill_at_any_operation_loses_nothing(sharded, commits, tmp_path, monkeypatch):
    write()
    expected, states = contents(), []
    with monkeypatch.context() as patch:
        total = kill_at(10**6, patch)
        write(commits=commits)
    for number in range(total()):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        write_old(sharded)
        for at in (number, 7 * number % total()):
            with monkeypatch.context() as patch, suppress(Killed):
                kill_at(at, patch)
                write(commits=commits)
            states.append(state())
            if commits and states[-1] == "refused":
                assert unfinished(FOLDER, KEY).position == {"count": 6}
        del states[-1]  # after the second kill
        write(commits=commits)
        assert contents() == expected
    assert states == sorted(states, key=["old", "refused", "new"].index)
    assert {"old", "refused"} <= set(states)


def test_an_error_before_the_first_commit_leaves_the_old_dataset_alone():
    write_old(sharded=True)
    expected = contents()
    with suppress(Killed), DatasetWriter(FOLDER, ByteTokenizer(), KEY) as writer:
        writer.append("train", IDS["train"], 35)
        raise Killed
    assert contents() == expected


def commit_and_die(key=KEY):
    with suppress(Killed), DatasetWriter(FOLDER, ByteTokenizer(), key) as writer:
        for split, ids in IDS.items():
            writer.append(split, ids[:9], 9)
        writer.commit({"count": 2})
        assert (FOLDER / "train_00000.bin.part").stat().st_size == 18  # also if nothing is closed
        writer.append("train", IDS["train"], 1)
        raise Killed


def test_what_was_committed_is_returned():
    commit_and_die()
    found = unfinished(FOLDER, KEY)
    assert (found.position, found.tokenizer.kind) == ({"count": 2}, "byte")
    assert unfinished(FOLDER, KEY | {"sources": []}) is None
    assert unfinished(Path("data/other"), KEY) is None


def test_tuples_in_a_key_equal_lists():
    commit_and_die({"sources": [("a.txt", 7)]})
    assert unfinished(FOLDER, {"sources": [("a.txt", 7)]}).position == {"count": 2}


def test_other_work_is_deleted():
    commit_and_die()
    write(key="other")
    expected = contents()
    assert JOURNAL not in expected
    write()
    assert contents() == expected


@pytest.mark.parametrize("name", [JOURNAL, "train_00000.bin.part", "val_00000.bin.part"])
@pytest.mark.parametrize("damage", ["missing", "short"])
def test_damaged_unfinished_work_is_not_continued(name, damage):
    commit_and_die()
    path = FOLDER / name
    raw = path.read_bytes()
    path.unlink()
    if damage == "short":
        path.write_bytes(raw[:15])
    assert unfinished(FOLDER, KEY) is None
    meta = write()
    assert meta["train"]["crc32"] == zlib.crc32(IDS["train"].astype("<u2"))


def test_a_damaged_journal_is_not_used():
    commit_and_die()
    raw = (FOLDER / JOURNAL).read_bytes()
    for place in range(len(raw)):
        (FOLDER / JOURNAL).write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        assert unfinished(FOLDER, KEY) is None


# Errors


@pytest.mark.parametrize("room", [0, 2, 17, 40])
def test_full_disk(room, monkeypatch):
    write()
    expected = contents()

    class Full(io.FileIO):
        def write(self, data):
            if self.tell() + len(data) > room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    with monkeypatch.context() as patch:
        full = lambda path, mode, *_: io.BufferedWriter(Full(path, mode), 1)  # noqa: E731
        patch.setattr(split_writer, "open", full, raising=False)
        patch.setattr(split_writer, "SHARD_TOKENS", 100)
        with pytest.raises(UserError, match="^cannot write data/own.*: No space left on device$"):
            write(key="full")
    assert {name for name in contents() if name.endswith(".bin")} < expected.keys()
    journal = {JOURNAL} if room > 17 else set()
    assert {name for name in contents() if name == JOURNAL} == journal
    assert bool(unfinished(FOLDER, "full")) == bool(journal)
    monkeypatch.setattr(split_writer, "SHARD_TOKENS", 100 if journal else 10)
    assert (
        write(key="full")["train"]["crc32"] == json.loads(expected["meta.json"])["train"]["crc32"]
    )


@pytest.mark.parametrize("failing", [0, 1, 2, 3, 4])
def test_error_when_a_shard_is_synced(failing, monkeypatch):
    calls = itertools.count()

    def fsync(handle):
        if next(calls) == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(UserError, match="^cannot write data/own.*: No space left on device$"):
        write(commits=())
    assert not (FOLDER / "meta.json").exists()


def test_two_writers_of_a_folder_are_refused():
    with (
        DatasetWriter(FOLDER, ByteTokenizer(), KEY),
        pytest.raises(UserError, match="another process is writing to data/own"),
        DatasetWriter(FOLDER, ByteTokenizer(), KEY),
    ):
        pass


def test_a_split_without_tokens_is_refused_and_nothing_is_left():
    with DatasetWriter(FOLDER, CharTokenizer("ab"), KEY) as writer:
        writer.append("train", [0, 1, 1], 3)
        writer.commit(0)
        with pytest.raises(UserError) as caught:
            writer.finish("own.txt", "5a")
    assert str(caught.value) == (
        "own.txt is too short to split: its 3 bytes leave 0 tokens for val.bin, which needs at "
        "least 2"
    )
    assert not FOLDER.exists()
