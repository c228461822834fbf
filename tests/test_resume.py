"""Runs that are stopped, resumed, refused by the disk, or that diverge."""

import errno
import io
import os
import shutil
import signal
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import tiny
import torch
from filelock import FileLock

import train
from folio import checkpoint as checkpoints
from folio import files, run_dir, saving, tracking
from folio.errors import UserError
from folio.files import LOCK
from folio.process import SIGPIPE, Interrupted, StopSignal
from train import Learner

RUN_FILES = ["ckpt.pt", "last.pt", "log.jsonl"]


def after_calls(monkeypatch, owner, name, number, act):
    """Makes `act()` run when owner.name has been called `number` times."""
    real, calls = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        result = real(*args, **kwargs)
        calls.append(name)
        if len(calls) == number:
            act()
        return result

    monkeypatch.setattr(owner, name, wrapped)


def send(number):
    return lambda: os.kill(os.getpid(), number)


def interrupted(*flags, number=signal.SIGTERM, name="update", calls=1):
    """Trains until a signal arrives after so many calls of a method of Learner."""
    with pytest.MonkeyPatch.context() as patch:
        after_calls(patch, Learner, name, calls, send(number))
        with pytest.raises(Interrupted) as caught:
            train.main(list(flags))
    return caught.value


def run_files(folder="out"):
    return sorted(set(os.listdir(folder)) - {LOCK})


def contents(folder="out"):
    return {name: Path(folder, name).read_bytes() for name in run_files(folder)}


def logged_steps(out_dir="out"):
    return [event["step"] for event in tiny.log_events(out_dir) if event["split"] == "train"]


def logged_changes():
    return [event["changed"] for event in tiny.log_events() if event["split"] == "resume"]


# Exact resume


@pytest.mark.parametrize(
    "settings",
    [
        {"dropout": 0.3},
        {"dropout": 0.3, "dtype": "bfloat16", "gradient_accumulation_steps": 2},
        {"dtype": "float16", "grad_clip": 0.0},
        {"eval_interval": 4, "checkpoint_interval": 2, "log_interval": 2},
        {"eval_interval": 7, "always_save_checkpoint": True},
        {"optimizer": "muon", **tiny.SWITCHES},
        {"optimizer": "muon", **tiny.SWITCHES, "dtype": "bfloat16", "n_layer": 2, "dropout": 0.3},
    ],
    ids=str,
)
def test_resume_equals_uninterrupted_run(verse, settings):
    settings = {"max_iters": 9} | settings
    train.main(tiny.flags(out_dir="out-whole", **settings))
    flags = tiny.flags(init_from="auto", **settings)
    interrupted(*flags, calls=2)
    interrupted(*flags, name="evaluate", calls=1)
    while tiny.saved("last.pt")["iter_num"] < 9:
        interrupted(*flags, calls=1)
    train.main(flags)  # for the last evaluation
    assert tiny.differences("out", "out-whole") == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_resume_on_a_gpu_is_close_to_uninterrupted_run(verse, dtype):
    settings = {"device": "cuda", "dtype": dtype, "dropout": 0.3, "max_iters": 9}
    train.main(tiny.flags(out_dir="out-whole", **settings))
    interrupted(*tiny.flags(**settings), calls=5)
    train.main(tiny.flags(init_from="resume", **settings))
    resumed, whole = tiny.saved("last.pt"), tiny.saved("last.pt", "out-whole")
    assert resumed["scaler"] == whole["scaler"]
    for name, weight in resumed["model"].items():  # atomic additions have no fixed order
        assert torch.allclose(weight, whole["model"][name], atol=1e-5), name


def test_run_resumes_from_ckpt_pt_if_last_pt_is_missing(verse):
    train.main(tiny.flags(out_dir="out-whole", eval_interval=2))
    interrupted(*tiny.flags(eval_interval=2), calls=5)  # ckpt.pt is of step 4, last.pt of step 5
    Path("out/last.pt").unlink()
    train.main(tiny.flags(init_from="resume", eval_interval=2))
    assert tiny.differences("out", "out-whole") == []


def test_log_of_a_killed_run_has_no_line_twice(verse):
    train.main(tiny.flags(out_dir="out-whole"))
    interrupted(*tiny.flags(), calls=3)
    shutil.copy("out/last.pt", "kept.pt")
    interrupted(*tiny.flags(init_from="resume"), calls=2)
    os.replace("kept.pt", "out/last.pt")  # as if killed instead
    with open("out/log.jsonl", "a") as log:
        log.write('{"step": 5, "spl')
    train.main(tiny.flags(init_from="resume"))
    assert tiny.differences("out", "out-whole") == []


def test_states_are_saved_before_the_first_step_at_evaluations_and_in_between(verse, monkeypatch):
    saved, real = [], checkpoints.save

    def save(path, checkpoint, canceled):
        events = Path("out/log.jsonl").read_bytes()[: checkpoint.log_bytes]
        assert events.endswith(b"\n")
        saved.append((path.name, checkpoint.progress.step, events.count(b"\n")))
        real(path, checkpoint, canceled)

    monkeypatch.setattr(checkpoints, "save", save)
    train.main(tiny.flags(eval_interval=4, checkpoint_interval=3))
    # The log has the start, the evaluations so far, and the steps so far.
    assert saved == [("ckpt.pt", 0, 2), ("last.pt", 3, 5), ("ckpt.pt", 4, 7), ("ckpt.pt", 6, 10)]


@pytest.mark.parametrize("stop_at", [1, 3, 4])
def test_run_that_stopped_at_a_step_ends_like_an_uninterrupted_one(verse, capsys, stop_at):
    train.main(tiny.flags(out_dir="out-whole", dropout=0.1))
    train.main(tiny.flags(dropout=0.1, stop_at=stop_at))
    assert tiny.saved("last.pt")["iter_num"] == stop_at
    expected = f"stopped at step {stop_at}, saved in out/last.pt; to continue, run the same command"
    assert expected in (out := capsys.readouterr().out)
    assert "resume, without --stop_at" in out
    train.main(tiny.flags(dropout=0.1, init_from="resume"))
    assert tiny.differences("out", "out-whole") == []


def test_auto_starts_a_run_or_resumes_it(verse, capsys):
    train.main(tiny.flags(init_from="auto", max_iters=3))
    assert "resumed" not in capsys.readouterr().out
    train.main(tiny.flags(init_from="auto"))
    assert "resumed out/last.pt at step 3; changed: max_iters 3 → 6" in capsys.readouterr().out


# Changed settings


def test_changed_settings_are_logged_once(verse):
    train.main(tiny.flags(max_iters=3))
    flags = tiny.flags(init_from="resume", learning_rate=0.02)
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Learner, "gradient", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                train.main(flags)
    with pytest.MonkeyPatch.context() as patch:
        after_calls(patch, run_dir.RunDir, "append", 1, send(signal.SIGTERM))
        with pytest.raises(Interrupted):
            train.main(flags)
    train.main(flags)
    assert logged_changes() == [{"max_iters": [3, 6], "learning_rate": [0.01, 0.02]}]


def test_settings_that_may_change(verse):
    train.main(tiny.flags(max_iters=3))
    changes = {"eval_interval": 2, "dtype": "bfloat16", "batch_size": 2, "beta2": 0.9, "seed": 5}
    train.main(tiny.flags(init_from="resume", log_interval=2, checkpoint_interval=1, **changes))
    assert tiny.saved("last.pt")["iter_num"] == 6
    assert logged_changes()[0].keys() > changes.keys()


def test_every_difference_is_named_and_nothing_is_written(verse):
    train.main(tiny.flags(max_iters=3))
    before = contents()
    tiny.prepare_verse("other", (tiny.VERSE * 20).replace("S", "Z"))
    changes = {"dataset": "other", "n_embd": 32, "bias": True, "optimizer": "muon"}
    with pytest.raises(UserError) as caught:
        train.main(tiny.flags(init_from="resume", **changes))
    for words in (
        "n_embd is 16 in the checkpoint and 32 in the settings",
        "bias is False",
        "optimizer is adamw in the checkpoint and muon",
        "the tokenizer is char with 24 tokens in the checkpoint and another char with 24 tokens",
        "dataset is verse in the checkpoint and other in the settings",
    ):
        assert words in str(caught.value)
    assert contents() == before


def test_dataset_may_be_renamed(verse):
    train.main(tiny.flags(max_iters=3))
    tiny.prepare_verse("sonnet")
    train.main(tiny.flags(init_from="resume", dataset="sonnet"))
    assert tiny.saved("last.pt")["iter_num"] == 6


# Checkpoints of earlier versions


def make_old(path):
    """Rewrites a checkpoint as earlier versions did."""
    content = torch.load(path, weights_only=True)
    del content["log_bytes"]
    content["seed"] = content["config"]["seed"]
    content["config"]["zero_init"] = content["model_args"]["zero_init"] = True
    for settings in (content["config"], content["model_args"]):
        settings["bigrams"] = settings.pop("ngrams") == 2
    weights = {n.replace("ngrams.2", "bigrams"): w for n, w in content["model"].items()}
    content["model"] = {name.replace("context.", ""): weights[name] for name in weights}
    assert {"transformer.bigrams.weight", "transformer.smear.weight"} < content["model"].keys()
    for optimizer in filter(None, (content["optimizer"], content["muon"])):
        for group in optimizer["param_groups"]:
            group["rate"] = group.pop("lr_scale")
    torch.save(content, path)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_checkpoint_of_an_earlier_version_resumes_exactly(verse, optimizer):
    switches = tiny.SWITCHES | {"activation": "relu2", "ngrams": 2}  # those of that time
    settings = switches | {"optimizer": optimizer, "max_iters": 9}
    train.main(tiny.flags(out_dir="out-whole", **settings))
    interrupted(*tiny.flags(**settings), calls=4)
    make_old("out/last.pt")
    train.main(tiny.flags(init_from="resume", **settings))
    assert tiny.differences("out", "out-whole") == []


# Stop signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_lets_the_step_finish_and_saves_the_state(verse, number):
    stop = interrupted(*tiny.flags(), number=number, calls=2)
    assert stop.number == number
    assert tiny.saved("last.pt")["iter_num"] == 2
    assert str(stop) == (
        "stopped at step 2, saved in out/last.pt; to continue, run the same command with "
        "--init_from=resume"
    )


def test_signal_ends_an_evaluation(verse):
    train.main(tiny.flags(out_dir="out-whole"))
    interrupted(*tiny.flags(), name="split_loss", calls=3)  # two at step 0
    assert (tiny.saved("last.pt")["iter_num"], tiny.saved("last.pt")["evaluated"]) == (3, 0)
    train.main(tiny.flags(init_from="resume"))
    assert tiny.differences("out", "out-whole") == []


def test_second_sigint_ends_a_save_and_keeps_the_files_whole(verse, monkeypatch):
    train.main(tiny.flags(max_iters=3))
    before, stopped, runs = contents(), threading.Event(), []

    class InterruptedFile(io.FileIO):
        """A file in which a write is interrupted by two SIGINTs."""

        def write(self, data):
            for event in (stopped, runs[0].run_dir.canceled):
                send(signal.SIGINT)()
                assert event.wait(10)  # until the main thread has received it
            return super().write(data)

    after_calls(monkeypatch, StopSignal, "request", 1, stopped.set)
    setup = train.setup
    monkeypatch.setattr(train, "setup", lambda *args: runs.append(setup(*args)) or runs[0])
    opened = lambda path, mode: io.BufferedWriter(InterruptedFile(path, mode))  # noqa: E731
    monkeypatch.setattr(files, "open", opened, raising=False)
    with pytest.raises(Interrupted, match="interrupted immediately"):
        train.main(tiny.flags(init_from="resume"))
    after = contents()
    assert after.pop("log.jsonl").startswith(before.pop("log.jsonl"))
    assert after == before


def fail_output(monkeypatch, error, line="", act=lambda: None):
    """Makes printing fail with an error, for lines that start with `line`."""

    def write(text, **_):
        if text.startswith(line):
            act()
            raise error

    monkeypatch.setattr(tracking.tqdm, "write", write)


def test_run_stops_and_is_saved_if_the_reader_of_its_output_exits(verse, monkeypatch):
    train.main(tiny.flags(out_dir="out-whole"))
    with monkeypatch.context() as patch:
        fail_output(patch, BrokenPipeError(errno.EPIPE, "Broken pipe"), "iter 4")
        after_calls(patch, checkpoints, "save", 3, send(signal.SIGTERM))  # is ignored
        with pytest.raises(Interrupted, match="stopped at step 5, saved in out/last.pt") as caught:
            train.main(tiny.flags())
    assert caught.value.number == SIGPIPE
    assert tiny.saved("last.pt")["iter_num"] == 5
    train.main(tiny.flags(init_from="resume"))
    assert tiny.differences("out", "out-whole") == []


def test_sigint_that_ends_the_reader_too_is_reported_as_sigint(verse, monkeypatch):
    error = BrokenPipeError(errno.EPIPE, "Broken pipe")
    fail_output(monkeypatch, error, "iter 4", act=send(signal.SIGINT))
    with pytest.raises(Interrupted) as caught:
        train.main(tiny.flags())
    assert caught.value.number == signal.SIGINT


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_output_on_a_full_disk_or_a_closed_terminal_is_lost(verse, monkeypatch, number):
    train.main(tiny.flags(out_dir="out-whole"))
    fail_output(monkeypatch, OSError(number, os.strerror(number)))
    train.main(tiny.flags())
    assert tiny.differences("out", "out-whole") == []


# A folder that contains an earlier run


def test_earlier_run_is_moved_aside_whole(verse, capsys):
    Path("out").mkdir()
    Path("out/note.txt").write_text("mine")
    for number in range(3):
        train.main(tiny.flags(max_iters=1, seed=number))
    seeds = [tiny.saved("last.pt", name)["config"]["seed"] for name in ("out.1", "out.2", "out")]
    assert seeds == [0, 1, 2]
    assert run_files("out.1") == RUN_FILES
    assert run_files("out") == [*RUN_FILES, "note.txt"]
    lines = [line for line in capsys.readouterr().out.splitlines() if "earlier run" in line]
    assert len(lines) == 2
    for words in ("moved the earlier run in out to out.2; ", "--init_from=resume", "--overwrite"):
        assert words in lines[1]


@pytest.mark.parametrize("name", RUN_FILES)
def test_one_file_of_a_run_is_enough_to_be_moved_aside(verse, name):
    Path("out").mkdir()
    Path("out", name).write_text("work of days")
    train.main(tiny.flags(max_iters=1))
    assert Path("out.1", name).read_text() == "work of days"


def test_overwriting_leaves_nothing_of_the_earlier_run(verse):
    train.main(tiny.flags())
    train.main(tiny.flags(overwrite=True, max_iters=1))
    assert not Path("out.1").exists()
    assert [tiny.saved(name)["iter_num"] for name in ("ckpt.pt", "last.pt")] == [1, 1]
    assert len(tiny.log_events()) == 4


def test_overwriting_keeps_a_run_that_is_resumed(verse):
    train.main(tiny.flags(max_iters=3))
    train.main(tiny.flags(overwrite=True, init_from="resume"))
    assert logged_steps() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("function", "settings"), [("compile", {"compile": True}), ("load", {"init_from": "resume"})]
)
def test_out_of_memory_at_the_start_is_explained_and_moves_nothing(
    verse, monkeypatch, function, settings
):
    def fail(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    train.main(tiny.flags(max_iters=1))
    monkeypatch.setattr(torch, function, fail)
    with pytest.raises(UserError, match="cpu is out of memory: use --batch_size=2"):
        train.main(tiny.flags(**settings))
    assert not Path("out.1").exists()


def test_folder_behind_a_link_is_moved_aside(verse):
    Path("disk").mkdir()
    Path("out").symlink_to("disk")
    train.main(tiny.flags(max_iters=1))
    train.main(tiny.flags(max_iters=2))
    assert Path("out").is_symlink()
    assert [tiny.saved("last.pt", name)["iter_num"] for name in ("disk.1", "disk")] == [1, 2]


@pytest.mark.parametrize("wrong", [{"block_size": 1024}, {"n_layer": 10**9}], ids=str)
def test_run_that_cannot_start_moves_nothing(verse, wrong):
    train.main(tiny.flags(max_iters=1))
    with pytest.raises(UserError):
        train.main(tiny.flags(**wrong))
    assert not Path("out.1").exists()


@pytest.mark.parametrize("init_from", ["scratch", "resume", "auto"])
def test_second_run_in_the_same_folder_is_refused(verse, init_from):
    train.main(tiny.flags(max_iters=1))
    before = contents()
    in_use = pytest.raises(UserError, match="another process is writing to out")
    with FileLock(Path("out", LOCK)), in_use:
        train.main(tiny.flags(init_from=init_from))
    assert contents() == before


# Full disks


def refuse(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FullDisk(io.FileIO):
    """A file of at most 100 bytes."""

    def write(self, data):
        return refuse() if self.tell() + len(data) > 100 else super().write(data)


class AtOnce:
    """An executor that runs each call at once, so that tests know when a file is written."""

    def __init__(self, max_workers):
        pass

    def submit(self, function, *args):
        future = Future()
        future.set_result(function(*args))
        return future

    def shutdown(self):
        pass


@pytest.fixture
def disk(monkeypatch):
    """A dict of what is full: "states", "log". States are written at once."""
    monkeypatch.setattr(saving, "ThreadPoolExecutor", AtOnce)
    full = {"states": False, "log": False}

    def opener(kind):
        def opened(path, mode="r", **options):
            if full[kind] and "r" not in mode:
                return io.BufferedWriter(FullDisk(path, mode))
            return open(path, mode, **options)

        return opened

    monkeypatch.setattr(files, "open", opener("states"), raising=False)
    monkeypatch.setattr(run_dir, "open", opener("log"), raising=False)
    return full


def between_updates(monkeypatch, first, before, after=lambda: None, last=99):
    """Makes before() run before one update, and after() after another one."""
    after_calls(monkeypatch, Learner, "gradient", first + 1, before)
    after_calls(monkeypatch, Learner, "update", last + 1, after)


@pytest.mark.parametrize("links", [True, False])
def test_disk_that_is_full_for_a_while_costs_nothing(verse, monkeypatch, disk, capsys, links):
    def fill(full):
        disk.update(states=full, log=full)

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    train.main(tiny.flags(out_dir="out-whole", max_iters=9))
    between_updates(monkeypatch, 1, lambda: fill(True), lambda: fill(False), last=3)
    train.main(tiny.flags(max_iters=9))
    assert tiny.differences("out", "out-whole") == []
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2  # about the log and the state
    assert all("No space left on device; training continues" in line for line in warnings)


def scripted_losses(monkeypatch, losses):
    values = iter(losses)
    monkeypatch.setattr(
        Learner, "evaluate", lambda *_: {"train_loss": 1.0, "loss": next(values), "perplexity": 1.0}
    )


def test_best_state_that_could_not_be_written_does_not_count(verse, monkeypatch, disk):
    scripted_losses(monkeypatch, [9.0, 1.0, 2.0, 3.0])
    between_updates(
        monkeypatch, 2, lambda: disk.update(states=True), lambda: disk.update(states=False), last=3
    )
    train.main(tiny.flags(max_iters=9))
    best = tiny.saved("ckpt.pt")
    assert (best["iter_num"], best["best_val_loss"]) == (6, 2.0)


def test_disk_that_is_full_at_the_end_is_an_error_and_keeps_the_old_state(verse, monkeypatch, disk):
    between_updates(monkeypatch, 4, lambda: disk.update(states=True, log=True))
    with pytest.raises(UserError, match=r"cannot write out/ckpt\.pt: No space left"):
        train.main(tiny.flags())
    assert tiny.saved("last.pt")["iter_num"] == 3
    assert logged_steps() == [0, 1, 2, 3]
    assert run_files() == RUN_FILES


def test_disk_that_is_full_at_the_start_is_an_error_before_the_first_step(verse, monkeypatch, disk):
    disk["states"] = True
    monkeypatch.setattr(Learner, "gradient", None)
    with pytest.raises(UserError, match=r"cannot write out/ckpt\.pt: No space left"):
        train.main(tiny.flags())


def test_states_are_saved_if_only_the_log_is_refused(verse, disk, capsys):
    disk["log"] = True
    with pytest.raises(UserError, match=r"cannot write out/log\.jsonl: No space left"):
        train.main(tiny.flags())
    assert capsys.readouterr().err.count("cannot write out/log.jsonl: No space left") == 1
    assert tiny.saved("last.pt")["iter_num"] == 6


def test_folder_that_is_missing_for_a_while_costs_nothing(verse, monkeypatch, capsys):
    monkeypatch.setattr(saving, "ThreadPoolExecutor", AtOnce)
    train.main(tiny.flags(out_dir="out-whole", max_iters=9))
    move, move_back = (lambda: os.rename("out", "away")), (lambda: os.rename("away", "out"))
    between_updates(monkeypatch, 1, move, move_back, last=3)
    train.main(tiny.flags(max_iters=9))
    assert tiny.differences("out", "out-whole") == []
    assert len(capsys.readouterr().err.splitlines()) == 2


# Long runs


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_steps(verse, monkeypatch):
    real, pages = Learner.evaluate, []

    def evaluate(*args):
        pages.append(int(Path("/proc/self/statm").read_text().split()[1]))
        return real(*args)

    monkeypatch.setattr(Learner, "evaluate", evaluate)
    train.main(tiny.flags(max_iters=20_000, eval_interval=2000, eval_iters=2, log_interval=10))
    assert (pages[-1] - pages[1]) * os.sysconf("SC_PAGE_SIZE") < 2**22  # 233 bytes per step
