"""Several processes: the same results as one, the same checkpoints, common stops and errors."""

import os
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from ranks import Ranks, in_world, train_ranks

import train
from folio.cli.errors import RankError, UserError
from folio.distributed import world
from folio.distributed.sharding import from_shard, full_tensor
from folio.distributed.world import process_group
from folio.inference.completion import sample_text
from folio.training.muon import orthogonalize, orthogonalize_copies, orthogonalize_shards
from folio.training.run import Run
from folio.training.setup import check_parallel

SETTINGS = {"gradient_accumulation_steps": 4, "batch_size": 2, "eval_interval": 50}
SETTINGS |= {"learning_rate": 1e-3, "bias": True, "n_layer": 2, "n_embd": 32}
both_parallel = pytest.mark.parametrize("parallel", ["ddp", "fsdp"])


def differences(losses, others):
    return np.abs(np.array(losses) - np.array(others, dtype=float))


# The same results


@pytest.mark.slow
@both_parallel
def test_evaluations_and_weights_of_several_processes_equal_those_of_one(verse, parallel):
    settings = {"optimizer": "muon", "learning_rate": 1e-3, "gradient_accumulation_steps": 2}
    settings |= tiny.SWITCHES | {"batch_size": 3, "n_layer": 2}
    train_ranks(1, out_dir="one", **settings)
    train_ranks(2, out_dir="two", parallel=parallel, **settings)
    for one, two in zip(tiny.log_events("one"), tiny.log_events("two"), strict=True):
        if one["event"] == "val":
            assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
            assert two["train_loss"] == pytest.approx(one["train_loss"], abs=1e-5)
    one, two = tiny.load("last.pt", "one"), tiny.load("last.pt", "two")
    assert one["model"].keys() == two["model"].keys()
    for name, weight in one["model"].items():
        torch.testing.assert_close(two["model"][name], weight, atol=1e-5, rtol=0)
    for key in ("optimizer", "muon"):
        assert one[key]["param_groups"] == two[key]["param_groups"]
        for index, moments in one[key]["state"].items():
            for name, moment in moments.items():
                other = two[key]["state"][index][name]
                torch.testing.assert_close(other, moment, atol=1e-5, rtol=0)


# Checkpoints


@pytest.mark.slow
def test_a_run_can_change_the_number_of_processes_and_the_kind_of_parallelism(verse):
    settings = {"optimizer": "muon", "gradient_accumulation_steps": 4, "learning_rate": 1e-3}
    settings |= {"batch_size": 1, "n_embd": 18, "max_iters": 12, "eval_interval": 4}
    settings |= {"eval_iters": 1}  # fewer evaluated windows than processes
    settings |= {"smear": 2, "n_head": 1}  # fewer rows of a matrix, and others not divisible by 4
    whole = train_ranks(1, out_dir="whole", **settings)
    sections = [(4, "fsdp", 4), (1, "ddp", 6), (2, "ddp", 9), (2, "fsdp", 12)]
    for size, parallel, stop_at in sections:
        losses = train_ranks(size, parallel=parallel, stop_at=stop_at, init_from="auto", **settings)
    assert differences(losses, whole).max() < 1e-5
    best = tiny.load("last.pt")["best_val_loss"]
    assert best == pytest.approx(tiny.load("last.pt", "whole")["best_val_loss"], abs=1e-5)


@pytest.mark.slow
@both_parallel
def test_resuming_is_exact_and_samples_are_those_of_one_process(verse, parallel):
    settings = {"gradient_accumulation_steps": 2, "dropout": 0.2, "sample_interval": 3}
    train_ranks(2, out_dir="whole", parallel=parallel, **settings)
    texts = samples_printed()
    assert texts.keys() == {"0", "3", "6"}
    train_ranks(2, stop_at=3, parallel=parallel, **settings)
    train_ranks(2, init_from="resume", parallel=parallel, **settings)
    assert not tiny.differences("out", "whole", names=["last.pt"])
    assert samples_printed() == {step: texts[step] for step in ("3", "6")}
    run = tiny.new_run(**settings)
    expected = sample_text(run.model, verse.tokenizer, run.settings.seed)
    assert texts["0"] == expected


def samples_printed():
    """Returns {step: text} of the samples that rank 0 has printed. The others print nothing."""
    assert Path("rank1.txt").read_text() == ""
    out = Path("rank0.txt").read_text()
    return dict(re.findall(r"(?s)sample at step (\d+):\n(.*?)\n\n", out))


@pytest.mark.slow
def test_processes_with_a_time_budget_make_the_same_steps(verse):
    settings = {"minutes": 1, "max_iters": 10**5, "eval_interval": 10**5, "eval_iters": 1}
    flags = tiny.flags(gradient_accumulation_steps=2, log_interval=1, **settings)
    Ranks(2, train_with_clocks, flags).results()  # other numbers of steps would be a deadlock
    assert 50 < sum(event["event"] == "train" for event in tiny.log_events()) < 70


def train_with_clocks(flags):
    """Trains with clocks that disagree: a step takes 1 s on rank 0 and 3 s on rank 1."""
    Run.elapsed_s = lambda run: run.progress.step * (1.0 + 2 * run.world.rank)
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
        assert differences(losses, one).max() < 2e-3


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
    assert differences(losses, one).max() < tolerance


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
    ("text", "message"),
    [(tiny.VERSE * 19, "content of the dataset differs"), (None, "train.py: rank 1: ")],
)
def test_a_process_with_other_or_no_data_ends_all_with_one_message(verse, text, message):
    statuses, (error, other) = Ranks(2, train_elsewhere, text).wait()
    assert statuses == [2, 2]
    assert message in error
    assert other == ""


def train_elsewhere(text):
    """Trains in another folder on rank 1, with a dataset of its own if there is a text."""
    if os.environ["RANK"] == "1":
        os.mkdir("elsewhere")
        os.chdir("elsewhere")
        if text:
            tiny.prepare_verse(text=text)
    train.main(tiny.flags(gradient_accumulation_steps=2))


@pytest.mark.slow
def test_names_for_trackers_may_differ_between_processes_and_other_settings_not(verse):
    preset = "import os\nwandb_run_name = os.environ['RANK']\n"
    Path("named.py").write_text(preset)
    Path("seeded.py").write_text(preset + "seed = int(wandb_run_name)\n")
    flags = tiny.flags(gradient_accumulation_steps=2, max_iters=1)
    assert Ranks(2, train.main, ["named.py", *flags]).wait()[0] == [0, 0]
    statuses, (error, _) = Ranks(2, train.main, ["seeded.py", *flags]).wait()
    assert statuses == [2, 2]
    assert "seed differs between processes (0 and 1)" in error


@pytest.mark.parametrize(
    ("settings", "size", "advice"),
    [
        ({"gradient_accumulation_steps": 65}, 64, "--gradient_accumulation_steps=128$"),
        ({"parallel": "fsdp", "dtype": "float16", "gradient_accumulation_steps": 2}, 2, "float16"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_processes_are_refused(settings, size, advice):
    with pytest.raises(UserError, match=advice):
        check_parallel(tiny.settings(**settings), size)


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


# Muon


SHAPES = [(6, 6), (5, 9), (9, 5), (6, 6), (3, 7), (9, 5), (6, 6)]


@pytest.mark.slow
def test_divided_orthogonalization_equals_the_whole(folder):
    expected = [orthogonalized(matrix) for matrix in random_matrices()]
    for results in Ranks(4, in_world, copies_and_shards).results():
        for result, matrix in zip(results, 2 * expected, strict=True):
            np.testing.assert_allclose(result, matrix, atol=1e-5)


def random_matrices():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def orthogonalized(matrix):
    rows, columns = matrix.shape
    if rows > columns:
        return orthogonalized(matrix.T).T
    return orthogonalize(matrix[None])[0]


def copies_and_shards(world):
    """Returns the results for matrices that all processes have, and for divided ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    matrices = random_matrices()
    mesh = init_device_mesh("cpu", (world.size,))
    sharded = [distribute_tensor(matrix, mesh, [Shard(0)]) for matrix in matrices]
    shards = orthogonalize_shards([matrix.to_local() for matrix in sharded], sharded, world)
    results = orthogonalize_copies(matrices, world)
    for matrix, shard in zip(sharded, shards, strict=True):
        results.append(full_tensor(from_shard(matrix, shard)))
    return [result.numpy() for result in results]
