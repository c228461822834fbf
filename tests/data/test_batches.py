import numpy as np
import pytest
import tiny
import torch

from folio.data import batches
from folio.data.batches import Batches, Split, dropout_seed, window_starts
from folio.distributed.world import SINGLE_PROCESS

IDS = np.random.default_rng(0).integers(0, 2**16, 500).astype(np.uint16)
IDS[[0, 7, -1]] = 2**16 - 1  # too large for a signed 16-bit type


@pytest.fixture(params=["in its file", "resident"])
def split(request):
    """IDS on a CPU, and with a CPU in the role of a GPU, in whose memory they are."""
    split = Split(IDS, "cpu")
    assert split.resident is None
    if request.param == "resident":
        split.resident = torch.from_numpy(IDS.astype(np.int32))
    return split


def expected_windows(starts, length):
    """Returns inputs and targets of windows of IDS, as lists."""
    rows = [IDS[start : start + length + 1].tolist() for start in starts]
    return [row[:-1] for row in rows], [row[1:] for row in rows]


def expected_batch(settings, step):
    return expected_windows(window_starts(settings.seed, 8 * step, 8, len(IDS) - 8), 8)


def join_micro_batches(micro_batches):
    """Returns inputs and targets of all micro-batches, as lists."""
    return tuple(torch.cat(tensors).tolist() for tensors in zip(*micro_batches, strict=True))


# Random numbers


def test_window_starts_depend_on_seed_and_number_only():
    first = window_starts(1, 16, 8, 10**9)
    np.random.seed(5)
    torch.manual_seed(5)
    assert (window_starts(1, 16, 8, 10**9) == first).all()
    for seed, number in ((1, 24), (2, 16)):
        assert (window_starts(seed, number, 8, 10**9) != first).all()


def test_every_window_is_about_equally_frequent():
    starts = np.concatenate([window_starts(0, 100 * step, 100, 10) for step in range(200)])
    assert np.bincount(starts, minlength=10) == pytest.approx(2000, rel=0.1)


def test_no_start_is_beyond_the_last_window():
    phase = int(np.random.SeedSequence(0).generate_state(1, np.uint64)[0])
    # the step at which phase + step * golden ratio is closest to 1
    step = (2**64 - 1 - phase) * pow(int(batches.GOLDEN_RATIO), -1, 2**64) % 2**64
    assert window_starts(0, step, 1, 1000) == [999]


def test_dropout_seeds_differ_between_steps_and_between_seeds():
    assert len({dropout_seed(seed, step) for seed in range(10) for step in range(10)}) == 100
    assert dropout_seed(3, 4) == dropout_seed(3, 4)


# Batches


@pytest.mark.parametrize(("batch_size", "accumulation"), [(8, 1), (4, 2), (1, 8)])
def test_a_batch_does_not_depend_on_accumulation_or_earlier_batches(
    split, batch_size, accumulation
):
    settings = tiny.settings(batch_size=batch_size, gradient_accumulation_steps=accumulation)
    source = Batches(split, settings, SINGLE_PROCESS)
    for step in (0, 1, 2, 2, 9, 4, 0):
        micro_batches = list(source.at(step))
        assert [x.shape for x, _ in micro_batches] == [(batch_size, 8)] * accumulation
        assert {x.dtype for pair in micro_batches for x in pair} == {torch.int64}
        assert join_micro_batches(micro_batches) == expected_batch(settings, step)


def test_a_split_of_at_most_the_maximum_is_copied_to_the_device(monkeypatch):
    assert Split(IDS, "meta").resident.shape == IDS.shape
    monkeypatch.setattr(batches, "MAX_RESIDENT_BYTES", 4 * len(IDS) - 1)
    assert Split(IDS, "meta").resident is None


@pytest.mark.gpu
def test_gpu_batches_from_memory_and_from_the_file_are_equal(monkeypatch):
    settings = tiny.settings(gradient_accumulation_steps=2)
    resident = Split(IDS, "cuda")
    monkeypatch.setattr(batches, "MAX_RESIDENT_BYTES", 0)
    streamed = Split(IDS, "cuda")
    assert [split.resident is None for split in (resident, streamed)] == [False, True]
    for split in (resident, streamed):
        for step in (0, 1, 2, 5):
            micro_batches = list(Batches(split, settings, SINGLE_PROCESS).at(step))
            assert {x.device.type for pair in micro_batches for x in pair} == {"cuda"}
            assert join_micro_batches(micro_batches) == expected_batch(settings, step)
