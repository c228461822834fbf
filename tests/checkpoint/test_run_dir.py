"""RunDir: which checkpoint is loaded, and what is written to the folder."""

import os
from pathlib import Path

import pytest
import tiny

from folio.checkpoint.format import Checkpoint, save_checkpoint
from folio.checkpoint.progress import Progress
from folio.checkpoint.run_dir import RunDir
from folio.cli.errors import UserError

MODEL = tiny.random_model()

pytestmark = pytest.mark.usefixtures("folder")


def checkpoint_at(step=0):
    progress = Progress(step=step, best_val_loss=9.0)
    return Checkpoint(MODEL.config, MODEL.state_dict(), progress, {"dataset": "verse"})


def write(path, step=0):
    Path(path).parent.mkdir(exist_ok=True)
    save_checkpoint(Path(path), checkpoint_at(step))


# Loading


def test_the_error_for_a_missing_checkpoint_lists_the_runs():
    with pytest.raises(UserError, match="^there is no checkpoint out/ckpt.pt; available: none"):
        RunDir("out").load_best()
    for path in ("out-verse/ckpt.pt", "b/ckpt.pt", "c/last.pt"):
        write(path)
    with pytest.raises(UserError, match="available: b, out-verse$"):
        RunDir("out").load_best()


# Saving


def test_last_pt_is_a_link_to_the_best_checkpoint_until_the_next_save():
    run_dir = RunDir("out")
    assert run_dir.load_newest(required=False) is None
    write("out/ckpt.pt", step=0)
    assert run_dir.load_newest().progress.step == 0
    run_dir.save(checkpoint_at(1), best=True)
    assert os.path.samefile(run_dir.best, run_dir.last)
    run_dir.save(checkpoint_at(2), best=False)
    steps = [saved.progress.step for saved in (run_dir.load_best(), run_dir.load_newest())]
    assert steps == [1, 2]
    assert not list(run_dir.folder.glob("*.tmp"))


def test_a_list_of_folders_can_have_runs_of_a_sweep():
    run_dirs = RunDir.parse_list("s/seed=1,n_layer=4,out-a, out-b/, seed=2,n_layer=4")
    folders = ["s/seed=1,n_layer=4", "out-a", "out-b", "seed=2,n_layer=4"]
    assert [str(run_dir.folder) for run_dir in run_dirs] == folders
