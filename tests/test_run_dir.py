"""RunDir: which checkpoint is loaded, what is written to the folder and in which order."""

import errno
import os
from pathlib import Path

import pytest
import tiny

from folio import checkpoint as checkpoints
from folio import run_dir
from folio.checkpoint import Checkpoint, Progress
from folio.errors import UserError
from folio.run_dir import RunDir
from model import GPT, GPTConfig

MODEL = GPT(GPTConfig(**tiny.SHAPE, vocab_size=11))

pytestmark = pytest.mark.usefixtures("folder")


def checkpoint_at(step=0):
    progress = Progress(step=step, best_val_loss=9.0)
    return Checkpoint(MODEL.config, MODEL.state_dict(), progress, {"dataset": "verse"})


def write(folder, *names, step=0):
    Path(folder).mkdir(exist_ok=True)
    for name in names:
        checkpoints.save(Path(folder, name), checkpoint_at(step))


def refuse(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# Loading


@pytest.mark.parametrize(
    ("existing", "name", "hint"),
    [
        ([], "out", "; train a model first: python train.py"),
        (["out/last.pt"], "out", "; last.pt exists, but no best state has been saved yet"),
        (["out-verse/ckpt.pt", "b/ckpt.pt"], "out-vers", "; did you mean out-verse?"),
        (["out-verse/ckpt.pt", "b/ckpt.pt"], "zz", "; available: b, out-verse"),
    ],
)
def test_missing_checkpoint_is_an_error_with_a_hint(existing, name, hint):
    for path in map(Path, existing):
        write(path.parent, path.name)
    with pytest.raises(UserError) as caught:
        RunDir(name).load_best()
    assert str(caught.value).startswith(f"there is no checkpoint {name}/ckpt.pt{hint}")


def test_newest_is_last_pt_or_else_ckpt_pt():
    assert RunDir("out").load_newest(required=False) is None
    write("out", "ckpt.pt", step=1)
    assert RunDir("out").load_newest().progress.step == 1
    write("out", "last.pt", step=2)
    assert RunDir("out").load_newest().progress.step == 2


def test_damaged_last_pt_says_how_to_resume_from_ckpt_pt():
    write("out", "ckpt.pt")
    Path("out/last.pt").write_bytes(b"damaged")
    with pytest.raises(UserError, match="is damaged .*; move out/last.pt away to resume from ckpt"):
        RunDir("out").load_newest()


# Saving


@pytest.mark.parametrize("links", [True, False])
def test_best_checkpoint_is_a_link_or_a_copy(links, monkeypatch):
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    run = RunDir("out")
    with run.locked():
        assert run.save(checkpoint_at(1), best=True) is None
        assert os.path.samefile(run.best, run.last) == links
        assert run.best.read_bytes() == run.last.read_bytes()
        assert run.save(checkpoint_at(2), best=False) is None
    steps = [checkpoints.load(path).progress.step for path in (run.best, run.last)]
    assert steps == [1, 2]
    assert not list(run.folder.glob("*.tmp"))


def test_canceled_save_keeps_the_old_files():
    write("out", "ckpt.pt", "last.pt", step=1)
    run = RunDir("out")
    run.canceled.set()
    for best in (True, False):
        assert "Operation canceled" in str(run.save(checkpoint_at(2), best))
    steps = [checkpoints.load(path).progress.step for path in (run.best, run.last)]
    assert steps == [1, 1]
    assert sorted(os.listdir("out")) == ["ckpt.pt", "last.pt"]


def test_run_resumes_from_ckpt_pt_if_only_last_pt_could_not_be_replaced(monkeypatch):
    write("out", "ckpt.pt", "last.pt", step=1)
    run, real = RunDir("out"), os.replace

    def replace(source, path):
        if Path(path).name == "last.pt":
            refuse()
        real(source, path)

    monkeypatch.setattr(os, "replace", replace)
    assert run.save(checkpoint_at(2), best=True) is None
    steps = [checkpoints.load(path).progress.step for path in (run.best, run.last)]
    assert steps == [2, 1]
    assert run.load_newest().path == run.best


def test_run_continues_from_a_ckpt_pt_that_is_further_along():
    """Such as one that nanoGPT wrote."""
    write("out", "last.pt", step=40)
    write("out", "ckpt.pt", step=600)
    assert RunDir("out").load_newest().progress.step == 600


def test_ckpt_pt_of_another_run_is_not_overwritten():
    Path("out").mkdir()
    for name, step, loss in (("last.pt", 40, 2.0), ("ckpt.pt", 30, 1.0)):
        checkpoint = checkpoint_at(step)
        checkpoint.progress.best_val_loss = loss
        checkpoints.save(Path("out", name), checkpoint)
    with pytest.raises(UserError, match=r"out/ckpt.pt \(step 30\) and out/last.pt \(step 40\) are"):
        RunDir("out").load_newest()


def test_ckpt_pt_that_is_missing_is_written_after_resuming():
    checkpoint = checkpoint_at(40)
    checkpoint.progress.record(1.5)
    Path("out").mkdir()
    checkpoints.save(Path("out", "last.pt"), checkpoint)
    progress = RunDir("out").load_newest().progress
    assert progress.step == 40
    assert progress.needs_evaluation(tiny.settings(max_iters=40))  # also at the end of a run
    assert not progress.is_finished(tiny.settings(max_iters=40, patience=1))
    assert progress.record(9.0)  # is the best


def test_ckpt_pt_that_is_damaged_is_not_replaced():
    write("out", "last.pt", step=40)
    Path("out/ckpt.pt").write_bytes(b"damaged")
    with pytest.raises(UserError, match="ckpt.pt is damaged .*; move out/ckpt.pt away to resume"):
        RunDir("out").load_newest()


def test_temporary_files_of_a_killed_run_are_removed():
    write("out", "ckpt.pt", "last.pt", "ckpt.pt.tmp", "last.pt.tmp")
    run = RunDir("out")
    run.begin(tiny.settings(init_from="resume"), run.load_newest())
    assert sorted(os.listdir("out")) == ["ckpt.pt", "last.pt"]


# The log


def test_event_that_cannot_be_written_is_written_with_a_later_one(monkeypatch):
    Path("out").mkdir()
    run = RunDir("out")
    with monkeypatch.context() as patch:
        patch.setattr(run_dir, "open", refuse, raising=False)
        assert str(run.append({"step": 0})) == "cannot write out/log.jsonl: No space left on device"
    assert run.append({"step": 1}) is None
    assert tiny.log_events() == [{"step": 0}, {"step": 1}]


def test_resuming_truncates_the_log_to_that_of_the_checkpoint():
    Path("out").mkdir()
    run, settings = RunDir("out"), tiny.settings(init_from="resume")
    run.append({"step": 0})
    checkpoint = checkpoint_at(1)
    checkpoint.log_bytes = run.log_size()
    run.save(checkpoint, best=False)
    run.append({"step": 1})
    run.log.write_bytes(run.log.read_bytes()[:-3])  # killed while writing
    run.begin(settings, run.load_newest())
    assert tiny.log_events() == [{"step": 0}]


def test_size_of_the_log_includes_events_that_could_not_be_written_before(monkeypatch):
    Path("out").mkdir()
    run = RunDir("out")
    with monkeypatch.context() as patch:
        patch.setattr(run_dir, "open", refuse, raising=False)
        run.append({"step": 0})
        assert run.log_size() is None
    assert run.log_size() == run.log.stat().st_size == len(b'{"step": 0}\n')


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a POSIX system")
@pytest.mark.parametrize("name", ["ckpt.pt", "last.pt", "log.jsonl"])
def test_pipe_in_place_of_a_file_is_refused(name):
    write("out", "ckpt.pt", "last.pt")
    run = RunDir("out")
    resumed = run.load_newest()
    Path("out", name).unlink(missing_ok=True)
    os.mkfifo(f"out/{name}")

    def use():
        run.begin(tiny.settings(init_from="resume"), resumed)
        RunDir("out").load_best()
        RunDir("out").load_newest()

    with pytest.raises(UserError, match=f"out/{name} is not a regular file"):
        use()


@pytest.mark.parametrize("init_from", ["resume", "auto"])
def test_save_of_another_process_since_loading_is_noticed(init_from):
    write("out", "last.pt")
    run = RunDir("out")
    resumed = run.load_newest()
    write("out", "last.pt", step=1)
    with pytest.raises(UserError, match="another process has just written to out: try again"):
        run.begin(tiny.settings(init_from=init_from), resumed)


# An earlier run in the folder


def test_files_that_cannot_be_moved_are_an_error(monkeypatch):
    write("out", "last.pt")
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(UserError, match="cannot write to out: No space left on device"):
        RunDir("out").begin(tiny.settings())
    assert os.listdir("out") == ["last.pt"]
