"""RunDir: which checkpoint is loaded, and what is written to the folder."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import tiny

from folio.checkpoint.format import Checkpoint, save_checkpoint
from folio.checkpoint.progress import Progress
from folio.checkpoint.run_dir import RunDir
from folio.cli.errors import UserError

MODEL = tiny.random_model()

pytestmark = pytest.mark.usefixtures("folder")


def checkpoint_at(step):
    progress = Progress(step=step, best_val_loss=9.0)
    return Checkpoint(MODEL.config, MODEL.state_dict(), progress, {"dataset": "verse"})


# Loading


def test_the_error_for_a_missing_checkpoint_lists_the_runs():
    with pytest.raises(UserError, match="^there is no checkpoint out/ckpt.pt; available: none"):
        RunDir("out").load_best()
    for path in ("out-verse/ckpt.pt", "b/ckpt.pt", "c/last.pt"):
        Path(path).parent.mkdir()
        Path(path).touch()
    with pytest.raises(UserError, match="available: b, out-verse$"):
        RunDir("out").load_best()


# Saving


def test_last_pt_is_a_link_to_the_best_checkpoint_until_the_next_save():
    run_dir = RunDir("out")
    assert run_dir.load_newest(required=False) is None
    run_dir.folder.mkdir()
    save_checkpoint(run_dir.best, checkpoint_at(0))
    assert run_dir.load_newest().progress.step == 0
    run_dir.save(checkpoint_at(1), best=True)
    assert os.path.samefile(run_dir.best, run_dir.last)
    run_dir.save(checkpoint_at(2), best=False)
    steps = [saved.progress.step for saved in (run_dir.load_best(), run_dir.load_newest())]
    assert steps == [1, 2]
    assert not list(run_dir.folder.glob("*.tmp"))


# Resuming


@pytest.mark.parametrize(("elapsed_s", "num_kept"), [(0.5, 0), (1.0, 2), (2.5, 3), (9.0, 3)])
@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_the_log_of_a_resumed_run_has_whole_earlier_lines_and_links_are_kept(
    elapsed_s, num_kept, link
):
    common = {"event": "final", "step": 1, "tokens": 1, "loss": 1.0}
    events = [common | {"elapsed_s": seconds} for seconds in (1.0, 2.5)]
    lines = [json.dumps(events[0]), "of another program", json.dumps(events[1]), "{"]
    content = "\n".join(lines).encode()
    for log in (Path("other.jsonl"), RunDir("out").log):
        log.parent.mkdir(exist_ok=True)
        log.write_bytes(content)
    if link:
        log.unlink()
        link(Path("other.jsonl").resolve(), log)
    run_dir, progress = RunDir("out"), Progress(elapsed_s=elapsed_s)
    run_dir.begin(None, replace(checkpoint_at(1), progress=progress))
    assert log.read_bytes() == content  # until there is more
    run_dir.append("X")
    assert log.read_text().splitlines() == [*lines[:num_kept], '"X"']
    assert Path("other.jsonl").read_bytes() == content
