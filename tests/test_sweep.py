"""tools.sweep: combinations of settings, and runs in their own processes."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny

import train
from folio import checkpoint as checkpoints
from folio.checkpoint import Checkpoint, Progress
from folio.dataset import fingerprint
from folio.errors import UserError
from folio.files import locked
from folio.settings import ROOT
from tools import runs, sweep, workers

pytestmark = pytest.mark.usefixtures("folder")


def write(text, name="a.py"):
    Path(name).write_text(text)
    return name


def flags(**settings):
    """Returns arguments for a sweep of the tiny model."""
    return [each for each in tiny.flags(**settings) if not each.startswith("--out_dir")]


# Combinations


def settings_of(*argv):
    """Returns {name of the run: settings} of the runs of all combinations."""
    combinations = sweep.Grid(argv).combinations()
    return {folder.name: settings for each in combinations for folder, settings in each}


def values(*argv):
    """Returns the names that vary, and their values in each run."""
    names = sweep.Grid(argv).names
    return names, [tuple(getattr(s, name) for name in names) for s in settings_of(*argv).values()]


def test_flags_and_config_files_are_combined():
    file = write("n_layer = [1, 2]\ndropout = (0.1, 0)")
    expected = ["n_layer", "dropout"], [(1, 0.1), (1, 0.0), (2, 0.1), (2, 0.0)]
    assert values(file) == expected
    assert values("--n_layer=1,2", "--dropout", "0.1,0") == expected


def test_rightmost_argument_takes_precedence():
    file = write("n_layer = [1, 2, 3]\ndropout = [0.1, 0]")
    assert values(file, "--dropout=0.3") == (["n_layer"], [(1,), (2,), (3,)])
    assert values("--dropout=0.3,0.4", file, "--n_layer=7") == (["dropout"], [(0.1,), (0.0,)])
    assert values(file, "--dropout=0", "--n_layer=7,8") == (["n_layer"], [(7,), (8,)])


def test_values_of_every_type():
    assert values("--bias=True,False")[1] == [(True,), (False,)]
    assert values("--patience=None,3")[1] == [(None,), (3,)]
    assert values("--norm=rmsnorm,layernorm")[1] == [("rmsnorm",), ("layernorm",)]
    assert values("--dropout=0.1,0.10,0.2")[1] == [(0.1,), (0.2,)]


def test_config_file_reads_values_of_its_combination(capsys):
    found = settings_of("--n_layer=2,4", write("print('hello')\nn_embd = 64 * n_layer"))
    assert [(each.n_layer, each.n_embd) for each in found.values()] == [(2, 128), (4, 256)]
    assert capsys.readouterr().out == "hello\n"  # once


def test_values_but_not_their_number_may_depend_on_another_setting():
    file = write("n_embd = [n_layer, 2 * n_layer]")
    assert values("--n_layer=3,5", file)[1] == [(3, 3), (3, 6), (5, 5), (5, 10)]
    with pytest.raises(UserError, match="n_embd"):
        settings_of("--n_layer=3,5", write("n_embd = list(range(1, n_layer))"))


def test_seeds_are_repeats_of_one_combination():
    combinations = sweep.Grid(["--seed=1,2,3", "--n_layer=1,2"]).combinations()
    assert [[folder.name for folder, _ in each] for each in combinations] == [
        [f"seed={seed},n_layer={n}" for seed in (1, 2, 3)] for n in (1, 2)
    ]
    assert [settings.seed for _, settings in combinations[0]] == [1, 2, 3]


def test_run_names_are_folder_names():
    assert list(settings_of("--dataset=a b,a/c")) == ["dataset=a_b", "dataset=a_c"]
    with pytest.raises(UserError, match="dataset=a_b"):
        settings_of("--dataset=a b,a_b")


def test_random_combinations_are_reproducible_and_nested():
    counts = (1, 5, 30, 99, 100, 101)
    drawn = [set(sweep.draw([20, 5], count)) for count in counts]
    assert [len(each) for each in drawn] == [1, 5, 30, 99, 100, 100]
    assert all(few <= more for few, more in pairwise(drawn))
    argv = ["--n_layer=1,2,3", "--bias=True,False"]
    assert len(settings_of(*argv, "--trials=2")) == 2
    assert settings_of(*argv, "--trials=2").keys() <= settings_of(*argv, "--trials=4").keys()


def test_values_of_ranges_are_drawn_evenly():
    file = write("n_layer = 'uniform:10:20'")
    found = list(settings_of(file, "--learning_rate=log:1e-4:1e-2", "--trials=200").values())
    assert len(found) == 200
    assert {each.n_layer for each in found} == set(range(10, 21))
    assert all(1e-4 <= each.learning_rate <= 1e-2 for each in found)
    assert 80 < sum(each.learning_rate < 1e-3 for each in found) < 120  # the geometric mean


@pytest.mark.parametrize(
    ("argv", "wrong"),
    [
        ([], "--learning_rate=1e-3,3e-4"),  # an example of several values
        (["--seed=1,2", "--out_dir=x"], "--out_dir"),
        (["--seed=1,2", "--init_from=resume"], "init_from"),
        (["--seed=1,2", "--halving=3", "--minutes=1"], "--minutes=None"),
        (["--seed=1,2", "--halving=3", "--max_iters=4"], "--max_iters=5"),
        (["--seed=1,2", "--sweep_dir="], "sweep_dir"),
        (["--seed=1,2", "--dataset=gone"], "gone"),
        (["--jobs=1,2"], "jobs"),
        (["--teachers=a,b"], "teachers"),
        (["--seed=1,x"], "'x'"),
        (["--dropout=0.1,0.2,7"], "7.0"),
        (["--dropout=0.1,"], "''"),
        (["--learning_rate=1e-3,1e-5", "--min_lr=1e-4"], "min_lr"),
        (["a.py"], "a.py: warmup_iters must be int, not 'x'"),
        (["b.py"], "1,000,000,000"),
        (["--dropout=uniform:0:0.3"], "--trials=N"),
        (["--dropout=uniform:1:0"], "uniform:1:0"),
        (["--learning_rate=log:0:1"], "log:0:1"),
        (["--learning_rate=log:1"], "log:1"),
        (["--learning_rate=log:a:1"], "log:a:1"),
        (["--learning_rate=even:0:1"], "even:0:1"),
    ],
)
def test_mistakes_are_reported_before_training(argv, wrong, verse):
    write("warmup_iters = [1, 'x']")
    write("warmup_iters = range(10**9)", "b.py")
    with pytest.raises(UserError) as caught:
        sweep.main([*flags(), *argv])
    assert wrong in str(caught.value)
    assert not Path("out-sweep").exists()


# Training


class FakeTraining:
    """Writes the log and the checkpoint of each run at once, instead of training it."""

    def __init__(self):
        self.loss_of = lambda settings: 1.0  # None: the run fails
        self.started = []  # (name of the run, step)

    def start(self, task, variables):
        folder, settings, stop_at = task
        self.started.append((folder.name, stop_at))
        folder.mkdir(exist_ok=True)
        if (loss := self.loss_of(settings)) is None:
            Path(folder, "output.txt").write_text("train.py: it failed\n")
            return SimpleNamespace(poll=lambda: 2, returncode=2)
        start = {"split": "start", "parameters": 1, "settings": {"n_embd": settings.n_embd}}
        event = {"split": "val", "step": stop_at, "loss": loss, "tokens": 1, "elapsed_s": 1}
        with open(folder / "log.jsonl", "a") as log:
            log.write(f"{json.dumps(start)}\n{json.dumps(event)}\n")
        model, progress = tiny.random_model(), Progress(stop_at, stop_at, stop_at, loss)
        saved = Checkpoint(model.config, model.state_dict(), progress, dataclasses.asdict(settings))
        saved.data = fingerprint(settings.dataset)
        checkpoints.save(folder / "last.pt", saved)
        shutil.copy(folder / "last.pt", folder / "ckpt.pt")
        return SimpleNamespace(poll=lambda: 0, returncode=0)


@pytest.fixture
def fake(verse, monkeypatch):
    """A FakeTraining that sweeps use."""
    fake = FakeTraining()
    monkeypatch.setattr(workers, "start", fake.start)
    monkeypatch.setattr(workers, "POLL_SECONDS", 0)
    return fake


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_halving_compares_the_mean_loss_of_seeds(fake, jobs):
    losses = {16: (1.0, 9.0), 8: (4.0, 5.0), 4: (6.0, 6.0), 2: (0.5, None)}
    fake.loss_of = lambda settings: losses[settings.n_embd][settings.seed - 1]
    argv = flags(max_iters=50, eval_interval=10, n_embd="16,8,4,2", n_head=1)
    argv += ["--seed=1,2", "--halving=4", f"--jobs={jobs}"]
    with pytest.raises(UserError, match="1 of 8 runs failed: n_embd=2,seed=2: train.py: it failed"):
        sweep.main(argv)
    names = {n: [f"n_embd={n},seed={seed}" for seed in (1, 2)] for n in losses}
    assert sorted(fake.started[:8]) == sorted((run, 10) for n in names for run in names[n])
    assert fake.started[8:] == [(run, step) for step in (20, 50) for run in names[8]]
    fake.started.clear()
    with pytest.raises(UserError, match="1 of 8 runs failed"):
        sweep.main(argv)
    assert fake.started == [("n_embd=2,seed=2", 10)]  # only the failed run is tried again


def test_a_sweep_whose_runs_all_fail_has_no_table(fake, capsys):
    fake.loss_of = lambda settings: None
    with pytest.raises(UserError, match=r"2 of 2 runs failed: seed=1: train.py: it failed"):
        sweep.main([*flags(), "--seed=1,2"])
    assert "| run" not in capsys.readouterr().out


def test_a_folder_with_another_run_is_refused(fake):
    argv = [*flags(dtype="auto"), "--seed=1,2"]
    sweep.main(argv)
    fake.started.clear()
    sweep.main([*argv, "--log_interval=7"])
    assert not fake.started
    with pytest.raises(UserError, match="batch_size was 4, now 3"):
        sweep.main([*argv, "--batch_size=3"])
    with (
        locked("out-sweep/seed=2"),
        pytest.raises(UserError, match="another process is writing to out-sweep/seed=2"),
    ):
        sweep.main(argv)
    tiny.prepare_verse(text=tiny.VERSE * 30)
    with pytest.raises(UserError, match="verse has changed"):
        sweep.main([*argv, "--seed=1,2,3"])


def test_damaged_checkpoint_is_reported(fake):
    sweep.main([*flags(), "--seed=1,2"])
    Path("out-sweep/seed=1/last.pt").write_bytes(b"damaged")
    with pytest.raises(UserError, match="out-sweep/seed=1/last.pt"):
        sweep.main([*flags(), "--seed=1,2"])


def test_runs_share_cores_and_gpus(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(workers.torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(workers.torch.cuda, "device_count", lambda: 2)
    assert workers.environment("cpu", 0, 1) == {}
    assert workers.environment("cpu", 1, 3) == {"OMP_NUM_THREADS": "2"}
    gpus = [workers.environment("cuda", n, 3)["CUDA_VISIBLE_DEVICES"] for n in range(3)]
    assert gpus == ["0", "1", "0"]
    assert "CUDA_VISIBLE_DEVICES" not in workers.environment("cuda:1", 0, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert workers.environment("cuda", 1, 1) == {"CUDA_VISIBLE_DEVICES": "7"}


# Processes


def start(*argv, tool="sweep"):
    """Starts a sweep, or another tool, in its own process group, as a shell does."""
    return subprocess.Popen(
        [sys.executable, "-m", f"tools.{tool}", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.05)


@pytest.mark.parametrize("tool", ["bench", "gpu_suite", "playground", "plot", "sweep"])
def test_tools_answer_help_and_signals_while_torch_is_imported(tool):
    write(f"import os\nos.kill(os.getpid(), {int(signal.SIGTERM)})\n", "torch.py")
    out, err = (helped := start("--help", tool=tool)).communicate()
    assert (helped.returncode, err) == (0, "")
    assert out.startswith(f"usage: {tool}.py ")
    stopped = start(*(["out-a"] if tool == "plot" else []), tool=tool)
    assert stopped.communicate() == ("", "")
    assert stopped.returncode == 143


@pytest.mark.slow
def test_each_combination_is_trained_and_compared(verse, capsys):
    argv = [*flags(n_embd="16,8"), "--seed=1,2", "--jobs=2"]
    sweep.main(argv)
    out = capsys.readouterr().out
    for run in runs.read_all(["out-sweep"]):
        name = f"n_embd={run.settings['n_embd']},seed={run.settings['seed']}"
        assert run.folder == f"out-sweep/{name}"
        assert run.val[-1]["step"] == 6
        assert f"{name}: val loss {run.best()['loss']:.4f}" in out
        assert "step 6: train loss" in Path(run.folder, "output.txt").read_text()
    head, _, *rows = out[out.index("| run") :].splitlines()
    assert [cell.strip() for cell in head.split("|")[1:4]] == ["run", "best val loss", "seeds"]
    cells = [[cell.strip() for cell in row.split("|")[1:4]] for row in rows]
    assert sorted(cell[0] for cell in cells) == [f"out-sweep/n_embd={n},seed=*" for n in (16, 8)]
    losses = [float(cell[1].split(" ± ")[0]) for cell in cells]
    assert losses == sorted(losses)
    assert [cell[2] for cell in cells] == ["2", "2"]

    before = {path: path.stat().st_mtime_ns for path in Path("out-sweep").glob("*/*")}
    sweep.main(argv)
    assert {path: path.stat().st_mtime_ns for path in Path("out-sweep").glob("*/*")} == before
    assert "4 runs, 4 of them already finished" in capsys.readouterr().out


@pytest.mark.slow
def test_failed_run_is_reported_and_the_others_continue(verse, capsys):
    message = "1 of 2 runs failed: n_head=3: .*n_embd=16 is not divisible"
    with pytest.raises(UserError, match=message):
        sweep.main([*flags(n_head="3,4", max_iters=1)])
    out = capsys.readouterr().out
    assert "n_head=3: failed: train.py: n_embd=16" in out
    assert "| out-sweep/n_head=4 |" in out


@pytest.mark.slow
def test_interrupted_sweep_continues_to_the_same_results(verse):
    settings = {"max_iters": 500, "eval_interval": 100}
    argv = [*flags(**settings, dropout="0,0.1"), "--jobs=2", "--halving=3"]
    stopped = start(*argv)
    wait_for(Path("out-sweep/dropout=0.0/last.pt").exists)
    os.killpg(stopped.pid, signal.SIGINT)  # as Ctrl-C, which reaches the runs, too
    _, err = stopped.communicate()
    assert stopped.returncode == 130
    assert err == "sweep.py: stopped and saved; to continue, run the same command\n"
    with locked("out-sweep/dropout=0.0"):  # its process has ended
        pass
    out, _ = (again := start(*argv)).communicate()
    assert again.returncode == 0
    assert "2 runs, 0 of them" in out
    [best] = [run for run in runs.read_all(["out-sweep"]) if run.val[-1]["step"] == 500]
    train.main(tiny.flags(**settings, dropout=best.settings["dropout"]))
    assert tiny.differences("out", best.folder) == []


@pytest.mark.slow
def test_interrupted_sweep_reports_runs_that_could_not_save(verse):
    stopped = start(*flags(max_iters=5000, eval_interval=5000), "--seed=1,2")
    wait_for(Path("out-sweep/seed=1/last.pt").exists)
    Path("out-sweep/seed=1/last.pt.tmp/x").mkdir(parents=True)  # no file can replace it
    stopped.send_signal(signal.SIGTERM)
    _, err = stopped.communicate()
    assert "sweep.py: stopped, but seed=1: train.py: stopped" in err
    assert "progress since the last save is lost" in err


@pytest.mark.slow
def test_runs_start_from_weights_and_resume(verse):
    train.main(tiny.flags())
    model = [f"--{name}=" for name in tiny.SHAPE]
    argv = [each for each in flags() if not each.startswith(tuple(model))]
    argv += ["--init_from=out/ckpt.pt", "--seed=1,2", "--jobs=2"]
    sweep.main([*argv, "--max_iters=1"])
    sweep.main([*argv, "--max_iters=2"])
    for seed in (1, 2):
        first = tiny.log_events(f"out-sweep/seed={seed}")[1]
        assert first["loss"] == pytest.approx(tiny.saved()["best_val_loss"])
        assert tiny.saved("last.pt", f"out-sweep/seed={seed}")["iter_num"] == 2
    with pytest.raises(UserError, match="n_layer was 1, now 2"):
        sweep.main([*argv, "--max_iters=2", "--n_layer=2"])
