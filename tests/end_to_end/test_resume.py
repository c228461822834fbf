"""Runs that are stopped, resumed, refused by the disk, or find an earlier run in their folder."""

import errno
import os
import re
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from filelock import FileLock

import sample
import train
from folio.cli.errors import UserError
from folio.cli.files import LOCK_FILE, lock_folder
from folio.cli.process import SIGPIPE, Interrupted
from folio.training import evaluation, run_log

RUN_FILES = ["ckpt.pt", "last.pt", "log.jsonl"]
COPY_OTHER = partial(shutil.copy, "out-other/ckpt.pt")
LIMIT = 10_000  # bytes, more than a log and less than a checkpoint has


def after_calls(monkeypatch, name, number, act):
    """Makes `act()` run when a run has called a function `number` times."""
    module = train if hasattr(train, name) else evaluation
    real, calls = getattr(module, name), []

    def wrapped(*args, **kwargs):
        result = real(*args, **kwargs)
        calls.append(name)
        if len(calls) == number:
            act()
        return result

    monkeypatch.setattr(module, name, wrapped)


def interrupted(*flags, number=signal.SIGTERM, name="train_step", calls=1):
    """Trains until a signal arrives after so many calls of a function of train.py."""
    with pytest.MonkeyPatch.context() as patch:
        after_calls(patch, name, calls, lambda: os.kill(os.getpid(), number))
        with pytest.raises(Interrupted) as caught:
            train.main(list(flags))
    return caught.value


def run_files(folder="out"):
    return sorted(set(os.listdir(folder)) - {LOCK_FILE})


def assert_resumed_run_equals_uninterrupted_one(**settings):
    train.main(tiny.flags(init_from="resume", **settings))
    train.main(tiny.flags(out_dir="out-whole", **settings))
    assert tiny.differences("out", "out-whole") == []


# Exact resume


@pytest.mark.parametrize(
    "settings",
    [
        {"dropout": 0.3, "dtype": "bfloat16", "gradient_accumulation_steps": 2},
        {"dtype": "float16", "grad_clip": 0.0},
        {"optimizer": "muon", **tiny.SWITCHES, "n_layer": 2, "dropout": 0.3},
        {"eval_interval": 4, "checkpoint_interval": 2, "log_interval": 2},
        {"eval_interval": 5, "always_save_checkpoint": True},
    ],
    ids=str,
)
def test_resume_equals_uninterrupted_run(verse, settings):
    settings = {"max_iters": 7} | settings
    flags = tiny.flags(init_from="auto", **settings)
    train.main([*flags, "--stop_at=2"])
    interrupted(*flags, name="split_loss", calls=1)  # in an evaluation
    while tiny.load("last.pt")["iter_num"] < 7:
        interrupted(*flags, calls=1)
    assert_resumed_run_equals_uninterrupted_one(**settings)  # it makes the last evaluation


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_resume_on_a_gpu_is_close_to_uninterrupted_run(verse, dtype):
    settings = {"device": "cuda", "dtype": dtype, "dropout": 0.3, "max_iters": 9}
    train.main(tiny.flags(out_dir="out-whole", **settings))
    interrupted(*tiny.flags(**settings), calls=5)
    train.main(tiny.flags(init_from="resume", **settings))
    resumed, whole = tiny.load("last.pt"), tiny.load("last.pt", "out-whole")
    assert resumed["scaler"] == whole["scaler"]
    # Atomic additions have no fixed order.
    torch.testing.assert_close(resumed["model"], whole["model"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("stop_at", "file"), [(2, "last.pt at step 1"), (4, "ckpt.pt at step 3")])
def test_a_killed_run_resumes_from_the_file_file_and_a_longer_log(verse, capsys, stop_at, file):
    """It can be killed before it links last.pt to ckpt.pt. The log has no line twice."""
    train.main(tiny.flags(stop_at=1))
    shutil.copy("out/last.pt", "kept.pt")
    train.main(tiny.flags(stop_at=stop_at, init_from="resume"))
    os.replace("kept.pt", "out/last.pt")
    with open("out/log.jsonl", "a") as log:
        log.write('{"step": 5, "spl')
    assert_resumed_run_equals_uninterrupted_one()
    assert f"resumed out/{file}" in capsys.readouterr().out


def test_a_best_model_that_is_later_than_last_pt_is_kept_with_its_loss(verse, monkeypatch):
    tiny.fake_losses(monkeypatch, 2.0, 1.0, 1.5, 1.4)  # at 0, 3, 6 and at the end
    train.main(tiny.flags(eval_iters=None, stop_at=2))
    shutil.copy("out/last.pt", "kept.pt")
    train.main(tiny.flags(eval_iters=None, stop_at=4, init_from="resume"))
    os.replace("kept.pt", "out/last.pt")
    train.main(tiny.flags(eval_iters=None, init_from="resume", learning_rate=0.02))
    assert tiny.load("ckpt.pt")["iter_num"] == 3
    assert tiny.load("last.pt")["best_val_loss"] == 1.0
    assert tiny.log_events()[-1]["loss"] == 1.4  # of step 3


@pytest.mark.parametrize("steps", [2, 9])  # with a log that is shorter and longer than ckpt.pt's
def test_a_copied_checkpoint_begins_a_log_without_repeated_steps(verse, monkeypatch, steps):
    train.main(tiny.flags(stop_at=4))
    Path("out-copy").mkdir()
    shutil.copy("out/ckpt.pt", "out-copy")
    flags = tiny.flags(out_dir="out-copy", init_from="resume", max_iters=30, eval_interval=20)
    with monkeypatch.context() as patch:
        after_calls(patch, "train_step", steps, lambda: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception, match="killed"):
            train.main(flags)
    train.main(flags)
    trained = [e["step"] for e in tiny.log_events("out-copy") if e["event"] == "train"]
    assert trained == list(range(3, 30))


def test_an_evaluation_that_was_made_up_is_the_newest_state_after_a_kill(verse):
    settings = {"always_save_checkpoint": True, "learning_rate": 1.0, "decay_lr": False}
    interrupted(*tiny.flags(**settings), name="split_loss", calls=2 * 2 + 1)  # at step 6
    shutil.copy("out/last.pt", "kept.pt")
    train.main(tiny.flags(**settings, init_from="resume"))
    os.replace("kept.pt", "out/last.pt")  # killed before it was linked to ckpt.pt
    assert tiny.load("ckpt.pt")["best_step"] == 0
    train.main(tiny.flags(**settings, init_from="resume"))
    assert tiny.load("ckpt.pt")["best_step"] == 0


def test_a_run_stopped_in_its_first_evaluation_makes_it_when_resumed(verse, capsys):
    stop = interrupted(*tiny.flags(), name="split_loss", calls=1)
    assert "stopped at step 0, saved in out; to continue" in str(stop)
    assert_resumed_run_equals_uninterrupted_one()
    assert "evaluating again" not in capsys.readouterr().out


def test_an_interrupted_final_evaluation_is_made_up(verse, capsys):
    flags = tiny.flags(eval_iters=None)
    train.main([*flags, "--out_dir=out-whole"])
    stop = interrupted(*flags, name="split_loss", calls=2 * 3 + 1)  # after three evaluations
    assert "stopped at step 6, saved in out; to continue" in str(stop)
    for _ in range(2):  # a finished run is evaluated again
        train.main([*flags, "--init_from=resume"])
        assert tiny.differences("out", "out-whole") == []
        interrupted(*flags, "--init_from=resume", name="split_loss")
        assert tiny.log_events()[-1]["event"] == "final"
        assert "finished at step 6; to train longer, increase --max_" in capsys.readouterr().out


def test_a_run_that_has_kept_the_newest_model_can_keep_the_best_from_now_on(verse, monkeypatch):
    tiny.fake_losses(monkeypatch, 2.0, 1.0, 3.0, 2.5, 2.7, 2.6)  # at 0, 3, 6; 6, 9 and at the end
    train.main(tiny.flags(eval_iters=None, always_save_checkpoint=True))
    train.main(tiny.flags(eval_iters=None, max_iters=9, init_from="resume"))
    assert tiny.load("ckpt.pt")["iter_num"] == 6
    assert tiny.log_events()[-1]["loss"] == 2.6


@pytest.mark.parametrize("change", [os.unlink, COPY_OTHER])
def test_a_best_model_of_another_run_is_not_evaluated(verse, monkeypatch, change):
    train.main(tiny.flags(out_dir="out-other", max_iters=1))
    tiny.fake_losses(monkeypatch, 2.0, 1.0, 3.0)
    after_calls(monkeypatch, "evaluate", 3, lambda: change("out/ckpt.pt"))
    with pytest.raises(UserError, match=r"^resume the run .*out/ckpt\.pt"):
        train.main(tiny.flags(eval_iters=None))


@pytest.mark.parametrize("change", [os.unlink, COPY_OTHER])
def test_a_finished_run_has_its_newest_model_again_after_a_resume(verse, change):
    train.main(tiny.flags(out_dir="out-other", max_iters=1))
    train.main(tiny.flags(always_save_checkpoint=True))
    change("out/ckpt.pt")
    train.main(tiny.flags(always_save_checkpoint=True, init_from="resume"))
    assert tiny.load("ckpt.pt")["iter_num"] == 6


def test_a_best_model_that_was_kept_before_a_kill_stays(verse, monkeypatch):
    tiny.fake_losses(monkeypatch, 2.0, 1.0, 1.5, 1.6, 1.7)  # at 0, 3, 6, 6 again and 9
    train.main(tiny.flags())
    best = tiny.contents("out")["ckpt.pt"]
    shutil.copy("out/last.pt", "kept.pt")
    train.main(tiny.flags(init_from="resume", always_save_checkpoint=True))
    os.replace("kept.pt", "out/last.pt")  # killed before it was linked to ckpt.pt
    train.main(tiny.flags(init_from="resume", always_save_checkpoint=True, max_iters=9))
    assert tiny.contents("out")["ckpt-3.pt"] == best


@pytest.mark.parametrize("flags", [{"stop_at": 7}, {}, {"patience": 2, "max_iters": 30}])
def test_a_run_that_keeps_the_newest_model_from_now_on_keeps_its_best_so_far(
    verse, monkeypatch, flags
):
    tiny.fake_losses(monkeypatch, 2.0, 1.0, 1.5, 1.6, 1.7, 1.8)  # at 0, 3, …
    train.main(tiny.flags(**{"max_iters": 9} | flags))
    best = tiny.contents("out")["ckpt.pt"]
    settings = {"max_iters": 9} | flags | {"stop_at": None, "always_save_checkpoint": True}
    train.main(tiny.flags(init_from="resume", **settings))
    assert tiny.contents("out")["ckpt-3.pt"] == best
    progress = tiny.load("ckpt.pt")
    assert (progress["iter_num"], progress["best_val_loss"]) == (9, 1.0)


def test_a_run_without_its_best_model_begins_the_comparison_again(verse, capsys):
    train.main(tiny.flags(out_dir="out-other", max_iters=1))
    train.main(tiny.flags(eval_iters=None, stop_at=4, eval_interval=2))
    for remove in (os.unlink, partial(os.truncate, length=99), COPY_OTHER):
        shutil.copytree("out", "out-copy")
        remove("out-copy/ckpt.pt")
        train.main(tiny.flags(eval_iters=None, out_dir="out-copy", init_from="resume"))
        assert re.search("^evaluating again: .*out-copy/ckpt.pt", capsys.readouterr().out, re.M)
        assert tiny.log_events("out-copy")[-1]["event"] == "final"
        shutil.rmtree("out-copy")


def test_a_best_model_that_cannot_be_read_is_not_replaced(verse):
    train.main(tiny.flags(stop_at=4))
    Path("out/ckpt.pt").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    before = tiny.contents("out")
    with pytest.raises(UserError, match="out/ckpt.pt is a Git LFS pointer"):
        train.main(tiny.flags(init_from="resume"))
    assert tiny.contents("out") == before


@pytest.mark.parametrize(("eval_iters", "best_step"), [(2, 9), (4, 3)])
def test_other_validation_windows_begin_the_comparison_again(
    verse, monkeypatch, eval_iters, best_step
):
    tiny.fake_losses(monkeypatch, 2.0, 1.0, 1.5, 2.9)
    train.main(tiny.flags(eval_iters=2))  # windows: 8 at first, 4 or 8 then
    best = tiny.contents("out")["ckpt.pt"]
    train.main(tiny.flags(max_iters=9, init_from="resume", batch_size=2, eval_iters=eval_iters))
    assert tiny.load("ckpt.pt")["iter_num"] == best_step
    assert tiny.contents("out").get("ckpt-3.pt", best) == best
    assert Path("out/ckpt-3.pt").exists() == (best_step != 3)


def test_a_run_that_patience_has_ended_is_not_evaluated_over_other_windows(verse, monkeypatch):
    tiny.fake_losses(monkeypatch, 2.0, 1.0, 1.5, 1.6)  # at 0, 3, 6 and 9
    train.main(tiny.flags(max_iters=30, patience=2))
    best = tiny.contents("out")["ckpt.pt"]
    flags = tiny.flags(max_iters=30, patience=2, batch_size=2, minutes=0.0001)
    train.main([*flags, "--init_from=resume"])
    assert tiny.contents("out")["ckpt.pt"] == best


def test_a_run_of_an_earlier_release_keeps_its_best_model(verse, monkeypatch):
    tiny.fake_losses(monkeypatch, 2.0, 1.0, 1.5, 1.4)
    train.main(tiny.flags())
    for name in ("ckpt.pt", "last.pt"):
        content = tiny.load(name)
        del content["val_windows"]
        torch.save(content, f"out/{name}")
    train.main(tiny.flags(max_iters=9, init_from="resume"))
    assert tiny.load("ckpt.pt")["iter_num"] == 3


def test_a_finished_run_that_is_resumed_keeps_its_log(verse):
    train.main(tiny.flags(eval_iters=None))
    before = tiny.log_events()
    train.main(tiny.flags(eval_iters=1, init_from="resume"))
    assert tiny.log_events() == before


def test_the_log_of_a_finished_run_has_no_steps_that_were_not_saved(verse, monkeypatch):
    train.main(tiny.flags())
    before = tiny.log_events()
    with monkeypatch.context() as patch:
        after_calls(patch, "train_step", 2, lambda: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception, match="killed"):
            train.main(tiny.flags(max_iters=30, init_from="resume"))
    train.main(tiny.flags(init_from="resume"))
    assert tiny.log_events() == before


def test_a_run_beyond_a_new_max_iters_ends_with_an_evaluation_of_its_step(verse):
    train.main(tiny.flags(stop_at=4))
    train.main(tiny.flags(max_iters=3, init_from="resume"))
    last = tiny.log_events()[-2:]
    assert [(event["event"], event["step"]) for event in last] == [("resume", 4), ("val", 4)]


def test_bits_per_byte_at_the_end_are_of_the_windows_of_the_loss(folder, capsys):
    tiny.prepare_verse(text="ä" * 3600 + "ab" * 180)  # of 2 bytes, and of 1 at the end
    for changes in ({"eval_iters": 2}, {"eval_iters": 60, "init_from": "resume"}):
        train.main(tiny.flags(**changes))
    first, second = re.findall("^done; (.*)$", capsys.readouterr().out, re.M)
    assert first == second


def test_a_finished_run_keeps_its_best_model_whatever_is_evaluated(verse, capsys):
    train.main(tiny.flags())
    before = tiny.contents("out")
    train.main(tiny.flags(init_from="resume", batch_size=2, eval_only=True))
    assert tiny.contents("out") == before
    train.main(tiny.flags(init_from="resume", batch_size=2))
    assert "evaluating again" not in capsys.readouterr().out
    after = tiny.contents("out")
    assert [after[name] for name in ("ckpt.pt", "last.pt")] == [before["ckpt.pt"]] * 2


# Changed settings


def test_settings_may_change_and_changes_are_logged_once(verse, capsys):
    train.main(tiny.flags(max_iters=3))
    tiny.prepare_verse("sonnet")  # the same text
    changes = {"eval_interval": 2, "dtype": "bfloat16", "batch_size": 2, "beta2": 0.9, "seed": 5}
    flags = tiny.flags(init_from="resume", dataset="sonnet", **changes)
    train.main([*flags, "--stop_at=4"])
    assert "resumed out/last.pt at step 3; changed: " in capsys.readouterr().out
    train.main(flags)
    assert tiny.load("last.pt")["iter_num"] == 6
    [logged] = [event["changed"] for event in tiny.log_events() if event["event"] == "resume"]
    assert logged.keys() > changes.keys()
    assert logged["max_iters"] == [3, 6]
    assert tiny.log_events()[-1]["tokens"] == 3 * 4 * 8 + 3 * 2 * 8


def test_a_run_beyond_the_new_max_iters_is_evaluated_and_ends(verse, capsys):
    train.main(tiny.flags(stop_at=5))
    train.main(tiny.flags(init_from="resume", max_iters=4))
    assert (
        "\nfinished at step 5; to train longer, increase --max_iters\n" in capsys.readouterr().out
    )
    assert (tiny.log_events()[-1]["step"], tiny.log_events()[-1]["event"]) == (5, "val")


def test_every_difference_is_named_and_nothing_is_written(verse):
    train.main(tiny.flags(max_iters=3))
    before = tiny.contents("out")
    tiny.prepare_verse("other", (tiny.VERSE * 20).replace("S", "Z"))
    changes = {"dataset": "other", "n_embd": 32, "bias": True, "optimizer": "muon"}
    with pytest.raises(UserError) as caught:
        train.main(tiny.flags(init_from="resume", **changes))
    for words in (
        "n_embd is 16 in the checkpoint and 32",
        "bias is False",
        "optimizer is adamw",
        "tokenizer is char with 24 tokens in the checkpoint and a different char",
        "dataset other has different content from verse",
    ):
        assert words in str(caught.value)
    assert tiny.contents("out") == before


# Stop signals


@pytest.mark.parametrize(
    ("number", "stop_at"), [(signal.SIGINT, None), (signal.SIGHUP, None), (signal.SIGTERM, 5)]
)
def test_a_signal_during_a_step_discards_it_and_saves_the_state(verse, number, stop_at):
    settings = {"gradient_accumulation_steps": 4, "dropout": 0.3}
    with pytest.MonkeyPatch.context() as patch:  # once per micro-batch
        after_calls(patch, "set_gradient_sync", 2 * 4 + 3, lambda: pytest.fail("too late"))
        flags = tiny.flags(stop_at=stop_at, **settings)
        stop = interrupted(*flags, number=number, name="set_gradient_sync", calls=2 * 4 + 2)
    assert stop.number == number
    assert tiny.load("last.pt")["iter_num"] == 2
    assert "stopped at step 2, saved in out; to continue" in str(stop)
    assert_resumed_run_equals_uninterrupted_one(**settings)


def test_stopping_at_the_last_step_ends_the_run_and_a_signal_counts_more(verse, capsys):
    assert interrupted(*tiny.flags(stop_at=2), calls=2).number == signal.SIGTERM
    train.main(tiny.flags(max_iters=3, stop_at=3))
    assert capsys.readouterr().out.splitlines()[-1].startswith("generate text: ")


@pytest.mark.parametrize("number", [None, signal.SIGINT])  # Ctrl-C ends a reader, too
def test_run_stops_and_is_saved_if_the_reader_of_its_output_exits(verse, number):
    def write(text, **_):
        if text.startswith("iter 4"):
            if number:
                os.kill(os.getpid(), number)
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_log.tqdm, "write", write)
        with pytest.raises(Interrupted, match="stopped at step 5, saved in out") as caught:
            train.main(tiny.flags())
    assert caught.value.number == (number or SIGPIPE)
    assert tiny.load("last.pt")["iter_num"] == 5
    assert_resumed_run_equals_uninterrupted_one()


# A folder that contains an earlier run


def test_earlier_run_is_moved_aside_whole(verse, capsys):
    Path("disk").mkdir()
    Path("out").symlink_to("disk")
    Path("out/note.txt").write_text("mine")
    for number in range(3):
        train.main(tiny.flags(max_iters=1, seed=number))
    folders = ("disk.1", "disk.2", "out")
    seeds = [tiny.load("last.pt", name)["config"]["seed"] for name in folders]
    assert seeds == [0, 1, 2]
    assert run_files("disk.1") == RUN_FILES
    assert run_files("out") == [*RUN_FILES, "note.txt"]
    assert "moved the earlier run in out to disk.2" in capsys.readouterr().out


def test_overwriting_deletes_an_earlier_run_unless_it_is_resumed(verse):
    train.main(tiny.flags())
    train.main(tiny.flags(overwrite=True, max_iters=1))
    assert not Path("out.1").exists()
    assert [tiny.load(name)["iter_num"] for name in ("ckpt.pt", "last.pt")] == [1, 1]
    assert len(tiny.log_events()) == 4
    train.main(tiny.flags(overwrite=True, init_from="resume", max_iters=2))
    assert len(tiny.log_events()) == 7


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_kill_while_an_earlier_run_is_removed_does_not_make_it_the_new_one(
    verse, monkeypatch, overwrite
):
    train.main(tiny.flags(max_iters=3))
    name, remove = ("unlink", Path.unlink) if overwrite else ("move", shutil.move)

    def kill_after_one(path, *args, **kwargs):
        remove(path, *args, **kwargs)
        if path.name == "ckpt.pt":
            raise KeyboardInterrupt  # in place of SIGKILL

    with monkeypatch.context() as patch:
        patch.setattr(Path if overwrite else shutil, name, kill_after_one)
        with pytest.raises(KeyboardInterrupt):
            train.main(tiny.flags(seed=5, overwrite=overwrite))
    with pytest.raises(UserError, match=r"rest of a run .* or delete out/\.replacing to resume"):
        train.main(tiny.flags(seed=5, init_from="resume"))
    train.main(tiny.flags(seed=5, init_from="auto", overwrite=overwrite))
    assert run_files() == RUN_FILES
    assert tiny.log_events()[0]["settings"]["seed"] == 5
    assert [event["step"] for event in tiny.log_events() if event["event"] == "val"] == [0, 3, 6]


def test_an_earlier_run_that_cannot_be_moved_remains(verse, monkeypatch):
    train.main(tiny.flags(stop_at=3))
    monkeypatch.setattr("folio.cli.files.count", lambda _: ["x/1"])  # in a missing folder
    with pytest.raises(UserError, match="cannot create .*No such file"):
        train.main(tiny.flags())
    train.main(tiny.flags(init_from="resume"))
    assert tiny.load("last.pt")["iter_num"] == 6


def test_a_folder_in_use_is_not_changed(verse):
    train.main(tiny.flags(max_iters=1))
    before = tiny.contents("out")
    in_use = pytest.raises(UserError, match="another process is writing to out")
    for init_from in ("scratch", "resume"):
        with FileLock(Path("out", LOCK_FILE)), in_use:
            train.main(tiny.flags(init_from=init_from))
    assert tiny.contents("out") == before
    assert not Path("out.1").exists()


def test_a_checkpoint_is_read_while_the_folder_is_locked(verse, monkeypatch):
    train.main(tiny.flags(stop_at=1))

    def check(settings):
        with pytest.raises(UserError, match="another process is writing to out"):
            lock_folder("out").__enter__()
        return load_start(settings)

    load_start = train.load_start
    monkeypatch.setattr(train, "load_start", check)
    train.main(tiny.flags(init_from="resume"))
    assert tiny.load("last.pt")["iter_num"] == 6


# Checkpoints of several steps


def test_the_weights_of_each_evaluation_are_kept_while_their_run_is(verse, capsys):
    interrupted(*tiny.flags(keep_checkpoints=True), calls=4)
    train.main(tiny.flags(keep_checkpoints=True, init_from="resume"))
    assert run_files() == ["ckpt-0.pt", "ckpt-3.pt", "ckpt-6.pt", *RUN_FILES]
    kept = tiny.load("ckpt-3.pt")
    assert (kept["iter_num"], kept["optimizer"]) == (3, None)
    sample.main(["--init_from=out/ckpt-3.pt", "--device=cpu", "--max_new_tokens=3"])
    assert capsys.readouterr().err.startswith("out/ckpt-3.pt: step 3")
    [loss] = [e["loss"] for e in tiny.log_events() if (e["step"], e["event"]) == (3, "val")]
    Path("out/ckpt-mine.pt").touch()
    train.main(tiny.flags(init_from="out/ckpt-3.pt", keep_checkpoints=True, max_iters=1))
    assert tiny.log_events()[1]["loss"] == loss
    assert run_files("out.1") == ["ckpt-0.pt", "ckpt-3.pt", "ckpt-6.pt", *RUN_FILES]
    train.main(tiny.flags(init_from="out/ckpt-1.pt", overwrite=True, max_iters=1))
    assert run_files() == ["ckpt-mine.pt", *RUN_FILES]


# Full disks


def test_a_full_disk_ends_a_run_that_can_be_resumed(verse, limit_files):
    limit_files(LIMIT)
    with pytest.raises(UserError, match=r"cannot write out/ckpt\.pt"):
        train.main(tiny.flags())
    assert run_files() == ["log.jsonl"]
    limit_files(-1)
    with pytest.MonkeyPatch.context() as patch:
        after_calls(patch, "train_step", 5, lambda: limit_files(LIMIT))
        with pytest.raises(UserError, match=r"cannot write out/(ckpt|last)\.pt"):
            train.main(tiny.flags())
    limit_files(-1)
    assert_resumed_run_equals_uninterrupted_one()
