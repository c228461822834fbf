"""tools.sweep: runs in their own processes, interrupted and continued."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import tiny

import train
from folio import budget as budgets
from folio.errors import UserError
from folio.files import InUseError, locked
from folio.settings import ROOT, load
from tools import crew, runs, sweep
from tools.table import NOTE
from tools.trainer import best_loss, describe, final_loss

LOSS = ["best val loss", "seeds"]  # columns of repeated runs


@pytest.fixture(autouse=True)
def _one_thread(folder, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def flags(**settings):
    """Returns arguments for a sweep of the tiny model."""
    return [each for each in tiny.flags(**settings) if not each.startswith("--out_dir")]


def steps():
    """Returns {run: step of its last evaluation}."""
    return {
        Path(run.folder).name: run.val[-1]["step"]
        for run in runs.read_all(["out-sweep"])
        if run.val
    }


def start(*argv, tool="sweep"):
    """Starts a sweep, or another tool, in its own process group, as a shell does."""
    return subprocess.Popen(
        [sys.executable, "-m", f"tools.{tool}", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.05)


def is_unused(folder):
    try:
        with locked(folder):
            return True
    except InUseError:
        return False


# Starting


def write_torch(number):
    """Makes `import torch` send a signal to the process that starts in the current folder."""
    Path("torch.py").write_text(f"import os\nos.kill(os.getpid(), {int(number)})\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("tool", ["bench", "plot", "sweep", "transformers_sample"])
def test_signal_during_imports_ends_a_tool_without_a_traceback(tool, number):
    write_torch(number)
    argv = ["out-a"] if tool == "plot" else []
    stopped = start(*argv, tool=tool)
    assert stopped.communicate() == ("", "")
    assert stopped.returncode == 128 + number


@pytest.mark.parametrize(
    ("tool", "names"),
    [
        ("bench", "script runs target vs vs_dir profile count gpu_suite parts results"),
        ("plot", "x y all out attention out_dir start layer"),
        ("sweep", "sweep_dir jobs trials search halving"),
    ],
)
def test_help_of_a_tool_is_printed_without_torch(tool, names):
    write_torch(signal.SIGTERM)
    out, err = (helped := start("--help", tool=tool)).communicate()
    assert (helped.returncode, err) == (0, "")
    assert out.startswith(f"usage: {tool}.py ")
    assert re.findall(r"^  --(\w+)=", out, re.M) == names.split()
    assert ("--learning_rate=1e-3,3e-4" in out) == (tool == "sweep")


# Training


@pytest.mark.slow
def test_each_combination_is_trained_and_compared(verse, capsys):
    sweep.main([*flags(n_embd="16,8"), "--seed=1,2", "--jobs=2"])
    out = capsys.readouterr().out
    names = [f"n_embd={n},seed={seed}" for n in (16, 8) for seed in (1, 2)]
    assert steps() == dict.fromkeys(names, 6)
    for name in names:
        assert f"{name}: best val loss" in out
        run = runs.read(Path("out-sweep", name))
        assert f"n_embd={run.settings['n_embd']},seed={run.settings['seed']}" == name
        assert run.val[-1]["step"] == 6
        assert "step 6: train loss" in Path("out-sweep", name, "output.txt").read_text()
    head, _, *rows, note = out[out.index("| run") :].splitlines()
    assert [cell.strip() for cell in head.split("|")[1:5]] == ["run", "n_embd", *LOSS]
    cells = [[cell.strip() for cell in row.split("|")[1:5]] for row in rows]
    assert sorted(cell[0] for cell in cells) == [f"out-sweep/n_embd={n},seed=*" for n in (16, 8)]
    losses = [float(cell[2].split(" ± ")[0]) for cell in cells]
    assert losses == sorted(losses)
    assert [cell[3] for cell in cells] == ["2", "2"]
    assert note == NOTE


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_halving_compares_the_mean_loss_of_seeds(fake_crew, jobs):
    losses = {16: (1.0, 9.0), 8: (4.0, 5.0), 4: (6.0, 6.0), 2: (0.5, None)}
    fake_crew.loss_of = lambda settings: losses[settings.n_embd][settings.seed - 1]
    settings = {"max_iters": 50, "eval_interval": 10, "n_embd": "16,8,4,2", "n_head": 1}
    with pytest.raises(UserError, match="1 of 8 runs failed: n_embd=2,seed=2: train.py: it failed"):
        sweep.main([*flags(**settings), "--seed=1,2", "--halving=4", f"--jobs={jobs}"])
    names = {n: [f"n_embd={n},seed={seed}" for seed in (1, 2)] for n in losses}
    assert sorted(fake_crew.started[:8]) == sorted((run, 10) for n in names for run in names[n])
    assert fake_crew.started[8:] == [(run, step) for step in (20, 50) for run in names[8]]


@pytest.mark.slow
def test_finished_runs_are_kept_unless_more_steps_are_asked_for(verse, capsys):
    argv = [*flags(), "--seed=1,2"]
    sweep.main(argv)
    before = {path: path.stat().st_mtime_ns for path in Path("out-sweep").glob("*/*")}
    sweep.main(argv)
    assert {path: path.stat().st_mtime_ns for path in Path("out-sweep").glob("*/*")} == before
    assert "2 runs, 2 of them already finished" in capsys.readouterr().out
    shutil.rmtree("out-sweep/seed=1")
    sweep.main([*flags(max_iters=9), "--seed=1,2"])
    assert [run.val[-1]["step"] for run in runs.read_all(["out-sweep"])] == [9, 9]


@pytest.mark.slow
def test_failed_run_is_reported_and_the_others_continue(verse, capsys):
    message = "1 of 2 runs failed: n_head=3: .*n_embd=16 is not divisible"
    with pytest.raises(UserError, match=message):
        sweep.main([*flags(n_head="3,4", max_iters=1)])
    assert steps() == {"n_head=4": 1}
    out = capsys.readouterr().out
    assert "n_head=3: failed: train.py: n_embd=16" in out
    assert "| out-sweep/n_head=4 |" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "there is nothing to compare: give a setting several values"),
        (["--seed=1,2", "--out_dir=x"], "use --sweep_dir, not --out_dir"),
        (["--seed=1,2", "--init_from=resume"], "resumes runs automatically: remove init_from"),
        (["--jobs=1,2"], "jobs has several values"),
        ([f"--wandb_run_name={'x' * 300},b"], "the name of a run would be too long"),
        (["--dropout=uniform:0:0.3"], "there are 200 combinations: use --trials=N"),
        (["--seed=1,2", "--search=tpe"], "--search=tpe needs .*: add --trials=N"),
        (["--seed=1,2", "--search=tpe", "--trials=2", "--halving=3"], "remove --halving"),
        (["--seed=1,2", "--halving=3", "--minutes=1"], "same step: add --minutes=None"),
        (["--seed=1,2", "--sweep_dir="], "sweep_dir must not be empty"),
        (["--seed=1,x"], "--seed must be int, not 'x'"),
        (["--learning_rate=1e-3,1e-5", "--min_lr=1e-4"], "must not be greater than"),
    ],
)
def test_mistakes_are_reported_before_training(argv, message, folder):
    with pytest.raises(UserError, match=message):
        sweep.main([*flags(), *argv])
    assert not (folder / "out-sweep").exists()


# Earlier results


def test_run_with_other_settings_is_refused():
    earlier = vars(tiny.settings(seed=1)) | {"dtype": "bfloat16", "log_interval": 7}
    event = {"step": 0, "split": "start", "parameters": 1, "settings": earlier}
    Path("out-sweep/seed=1").mkdir(parents=True)
    Path("out-sweep/seed=1/log.jsonl").write_text(json.dumps(event))
    with pytest.raises(UserError, match="other settings: batch_size was 4, now 3; choose another"):
        sweep.main([*flags(batch_size=3, dtype="auto", max_iters=9), "--seed=1,2"])


@pytest.mark.slow
def test_run_on_other_content_of_the_dataset_is_refused(verse):
    sweep.main([*flags(max_iters=1), "--seed=1,2"])
    tiny.prepare_verse(text=tiny.VERSE * 30)
    with pytest.raises(UserError, match="content of dataset verse has changed since out-sweep/see"):
        sweep.main([*flags(max_iters=1), "--seed=1,2,3"])


def test_a_run_is_finished_after_the_steps_that_fit_into_its_time_budget(verse, monkeypatch):
    monkeypatch.setattr(budgets, "seconds_per_step", lambda *_: 0.01)
    budget = {"minutes": 0.01, "max_iters": 1000, "eval_interval": 500}
    arguments, planned = tiny.flags(**budget), load(sweep.SweepConfig, tiny.flags(**budget))
    train.main([*arguments, "--stop_at=3"])
    assert final_loss(Path("out"), planned) is None
    train.main([*arguments, "--init_from=resume"])
    assert final_loss(Path("out"), planned) == tiny.saved()["best_val_loss"]
    sweep.check_run(Path("out"), planned)  # does not raise: the same settings


def test_a_sweep_whose_runs_all_fail_has_no_table(fake_crew, capsys):
    fake_crew.loss_of = lambda settings: None
    with pytest.raises(UserError, match="2 of 2 runs failed: seed=1: train.py: it failed"):
        sweep.main([*flags(), "--seed=1,2"])
    assert "| run" not in capsys.readouterr().out


def test_run_that_is_stopped_from_outside_is_a_failure(fake_crew, monkeypatch):
    start = fake_crew.start

    def stopped(folder, *arguments):
        future = start(folder, *arguments)
        if folder.name == "seed=2":
            future = Future()
            future.set_result(crew.STOPPED)
        return future

    monkeypatch.setattr(fake_crew, "start", stopped)
    with pytest.raises(UserError, match="1 of 2 runs failed: seed=2: stopped; to try them again"):
        sweep.main([*flags(), "--seed=1,2"])


# Interruption


@pytest.mark.slow
def test_killed_sweep_continues_to_the_same_results(verse):
    settings = {"max_iters": 600, "eval_interval": 200}
    for seed in (1, 2, 3):
        train.main(tiny.flags(**settings, seed=seed, out_dir=f"out-whole/seed={seed}"))
    argv = [*flags(**settings), "--seed=1,2,3", "--jobs=2"]
    killed = start(*argv)
    wait_for(Path("out-sweep/seed=3/last.pt").exists)
    killed.kill()
    killed.communicate()
    assert 600 in steps().values()
    assert steps()["seed=3"] < 600
    wait_for(lambda: is_unused("out-sweep/seed=3"))  # its process saves and exits by itself
    out, _ = (again := start(*argv)).communicate()
    assert again.returncode == 0
    assert "3 runs, 0 of them" not in out
    for seed in (1, 2, 3):
        assert tiny.differences(f"out-whole/seed={seed}", f"out-sweep/seed={seed}") == []
    [row] = [line for line in out.splitlines() if line.startswith("| out-sweep")]
    assert [cell.strip() for cell in row.split("|")[1:4:2]] == ["out-sweep/seed=*", "3"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_sweep_saves_its_runs(verse, number, status):
    stopped = start(*flags(max_iters=5000, eval_interval=5000), "--seed=1,2")
    wait_for(Path("out-sweep/seed=1/last.pt").exists)
    os.killpg(stopped.pid, number)  # as Ctrl-C, which reaches the runs too
    _, err = stopped.communicate()
    assert stopped.returncode == status
    assert err == "sweep.py: stopped and saved; to continue, run the same command\n"
    assert not Path("out-sweep/seed=2").exists()
    assert "saved in out-sweep/seed=1/last.pt" in Path("out-sweep/seed=1/output.txt").read_text()


@pytest.mark.slow
def test_interrupted_sweep_reports_runs_that_could_not_save(verse):
    stopped = start(*flags(max_iters=5000, eval_interval=5000), "--seed=1,2")
    wait_for(Path("out-sweep/seed=1/last.pt").exists)
    Path("out-sweep/seed=1/last.pt.tmp/x").mkdir(parents=True)  # no file can replace it
    stopped.send_signal(signal.SIGTERM)
    _, err = stopped.communicate()
    assert "sweep.py: stopped, but seed=1: train.py: stopped" in err
    assert "progress since the last save is lost" in err


# Sharing the machine


def test_run_waits_for_another_process_in_its_folder(folder):
    waiting = threading.Thread(target=crew.Crew(1).wait_until_unused, args=[folder / "run"])
    with locked(folder / "run"):
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
    waiting.join(10)
    assert not waiting.is_alive()


def test_runs_share_cores_and_gpus(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(crew.torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(crew.torch.cuda, "device_count", lambda: 2)
    assert crew.environment("cpu", 0, 1) == {}
    assert crew.environment("cpu", 1, 3) == {"OMP_NUM_THREADS": "2"}
    gpus = [crew.environment("cuda", slot, 3)["CUDA_VISIBLE_DEVICES"] for slot in range(3)]
    assert gpus == ["0", "1", "0"]
    assert "CUDA_VISIBLE_DEVICES" not in crew.environment("cuda:1", 0, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert crew.environment("cuda", 1, 1) == {"CUDA_VISIBLE_DEVICES": "7"}


def test_a_run_whose_log_is_gone_still_has_its_best_loss(verse):
    assert best_loss(Path("out")) is None
    train.main(tiny.flags(stop_at=3))
    assert best_loss(Path("out")) == tiny.saved()["best_val_loss"]
    Path("out/log.jsonl").write_text("damaged")
    assert describe(Path("out"), crew.FINISHED) == "finished"
