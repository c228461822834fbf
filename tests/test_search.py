"""tools.search: combinations that Optuna chooses, continued by the same command."""

import logging
import math
import shutil
import sys
from pathlib import Path
from statistics import median

import pytest
import tiny

from folio.errors import UserError
from tools import search, sweep

VALUES = ["--learning_rate=log:1e-4:1e-1", "--norm=layernorm,rmsnorm"]


def flags(trials, *argv):
    base = [each for each in tiny.flags() if not each.startswith(("--out_dir", "--learning_rate"))]
    return [*base, *(argv or VALUES), "--search=tpe", f"--trials={trials}"]


def loss_of(settings):
    """A loss with its minimum at a learning rate of 3e-3 and rmsnorm."""
    return 1 + math.log(settings.learning_rate / 3e-3) ** 2 + (settings.norm == "layernorm")


@pytest.fixture
def crew(fake_crew):
    pytest.importorskip("optuna")
    fake_crew.loss_of = loss_of
    return fake_crew


def test_later_trials_are_better_than_the_first(crew, capsys):
    losses = []
    crew.loss_of = lambda settings: losses.append(loss_of(settings)) or losses[-1]
    sweep.main(flags(30))
    assert len(losses) == len(crew.started) == len(set(crew.started)) > 20
    assert median(losses[10:]) < 0.7 * median(losses[:10])
    out, err = capsys.readouterr()
    assert out.startswith("30 trials, 0 of them already complete\n1 of 30: learning_rate=")
    assert f"| out-sweep/{crew.started[0][0]} " in out
    assert err == ""


def test_the_same_command_continues_the_search(crew, capsys):
    sweep.main(flags(6))
    started, crew.started = crew.started, []
    sweep.main(flags(6))
    assert crew.started == []
    assert "6 trials, 6 of them already complete" in capsys.readouterr().out
    sweep.main(flags(12))
    assert len(crew.started) == 6
    assert not set(crew.started) & set(started)
    out = capsys.readouterr().out
    assert out.startswith("12 trials, 6 of them already complete\n7 of 12: ")
    assert out.count("| out-sweep/") == 12
    shutil.rmtree(Path("out-sweep", started[0][0]))
    crew.started = []
    sweep.main(flags(12))
    assert crew.started == started[:1]


def test_interrupted_trials_are_continued_first(crew):
    crew.loss_of = lambda settings: 1 / 0
    with pytest.raises(ZeroDivisionError):
        sweep.main(flags(4, *VALUES, "--jobs=2"))
    [stopped] = crew.started
    crew.loss_of, crew.started = loss_of, []
    sweep.main(flags(4, *VALUES, "--jobs=2"))
    assert crew.started[0] == stopped
    assert len(set(crew.started)) == len(crew.started) == 4


def test_failed_trials_are_tried_again(crew):
    crew.loss_of = lambda settings: loss_of(settings) if settings.norm == "rmsnorm" else None
    with pytest.raises(UserError, match=r"\d of \d runs failed: learning_rate=.*,norm=layernorm"):
        sweep.main(flags(8))
    failed = [each for each in crew.started if each[0].endswith("norm=layernorm")]
    assert 0 < len(failed) < 8
    crew.loss_of, crew.started = loss_of, []
    sweep.main(flags(8))
    assert crew.started == failed


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_combination_is_trained_once(crew, jobs, capsys):
    sweep.main(flags(12, "--n_layer=1,2", "--bias=True,False", f"--jobs={jobs}"))
    assert len(crew.started) == len(set(crew.started)) <= 4
    sweep.main(flags(12, "--n_layer=1,2", "--bias=True,False", f"--jobs={jobs}"))
    assert "12 trials, 12 of them already complete" in capsys.readouterr().out


def test_a_trial_has_the_mean_loss_of_its_seeds(crew):
    import optuna

    crew.loss_of = lambda settings: settings.seed * settings.n_layer
    sweep.main(flags(2, "--n_layer=1,2,3,4,5,6,7,8", "--seed=1,2,6"))
    assert [name.split("seed=")[1] for name, _ in crew.started[:3]] == ["1", "2", "6"]
    storage = optuna.storages.journal.JournalFileBackend("out-sweep/optuna.journal")
    storage = optuna.storages.journal.JournalStorage(storage)
    [study] = optuna.get_all_study_summaries(storage)
    trials = optuna.load_study(study_name=study.study_name, storage=storage).trials
    assert [trial.value for trial in trials] == [3 * (1 + t.params["n_layer"]) for t in trials]


def test_values_that_a_config_file_derives_follow(crew):
    Path("a.py").write_text("eval_interval = max_iters // 10\n")
    intervals = {}
    crew.loss_of = lambda settings: intervals.setdefault(settings.max_iters, settings.eval_interval)
    sweep.main(flags(9, "--max_iters=30,10,20", "a.py"))
    assert intervals == {10: 1, 20: 2, 30: 3}


def test_numbers_are_ordered_and_other_values_are_not():
    pytest.importorskip("optuna")
    assert search.sorted_indices([30, 10, 20, 10]) == [3, 2, 0]
    numbers = search.distribution([30, 10, 20, 10])
    assert (numbers.low, numbers.high) == (0, 2)
    assert search.sorted_indices([None, 3, 1]) == [0, 1, 2]
    for values in ([None, 3, 1], [True, False], ["b", "a"]):
        assert search.distribution(values).choices == tuple(range(len(values)))


def test_other_values_begin_another_search(crew):
    sweep.main(flags(3, "--n_layer=1,2,3"))
    crew.started = []
    sweep.main(flags(3, "--n_layer=4,5,6"))
    assert 0 < len(crew.started) <= 3


def test_optuna_is_silent(crew, caplog, recwarn, capfd):
    with caplog.at_level(logging.WARNING):
        sweep.main(flags(2))
    assert (caplog.records, [*recwarn], capfd.readouterr().err) == ([], [], "")


def test_lock_of_a_killed_sweep_is_removed(crew):
    sweep.main(flags(1))
    Path("out-sweep/optuna.journal.lock").touch()
    sweep.main(flags(2))  # does not wait for the lock
    assert not Path("out-sweep/optuna.journal.lock").exists()
    assert len(crew.started) == 2


@pytest.mark.parametrize("damage", [lambda raw: b"x\ny\n", lambda raw: raw[:-20]])
def test_damaged_study_is_reported(crew, damage):
    sweep.main(flags(1))
    journal = Path("out-sweep/optuna.journal")
    journal.write_bytes(damage(journal.read_bytes()))
    with pytest.raises(UserError, match="optuna.journal is damaged: delete it"):
        sweep.main(flags(1))


def test_optuna_is_needed(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match="pip install optuna"):
        sweep.main(flags(2))
    assert not Path("out-sweep").exists()


@pytest.mark.slow
def test_trials_are_trained_and_kept(verse, capsys):
    pytest.importorskip("optuna")
    sweep.main(flags(2, *VALUES, "--jobs=2"))
    before = {path: path.stat().st_mtime_ns for path in Path("out-sweep").glob("*/*")}
    assert len({path.parent for path in before}) == 2
    sweep.main(flags(2, *VALUES, "--jobs=2"))
    assert {path: path.stat().st_mtime_ns for path in Path("out-sweep").glob("*/*")} == before
    assert "2 trials, 2 of them already complete" in capsys.readouterr().out
