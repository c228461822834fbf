"""tools/overview.py: the table and the curves of runs, while they train and are deleted."""

import json
import os
import shutil
from pathlib import Path

import pytest
from tiny import write_run

from folio.errors import UserError
from tools import overview

pytestmark = pytest.mark.usefixtures("folder")


def append(name, text):
    with open(Path(name, "log.jsonl"), "a") as log:
        log.write(text)


def folders():
    return [folder for folder, _ in overview.logs()]


def test_no_runs():
    assert overview.logs() == []
    assert overview.table([]) == (["run"], [])
    assert overview.curves([], "steps") is None
    assert overview.selection([], "out/ckpt.pt") == []


def test_logs_of_runs_and_sweeps_are_found_with_their_sizes():
    write_run("out-b", [4.0])
    write_run("out-a", [])
    write_run("out-sweep/n=1", [3.0])
    write_run(".hidden", [3.0])
    Path("data/verse").mkdir(parents=True)
    Path("out-c").mkdir()
    Path("out-c", "ckpt.pt").touch()  # such as nanoGPT's: it has no log
    found = overview.logs()
    assert [folder for folder, _ in found] == ["out-a", "out-b", "out-sweep/n=1"]
    assert [size for _, size in found] == [
        Path(folder, "log.jsonl").stat().st_size for folder, _ in found
    ]


def test_a_log_that_grows_changes_what_is_shown():
    write_run("out-a", [4.0, 3.0])
    write_run("out-b", [4.0, 3.5])
    before, shown = overview.logs(), overview.table(folders())
    assert overview.logs() == before
    event = {"split": "val", "step": 20, "tokens": 2000, "elapsed_s": 6, "loss": 2.0}
    append("out-b", json.dumps(event)[:20])
    assert overview.logs() != before
    assert overview.table(folders()) == shown  # the line is incomplete
    append("out-b", json.dumps(event)[20:] + "\n")
    header, rows = overview.table(folders())
    assert (rows[0][0], rows[0][header.index("best val loss")]) == ("out-b", "2.0000")


def test_the_table_has_a_row_per_run_and_the_settings_that_differ():
    write_run("out-a", [4.0, 2.0, 2.5])
    write_run("out-b", [4.0, 1.5], n_layer=4)
    write_run("out-c", [])  # not evaluated yet
    header, rows = overview.table(folders())
    assert header[:2] == ["run", "best val loss"]
    assert header[-1] == "n_layer"
    column = dict(zip(header, zip(*rows, strict=True), strict=True))
    assert column["run"] == ("out-b", "out-a", "out-c")
    assert column["best val loss"] == ("1.5000", "2.0000", "")
    assert column["parameters"] == ("1,000",) * 3
    assert column["n_layer"] == ("4", "2", "2")


def test_the_run_of_the_model_the_newest_and_the_best_are_selected():
    for number in range(overview.MOST_CURVES + 2):
        write_run(f"out-{number}", [4.0, 3.0 - number / 100], seed=number)
    write_run("out-empty", [])
    write_run("out-new", [])
    os.utime("out-new/log.jsonl", (2e9, 2e9))
    found = overview.selection(folders(), "out-0/ckpt.pt")
    assert found == ["out-0", "out-new", *(f"out-{number}" for number in range(9, 3, -1))]


def test_curves_are_drawn_of_runs_that_were_evaluated():
    pytest.importorskip("matplotlib")
    write_run("out-a", [4.0, 2.0])
    write_run("out-b", [])
    assert overview.curves(["out-b"], "steps") is None
    (axes,) = overview.curves(["out-a", "out-b"], "seconds").axes
    assert axes.get_xlabel() == "seconds"
    _, labels = axes.get_legend_handles_labels()
    assert labels == ["out-a"]


@pytest.mark.parametrize("content", ["", "{", "\0\xff" * 50, '{"split": "start"}\n[1]\n'])
def test_a_damaged_log_does_not_hide_the_other_runs(content):
    write_run("out-a", [4.0, 2.0])
    write_run("out-b", [3.0])
    Path("out-b", "log.jsonl").write_text(content, encoding="latin-1")
    header, rows = overview.table(folders())
    assert [row[0] for row in rows] == ["out-a", "out-b"]
    assert rows[1][header.index("best val loss")] == ""
    os.utime("out-a/log.jsonl", (2e9, 2e9))
    assert overview.selection(folders(), "out-0/ckpt.pt") == ["out-a"]


def test_a_deleted_run_is_no_longer_found_and_an_error_where_it_is_selected():
    write_run("out-a", [4.0])
    write_run("out-b", [3.0])
    shutil.rmtree("out-a")
    assert folders() == ["out-b"]
    with pytest.raises(UserError, match="no log out-a/log.jsonl; available runs: out-b"):
        overview.curves(["out-a"], "steps")


def test_a_log_that_is_deleted_meanwhile_is_left_out(monkeypatch):
    write_run("out-b", [3.0])
    monkeypatch.setattr(overview, "nested", lambda: [Path("out-a"), Path("out-b")])
    assert folders() == ["out-b"]
