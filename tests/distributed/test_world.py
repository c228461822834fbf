"""Several processes: the same results as one, the same checkpoints, common stops and errors."""

import os
import re
import signal
import sys
import time
from contextlib import chdir
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from ranks import Ranks, train_ranks

import train
from folio.cli.errors import RankError, UserError
from folio.distributed import world
from folio.distributed.world import World, process_group
from folio.hardware.device import Machine
from folio.inference.completion import sample_text
from folio.training.run import Timer
from folio.training.setup import check_parallel

SETTINGS = {"gradient_accumulation_steps": 4, "batch_size": 2, "eval_interval": 50}
SETTINGS |= {"learning_rate": 1e-3, "bias": True, "n_layer": 2, "n_embd": 32}
both_parallel = pytest.mark.parametrize("parallel", ["ddp", "fsdp"])


# The same results


@pytest.mark.slow
def test_a_run_can_change_its_processes_and_parallelism_and_equals_that_of_one(verse):
    """Rows of matrices cannot be divided equally, and there are fewer windows than processes."""
    settings = tiny.SWITCHES | {"optimizer": "muon", "learning_rate": 1e-3, "n_embd": 18}
    settings |= {"n_head": 1, "gradient_accumulation_steps": 4, "batch_size": 1}
    settings |= {"max_iters": 12, "eval_interval": 4, "eval_iters": 1}
    whole = train_ranks(1, out_dir="whole", **settings)
    for size, parallel, stop_at in [(4, "fsdp", 4), (1, "ddp", 6), (2, "ddp", 9), (2, "fsdp", 12)]:
        losses = train_ranks(size, parallel=parallel, stop_at=stop_at, init_from="auto", **settings)
    assert losses == pytest.approx(whole, abs=1e-5)
    assert "machine: 2 processes (fsdp), each on cpu" in Path("rank0.txt").read_text()
    evaluations, expected = (val_losses(name) for name in ("out", "whole"))
    assert evaluations == pytest.approx(expected, abs=1e-5)
    last, expected = tiny.load("last.pt"), tiny.load("last.pt", "whole")
    for key in ("model", "optimizer", "muon"):
        torch.testing.assert_close(last[key], expected[key], atol=1e-5, rtol=0)


def val_losses(out_dir):
    """Returns the losses of both splits in all evaluations of a run."""
    events = [event for event in tiny.log_events(out_dir) if event["event"] == "val"]
    return [event[name] for event in events for name in ("train_loss", "loss")]


@pytest.mark.slow
@both_parallel
def test_resuming_is_exact_and_samples_are_those_of_one_process(verse, parallel):
    settings = {"gradient_accumulation_steps": 2, "dropout": 0.2, "sample_interval": 3}
    train_ranks(2, out_dir="whole", parallel=parallel, **settings)
    samples = samples_printed()
    assert [step for step, _ in samples] == ["0", "3", "6"]
    train_ranks(2, stop_at=3, parallel=parallel, **settings)
    train_ranks(2, init_from="resume", parallel=parallel, **settings)
    assert not tiny.differences("out", "whole", names=["last.pt"])
    assert samples_printed() == samples[1:]
    run = tiny.new_run(**settings)
    assert samples[0][1] == sample_text(run.model, verse.tokenizer, run.settings.seed)


def samples_printed():
    """Returns (step, text) of the samples that rank 0 has printed. The others print nothing."""
    assert Path("rank1.txt").read_text() == ""
    return re.findall(r"(?s)sample at step (\d+):\n(.*?)\n\n", Path("rank0.txt").read_text())


@pytest.mark.slow
def test_processes_with_a_time_budget_make_the_same_steps(verse):
    settings = {"minutes": 1, "max_iters": 10**5, "eval_interval": 10**5, "eval_iters": 1}
    flags = tiny.flags(gradient_accumulation_steps=2, log_interval=1, **settings)
    Ranks(2, train_with_clocks, flags).results()  # other numbers of steps would be a deadlock
    assert 50 < sum(event["event"] == "train" for event in tiny.log_events()) < 70


def train_with_clocks(flags):
    """Trains with clocks that disagree: a step takes 1 s on rank 0 and 3 s on rank 1."""
    rank = int(os.environ["RANK"])
    Timer.elapsed_s = lambda timer: timer.progress.step * (1.0 + 2 * rank)
    train.main(flags)


@pytest.mark.slow
def test_if_one_process_cannot_compile_all_continue_without(verse):
    train_ranks(2, out_dir="plain", gradient_accumulation_steps=2)
    flags = tiny.flags(gradient_accumulation_steps=2, compile=True)
    [calls, _] = Ranks(2, train_with_compiler_of_one, flags).results()
    assert calls == 4  # of a block and the loss, in an evaluation and a step, before the first one
    assert "compilation failed; continuing" in Path("rank1.txt").read_text()
    assert tiny.equal(tiny.load()["model"], tiny.load(out_dir="plain")["model"])


def train_with_compiler_of_one(flags):
    """Trains with a compiler that fails on rank 1. Returns the number of calls of compiled code."""
    calls, compile = [], torch.compile

    def backend(graph, inputs):
        if os.environ["RANK"] == "1":
            raise RuntimeError
        return lambda *args: calls.append(args) or graph.forward(*args)

    torch.compile = lambda method, **_: compile(method, backend=backend)
    train.main(flags)
    return len(calls)


@pytest.mark.slow
def test_bfloat16_of_fsdp_is_close_to_that_of_ddp(verse):
    settings = SETTINGS | {"dtype": "bfloat16", "max_iters": 8, "sample_interval": 8}
    one = train_ranks(1, out_dir="one", **settings)
    for parallel in ("ddp", "fsdp"):
        losses = train_ranks(2, out_dir=parallel, parallel=parallel, **settings)
        assert losses == pytest.approx(one, abs=2e-3)


@pytest.mark.gpu
@both_parallel
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 2e-2)])
def test_a_launched_process_on_a_gpu_is_close_to_an_ordinary_one(
    verse, parallel, compile, dtype, tolerance
):
    settings = SETTINGS | {"device": "cuda", "dtype": dtype, "compile": compile, "max_iters": 50}
    one = train_ranks(1, out_dir="one", **settings)
    flags = tiny.flags(out_dir="two", parallel=parallel, log_interval=1, **settings)
    Ranks(1, train.main, flags).results(timeout_s=300)  # the compiler is slow at first
    losses = [event["loss"] for event in tiny.log_events("two") if event["event"] == "train"]
    assert losses == pytest.approx(one, abs=tolerance)


# Stops and errors


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_at_the_same_step(verse):
    ranks = Ranks(2, train.main, tiny.flags(gradient_accumulation_steps=2, max_iters=10**6))
    wait_for(Path("out/last.pt"))
    os.kill(ranks.processes[1].pid, signal.SIGINT)
    statuses, (main, other) = ranks.wait()
    assert statuses == [128 + signal.SIGTERM, 128 + signal.SIGINT]
    assert f"stopped at step {tiny.load('last.pt')['iter_num']}" in main
    assert other == ""


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "parallel"), [(0, "fsdp"), (1, "ddp")])
def test_if_a_process_is_killed_the_others_end_with_a_message(verse, rank, parallel):
    flags = tiny.flags(gradient_accumulation_steps=2, max_iters=10**6, parallel=parallel)
    ranks = Ranks(2, train_with_timeout, flags)
    wait_for(Path("out/last.pt"))
    os.kill(ranks.processes[rank].pid, signal.SIGKILL)
    statuses, errors = ranks.wait()
    assert statuses[rank] == -signal.SIGKILL
    assert statuses[1 - rank] == 2
    last = errors[1 - rank].strip().splitlines()[-1]
    assert last.startswith(f"train.py: rank {1 - rank}: another process of the run has ended")
    tiny.new_run(init_from="resume", gradient_accumulation_steps=2)  # the checkpoint is whole


def train_with_timeout(flags):
    """Trains with a short timeout: in 1 of 3,000 runs, gloo does not notice an ended process."""
    world.TIMEOUT = timedelta(seconds=20)
    train.main(flags)


def wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, [p.read_text() for p in Path().glob("rank*.txt")]
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("eval_interval = 5 + _rank", ""),  # as measured; rank 0's counts
        ("os.chdir(('.', 'elsewhere')[_rank])", "content of the dataset differs"),
        ("os.chdir(('.', 'elsewhere/data')[_rank])", "train.py: rank 1: "),
    ],
)
def test_processes_with_other_settings_or_data_end_with_one_message(verse, preset, message):
    Path("elsewhere").mkdir()
    with chdir("elsewhere"):
        tiny.prepare_verse(text=tiny.VERSE * 19)
    Path("preset.py").write_text(f"import os\n_rank = int(os.environ['RANK'])\n{preset}\n")
    flags = tiny.flags(gradient_accumulation_steps=2, max_iters=1)
    statuses, (out, other) = Ranks(2, train.main, [*flags, "preset.py"]).wait()
    assert statuses == ([2, 2] if message else [0, 0])
    assert message in out
    assert other == ""


def test_a_process_with_another_command_is_refused(monkeypatch):
    other = {"the command line": "--seed=2"}
    monkeypatch.setattr(World, "all_gather_object", lambda _, value: [value, other])
    with pytest.raises(UserError, match=r"the command line differs .*\(--seed=1 and --seed=2\)"):
        World().share_settings(SimpleNamespace(command_line="--seed=1"))


def test_settings_that_do_not_fit_the_processes_are_refused():
    machine, processes = Machine("cpu", "float16", False), World(size=64, is_launched=True)
    with pytest.raises(UserError, match="--gradient_accumulation_steps=128$"):
        check_parallel(tiny.settings(gradient_accumulation_steps=65), machine, processes)
    settings = tiny.settings(gradient_accumulation_steps=64, parallel="fsdp")
    with pytest.raises(UserError, match="float16"):
        check_parallel(settings, machine, processes)
    check_parallel(settings, machine, World())  # fsdp counts only with several processes


@pytest.fixture
def launched(monkeypatch):
    """Makes this process look like one of torchrun."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("the timeout in a bug: connection closed"), RuntimeError),
        (RuntimeError("[/x/gloo/gloo/transport/tcp/pair.cc:553] Connection closed"), RankError),
        (torch.distributed.DistBackendError("NCCL error: remote process exited"), RankError),
        (torch.distributed.DistBackendError("NCCL error: out of memory"), RuntimeError),
    ],
    ids=str,
)
def test_only_errors_of_the_network_are_a_lost_connection(launched, monkeypatch, error, expected):
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    with pytest.raises(expected), process_group("cpu"):
        raise error


def test_processes_that_torchrun_cannot_connect_are_refused(launched, monkeypatch):
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(RankError, match="rank x cannot connect"):
        process_group("cpu").__enter__()
