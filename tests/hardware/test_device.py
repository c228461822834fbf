import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from folio.cli.errors import UserError
from folio.hardware import device
from folio.hardware.device import (
    Machine,
    ThreadTuner,
    default_dtype,
    resolve_device,
    set_up_machine,
)

COMPILED, GRAPH = ", compiled (default on cuda)", "each step a CUDA graph"
UNKNOWN_CARDS = ("NVIDIA H100 PCIe", "NVIDIA L40", "RTX 4090 D", "NVIDIA A100-SXM4-40GB MIG 1g.5gb")


@pytest.fixture
def machine_with(monkeypatch):
    """Returns a function that makes torch report GPUs, beside a CPU with three threads."""

    def pretend(cards=0, mps=False, card="NVIDIA H100 80GB HBM3", bf16=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
        # torch counts emulated bfloat16 as supported by default
        supported = lambda including_emulation=True: bf16 or including_emulation  # noqa: E731
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
        monkeypatch.setattr(torch.cuda, "set_device", lambda number: range(cards)[number])
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)

    return pretend


@pytest.mark.parametrize(
    ("name", "hardware", "resolved"),
    [
        ("auto", {}, "cpu"),
        ("auto", {"mps": True}, "mps"),
        ("auto", {"cards": 1, "mps": True}, "cuda"),
        ("cpu", {"cards": 1}, "cpu"),
        ("cuda:1", {"cards": 2}, "cuda:1"),
    ],
)
def test_auto_selects_a_gpu(name, hardware, resolved, machine_with):
    machine_with(**hardware)
    assert resolve_device(name) == resolved


@pytest.mark.parametrize("name", ["cuda:2", "cuda:-1", "mps", "gpu"])
def test_a_missing_device_is_an_error(name, machine_with):
    machine_with(cards=2)
    with pytest.raises(UserError, match=name):
        resolve_device(name)


def test_bfloat16_is_used_where_the_hardware_has_it(machine_with, monkeypatch):
    for bf16, dtype in ((True, "bfloat16"), (False, "float16")):
        machine_with(cards=2, bf16=bf16)
        assert default_dtype("cuda:1")[0] == dtype
    for unit, dtype in (("avx512_bf16", "bfloat16"), ("bf16", "bfloat16"), ("avx512_f", "float32")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda unit=unit: {unit: True})
        assert default_dtype("cpu")[0] == dtype
    assert default_dtype("mps")[0] == "float32"


@pytest.mark.parametrize(
    ("card", "half", "single"),
    [("NVIDIA GH200 480GB", 989, 494), ("NVIDIA GeForce RTX 4090", 165.2, 82.6)]
    + [(card, None, None) for card in UNKNOWN_CARDS],
)
def test_the_peak_of_a_known_card_is_from_its_data_sheet_and_others_are_measured(
    card, half, single, machine_with, monkeypatch
):
    machine_with(cards=1, card=card)
    monkeypatch.setattr(device, "_measure_peak", lambda device, dtype: 1e12)
    for dtype, tera_flops in (("float16", half), ("float32", single)):
        machine = Machine("cuda", dtype, False)
        assert machine.data_sheet_flops == (tera_flops and 1e12 * tera_flops)
        assert machine.peak_flops == 1e12 * (tera_flops or 1)


@pytest.mark.parametrize(
    ("name", "dtype", "compile", "step_flops", "words"),
    [
        ("cpu", "float32", "auto", None, "float32 (as set), not compiled (default on cpu)"),
        ("mps", "float16", True, None, "(Apple GPU), float16 (as set), compiled (as set)"),
        ("cuda:1", "bfloat16", "auto", None, "HBM3), bfloat16 (as set)" + COMPILED),
        ("cuda:1", "bfloat16", "auto", 2.1e12, COMPILED),  # 989 TFLOP/s
        ("cuda:1", "auto", "auto", 1.9e12, "hardware), not compiled (short steps), " + GRAPH),
        ("cuda:1", "float16", "auto", 1.9e12, COMPILED),
    ],
)
def test_models_are_compiled_as_set_or_on_cuda_except_for_short_steps(
    name, dtype, compile, step_flops, words, machine_with
):
    machine_with(cards=2)
    machine = set_up_machine(name, dtype, compile, step_flops)
    assert machine.summary.endswith(words)
    assert machine.compile == (", compiled" in words)
    assert machine.cuda_graph == words.endswith("graph")


@pytest.fixture
def simulate(monkeypatch):
    """A function that makes steps of 0.5 s. Returns the number of threads of each, and messages.

    share(threads) is the part of the time for which threads have a core.
    """
    clock, current = SimpleNamespace(now=0.0), SimpleNamespace(threads=4)
    monkeypatch.setattr(device.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(torch, "get_num_threads", lambda: current.threads)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: setattr(current, "threads", n))
    cores = ThreadTuner(Machine("cpu", "float32", False))

    def simulate(seconds, share):
        monkeypatch.setattr(cores, "_share", lambda: share(current.threads))
        threads, messages = [], []
        for _ in range(2 * seconds):
            clock.now += 0.5
            threads.append(current.threads)
            messages += filter(None, [cores.check()])
        return threads, messages

    return simulate


@pytest.mark.parametrize(("share", "kept"), [(0.95, 4), (0.77, 3), (0.1, 2)])
def test_threads_without_cores_are_given_up(simulate, share, kept):
    threads, messages = simulate(20, lambda n: share if n == 4 else 1)
    assert threads[-1] == kept
    reason = "other programs use the cores"
    assert messages == [f"{reason}: continuing with {kept} of 4 threads"] * (kept < 4)


def test_threads_are_used_again_after_a_disturbance(simulate):
    threads, _ = simulate(10, lambda n: 0.5 if n > 1 else 1)
    assert threads[-1] == 1
    assert simulate(36, lambda n: 1)[0][-1] == 4  # 30 s after the last of two reductions


def test_beside_a_steady_rival_more_threads_are_rarely_tried(simulate):
    simulate(20, lambda n: 0.4 if n == 4 else 1)
    threads, messages = simulate(3600, lambda n: 0.4 if n == 4 else 1)
    assert 0 < threads.count(4) < 0.01 * len(threads)
    assert threads.count(2) + threads.count(4) == len(threads)
    assert messages == []


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="needs Linux")
def test_thread_times_grow():
    before = sum(device._thread_times().values())
    sum(range(10**6))
    assert sum(device._thread_times().values())[0] > before[0]


def test_a_thread_that_has_ended_takes_no_core(monkeypatch):
    times = iter([{"a": np.array([9, 0]), "b": np.array([50, 1])}, {"a": np.array([19, 1])}])
    monkeypatch.setattr(device, "_thread_times", lambda: next(times))
    assert ThreadTuner(Machine("cpu", "float32", False))._share() == 10 / 11
