"""Windows of a split: their order, and their tensors from a file or from a GPU's memory."""

import numpy as np
import pytest
import tiny
import torch

import train
from folio.data import batches
from folio.data.batches import Split, dropout_seed, window_starts

IDS = np.random.default_rng(0).integers(0, 2**16, 500).astype(np.uint16)
IDS[[0, 7, -1]] = 2**16 - 1  # too large for a signed 16-bit type


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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_batches_from_the_file_and_from_memory_are_equal(device, monkeypatch):
    monkeypatch.setattr(batches, "MAX_RESIDENT_BYTES", 0)
    resident, streamed = Split(IDS, device), Split(IDS, device)
    resident.resident = torch.from_numpy(IDS.astype(np.int32)).to(device)  # a CPU as a GPU, too
    assert streamed.resident is None
    for number in (0, 1, 2, 2, 9, 4, 0):
        starts = window_starts(1337, 8 * number, 8, len(IDS) - 6)
        windows = torch.tensor([IDS[start : start + 7].tolist() for start in starts], device=device)
        for split in (resident, streamed):
            x, y = split.batch(1337, number, batch_size=8, block_size=6)
            assert tiny.equal([x, y], [windows[:, :-1], windows[:, 1:]])  # int64, too


@pytest.mark.parametrize(("batch_size", "accumulation"), [(4, 2), (1, 8)])
def test_the_text_of_a_step_does_not_depend_on_accumulation(verse, batch_size, accumulation):
    run = tiny.new_run(batch_size=batch_size, gradient_accumulation_steps=accumulation)
    for step in (0, 5):
        micro_batches = list(train.micro_batches(run, step))
        assert len(micro_batches) == accumulation
        joined = [torch.cat(tensors) for tensors in zip(*micro_batches, strict=True)]
        assert tiny.equal(joined, list(run.dataset.train.batch(1337, step, 8, 8)))


def test_a_split_of_at_most_the_maximum_is_copied_to_the_device(monkeypatch):
    assert Split(IDS, "meta").resident.shape == IDS.shape
    monkeypatch.setattr(batches, "MAX_RESIDENT_BYTES", 4 * len(IDS) - 1)
    assert Split(IDS, "meta").resident is None
