"""Tests of folio/training/run_log.py: the console, log.jsonl, and the progress bar."""

import errno
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import tiny

import train
from folio.cli.errors import UserError
from folio.cli.settings import load_settings
from folio.hardware.device import Machine
from folio.training import run_log
from folio.training.run import open_log
from model import GPT, GPTConfig


def test_console_and_log_have_a_line_for_each_event(verse, capsys):
    Path("rate.py").write_text("learning_rate = 0.02")
    flags = tiny.flags(learning_rate=0.01, seed=4, log_interval=2)
    train.main([*flags, "rate.py"])
    out, err = capsys.readouterr()
    assert out.startswith(f"settings: {' '.join(flags)} rate.py\ndataset: verse, 1,458 training")
    assert re.search(r"^model: 3,\d{3} parameters.* 6 steps of 32 tokens\nmachine: cpu", out, re.M)
    steps = re.findall(r"^step (\d+): train loss \d+\.\d{4}, val loss \d+\.\d{4}", out, re.M)
    iters = re.findall(r"^iter (\d+): loss \d+\.\d{4}, time \d+\.\d\dms, mfu [\d.]+%", out, re.M)
    assert steps == ["0", "3", "6"]
    assert iters == ["0", "2", "4"]
    assert "|" not in out + err  # no progress bar outside a terminal
    assert "peak memory" not in out  # on a GPU only
    events = tiny.log_events()
    assert [(e["step"], e["event"]) for e in events] == [
        (0, "start"), (0, "val"), (0, "train"), (2, "train"), (3, "val"), (4, "train"), (6, "val"),
    ]  # fmt: skip
    common = {"step", "event", "loss", "lr", "tokens", "elapsed_s"}
    of_evaluation = {"train_loss", "perplexity", "bits_per_byte", "best_step"}
    of_evaluation |= {"train_windows", "val_windows"}
    assert events[0]["settings"]["log_interval"] == 2
    assert "out_dir" not in events[0]["settings"]
    assert set(events[2]) == common | {"tokens_per_s", "mfu", "grad_norm"}
    assert set(events[-1]) == common | of_evaluation
    assert events[-1]["tokens"] == 6 * 4 * 8


@pytest.fixture
def run(verse):
    return tiny.new_run(log_interval=2, eval_interval=10, max_iters=20)


def test_speed_excludes_pauses_and_time_left_includes_them(run, monkeypatch, capsys):
    peak = run.machine.peak_flops  # measured with the real clock
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    with open_log(run) as log:
        with run.timer.pause():
            clock.now += 1000  # the first evaluation
        for _ in range(3):
            clock.now += 4
            if run.progress.step % 2 == 0:
                log.step(2.5, float("inf"), lr=0.1)
            run.progress.add_step(32)
            with run.timer.pause():
                clock.now += 10
    first, second = tiny.log_events()[1:]
    assert (first["step"], second["step"]) == (0, 2)
    assert first["tokens_per_s"] == second["tokens_per_s"] == 8  # 32 per step of 4 s
    assert second["mfu"] == pytest.approx(run.model.flops_per_token() * 8 / peak)
    assert (second["tokens"], second["grad_norm"]) == (96, None)
    # 17 steps of 32 / 3 s: three steps of 4 s with two pauses of 10 s so far
    assert capsys.readouterr().out.splitlines()[-1].endswith(", 8 tokens/s, 03:01 left")


def test_fewer_threads_are_reported_once(run, capsys):
    run.thread_tuner = Mock()
    run.thread_tuner.check.side_effect = [None, "fewer threads", *[None] * 18]
    train.train(run)
    assert capsys.readouterr().out.count("fewer threads\n") == 1


def test_output_on_a_full_disk_loses_only_a_line(run, monkeypatch):
    with open_log(run) as log:
        monkeypatch.setattr(run_log.tqdm, "write", Mock(side_effect=OSError(errno.ENOSPC, "full")))
        log.say("line")


def test_progress_bar_replaces_step_lines_on_a_terminal(verse, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", sys.stdout)  # one terminal shows both
    for name in ("COLUMNS", "LINES"):
        monkeypatch.setenv(name, "120")
    train.main(tiny.flags())  # the line of each evaluation redraws the bar
    out = capsys.readouterr().out
    assert "iter " not in out
    assert re.search(r"step 3/6, loss [\d.]+, [\d,]+ tokens/s, \d\d:\d\d left \|", out)
    assert "\rstep 6: train loss" in out
    assert re.search(r"\r +\rdone; best val bits per byte", out)  # the bar is cleared


@pytest.mark.gpu
def test_the_peak_memory_of_a_gpu_is_reported(verse, capsys):
    train.main(tiny.flags(device="cuda"))
    assert re.search(r"^peak memory: [\d.,]+ GiB$", capsys.readouterr().out, re.M)
    assert all(0 < event["peak_memory_gib"] < 1 for event in tiny.log_events())


# Weights & Biases, which a mock replaces


def test_wandb_receives_the_numbers_of_the_log(verse, monkeypatch):
    wandb = Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    train.main(tiny.flags(wandb_log=True, wandb_project="verses", wandb_run_name="first"))
    settings = wandb.init.call_args.kwargs
    assert (settings["project"], settings["name"]) == ("verses", "first")
    assert settings["config"]["n_embd"] == 16
    run = wandb.init.return_value
    logged = [(call.kwargs["step"], call.args[0]) for call in run.log.call_args_list]
    expected = []
    for event in tiny.log_events()[1:]:
        step, kind = event.pop("step"), event.pop("event")
        expected.append((step, {f"{kind}/{name}": value for name, value in event.items()}))
    assert logged == expected
    run.finish.assert_called_once()


def test_a_missing_package_is_reported_before_training(verse, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    message = "wandb_log cannot start: run python -m pip install wandb"
    train.main(tiny.flags(max_iters=1))
    with pytest.raises(UserError, match=message):
        train.main(tiny.flags(overwrite=True, wandb_log=True))
    assert tiny.load("last.pt")["iter_num"] == 1  # the earlier run is still there


# Hints at the start, and advice at the end


def test_a_run_of_the_default_size_that_takes_days_is_reported(verse, monkeypatch):
    run = tiny.new_run()
    monkeypatch.setattr(Machine, "peak_flops", 1e12)
    assert list(run_log.hints(run)) == []
    run.model = GPT(GPTConfig(vocab_size=64, n_layer=1))
    for flags, count in ((["--dataset=verse"], 2), (["--batch_size=12"], 1), (["--minutes=1"], 2)):
        run.settings = load_settings(train.TrainConfig, flags)
        *lines, wait = run_log.hints(run)
        assert re.fullmatch(r"the first step ends after [\d:]+ or more", wait)
        assert len(lines) == count - 1
        assert all("config/own_text.py --dataset=" in line for line in lines)


@pytest.mark.parametrize(("changes", "is_said"), [({}, True), ({"decay_lr": False}, False)])
def test_a_warmup_longer_than_the_run_is_reported(verse, capsys, changes, is_said):
    train.main(tiny.flags(max_iters=41, warmup_iters=41, eval_interval=50, **changes))
    line = "\nthe run ends in the warmup of 41 steps: set --warmup_iters=2\n"
    assert bool(re.search(line, capsys.readouterr().out)) == is_said


@pytest.mark.parametrize(
    ("train_losses", "val_losses", "epochs", "text", "changes"),
    [
        ([4, 2, 1.5, 1.0], [4, 2.1, 1.7, 1.9], 9, "risen by 0.20 since step 200", {"dropout": 0.3}),
        ([4, 2, 1.5, 1.9], [4, 2.1, 1.7, 1.9], 9, "both losses have", {"learning_rate": 0.005}),
        ([4, 2, 1.4, 1.1], [4, 2.1, 1.6, 1.5], 9, "9 passes .* more text would", {}),
        ([4, 2, 1.4, 1.1], [4, 2.1, 1.6, 1.5], 1.4, "1.4 passes .* loss 1.50$", {}),  # undecided
        ([4, 2, 1.5, 1.4], [4, 2.3, 1.8, 1.7], 0.2, "longer", {"minutes": 4, "max_iters": 600}),
        ([4, 2, 1.5], [4, 2.3, 1.8], 0.2, "longer", {"minutes": 4}),  # 200 of 300 steps
        ([4, 2, 1.6, 1.5, 1.4], [4, 2.3, 2.0, 1.8, 1.7], 0.2, "loss 1.70$", {}),  # 400 of 300
        ([4, 2, 1.5, 1.4], [4, 2.3, 1.7, 1.72], 0.2, "loss 1.72$", {}),  # patience has ended it
        # runs that docs/lab-notebook.md follows up: quick, fast
        ([4.2, 1.25, 1.16], [4.2, 1.48, 1.44], 1.4, "1.4 passes .* loss 1.44$", {}),
        ([4.2, 1.42, 1.12], [4.2, 1.61, 1.44], 3.5, "more text", {}),
        ([4.2, 1.39, 1.25], [4.2, 1.50, 1.40], 3.3, "3.3 passes .* loss 1.40$", {}),
    ],
)
def test_advice_by_the_form_of_the_curves(train_losses, val_losses, epochs, text, changes):
    evaluations = [
        {"step": 100 * number, "train_loss": train_loss, "loss": loss}
        for number, (train_loss, loss) in enumerate(zip(train_losses, val_losses, strict=True))
    ]
    settings = tiny.settings(dropout=0.2, max_iters=300, minutes=2)
    line, advised_changes = run_log.advice_on(evaluations, settings, epochs)
    assert re.search(text, line)
    assert advised_changes == changes
    assert run_log.advice_on(evaluations[:2], settings, epochs) is None


def test_evaluations_of_0_2_0_are_compared_by_the_validation_windows():
    last = {"train_windows": 2, "val_windows": 3}
    assert run_log.cover_same_text({"val_windows": 3}, last)
    assert not run_log.cover_same_text({"val_windows": 4}, last)


def test_advice_compares_evaluations_of_the_same_windows(verse, monkeypatch, capsys):
    advise = Mock(return_value=("ADVICE", {"max_iters": 8, "minutes": 5}))
    monkeypatch.setattr(run_log, "advice_on", advise)
    train.main(tiny.flags(max_iters=3))
    assert "\nADVICE: --max_iters=8 --minutes=5\n" in capsys.readouterr().out
    train.main(tiny.flags(max_iters=6, init_from="resume"))
    train.main(tiny.flags(max_iters=9, init_from="resume", batch_size=2))
    train.main(tiny.flags(max_iters=12, init_from="resume", batch_size=2, eval_iters=60))
    train.main(tiny.flags(max_iters=15, init_from="resume", batch_size=2, eval_iters=70))
    steps = [[event["step"] for event in call.args[0]] for call in advise.call_args_list]
    assert steps == [[0, 3], [0, 3, 6], [9], [12], [15]]  # the last two: of equal validation text
    times = [event["elapsed_s"] for event in tiny.log_events()]
    assert times == sorted(times)  # a resumed run continues the time


@pytest.mark.parametrize("name", ["event", "step", "loss", "train_loss", "elapsed_s"])
def test_a_resumed_run_ignores_lines_without_their_keys_or_types(verse, name):
    for damaged in (f'"{name[::-1]}":', f'"{name}": [], "":'):
        train.main(tiny.flags(eval_interval=1, overwrite=True))
        log = Path("out/log.jsonl")
        log.write_text(log.read_text().replace(f'"{name}":', damaged))
        train.main(tiny.flags(eval_interval=1, init_from="resume", max_iters=9))
        assert tiny.load("last.pt")["iter_num"] == 9
