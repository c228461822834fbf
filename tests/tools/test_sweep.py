"""tools.sweep: combinations of settings, and runs in their own processes."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import unquote

import pytest
import tiny

import train
from folio.cli.errors import UserError
from folio.cli.files import lock_folder
from folio.cli.settings import ROOT
from tools import sweep
from tools.plot.runs import read_runs

pytestmark = pytest.mark.usefixtures("folder")


def write(text, name="a.py"):
    Path(name).write_text(text)
    return name


def flags(**settings):
    """Returns arguments for a sweep of the tiny model."""
    return [flag for flag in tiny.flags(**settings) if not flag.startswith("--out_dir")]


# Combinations


def combine(*argv):
    """Returns {name of the run: settings} of the runs of all combinations."""
    runs = sweep.combine_values(argv)
    return {folder.name: settings for folder, settings in runs.items()}


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (
            ["--smear=1,2", "--seed=3,4"],
            "smear=1,seed=3 smear=1,seed=4 smear=2,seed=3 smear=2,seed=4",
        ),
        (["--seed=5,6", "a.py", "--smear=1,2"], "seed=3,smear=1 seed=3,smear=2"),
        (["a.py", "--seed=5,6"], "seed=5 seed=6"),
        (["--patience", "None,3"], "patience=None patience=3"),
        (["--qk_norm", "--seed=1,2"], "seed=1 seed=2"),
        (["--dropout=0.1,0.10,0.2"], "dropout=0.1 dropout=0.2"),
        (["--dataset=a b,a/b"], "dataset=a%20b dataset=a%2Fb"),
    ],
)
def test_values_of_flags_and_config_files_are_combined(argv, names):
    write("seed = 3")
    runs = combine(*argv)
    assert " ".join(runs) == names
    for name, settings in runs.items():
        for pair in unquote(name).split(","):
            setting, value = pair.split("=")
            assert str(getattr(settings, setting)) == value


def test_a_config_file_reads_the_values_of_its_combination():
    runs = combine("--n_layer=3,5", "--teachers=a,b", write("n_embd = 2 * n_layer"))
    assert [(run.n_embd, run.teachers) for run in runs.values()] == [(6, "a,b"), (10, "a,b")]


@pytest.mark.parametrize("init_from", ["scratch", "a.pt"])
def test_a_config_file_can_keep_the_settings_of_its_run(init_from):
    write("max_iters = 4 if (out_dir, init_from) == ('out-sweep/seed=1', 'auto') else 9")
    Path("out-sweep/seed=1").mkdir(parents=True)
    Path("out-sweep/seed=1/last.pt").touch()
    runs = combine("a.py", "--seed=1,2", f"--init_from={init_from}")
    assert [run.max_iters for run in runs.values()] == [4, 9]
    assert {run.init_from for run in runs.values()} == {init_from}


def test_a_given_default_is_not_left_to_the_checkpoint():
    runs = sweep.combine_values(["--block_size=512,1024", "--init_from=a.pt"])
    folder, settings = list(runs.items())[1]
    assert "--block_size=1024" in sweep.train_flags(folder, settings)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--learning_rate=1e-3,3e-4"),  # an example of several values
        (["--seed=1,1"], "there is nothing to compare"),
        (["--seed=1,2", "--out_dir=x"], "use --sweep_dir"),
        (["--seed=1,2", "--stop_at=4"], "stop_at"),
        (["--seed=1,2", "--init_from=resume"], "init_from"),
        (["--seed=1,2", "--dataset=gone"], "gone"),
        (["--seed=1,2", "--jobs=1,2"], "jobs"),
        (["--warmup_iters=1,x"], "warmup_iters must be int, not 'x'"),
        (["--n_embd=16,15"], "n_embd=15 is not divisible by n_head=2"),
        ([f"--seed={','.join('7' * 1001)}"], "a sweep can have 1,000 runs, not 1,001: give fewer"),
    ],
)
def test_mistakes_are_reported_before_training(argv, message, verse):
    with pytest.raises(UserError) as caught:
        sweep.main([*flags(), *argv])
    assert message in str(caught.value)
    assert not Path("out-sweep").exists()


# Processes


def test_runs_share_cores_and_gpus(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(sweep.torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(sweep.torch.cuda, "device_count", lambda: 2)
    assert sweep.worker_environment("cpu", 0, 1) == {}
    assert sweep.worker_environment("cpu", 1, 3) == {"OMP_NUM_THREADS": "2"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = [sweep.worker_environment("cuda", n, 3)["CUDA_VISIBLE_DEVICES"] for n in range(3)]
    assert gpus == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert sweep.worker_environment("cuda", 1, 1) == {"CUDA_VISIBLE_DEVICES": "7"}


def start(*argv):
    """Starts a sweep in its own process group, as a shell does."""
    return subprocess.Popen(
        [sys.executable, "-m", "tools.sweep", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def wait_for_saves(process, *folders):
    """Waits until the runs in these folders have saved, while the sweep is running."""
    while not all(Path(folder, "last.pt").exists() for folder in folders):
        assert process.poll() is None
        time.sleep(0.05)


@pytest.mark.slow
def test_runs_are_compared_and_only_failed_ones_repeated(verse, capsys):
    train.main(tiny.flags(dtype="auto"))
    model = tuple(f"--{name}=" for name in tiny.SHAPE)
    argv = [flag for flag in flags(dtype="auto") if not flag.startswith(model)]
    argv += ["--init_from=out/ckpt.pt", "--n_layer=1,2", "--seed=1,2", "--jobs=2"]
    with pytest.raises(UserError, match="^2 of 4 runs failed: see .* in out-sweep/n_layer=2,seed="):
        sweep.main(argv)
    out = capsys.readouterr().out
    assert "n_layer=2,seed=1: failed with status 2: train.py: out/ckpt.pt" in out
    runs = read_runs(["out-sweep"])
    for seed, run in enumerate(runs, 1):
        name = f"n_layer=1,seed={seed}"
        assert run.folder == f"out-sweep/{name}"
        assert run.val[0]["loss"] == pytest.approx(tiny.load()["best_val_loss"])
        assert run.val[-1]["step"] == 6
        assert f"{name}: val loss {run.loss:.4f}" in out
        assert "step 6: train loss" in Path(run.folder, "output.txt").read_text()
    mean = sum(run.loss for run in runs) / 2
    assert re.search(rf"\| n_layer=1,seed=\* \| +{mean:.4f} \| +0.0[\d]+ \| +2 \|", out)

    Path("out-sweep/n_layer=1,seed=1/last.pt").unlink()  # as after a crash in the last evaluation
    with pytest.raises(UserError, match="^2 of 4 runs failed"):
        sweep.main([*argv, "--log_interval=7"])
    repeated = re.findall(r"^\d of 2: ([^:]*)", capsys.readouterr().out, re.M)
    assert sorted(repeated) == ["n_layer=2,seed=1", "n_layer=2,seed=2"]
    with pytest.raises(UserError, match="batch_size was 4, now 3"):
        sweep.main([*argv, "--batch_size=3"])
    tiny.prepare_verse(text=tiny.VERSE * 30)
    with pytest.raises(UserError, match="verse has changed"):
        sweep.main(argv)
    Path("out-sweep/n_layer=1,seed=1").rename("out-sweep/n_layer=3,seed=1")
    with pytest.raises(UserError, match="n_layer was 1, now 3"):
        sweep.main([*argv, "--n_layer=3,4"])


def test_a_run_without_its_final_evaluation_has_not_finished(verse):
    train.main(tiny.flags(eval_iters=None))
    log, settings = Path("out/log.jsonl"), tiny.settings(eval_iters=None)
    assert sweep.has_finished("out", settings, verse.fingerprint)
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))  # as after Ctrl-C in it
    assert not sweep.has_finished("out", settings, verse.fingerprint)


def test_a_run_that_started_from_another_model_is_a_different_run(verse):
    train.main(tiny.flags(out_dir="out-a", max_iters=1))
    train.main(tiny.flags(init_from="out-a/ckpt.pt", stop_at=3))
    train.main(tiny.flags(init_from="resume"))
    for name in ("out-a/ckpt.pt", "./out-a/ckpt.pt"):
        assert sweep.has_finished("out", tiny.settings(init_from=name), verse.fingerprint)
    with pytest.raises(UserError, match="init_from was 'out-a/ckpt.pt', now 'scratch'"):
        sweep.has_finished("out", tiny.settings(), verse.fingerprint)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl(2)")
def test_the_runs_of_a_killed_sweep_end(verse):
    process = start(*flags(max_iters=10**6, eval_interval=1000, dropout="0,0.1"), "--jobs=2")
    folders = [Path("out-sweep", f"dropout={dropout}") for dropout in (0.0, 0.1)]
    wait_for_saves(process, *folders)
    process.kill()
    process.communicate()
    for folder in folders:
        with lock_folder(folder, timeout_s=30):  # its process has ended, long before its last step
            assert "stopped at step" in (folder / "output.txt").read_text()


@pytest.mark.slow
def test_interrupted_sweep_continues_to_the_same_results(verse):
    settings = {"max_iters": 500, "eval_interval": 100}
    argv = [*flags(**settings, dropout="0,0.1"), "--jobs=2"]
    process = start(*argv)
    wait_for_saves(process, "out-sweep/dropout=0.0")
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C, which reaches the runs, too
    _, err = process.communicate()
    assert process.returncode == 130
    waiting, stopped = err.strip().splitlines()
    assert waiting == "tools.sweep: waiting until the runs are saved"
    assert stopped == "tools.sweep: stopped; to continue, run the same command"
    with lock_folder("out-sweep/dropout=0.0"):  # its process has ended
        pass
    sweep.main(argv)
    for dropout in (0.0, 0.1):
        train.main(tiny.flags(**settings, dropout=dropout, overwrite=True))
        assert tiny.differences("out", f"out-sweep/dropout={dropout}") == []
