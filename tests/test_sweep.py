"""tools.sweep: every combination in a process of its own, and going on after whatever happened."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import tiny
from test_scripts import ROOT

import train
from config import UserError
from safety import Claim
from tools import runs, sweep


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def flags(**settings):
    """Arguments for a sweep over the tiny model."""
    return [each for each in tiny.flags(**settings) if not each.startswith("--out_dir")]


def record():
    """{run: how it ended} as it is on disk."""
    path = Path("out-sweep/sweep.json")
    return json.loads(path.read_text()) if path.exists() else {}


@pytest.mark.slow
def test_each_combination_is_trained_in_its_folder_and_compared(verse, capsys):
    sweep.main([*flags(n_embd="16,8"), "--seed=1,2", "--jobs=2"])
    out = capsys.readouterr().out
    names = [f"n_embd={n},seed={seed}" for n in (16, 8) for seed in (1, 2)]
    assert record() == dict.fromkeys(names, "finished")
    for name in names:
        assert f"{name}: best val loss" in out
        run = runs.read(Path("out-sweep", name))
        assert f"n_embd={run.settings['n_embd']},seed={run.settings['seed']}" == name
        assert run.val[-1]["step"] == 6
        assert "step 6: train loss" in Path("out-sweep", name, "output.txt").read_text()
    head, _, *rows = out[out.index("| run") :].splitlines()
    assert [cell.strip() for cell in head.split("|")[2:4]] == ["seed", "n_embd"]
    assert len(rows) == 4
    losses = [float(row.split("|")[5]) for row in rows]
    assert losses == sorted(losses)


@pytest.mark.slow
def test_what_is_finished_is_not_trained_again(verse, capsys):
    sweep.main([*flags(), "--seed=1,2"])
    before = {path: path.stat().st_mtime_ns for path in Path("out-sweep").glob("*/*")}
    sweep.main([*flags(), "--seed=1,2"])
    assert {path: path.stat().st_mtime_ns for path in Path("out-sweep").glob("*/*")} == before
    assert "2 runs, 2 of them finished before" in capsys.readouterr().out
    sweep.main([*flags(max_iters=9), "--seed=1,2"])  # which trains on
    assert [run.val[-1]["step"] for run in runs.read_all(["out-sweep"])] == [9, 9]


@pytest.mark.slow
def test_what_is_gone_is_trained_again_and_what_lacks_its_record_is_kept(verse, capsys):
    argv = [*flags(), "--seed=1,2"]
    sweep.main(argv)
    shutil.rmtree("out-sweep/seed=1")
    sweep.main(argv)
    assert "2 runs, 1 of them finished before" in capsys.readouterr().out
    Path("out-sweep/sweep.json").unlink()
    Path("out-sweep/seed=2/log.jsonl").write_text("")
    sweep.main(argv)
    assert "seed=2: finished, but its log has no evaluation" in capsys.readouterr().out
    Path("out-sweep/sweep.json").unlink()
    with pytest.raises(UserError, match="a run seed=1 of another sweep: batch_size was 4 and is 3"):
        sweep.main([*flags(batch_size=3), "--seed=1,2"])


@pytest.mark.slow
def test_a_mistake_that_trained_nothing_can_be_mended(verse):
    with pytest.raises(UserError, match="2 of 2 runs failed"):
        sweep.main([*flags(dataset="vers"), "--seed=1,2"])
    sweep.main([*flags(max_iters=1), "--seed=1,2"])


def test_help_is_printed(capsys):
    with pytest.raises(SystemExit):
        sweep.main(["--help"])
    assert "--jobs=1" in capsys.readouterr().out


def test_more_combinations_by_chance_are_those_and_others():
    settings = {n: sweep.SweepConfig(random=n) for n in (1, 5, 30, 99, 100, 101)}
    numbers = [set(sweep.chosen(each, 100)) for each in settings.values()]
    assert [len(each) for each in numbers] == [1, 5, 30, 99, 100, 100]
    assert all(few <= more for few, more in pairwise(numbers))
    assert len(sweep.chosen(settings[5], 10**30)) == 5


@pytest.mark.slow
def test_a_run_waits_for_what_still_trains_in_its_folder(verse, monkeypatch):
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        claim.__exit__(None, None, None)

    monkeypatch.setattr(sweep.time, "sleep", sleep)
    claim = Claim("out-sweep/seed=1").__enter__()
    sweep.main([*flags(max_iters=1), "--seed=1,2"])
    assert len(waited) == 1


@pytest.mark.slow
def test_a_run_that_could_not_save_is_named_where_a_sweep_is_stopped(verse):
    stopped = begin(*flags(max_iters=5000, eval_interval=5000), "--seed=1,2")
    wait_for(Path("out-sweep/seed=1/last.pt").exists)
    Path("out-sweep/seed=1/last.pt.tmp/x").mkdir(parents=True)  # which no file can replace
    stopped.send_signal(signal.SIGTERM)
    _, err = stopped.communicate()
    assert "stopped; but seed=1: train.py: stopped at step" in err
    assert "is lost" in err


@pytest.mark.slow
def test_a_run_that_fails_is_told_and_the_rest_go_on(verse, capsys):
    message = "1 of 3 runs failed: n_head=3: .*n_embd=16 is not divisible"
    with pytest.raises(UserError, match=message):
        sweep.main([*flags(n_head="2,3,4")])
    assert [why for why in record().values() if why == "finished"] == ["finished"] * 2
    assert "| out-sweep/n_head=4 |" in capsys.readouterr().out


@pytest.mark.slow
def test_ranges_may_be_in_a_config_file(verse):
    Path("mine.py").write_text("seed = [1, 2]\nlearning_rate = [1e-2, 1e-3]\nmax_iters = 2\n")
    sweep.main([*flags(), "mine.py", "--random=2"])
    assert len(record()) == 2
    sweep.main([*flags(), "mine.py", "--random=2"])
    assert len(record()) == 2  # the same two


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "there is nothing to compare: give a setting several values"),
        (["--seed=1,2", "--out_dir=x"], "name that of all --sweep_dir"),
        (["--seed=1,2", "--init_from=resume"], "resumes its runs by itself: leave init_from out"),
        (["--jobs=1,2"], "jobs has several values"),
        (["--seed=1,2", "--sweep_dir="], "sweep_dir is empty"),
        (["--dataset=a b,a_b"], "two runs would share the folder dataset=a_b"),
        (["--seed=1,x"], "--seed must be int, not 'x'"),
        (["--learning_rate=1e-3,1e-5", "--min_lr=1e-4"], "min_lr=0.0001 is above learning_rate"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(verse, argv, message, folder):
    with pytest.raises(UserError, match=message):
        sweep.main([*flags(), *argv])
    assert not (folder / "out-sweep").exists()


@pytest.mark.slow
def test_another_sweep_needs_another_folder(verse):
    sweep.main([*flags(max_iters=1), "--seed=1,2"])
    with pytest.raises(UserError, match="a run seed=1 of another sweep: batch_size was 4 and is 3"):
        sweep.main([*flags(max_iters=1, batch_size=3), "--seed=1,2"])


def test_a_record_that_is_damaged_is_told(verse):
    Path("out-sweep").mkdir()
    for content in ("{", "[]", '{"seed=1": 3}', "3"):
        Path("out-sweep/sweep.json").write_text(content)
        with pytest.raises(UserError, match="sweep.json is damaged"):
            sweep.main([*flags(), "--seed=1,2"])


def begin(*argv):
    """A sweep in a process of its own, with six runs long enough to be stopped amid."""
    command = [sys.executable, "-m", "tools.sweep", *argv]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_sweep_that_is_killed_goes_on_to_the_same_table(verse):
    settings = {"max_iters": 150, "eval_interval": 50}
    for n_embd in (16, 8, 24):
        for seed in (1, 2):
            out_dir = f"out-whole/n_embd={n_embd},seed={seed}"
            train.main(tiny.flags(**settings, n_embd=n_embd, seed=seed, out_dir=out_dir))
    argv = [*flags(**settings, n_embd="16,8,24"), "--seed=1,2", "--jobs=2"]
    stopped = begin(*argv)
    wait_for(lambda: "finished" in record().values())
    wait_for(Path("out-sweep/n_embd=8,seed=1/last.pt").exists)
    stopped.kill()
    stopped.communicate()
    assert 1 <= list(record().values()).count("finished") < 6
    wait_for(lambda: not list(Path("out-sweep").glob("*/.lock")))  # runs save and end by themselves
    out, _ = (again := begin(*argv)).communicate()
    assert again.returncode == 0
    assert "6 runs, 0 of them" not in out
    for path in Path("out-whole").glob("*/log.jsonl"):
        assert tiny.differences(path.parent, Path("out-sweep", path.parent.name)) == []
    assert len([line for line in out.splitlines() if line.startswith("| out-sweep")]) == 6


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_sweep_that_is_interrupted_says_how_to_go_on(verse, number, status):
    argv = [*flags(max_iters=5000, eval_interval=5000), "--seed=1,2"]
    stopped = begin(*argv)
    wait_for(Path("out-sweep/seed=1/last.pt").exists)
    stopped.send_signal(number)
    _, err = stopped.communicate()
    assert stopped.returncode == status
    assert err.endswith("stopped, each run at its last step; the same command goes on\n")
    assert record() == {"seed=1": "stopped", "seed=2": "stopped"}
    assert "go on by the same command" in Path("out-sweep/seed=1/output.txt").read_text()


def test_runs_that_share_a_machine_share_its_cores_and_gpus(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(sweep.torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(sweep.torch.cuda, "device_count", lambda: 0)
    assert sweep.environment(0, 1) == {}
    assert sweep.environment(1, 3) == {"OMP_NUM_THREADS": "2"}
    monkeypatch.setattr(sweep.torch.cuda, "device_count", lambda: 2)
    cards = [sweep.environment(slot, 3)["CUDA_VISIBLE_DEVICES"] for slot in range(3)]
    assert cards == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert sweep.environment(1, 1)["CUDA_VISIBLE_DEVICES"] == "7"
