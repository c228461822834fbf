import dataclasses
import threading

import numpy as np
import pytest
import tiny
import torch

import batches
from batches import Batches, Split, batch_starts, on_device

IDS = np.random.default_rng(0).integers(0, 2**16, 500).astype(np.uint16)
IDS[[0, 7, -1]] = 2**16 - 1  # the largest there is, which a signed type of 16 bits has not


@pytest.fixture(params=["on the cpu", "resident", "read ahead"])
def split(request, monkeypatch):
    """IDS on the CPU, which batches.py may take for a device with memory of its own."""
    if request.param != "on the cpu":
        monkeypatch.setattr(batches, "kind_of", lambda device: "mps")  # cuda would pin memory
    if request.param == "read ahead":
        monkeypatch.setattr(batches, "SHARE_FOR_DATA", 0)
    made = Split(IDS, "cpu")
    assert (made.resident is not None) == (request.param == "resident")
    assert (Batches(made, tiny.settings()).reader is not None) == (request.param == "read ahead")
    return made


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sliced(starts, length):
    """Inputs and targets of the windows of IDS, as lists."""
    rows = [IDS[start : start + length + 1].tolist() for start in starts]
    return [row[:-1] for row in rows], [row[1:] for row in rows]


# Where windows begin


def test_a_batch_is_a_function_of_seed_and_step_alone():
    first = batch_starts(1, 2, 8, 1000)
    np.random.seed(5)
    torch.manual_seed(5)
    assert (batch_starts(1, 2, 8, 1000) == first).all()


@pytest.mark.parametrize("other", [(1, 3), (2, 2)])
def test_another_step_or_seed_has_another_batch(other):
    assert (batch_starts(*other, 8, 10**9) != batch_starts(1, 2, 8, 10**9)).all()


def test_batches_reach_every_window_about_equally_often():
    starts = np.concatenate([batch_starts(0, step, 100, 10) for step in range(200)])
    assert np.bincount(starts, minlength=10) == pytest.approx(2000, rel=0.1)


def test_no_window_begins_beyond_the_last():
    phase = int(np.random.SeedSequence(0).generate_state(1, np.uint64)[0])
    last = (2**64 - 1 - phase) * pow(int(batches.GOLDEN_RATIO), -1, 2**64) % 2**64
    assert batch_starts(0, last, 1, 1000) == [999]  # where the sequence comes next to a whole turn


# Splits


def test_the_target_of_a_token_is_the_one_after_it():
    ids = np.arange(100, dtype=np.uint16)
    x, y = Split(ids, "cpu").windows(np.array([0, 91]), 8)
    assert x.tolist() == [list(range(8)), list(range(91, 99))]
    assert (y == x + 1).all()


@pytest.mark.parametrize("length", [1, 8, 499])
def test_windows_are_slices_of_the_ids_wherever_those_are_kept(split, length):
    last = len(IDS) - length - 1
    starts = np.array([0, last, last // 2, last])
    windows = split.windows(starts, length)
    assert [tensor.tolist() for tensor in windows] == list(sliced(starts, length))
    assert all(tensor.dtype == torch.int64 and tensor.is_contiguous() for tensor in windows)


def test_ids_stay_in_their_file_where_a_device_has_no_room(monkeypatch):
    monkeypatch.setattr(batches, "kind_of", lambda device: "mps")
    for memory, fits in ((4 * 8 * len(IDS), True), (4 * 8 * len(IDS) - 1, False)):
        monkeypatch.setattr(batches, "memory_bytes", lambda device, memory=memory: memory)
        assert (Split(IDS, "cpu").resident is not None) == fits


def test_only_the_splits_of_a_dataset_move(verse):
    moved = on_device(verse, "cpu")
    for field in dataclasses.fields(verse):
        before, after = getattr(verse, field.name), getattr(moved, field.name)
        if field.name in ("train", "val"):
            assert (after.ids is before, after.device, len(after)) == (True, "cpu", len(before))
        else:
            assert after is before


# Batches of a step


def rows_of(micro_batches):
    """The windows of micro-batches, one after the other, as lists: inputs, targets."""
    return tuple(torch.cat(tensors).tolist() for tensors in zip(*micro_batches, strict=True))


@pytest.mark.parametrize(("batch_size", "accumulation"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_the_global_batch_does_not_depend_on_how_it_is_cut(split, batch_size, accumulation):
    config = tiny.settings(batch_size=batch_size, gradient_accumulation_steps=accumulation)
    micro_batches = Batches(split, config).of(7)
    assert [x.shape for x, _ in micro_batches] == [(batch_size, 8)] * accumulation
    assert rows_of(micro_batches) == sliced(batch_starts(config.seed, 7, 8, 500 - 8), 8)


def test_a_step_has_its_batch_whatever_was_asked_before(split):
    config = tiny.settings(gradient_accumulation_steps=2)
    made = Batches(split, config)
    for step in (0, 1, 2, 2, 3, 9, 4, 5, 0, 1):
        assert rows_of(made.of(step)) == sliced(batch_starts(config.seed, step, 8, 500 - 8), 8)


@pytest.mark.parametrize("split", ["read ahead"], indirect=True)
def test_the_batch_of_the_next_step_is_read_beside_this_one(split, monkeypatch):
    monkeypatch.setattr(split, "windows", lambda *_: threading.current_thread())
    made = Batches(split, tiny.settings())
    readers = [made.of(step)[0] for step in (0, 1, 2, 9, 10)]
    beside = [reader is not threading.main_thread() for reader in readers]
    assert beside == [False, True, True, False, True]
    assert len(set(readers)) == 2  # one reader for all, which so reads in order


@pytest.mark.parametrize("split", ["read ahead"], indirect=True)
def test_an_error_while_reading_ahead_is_that_of_the_step_it_was_for(split, monkeypatch):
    def windows(*_):
        if threading.current_thread() is not threading.main_thread():
            raise OSError("the disk is gone")
        return "read"

    monkeypatch.setattr(split, "windows", windows)
    made = Batches(split, tiny.settings())
    assert made.of(0) == ["read"]
    with pytest.raises(OSError, match="the disk is gone"):
        made.of(1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_gets_the_same_batches_from_its_memory_and_from_the_file(monkeypatch):
    config = tiny.settings(gradient_accumulation_steps=2)
    resident = Batches(Split(IDS, "cuda"), config)
    monkeypatch.setattr(batches, "SHARE_FOR_DATA", 0)
    streamed = Batches(Split(IDS, "cuda"), config)
    assert resident.reader is None
    assert streamed.reader is not None
    for step in (0, 1, 2, 5):
        expected = sliced(batch_starts(config.seed, step, 8, 500 - 8), 8)
        for made in (resident, streamed):
            micro_batches = made.of(step)
            assert {x.device.type for pair in micro_batches for x in pair} == {"cuda"}
            assert rows_of(micro_batches) == expected
