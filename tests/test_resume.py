"""Runs that are stopped, resumed, begun where another was, refused by a disk, or gone wrong."""

import errno
import io
import json
import math
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import tiny
import torch
from filelock import FileLock

import checkpoint as ckpt
import report
import safety
import sample
import train
from config import UserError
from safety import Interrupted


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def after_calls(monkeypatch, owner, name, number, act):
    """Have `act()` run when owner.name has been called `number` times."""
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
    """Train until a signal comes after so many calls of a function of train.py."""
    with pytest.MonkeyPatch.context() as patch:
        after_calls(patch, train, name, calls, send(number))
        with pytest.raises(Interrupted) as caught:
            train.main(list(flags))
    return caught.value


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
def test_a_run_that_was_stopped_ends_as_one_that_never_was(verse, settings):
    settings = {"max_iters": 9, "learning_rate": 1e-2} | settings
    train.main(tiny.flags(out_dir="out-whole", **settings))
    flags = tiny.flags(init_from="auto", **settings)
    interrupted(*flags, calls=2)
    interrupted(*flags, name="evaluate", calls=1)  # the evaluation is done, but not taken down
    interrupted(*flags, calls=1)
    while tiny.saved("last.pt")["iter_num"] < 9:
        interrupted(*flags, calls=1)
    train.main(flags)  # for the last evaluation
    assert tiny.differences("out", "out-whole") == []


@pytest.mark.parametrize(
    ("began", "now", "n_layer"), [("muon", "adamw", 1), ("adamw", "muon", 1), ("adamw", "muon", 0)]
)
def test_a_run_does_not_go_on_by_another_optimizer(verse, folder, began, now, n_layer):
    train.main(tiny.flags(max_iters=3, optimizer=began, n_layer=n_layer))
    before = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
    with pytest.raises(UserError, match=f"optimizer {began} there and {now} here") as caught:
        train.main(tiny.flags(init_from="resume", optimizer=now, n_layer=n_layer))
    assert len(str(caught.value).splitlines()) == 1
    assert {path.name: path.read_bytes() for path in (folder / "out").iterdir()} == before


def test_a_model_with_every_switch_on_is_sampled_from_its_checkpoint(verse, capsys):
    train.main(tiny.flags(optimizer="muon", **tiny.SWITCHES))
    capsys.readouterr()
    flags = ["--device=cpu", "--dtype=float32", "--num_samples=1", "--max_new_tokens=20"]
    sample.main([*flags, "--start=Shall I compare"])  # longer than the context
    text = capsys.readouterr().out
    assert text.startswith("Shall I compare")
    assert len(text.partition("\n---------------")[0]) == 35


@pytest.mark.parametrize("kept", [["ckpt.pt"], ["last.pt"]])
def test_a_run_goes_on_from_last_or_else_from_its_best(verse, kept, folder):
    train.main(tiny.flags(out_dir="out-whole"))
    interrupted(*tiny.flags(eval_interval=2), calls=5)  # ckpt.pt is of step 4, last.pt of step 5
    for name in {"ckpt.pt", "last.pt"} - set(kept):
        (folder / "out" / name).unlink()
    train.main(tiny.flags(init_from="resume"))
    found = tiny.differences("out", "out-whole", names=["last.pt"])
    assert set(found) <= {"last.pt best_val_loss", "log.jsonl"}  # of other evaluations
    assert [e["step"] for e in tiny.log_events() if e["split"] == "train"] == [0, 1, 2, 3, 4, 5]


def test_a_state_is_saved_before_the_first_step_and_between_evaluations(verse, monkeypatch):
    written = []
    save = ckpt.save
    monkeypatch.setattr(
        ckpt, "save", lambda paths, c: (written.append((paths[-1].name, c.step)), save(paths, c))
    )
    train.main(tiny.flags(eval_interval=4, checkpoint_interval=3))
    assert [step for name, step in written if name == "last.pt"] == [0, 3, 4, 6]


def test_the_log_of_a_run_killed_between_saves_has_no_line_twice(verse, folder):
    train.main(tiny.flags(out_dir="out-whole"))
    interrupted(*tiny.flags(), calls=3)
    shutil.copy("out/last.pt", "kept.pt")
    interrupted(*tiny.flags(init_from="resume"), calls=2)
    shutil.copy("kept.pt", "out/last.pt")  # as if it had been killed
    with open("out/log.jsonl", "a") as log:
        log.write('{"step": 5, "spl')  # in the midst of a line
    train.main(tiny.flags(init_from="resume"))
    assert tiny.differences("out", "out-whole") == []


@pytest.mark.parametrize("place", ["start", "resume"])
def test_the_log_is_on_disk_before_the_state_that_follows_from_it(verse, place, monkeypatch):
    lines = []
    save = ckpt.save
    monkeypatch.setattr(
        ckpt, "save", lambda p, c: (lines.append((c.step, len(tiny.log_events()))), save(p, c))
    )
    train.main(tiny.flags(max_iters=3))
    assert lines[-1] == (3, 6)  # the start, three steps and two evaluations


def test_auto_starts_where_there_is_nothing_and_resumes_where_there_is(verse, capsys):
    train.main(tiny.flags(init_from="auto", max_iters=3))
    assert "resumed" not in capsys.readouterr().out
    train.main(tiny.flags(init_from="auto"))
    assert "resumed out/last.pt at step 3; changed: max_iters 3 → 6" in capsys.readouterr().out


def test_what_changed_on_resuming_is_in_the_log_once(verse):
    train.main(tiny.flags(max_iters=3))
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "gradient", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                train.main(tiny.flags(init_from="resume", learning_rate=0.02))
    train.main(tiny.flags(init_from="resume", learning_rate=0.02))
    events = [e for e in tiny.log_events() if e["split"] == "resume"]
    assert [(e["step"], e["changed"]) for e in events] == [
        (3, {"max_iters": [3, 6], "learning_rate": [0.01, 0.02]})
    ]


@pytest.mark.parametrize("act", [send(signal.SIGTERM), lambda: _raise(BrokenPipeError())])
def test_a_change_is_logged_once_however_soon_the_run_is_stopped(verse, monkeypatch, act):
    train.main(tiny.flags(max_iters=3))
    with monkeypatch.context() as patch:
        after_calls(patch, report.Report, "say", 1, act)
        with pytest.raises((Interrupted, BrokenPipeError)):
            train.main(tiny.flags(init_from="resume", learning_rate=0.02))
    train.main(tiny.flags(init_from="resume", learning_rate=0.02))
    events = [e["changed"] for e in tiny.log_events() if e["split"] == "resume"]
    assert events == [{"max_iters": [3, 6], "learning_rate": [0.01, 0.02]}]


def _raise(error):
    raise error


def test_a_signal_does_not_cut_the_save_that_a_reader_who_left_brought_about(verse, monkeypatch):
    def say(self, line):
        if line.startswith("iter 4"):
            monkeypatch.setattr(ckpt, "save", save_with_a_signal)
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    def save_with_a_signal(*args):
        send(signal.SIGTERM)()
        real(*args)

    real = ckpt.save
    monkeypatch.setattr(report.Report, "say", say)
    with pytest.raises(Interrupted, match="stopped at step 5, kept in out/last.pt"):
        train.main(tiny.flags())
    assert tiny.saved("last.pt")["iter_num"] == 5


def test_all_that_may_change_can(verse):
    train.main(tiny.flags(max_iters=3))
    changes = {"eval_interval": 2, "dtype": "bfloat16", "batch_size": 2, "beta2": 0.9, "seed": 5}
    train.main(tiny.flags(init_from="resume", log_interval=2, checkpoint_interval=1, **changes))
    assert tiny.saved("last.pt")["iter_num"] == 6


def test_every_contradiction_is_named(verse):
    train.main(tiny.flags(max_iters=3))
    tiny.prepare_verse("other", (tiny.VERSE * 20).replace("S", "Z"))
    with pytest.raises(UserError) as caught:
        train.main(tiny.flags(init_from="resume", dataset="other", n_embd=32, bias=True))
    for words in ("n_embd 16 there and 32 here", "bias False", "another vocabulary", "other data"):
        assert words in str(caught.value)


@pytest.mark.parametrize("name", ["verse", "other"])
def test_other_data_of_the_same_vocabulary_is_refused(verse, name):
    train.main(tiny.flags(max_iters=3))
    tiny.prepare_verse(name, tiny.VERSE[::-1] * 20)
    with pytest.raises(UserError, match=f"other data: verse there and {name} as it is here"):
        train.main(tiny.flags(init_from="resume", dataset=name))


def test_a_dataset_may_get_another_name(verse):
    train.main(tiny.flags(max_iters=3))
    tiny.prepare_verse("sonnet")
    train.main(tiny.flags(init_from="resume", dataset="sonnet"))
    assert tiny.saved("last.pt")["iter_num"] == 6


# Signals


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_lets_the_step_finish_and_the_state_be_saved(verse, number, status):
    stop = interrupted(*tiny.flags(), number=number, calls=2)
    assert stop.status == status
    assert tiny.saved("last.pt")["iter_num"] == 2
    assert str(stop) == (
        "stopped at step 2, kept in out/last.pt; go on by the same command and --init_from=resume"
    )


def test_an_evaluation_does_not_keep_a_signal_waiting(verse, monkeypatch):
    train.main(tiny.flags(out_dir="out-whole"))
    with monkeypatch.context() as patch:
        after_calls(patch, train, "split_loss", 3, send(signal.SIGTERM))  # the first at step 3
        with pytest.raises(Interrupted):
            train.main(tiny.flags())
    assert (tiny.saved("last.pt")["iter_num"], tiny.saved("last.pt")["evaluated"]) == (3, 0)
    train.main(tiny.flags(init_from="resume"))
    assert tiny.differences("out", "out-whole") == []


def test_a_second_ctrl_c_stops_a_save_and_leaves_the_files_whole(verse, monkeypatch, folder):
    train.main(tiny.flags(max_iters=3))
    before = (folder / "out" / "last.pt").read_bytes()

    def twice(*_):
        send(signal.SIGINT)()
        send(signal.SIGINT)()

    monkeypatch.setattr(safety.os, "fsync", twice)
    with pytest.raises(KeyboardInterrupt) as caught:
        train.main(tiny.flags(init_from="resume"))
    assert not isinstance(caught.value, Interrupted)
    assert (folder / "out" / "last.pt").read_bytes() == before
    assert sorted(os.listdir("out")) == ["ckpt.pt", "last.pt", "log.jsonl"]


def test_a_reader_of_the_output_that_leaves_costs_no_step(verse, monkeypatch):
    train.main(tiny.flags(out_dir="out-whole"))

    def say(self, line):
        if line.startswith("iter 4"):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with monkeypatch.context() as patch:
        patch.setattr(report.Report, "say", say)
        with pytest.raises(BrokenPipeError):
            train.main(tiny.flags())
    assert tiny.saved("last.pt")["iter_num"] == 5
    train.main(tiny.flags(init_from="resume"))
    assert tiny.differences("out", "out-whole") == []


def test_ctrl_c_under_a_pipe_is_told_as_ctrl_c(verse, monkeypatch):
    def say(self, line):
        if line.startswith("iter 4"):
            send(signal.SIGINT)()  # the terminal signals all, and who read the output ends first
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(report.Report, "say", say)
    with pytest.raises(Interrupted, match="stopped at step 5, kept in out/last.pt"):
        train.main(tiny.flags())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_lines_that_find_no_room_or_no_terminal_are_all_that_is_lost(verse, monkeypatch, number):
    train.main(tiny.flags(out_dir="out-whole"))

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(report.tqdm, "write", refuse)
    train.main(tiny.flags())
    assert tiny.differences("out", "out-whole") == []


# A folder that holds an earlier run


def test_an_earlier_run_is_moved_aside_whole(verse, folder, capsys):
    for number in range(3):
        train.main(tiny.flags(max_iters=3, seed=number))
    assert [tiny.saved("last.pt", d)["seed"] for d in ("out.1", "out.2", "out")] == [0, 1, 2]
    assert sorted(os.listdir("out.1")) == ["ckpt.pt", "last.pt", "log.jsonl"]
    told = [line for line in capsys.readouterr().out.splitlines() if "earlier run" in line]
    assert len(told) == 2
    assert "in out is now in out.2; " in told[1]
    assert "--init_from=resume" in told[1]
    assert "--overwrite=True" in told[1]


def test_what_is_not_of_the_run_stays_where_it_is(verse, folder):
    train.main(tiny.flags(max_iters=3))
    train.main(tiny.flags(max_iters=3, out_dir="out/other"))
    (folder / "out" / "note.txt").write_text("mine")
    train.main(tiny.flags(max_iters=3))
    assert sorted(os.listdir("out")) == ["ckpt.pt", "last.pt", "log.jsonl", "note.txt", "other"]
    assert sorted(os.listdir("out/other")) == ["ckpt.pt", "last.pt", "log.jsonl"]


@pytest.mark.parametrize("name", ["ckpt.pt", "last.pt", "log.jsonl"])
def test_one_file_of_a_run_is_enough_to_be_kept(verse, folder, name):
    (folder / "out").mkdir()
    (folder / "out" / name).write_text("work of days")
    train.main(tiny.flags(max_iters=1))
    assert (folder / "out.1" / name).read_text() == "work of days"


def test_a_folder_without_a_run_is_used_as_it_is(verse, folder):
    (folder / "out").mkdir()
    (folder / "out" / "note.txt").write_text("mine")
    train.main(tiny.flags(max_iters=1))
    assert (folder / "out" / "note.txt").read_text() == "mine"
    assert not (folder / "out.1").exists()


def test_overwriting_leaves_nothing_of_the_earlier_run(verse, folder):
    train.main(tiny.flags())
    train.main(tiny.flags(overwrite=True, max_iters=1))
    assert not (folder / "out.1").exists()
    assert [tiny.saved(name)["iter_num"] for name in ("ckpt.pt", "last.pt")] == [1, 1]
    assert len(tiny.log_events()) == 4


def test_overwriting_does_not_touch_a_run_that_is_resumed(verse):
    train.main(tiny.flags(max_iters=3))
    train.main(tiny.flags(overwrite=True, init_from="resume"))
    assert [e["step"] for e in tiny.log_events() if e["split"] == "train"] == [0, 1, 2, 3, 4, 5]


def test_behind_a_link_the_folder_itself_is_moved_aside(verse, folder):
    (folder / "disk").mkdir()
    (folder / "out").symlink_to("disk")
    train.main(tiny.flags(max_iters=1))
    train.main(tiny.flags(max_iters=2))
    assert (folder / "out").is_symlink()
    assert [tiny.saved("last.pt", d)["iter_num"] for d in ("disk.1", "disk")] == [1, 2]


@pytest.mark.parametrize("wrong", [{"block_size": 1024}, {"n_layer": 10**9}], ids=str)
def test_a_run_that_cannot_start_moves_nothing(verse, folder, wrong):
    train.main(tiny.flags(max_iters=1))
    with pytest.raises(UserError):
        train.main(tiny.flags(**wrong))
    assert not (folder / "out.1").exists()


@pytest.mark.parametrize("init_from", ["scratch", "resume", "auto"])
def test_a_second_training_in_the_same_folder_is_refused(verse, folder, init_from):
    train.main(tiny.flags(max_iters=1))
    before = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
    with (
        FileLock(folder / "out" / safety.LOCK),
        pytest.raises(UserError, match="another process is writing to out"),
    ):
        train.main(tiny.flags(init_from=init_from))
    (folder / "out" / safety.LOCK).unlink()
    assert {path.name: path.read_bytes() for path in (folder / "out").iterdir()} == before


def test_a_lock_that_a_killed_run_left_holds_nobody_up(verse, folder):
    (folder / "out").mkdir()
    (folder / "out" / safety.LOCK).touch()
    train.main(tiny.flags(max_iters=1))
    assert tiny.saved("last.pt")["iter_num"] == 1


@pytest.mark.parametrize(
    ("init_from", "before"), [("resume", True), ("auto", True), ("auto", False)]
)
def test_a_state_that_another_training_writes_meanwhile_is_seen(
    verse, monkeypatch, init_from, before
):
    train.main(tiny.flags(max_iters=3, out_dir="other"))
    if before:
        train.main(tiny.flags(max_iters=3))
    real = train.make_state

    def slowly(*args):
        Path("out").mkdir(exist_ok=True)
        shutil.copy("other/last.pt", "copy.pt")
        os.replace("copy.pt", "out/last.pt")
        return real(*args)

    monkeypatch.setattr(train, "make_state", slowly)
    with pytest.raises(UserError, match="another training wrote to out just now: start once more"):
        train.main(tiny.flags(init_from=init_from))
    assert not Path("out.1").exists()


# Disks that refuse


class FullDisk(io.FileIO):
    """A file that takes a few bytes, and no more."""

    def write(self, data):
        if self.tell() + len(data) > 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


@pytest.fixture
def disk(monkeypatch):
    """What is True in it is full: "states" or "log"."""
    full = {"states": False, "log": False}

    def opener(kind):
        def open_there(path, mode="r", **options):
            there = io.BufferedWriter(FullDisk(path, mode)) if full[kind] else None
            return there or open(path, mode, **options)

        return open_there

    monkeypatch.setattr(safety, "open", opener("states"), raising=False)
    monkeypatch.setattr(report, "open", opener("log"), raising=False)
    return full


def full_between(monkeypatch, disk, first, last):
    """Make the disk full from before one update to after another."""
    real = train.update

    def update(state, *rest):
        if state.step == first:
            disk.update(states=True, log=True)
        real(state, *rest)
        if state.step == last + 1:
            disk.update(states=False, log=False)

    monkeypatch.setattr(train, "update", update)


def test_a_disk_that_is_full_for_a_while_costs_nothing(verse, monkeypatch, disk, capsys):
    train.main(tiny.flags(out_dir="out-whole", max_iters=9))
    full_between(monkeypatch, disk, 1, 3)
    train.main(tiny.flags(max_iters=9))
    assert tiny.differences("out", "out-whole") == []
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2  # of the log, of the states
    assert all("No space left on device" in line for line in told)


def test_a_best_that_could_not_be_written_is_not_claimed(verse, monkeypatch, disk):
    losses = iter([9.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr(
        train, "evaluate", lambda *_: {"train": 1.0, "val": next(losses), "perplexity": 1.0}
    )
    full_between(monkeypatch, disk, 2, 3)
    train.main(tiny.flags(max_iters=9))
    assert (tiny.saved("ckpt.pt")["iter_num"], tiny.saved("ckpt.pt")["best_val_loss"]) == (6, 2.0)


def test_a_disk_that_is_full_at_the_end_is_an_error_and_leaves_what_was_there(
    verse, monkeypatch, disk
):
    full_between(monkeypatch, disk, 4, 99)
    with pytest.raises(UserError, match=r"cannot write out/ckpt\.pt and out/last\.pt: No space"):
        train.main(tiny.flags())
    assert tiny.saved("last.pt")["iter_num"] == 3
    assert [e["step"] for e in tiny.log_events() if e["split"] == "train"] == [0, 1, 2, 3]
    assert sorted(os.listdir("out")) == ["ckpt.pt", "last.pt", "log.jsonl"]


def test_a_disk_that_is_full_at_the_start_stops_before_the_first_step(verse, monkeypatch, disk):
    disk["states"] = True
    monkeypatch.setattr(train, "gradient", None)
    with pytest.raises(UserError, match=r"cannot write out/ckpt\.pt and out/last\.pt: No space"):
        train.main(tiny.flags())


def test_a_folder_that_vanishes_is_told_and_used_when_it_is_back(verse, monkeypatch, capsys):
    train.main(tiny.flags(out_dir="out-whole", max_iters=9))
    after_calls(monkeypatch, train, "update", 2, lambda: os.rename("out", "away"))
    after_calls(monkeypatch, train, "update", 5, lambda: os.rename("away", "out"))
    train.main(tiny.flags(max_iters=9))
    assert tiny.differences("out", "out-whole") == []
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2  # of the log, of the states
    assert all("cannot write to out: No such file or directory; training" in line for line in told)


def test_a_folder_that_stays_away_is_an_error(verse, monkeypatch):
    after_calls(monkeypatch, train, "update", 4, lambda: os.rename("out", "away"))
    with pytest.raises(UserError, match="cannot write to out: No such file"):
        train.main(tiny.flags())
    assert tiny.saved("last.pt", "away")["iter_num"] == 3


def test_a_folder_that_another_training_took_over_is_not_written_to(verse, monkeypatch):
    def take_over():
        os.rename("out", "away")
        shutil.copytree("other", "out")

    train.main(tiny.flags(out_dir="other", seed=5))
    after_calls(monkeypatch, train, "update", 2, take_over)
    with pytest.raises(UserError, match="out is another folder than at the start"):
        train.main(tiny.flags())
    assert tiny.differences("out", "other") == []


def test_states_are_saved_where_the_log_alone_is_refused(verse, monkeypatch, disk):
    disk["log"] = True
    with pytest.raises(UserError, match=r"cannot write out/log\.jsonl: No space"):
        train.main(tiny.flags())
    assert tiny.saved("last.pt")["iter_num"] == 6


# Training that goes wrong


@pytest.mark.parametrize("interval", [1, 3])
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_state(verse, interval):
    with pytest.raises(UserError) as caught:
        train.main(tiny.flags(learning_rate=1e30, warmup_iters=0, eval_interval=interval))
    assert re.search(
        r"wrong at step \d: (train )?loss (nan|inf) .*, learning rate 9.4e\+29; nothing of it",
        str(caught.value),
    )
    assert tiny.saved("last.pt")["iter_num"] == 0
    finite = [tensor.isfinite().all() for tensor in tiny.saved("last.pt")["model"].values()]
    assert all(finite)


def test_between_evaluations_only_weights_with_a_finite_gradient_are_saved(verse):
    with pytest.raises(UserError, match="training went wrong at step 1"):
        train.main(tiny.flags(learning_rate=1e30, warmup_iters=0, checkpoint_interval=1))
    train.main(tiny.flags(init_from="resume"))
    assert tiny.saved("last.pt")["iter_num"] == 6


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("log_interval", [1, 100])
def test_nothing_is_saved_of_a_step_gone_wrong_nor_after_it(
    verse, monkeypatch, where, log_interval
):
    real, steps = train.make_state, iter(range(100))

    def with_a_wrong_step(*args):
        state = real(*args)
        scale = lambda x: x * (math.inf if next(steps) == 4 else 1)  # noqa: E731
        if where == "loss":
            state.model.lm_head.register_forward_hook(
                lambda *a: scale(a[2]) if a[0].training else None
            )
        else:
            state.model.lm_head.weight.register_hook(scale)
        return state

    monkeypatch.setattr(train, "make_state", with_a_wrong_step)
    flags = tiny.flags(max_iters=9, eval_interval=6, checkpoint_interval=2)
    with pytest.raises(UserError, match=r"step 4: loss .* gradient norm (nan|inf), learning"):
        train.main([*flags, f"--log_interval={log_interval}"])
    assert tiny.saved("last.pt")["iter_num"] == 2
    assert all(math.isfinite(e["loss"]) for e in tiny.log_events()[1:])


def test_a_run_that_is_stopped_after_a_step_gone_wrong_keeps_what_was_saved(verse, monkeypatch):
    real = train.update

    def update(state, *rest):
        real(state, *rest)
        if state.step == 2:
            state.went_wrong[0] = 1
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(train, "update", update)
    with pytest.raises(UserError, match="training went wrong at step 0"):
        train.main(tiny.flags(log_interval=100))
    assert tiny.saved("last.pt")["iter_num"] == 0


def test_an_evaluation_that_is_not_finite_stops_the_run_before_it_is_saved(verse, monkeypatch):
    losses = iter([3.0, math.nan])
    monkeypatch.setattr(
        train, "evaluate", lambda *_: {"train": 1.0, "val": next(losses), "perplexity": 1.0}
    )
    with pytest.raises(
        UserError, match="training went wrong at step 3: train loss 1 and val loss nan"
    ):
        train.main(tiny.flags())
    assert tiny.saved("last.pt")["iter_num"] == 0


def test_steps_that_the_scaler_skips_do_not_stop_a_float16_run(verse, monkeypatch):
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(
        torch.amp, "GradScaler", lambda *a, **k: scaler(*a, **k, init_scale=2.0**40)
    )
    train.main(tiny.flags(dtype="float16", max_iters=40, eval_interval=40))
    events = [e for e in tiny.log_events() if e["split"] == "train"]
    skipped = [e["grad_norm"] is None for e in events]
    assert skipped[0]
    assert not skipped[-1]
    assert tiny.saved("last.pt")["scaler"]["scale"] < 2.0**40
    assert "Infinity" not in Path("out/log.jsonl").read_text()


def test_a_float16_gradient_that_is_infinite_at_scale_1_stops_the_run(verse, monkeypatch):
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *a, **k: scaler(*a, **k, init_scale=1.0))
    real = train.make_state

    def with_a_wrong_gradient(*args):
        state = real(*args)
        state.model.lm_head.weight.register_hook(lambda grad: grad * math.inf)
        return state

    monkeypatch.setattr(train, "make_state", with_a_wrong_gradient)
    with pytest.raises(UserError, match="training went wrong at step 0"):
        train.main(tiny.flags(dtype="float16"))


def test_the_gradient_norm_is_in_the_log(verse):
    train.main(tiny.flags(max_iters=2))
    norms = [e["grad_norm"] for e in tiny.log_events() if e["split"] == "train"]
    assert all(0 < norm < 100 for norm in norms)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_lack_of_memory_names_the_batches_that_train_alike(verse, monkeypatch, error):
    def gradient(*_):
        raise error

    monkeypatch.setattr(train, "gradient", gradient)
    with pytest.raises(UserError) as caught:
        train.main(tiny.flags(batch_size=15, gradient_accumulation_steps=2, eval_iters=7))
    for words in (
        "cpu is out of memory",
        "--batch_size=5 --gradient_accumulation_steps=6",
        "--eval_iters=21",
        "--block_size",
    ):
        assert words in str(caught.value)


def test_lack_of_memory_while_loading_is_not_called_damage(verse, monkeypatch):
    train.main(tiny.flags(max_iters=3))

    def load(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(UserError, match="cpu is out of memory: --batch_size=2"):
        train.main(tiny.flags(init_from="resume"))


def test_lack_of_memory_while_compiling_leaves_an_earlier_run_in_its_place(verse, monkeypatch):
    train.main(tiny.flags(max_iters=3))

    def compile(_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch, "compile", compile)
    with pytest.raises(UserError, match="cpu is out of memory"):
        train.main(tiny.flags(compile=True))
    assert tiny.saved("last.pt")["iter_num"] == 3


def test_a_batch_of_one_is_not_made_smaller():
    advice = train.less_memory(tiny.settings(batch_size=1))
    assert "batch_size=" not in advice
    assert "--n_layer" in advice


def test_other_errors_keep_their_traceback(verse, monkeypatch):
    def gradient(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(train, "gradient", gradient)
    with pytest.raises(RuntimeError, match="a bug"):
        train.main(tiny.flags())


def test_a_model_that_cannot_fit_is_refused_before_it_is_built(verse):
    with pytest.raises(
        UserError, match=r"more than [\d,]+ GiB of memory, and cpu has [\d,]+: lower"
    ):
        train.main(tiny.flags(n_layer=10**9))


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells it so")
def test_memory_does_not_grow_with_the_steps(verse, monkeypatch):
    real, resident = train.is_due, {}

    def watched(state, interval):
        if interval == 2000 and state.step % interval == 0:
            resident[state.step] = resident_bytes()
        return real(state, interval)

    monkeypatch.setattr(train, "is_due", watched)
    train.main(tiny.flags(max_iters=20_001, eval_interval=2000, eval_iters=2, log_interval=10))
    print({step: f"{size / 2**20:.1f} MiB" for step, size in resident.items()})
    assert resident[20_000] - resident[2000] < 2**22  # 233 bytes a step


# A GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_on_a_gpu_a_run_that_was_stopped_ends_as_one_that_never_was(verse, dtype):
    settings = {"device": "cuda", "dtype": dtype, "dropout": 0.3, "max_iters": 9}
    train.main(tiny.flags(out_dir="out-whole", **settings))
    for calls in (2, 3):
        interrupted(*tiny.flags(init_from="auto", **settings), calls=calls)
    train.main(tiny.flags(init_from="auto", **settings))
    mine, theirs = tiny.saved("last.pt"), tiny.saved("last.pt", "out-whole")
    assert mine["scaler"] == theirs["scaler"]
    for name, tensor in mine["model"].items():  # atomic additions are in no fixed order there
        assert torch.allclose(tensor, theirs["model"][name], atol=1e-5), name


# The log


def test_lines_that_are_not_the_logs_own_stay(folder):
    lines = ["not JSON\n", "[1]\n", '{"step": 9}\n', '{"step": "x", "split": "val"}\n']
    events = [{"step": step, "split": "train"} for step in range(4)]
    text = "".join(lines) + "".join(json.dumps(event) + "\n" for event in events)
    Path("log.jsonl").write_text(text + '{"step": 4, "split": "tr')
    report.Log("log.jsonl").cut(2, 0, {})
    assert Path("log.jsonl").read_text() == text[: text.index('{"step": 2')]


@pytest.mark.parametrize(("saved", "stay"), [(0.1, 0), (0.2, 1), (0.3, 2), (0.4, 3), (0.5, 0)])
def test_changes_stay_in_the_log_up_to_the_last_that_was_saved(folder, saved, stay):
    pairs = [(0.1, 0.2), (0.2, 0.3), (0.3, 0.4)]
    events = [{"step": 2, "split": "resume", "changed": {"learning_rate": pair}} for pair in pairs]
    Path("log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    report.Log("log.jsonl").cut(2, 0, {"learning_rate": saved})
    assert len(tiny.log_events(".")) == stay


def test_a_log_that_needs_no_cut_is_not_written_again(folder):
    Path("log.jsonl").write_text('{"step": 1, "split": "train"}\n')
    before = ckpt.stamp_of("log.jsonl")
    report.Log("log.jsonl").cut(2, 0, {})
    assert ckpt.stamp_of("log.jsonl") == before
