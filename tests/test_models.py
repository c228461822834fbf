"""tools/models.py: at most two models in memory, one thread that computes, checkpoints found."""

import os
import shutil
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny
import torch

from folio.errors import UserError
from folio.tokenizers import CharTokenizer
from tools import models as module
from tools.models import Models, checkpoints

LETTERS = CharTokenizer("abc")
SECONDS = 20  # that a test waits for another thread, on a busy machine


@pytest.fixture
def models():
    """Models in float32 on the CPU."""
    return Models("cpu", "float32")


@pytest.fixture
def paths(folder):
    """Paths of the checkpoints of three runs."""
    found = [f"{name}/ckpt.pt" for name in ("a", "b", "c")]
    for path in found:
        tiny.write_checkpoint(path, LETTERS)
    return found


def replace(path, **changes):
    """Replaces a checkpoint as a run does: by another file."""
    tiny.write_checkpoint("new/ckpt.pt", LETTERS, **changes)
    os.replace("new/ckpt.pt", path)


def in_memory(models, paths):
    return [path for path in paths if models.loaded(path)]


# Models in memory


def test_the_model_that_was_used_longest_ago_makes_room_for_a_third(models, paths):
    a, b, c = paths
    first, _ = models.newest(a)
    models.newest(b)
    assert models.newest(a)[0] is first
    assert in_memory(models, paths) == [a, b]
    models.newest(c)
    assert in_memory(models, paths) == [a, c]
    models.newest(b)
    assert in_memory(models, paths) == [b, c]


def test_an_error_keeps_no_model_in_memory(models, paths):
    references, errors = [], []

    def fail(path):
        trained, _ = models.newest(path)
        references.append(weakref.ref(trained.model))
        raise UserError("no")

    for path in paths:
        with pytest.raises(UserError) as error:
            models.run(fail, path)
        errors.append(error)  # with its traceback
    assert [each() is not None for each in references] == [False, True, True]


def test_a_dropped_model_is_freed_before_the_next_is_loaded(models, paths, monkeypatch):
    weights = [weakref.ref(models.newest(path)[0].model) for path in paths[:2]]
    real, alive = module.load_trained, []

    def load(*arguments):
        alive.append([each() is not None for each in weights])
        return real(*arguments)

    monkeypatch.setattr(module, "load_trained", load)
    models.newest(paths[2])
    replace(paths[2])
    models.newest(paths[2])
    assert alive == [[False, True], [False, True]]


def test_a_replaced_checkpoint_is_loaded_anew_in_place_of_its_old_version(models, paths):
    a, b, _ = paths
    old, before = models.newest(a)
    models.newest(b)
    replace(a, n_layer=1)
    new, after = models.newest(a)
    assert (old.model.config.n_layer, new.model.config.n_layer) == (2, 1)
    assert before != after
    assert models.newest(a) == (new, after)
    assert models.loaded(a) is new
    assert in_memory(models, paths) == [a, b]  # b was used longer ago, but is not dropped


def test_a_link_to_another_file_of_the_same_time_and_size_is_another_version(models, paths):
    a, b, _ = paths
    _, before = models.newest(a)
    os.utime(b, ns=(before.modified, before.modified))
    os.remove(a)
    os.link(b, a)  # as last.pt is linked
    after = models.newest(a)[1]
    assert before[:3] == after[:3]
    assert before != after


def test_a_version_is_found_in_memory_after_its_file_was_replaced_or_deleted(models, paths):
    a, b, c = paths
    old, version = models.newest(a)
    os.remove(a)
    assert models.same(version) is old
    replace(a, n_layer=1)
    assert models.same(version) is old
    models.newest(b)
    models.newest(c)  # drops a
    with pytest.raises(UserError, match=r"^a/ckpt.pt was replaced after this text was made"):
        models.same(version)
    os.remove(a)
    models.newest(b)
    models.newest(c)
    with pytest.raises(UserError, match=r"^there is no checkpoint a/ckpt.pt any more: choose"):
        models.same(version)


def test_a_version_that_is_no_longer_in_memory_is_read_again_from_the_same_file(models, paths):
    old, version = models.newest(paths[0])
    for path in paths[1:]:
        models.newest(path)
    new = models.same(version)
    assert new is not old
    assert tiny.same(dict(new.model.state_dict()), dict(old.model.state_dict()))
    assert len(in_memory(models, paths)) == 2


@pytest.mark.parametrize("content", [None, b"no checkpoint"])
def test_a_missing_or_damaged_checkpoint_is_an_error_and_can_be_repaired(models, paths, content):
    path = Path(paths[0])
    saved = path.read_bytes()
    path.unlink()
    if content:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"a/ckpt\.pt"):
        models.newest(paths[0])
    assert models.loaded(paths[0]) is None
    path.write_bytes(saved)
    assert models.newest(paths[0])[0].model.config.n_layer == 2


# The thread


def work(stopped, started):
    """Runs until it is stopped. Appends what happened to `started`."""
    started.append("started")
    assert stopped.wait(SECONDS)
    started.append("stopped")


def wait_for(models):
    """Waits until the thread of Models has done all work so far."""
    models.submit(int).result(SECONDS)


def test_a_stream_yields_while_its_function_runs(models):
    go, found = threading.Event(), []

    def work(stopped, word):
        assert go.wait(SECONDS)
        found.append((word, stopped.is_set()))

    stream = models.stream(work, "word")
    for _ in range(3):
        next(stream)
    assert not found
    go.set()
    *_, last = stream
    assert last.result() is None
    assert found == [("word", False)]


def test_closing_a_stream_stops_its_function(models):
    events = []
    stream = models.stream(work, events)
    next(stream)
    stream.close()
    wait_for(models)
    assert events == ["started", "stopped"]


def test_closing_a_stream_that_waits_cancels_it_and_not_the_one_that_runs(models):
    first, second = [], []
    streams = [models.stream(work, events) for events in (first, second)]
    for stream in streams:
        next(stream)
    streams[1].close()
    next(streams[0])
    assert (first, second) == (["started"], [])
    streams[0].close()
    wait_for(models)
    assert first == ["started", "stopped"]
    assert second == []  # it never starts


@pytest.mark.parametrize("error", [UserError("wrong"), ValueError("a bug")])
def test_the_caller_gets_the_exceptions_of_a_function(models, error):
    def fail(*_):
        raise error

    for call in (lambda: models.run(fail), lambda: list(models.stream(fail))[-1].result()):
        with pytest.raises(type(error), match=str(error)):
            call()
    assert models.run(lambda: "goes on") == "goes on"


def test_a_lack_of_memory_is_explained(models):
    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(UserError, match="cpu is out of memory: use --device=cpu, or a smaller"):
        models.run(fail)


def test_work_of_several_callers_runs_one_at_a_time_in_one_thread(models):
    inside, most, threads = [], [], set()

    def step(number):
        inside.append(number)
        most.append(len(inside))
        threads.add(threading.get_ident())
        time.sleep(0.001)
        inside.remove(number)
        return number

    def call(number):
        streamed = list(models.stream(lambda stopped: step(-number - 1)))
        return models.run(step, number), streamed

    with ThreadPoolExecutor(4) as pool:
        assert [found for found, _ in pool.map(call, range(12))] == list(range(12))
    assert set(most) == {1}
    assert len(most) == 24
    assert len(threads) == 1
    assert threading.get_ident() not in threads


# Checkpoints in the working directory


def touch(*paths):
    for path in map(Path, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(path))


def test_best_and_newest_states_of_runs_and_of_those_in_sweeps_are_found(folder):
    touch("out-a/ckpt.pt", "out-a/last.pt", "out-a/log.jsonl")
    touch("out-b/ckpt.pt")  # such as nanoGPT's
    touch("out-c/log.jsonl", "out-c/last.pt")  # has not been evaluated
    touch("out-d/log.jsonl", "data/verse/train.bin", "ckpt.pt")
    touch("out-sweep/n=1/ckpt.pt", "out-sweep/n=1/log.jsonl", "out-sweep/n=2/log.jsonl")
    os.link("out-sweep/n=1/ckpt.pt", "out-sweep/n=1/last.pt")  # as RunDir.save does
    assert checkpoints() == [
        ("out-a", "out-a/ckpt.pt"),
        ("out-a, newest state", "out-a/last.pt"),
        ("out-b", "out-b/ckpt.pt"),
        ("out-c, newest state", "out-c/last.pt"),
        ("out-sweep/n=1", "out-sweep/n=1/ckpt.pt"),
        ("out-sweep/n=1, newest state", "out-sweep/n=1/last.pt"),
    ]


def test_hidden_folders_are_no_runs_or_sweeps(folder):
    touch(".hidden/ckpt.pt", ".git/a/ckpt.pt", "out/ckpt.pt")
    assert checkpoints() == [("out", "out/ckpt.pt")]


def test_no_checkpoints(folder):
    assert checkpoints() == []


def test_a_run_that_is_deleted_meanwhile_does_no_harm(folder, monkeypatch):
    touch("out-a/ckpt.pt", "out-a/last.pt", "out-b/ckpt.pt")
    real = Path.is_file

    def deleting(path):
        if path.name == "last.pt":  # the first file has been found
            shutil.rmtree("out-a", ignore_errors=True)
        return real(path)

    monkeypatch.setattr(Path, "is_file", deleting)
    assert ("out-b", "out-b/ckpt.pt") in checkpoints()
    assert checkpoints() == [("out-b", "out-b/ckpt.pt")]
