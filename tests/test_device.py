import pytest
import torch

import device
from config import UserError
from device import (
    Machine,
    accelerator,
    captured,
    choose_machine,
    compile_or_fall_back,
    describe_device,
    peak_flops,
    resolve_compile,
    resolve_device,
    resolve_dtype,
)


@pytest.fixture
def machine_with(monkeypatch):
    """Make torch see so many CUDA GPUs, or an Apple GPU, beside a CPU of three threads."""

    def pretend(cards=0, mps=False, card="NVIDIA H100 80GB HBM3", bf16=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
        # torch counts emulated bfloat16 as supported unless told not to
        supported = lambda including_emulation=True: bf16 or including_emulation  # noqa: E731
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)

    return pretend


@pytest.fixture
def measured(monkeypatch):
    """Every measured peak is 1e12 FLOP/s."""
    monkeypatch.setattr(device, "_measured_peak", lambda device, dtype: 1e12)


# Devices


@pytest.mark.parametrize(
    ("name", "there", "resolved"),
    [
        ("auto", {}, "cpu"),
        ("auto", {"mps": True}, "mps"),
        ("auto", {"cards": 1}, "cuda"),
        ("auto", {"cards": 1, "mps": True}, "cuda"),
        ("cpu", {"cards": 1}, "cpu"),
        ("mps", {"mps": True}, "mps"),
        ("cuda", {"cards": 1}, "cuda"),
        ("cuda:1", {"cards": 2}, "cuda:1"),
    ],
)
def test_a_device_that_is_there_is_chosen(name, there, resolved, machine_with):
    machine_with(**there)
    assert resolve_device(name) == resolved


@pytest.mark.parametrize(
    ("name", "there", "message"),
    [
        ("cuda", {}, "device=cuda, but .* sees no CUDA GPU; use --device=auto"),
        ("cuda:0", {"mps": True}, "device=cuda:0, but .* sees no CUDA GPU"),
        ("cuda:2", {"cards": 2}, "device=cuda:2, but GPUs are numbered 0 to 1 here"),
        ("mps", {"cards": 1}, "device=mps, but .* sees no Apple GPU; use --device=auto"),
        ("gpu", {"cards": 1}, "must be auto, cpu, cuda, cuda:N or mps, not 'gpu'"),
        ("cuda:", {"cards": 1}, "not 'cuda:'"),
        ("cuda:-1", {"cards": 1}, "not 'cuda:-1'"),
    ],
)
def test_a_device_that_is_not_there_is_told(name, there, message, machine_with):
    machine_with(**there)
    with pytest.raises(UserError, match=message):
        resolve_device(name)


@pytest.mark.parametrize(
    ("name", "there", "description"),
    [
        ("cuda:1", {"cards": 2, "card": "Tesla T4"}, "Tesla T4"),
        ("mps", {"mps": True}, "Apple GPU"),
        ("cpu", {"cards": 1}, "3 threads"),
        ("cpu", {}, "no GPU found; 3 threads"),
    ],
)
def test_a_device_is_described(name, there, description, machine_with):
    machine_with(**there)
    assert describe_device(name) == description


# Number formats


@pytest.mark.parametrize(("bf16", "dtype"), [(True, "bfloat16"), (False, "float16")])
def test_a_gpu_computes_in_bfloat16_unless_it_would_emulate_it(bf16, dtype, machine_with):
    machine_with(cards=2, bf16=bf16)
    assert resolve_dtype("auto", "cuda:1")[0] == dtype


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ({}, "float32"),
        ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, "float32"),
        ({"avx512_bf16": True, "amx_bf16": False}, "bfloat16"),
        ({"avx512_bf16": False, "amx_bf16": True}, "bfloat16"),
        ({"neon": True, "bf16": True}, "bfloat16"),
    ],
)
def test_a_cpu_computes_in_bfloat16_if_it_multiplies_in_it(capabilities, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert resolve_dtype("auto", "cpu")[0] == dtype


def test_an_apple_gpu_computes_in_float32():
    assert resolve_dtype("auto", "mps") == ("float32", "no fast bfloat16 on this device")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps"])
def test_a_dtype_that_is_set_stays(dtype, kind):
    assert resolve_dtype(dtype, kind) == (dtype, "as set")


# Compiling


@pytest.mark.parametrize(("name", "compile"), [("cuda:1", True), ("mps", False), ("cpu", False)])
def test_compiling_is_for_cuda(name, compile):
    assert resolve_compile("auto", name)[0] is compile


@pytest.mark.parametrize("setting", [True, False])
@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps"])
def test_a_compile_that_is_set_stays(setting, kind):
    assert resolve_compile(setting, kind) == (setting, "as set")


def model(x):
    return x + 1


def compiler_that(monkeypatch, error):
    """A torch.compile whose product raises `error` on first use, as the real one does."""

    def compiled(x):
        raise error

    monkeypatch.setattr(torch, "compile", lambda model: compiled)


def test_a_model_that_compiles_is_compiled_after_a_trial(monkeypatch, capsys):
    compiled, tried = (lambda x: x + 1), []
    monkeypatch.setattr(torch, "compile", lambda model: compiled)
    assert compile_or_fall_back(model, tried.append) is compiled
    assert tried == [compiled]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RuntimeError("no C++ compiler\nSet TORCH_LOGS for more\n"), "no C++ compiler"),
        (RuntimeError("\n  no C++ compiler"), "no C++ compiler"),
        (NotImplementedError(), "NotImplementedError"),
    ],
)
def test_a_failing_compiler_is_told_in_one_line_and_done_without(error, cause, monkeypatch, capsys):
    compiler_that(monkeypatch, error)
    assert compile_or_fall_back(model, lambda compiled: compiled(1)) is model
    assert capsys.readouterr().err == (f"compiling failed, so this run is not compiled ({cause})\n")


def test_a_compiler_that_refuses_at_once_is_done_without(monkeypatch):
    monkeypatch.delattr(torch, "compile")
    assert compile_or_fall_back(model, lambda compiled: compiled(1)) is model


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt()]
)
def test_what_is_not_the_compilers_failure_stays_an_error(error, monkeypatch):
    compiler_that(monkeypatch, error)
    with pytest.raises(type(error)):
        compile_or_fall_back(model, lambda compiled: compiled(1))


def test_only_what_is_compiled_or_on_cuda_can_be_made_faster():
    assert accelerator(Machine("cpu", "float32", False, "")) is None
    assert accelerator(Machine("mps", "float32", False, "")) is None
    assert accelerator(Machine("cuda", "float32", False, "")) is not None


def test_a_step_on_a_cpu_is_made_faster_by_the_compiler_or_not_at_all(monkeypatch):
    accelerate = accelerator(Machine("cpu", "float32", True, ""))
    compiled = lambda x: x + 1  # noqa: E731
    monkeypatch.setattr(torch, "compile", lambda step: compiled)
    assert accelerate(model, torch.ones(1)) is compiled
    monkeypatch.delattr(torch, "compile")
    assert accelerate(model, torch.ones(1)) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_captured_function_gives_what_it_gave_and_keeps_earlier_results():
    first, second = torch.ones(3, device="cuda"), torch.full((3,), 5.0, device="cuda")
    replay = captured(lambda x: (x * 2, x + 1), first)
    results = [replay(first), replay(second)]
    assert [[part.tolist() for part in each] for each in results] == [
        [[2.0] * 3, [2.0] * 3],
        [[10.0] * 3, [6.0] * 3],
    ]


# Peaks


@pytest.mark.parametrize(
    ("card", "half", "single"),
    [
        ("NVIDIA B200", 2250, 1125),
        ("NVIDIA H200", 989, 494),
        ("NVIDIA GH200 480GB", 989, 494),
        ("NVIDIA H100 80GB HBM3", 989, 494),
        ("NVIDIA H100 PCIe", 756, 378),
        ("NVIDIA A100-SXM4-40GB", 312, 156),
        ("NVIDIA A100 80GB PCIe", 312, 156),
        ("NVIDIA A10", 125, 62.5),
        ("NVIDIA L40S", 362, 183),
        ("NVIDIA L4", 121, 60),
        ("Tesla V100-SXM2-16GB", 125, 15.7),
        ("Tesla V100-PCIE-32GB", 112, 14),
        ("NVIDIA H100 NVL", 835, 417),
        ("Tesla T4", 65, 8.1),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
    ],
)
def test_the_peak_of_a_known_card_is_its_data_sheets(card, half, single, machine_with):
    machine_with(cards=1, card=card)
    peaks = [peak_flops("cuda", dtype) for dtype in ("bfloat16", "float16", "float32")]
    assert peaks == [(peak * 1e12, f"data sheet, {card}") for peak in (half, half, single)]


@pytest.mark.parametrize(
    "card",
    [
        "NVIDIA A10G",
        "NVIDIA L40",
        "NVIDIA H20",
        "NVIDIA RTX A4000",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    ],
)
def test_the_peak_of_a_card_with_a_similar_name_is_measured(card, machine_with, measured):
    machine_with(cards=1, card=card)
    assert peak_flops("cuda", "bfloat16") == (1e12, "measured by a matrix product")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_of_a_cpu_is_measured_once(dtype):
    peak, source = peak_flops("cpu", dtype)
    assert 0 < peak < float("inf")
    assert peak_flops("cpu", dtype) == (peak, source)


# Machines


def test_a_machine_is_told_with_its_reasons_in_one_line(machine_with, measured):
    machine_with(cards=1, card="Tesla T4", bf16=False)
    machine = choose_machine("cuda", "auto", False)
    assert (machine.device, machine.dtype, machine.compile) == ("cuda", "float16", False)
    assert machine.summary == (
        "cuda (Tesla T4), float16 (with a loss scaler, as the GPU has no bfloat16), "
        "not compiled (as set)"
    )
    assert machine.peak == (65e12, "data sheet, Tesla T4")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matrix_products_run_in_the_machines_dtype(dtype):
    with choose_machine("cpu", dtype, False).autocast():
        assert (torch.eye(2) @ torch.eye(2)).dtype is device.DTYPES[dtype]


@pytest.mark.parametrize(("name", "waits"), [("cuda:0", True), ("cpu", False)])
def test_only_a_gpu_is_waited_for(name, waits, machine_with, monkeypatch):
    machine_with(cards=1)
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", calls.append)
    choose_machine(name, "float32", False).synchronize()
    assert calls == ([name] if waits else [])
