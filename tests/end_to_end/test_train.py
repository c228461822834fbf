"""Tests of train.py: steps, whole runs, and nanoGPT's files."""

import copy
import math
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F

import sample
import train
from folio.checkpoint.format import Checkpoint
from folio.checkpoint.progress import Progress
from folio.data.batches import window_starts
from folio.data.dataset import load_dataset
from folio.data.tokenizer import GPT2Tokenizer
from folio.training.evaluation import evaluation_starts, split_loss
from folio.training.setup import model_config

# One step


@pytest.mark.parametrize("grad_clip", [0.0, 0.05])
def test_step_is_adamw_on_the_clipped_gradient_of_the_mean_loss(verse, grad_clip):
    run = tiny.new_run(gradient_accumulation_steps=2, grad_clip=grad_clip, seed=3)
    reference, split = copy.deepcopy(run.model), run.dataset.train
    loss, norm = train.train_step(run, step=0, lr=0.01)

    expected = reference(*split.windows(window_starts(3, 0, 8, len(split) - 8), 8))
    expected.backward()
    gradient = torch.cat([p.grad.flatten() for p in reference.parameters()])
    assert norm == pytest.approx(gradient.norm())
    clip = grad_clip / norm if grad_clip else 1.0
    assert clip <= 1
    for parameter in reference.parameters():  # AdamW's first step is the sign of the gradient
        g = parameter.grad * clip
        decay = 1 - 0.01 * (run.settings.weight_decay if parameter.dim() > 1 else 0.0)
        parameter.data = parameter.data * decay - 0.01 * g / (g.abs() + 1e-8)
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    for mine, other in zip(run.model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-4)


def test_the_temperature_divides_the_logits_in_training_only(verse):
    run = tiny.new_run(train_temperature=0.5)
    run.model.lm_head.weight.data *= 20  # predictions far from uniform
    starts = evaluation_starts(run, "val", run.settings.eval_iters * run.settings.batch_size)
    windows = run.dataset.val.windows(starts, 8)
    assert split_loss(run, "val").item() == pytest.approx(run.model(*windows).item())
    [(x, y)] = train.micro_batches(run, step=0)
    logits = run.model.logits(x).flatten(0, 1)
    expected = F.cross_entropy(logits / 0.5, y.flatten()).item()
    assert expected > F.cross_entropy(logits, y.flatten()).item() + 0.1
    loss, _ = train.train_step(run, step=0, lr=0.1)
    assert loss.item() == pytest.approx(expected)


# Whole runs


def test_run_with_uint32_ids(folder):
    characters = "".join(map(chr, range(0x10000, 0x10000 + 65537)))
    tiny.prepare_verse(text=characters)
    train.main(tiny.flags(max_iters=1, eval_iters=1, n_embd=2))
    assert load_dataset("verse").train.dtype == np.uint32
    sample.main(["--out_dir=out", "--device=cpu", f"--start={characters[-1]}", "--num_samples=1",
                 "--max_new_tokens=2"])  # fmt: skip


def test_run_lowers_the_loss_and_writes_checkpoints_and_log(verse, folder):
    train.main(tiny.flags())
    names = {path.name for path in (folder / "out").iterdir() if not path.name.startswith(".")}
    assert names == {"ckpt.pt", "last.pt", "log.jsonl"}
    last = tiny.load("last.pt")
    assert last["iter_num"] == 6
    assert last["tokenizer"] == verse.tokenizer.to_dict()
    assert (last["config"]["learning_rate"], last["config"]["dtype"]) == (1e-2, "float32")
    losses = [event["loss"] for event in tiny.log_events() if event["event"] == "val"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("always", [False, True])
def test_patience_ends_a_run_and_ckpt_is_the_best_state(verse, monkeypatch, capsys, always):
    flags = tiny.flags(init_from="auto", patience=2, always_save_checkpoint=always)
    tiny.fake_losses(monkeypatch, 9.0, 2.0, 3.0, 2.0)
    train.main(flags)
    train.main([*flags, "--max_iters=30"])
    assert tiny.load("ckpt.pt")["iter_num"] == (9 if always else 3)
    assert (tiny.load("last.pt")["iter_num"], tiny.load("last.pt")["best_step"]) == (9, 3)
    lines = capsys.readouterr().out.splitlines()
    assert "stopped at step 9: no improvement since step 3" in lines
    kept = "newest" if always else "best"
    best = f"done; best val bits per byte {2 / math.log(2):.4f} (val loss 2.0000) at step 3"
    assert f"{best}; the {kept} model is in out/ckpt.pt" in lines
    assert lines[-1] == "generate text: python sample.py --out_dir=out"
    for max_iters, names in (30, "--patience"), (9, "--patience and --max_iters"):
        train.main([*flags, f"--max_iters={max_iters}"])
        line = f"finished at step 9; to train longer, increase {names}\n"
        assert line in capsys.readouterr().out


def test_samples_at_intervals_and_the_end_do_not_change_training(verse, capsys):
    train.main(tiny.flags(dropout=0.1))
    train.main(tiny.flags(dropout=0.1, sample_interval=4, out_dir="sampled"))
    texts = re.findall(r"^sample at step (\d+):\n([^\0]+?)\n\n", capsys.readouterr().out, re.M)
    assert [step for step, _ in texts] == ["0", "4", "6"]
    assert len({text for _, text in texts}) == 3
    assert tiny.equal(tiny.load("last.pt")["model"], tiny.load("last.pt", "sampled")["model"])


def test_eval_only_prints_the_loss_and_writes_nothing(verse, folder, capsys):
    train.main(tiny.flags(eval_only=True))
    out = capsys.readouterr().out
    assert "step 0: train loss" in out
    assert "\nrandom weights are evaluated; for a trained model, add --init_from=resume\n" in out
    assert "parameters, from random weights\n" in out
    assert not (folder / "out").exists()
    train.main(tiny.flags(max_iters=1))
    assert "; 1 steps of 32 tokens\n" in capsys.readouterr().out
    train.main(tiny.flags(init_from="auto", eval_only=True))
    assert "parameters, from out/last.pt: step 1\n" in capsys.readouterr().out


# nanoGPT's files

NANOGPT_SETTINGS = tiny.SETTINGS | {
    "wandb_log": False, "wandb_project": "verse", "wandb_run_name": "tiny", "log_interval": 1,
    "always_save_checkpoint": False, "dropout": 0.0, "lr_decay_iters": 6, "min_lr": 1e-3,
    "beta1": 0.9, "beta2": 0.99, "grad_clip": 1.0, "decay_lr": True, "backend": "nccl",
}  # fmt: skip


def test_nanogpts_config_dataset_and_checkpoint_can_be_used(folder):
    lines = [f"{name} = {value!r}\n" for name, value in NANOGPT_SETTINGS.items()]
    Path("nano.py").write_text("".join(lines))
    model = tiny.write_nanogpt_checkpoint(tiny.write_nanogpt_dataset(), prefix="_orig_mod.")
    train.main(["nano.py", "--init_from=resume"])
    last, val = tiny.load("last.pt"), [e for e in tiny.log_events() if e["event"] == "val"]
    # The loss of nanoGPT's other windows is not compared with folio's.
    assert [event["step"] for event in val] == [3, 6]
    assert last["best_val_loss"] == min(event["loss"] for event in val) != 2.5
    assert last["iter_num"] == 6
    assert last["optimizer"]["state"][0]["step"] == 4  # one before, three after resuming
    assert not tiny.equal(last["model"], dict(model.state_dict()))
    assert tiny.log_events()[0]["settings"]["n_embd"] == 16


def test_resuming_keeps_a_vocabulary_size_that_is_not_padded():
    config = model_config(tiny.settings(), GPT2Tokenizer())
    assert config.vocab_size == 50304
    resumed = Checkpoint(replace(config, vocab_size=50257), {}, Progress(), {})
    assert model_config(tiny.settings(), GPT2Tokenizer(), resumed).vocab_size == 50257


# Compilation and GPUs


@pytest.mark.parametrize("part", ["torch.compile", "backend"])
def test_run_continues_uncompiled_if_the_compiler_fails(verse, monkeypatch, capsys, part):
    train.main(tiny.flags(out_dir="plain", dropout=0.2))
    train.main(tiny.flags(dropout=0.2, stop_at=2))
    fail, compile = Mock(side_effect=RuntimeError("\n  no compiler here\nand more")), torch.compile
    failing = {"torch.compile": fail, "backend": lambda f, **_: compile(f, backend=fail)}
    monkeypatch.setattr(torch, "compile", failing[part])
    train.main(tiny.flags(dropout=0.2, init_from="resume", compile=True))
    [line] = capsys.readouterr().err.splitlines()
    cause = "no compiler here)" if part == "torch.compile" else "backend="
    assert line.startswith(f"compilation failed; continuing without it ({cause}")
    assert tiny.equal(tiny.load()["model"], tiny.load(out_dir="plain")["model"])


@pytest.mark.parametrize(
    ("device", "dtype", "compile", "tolerance"),
    [
        pytest.param("cpu", "float32", True, 1e-4, marks=pytest.mark.slow),
        pytest.param("cuda", "bfloat16", True, 5e-3, marks=pytest.mark.gpu),
        pytest.param("cuda", "bfloat16", "max-autotune", 5e-3, marks=pytest.mark.gpu),
        pytest.param("cuda", "float16", True, 5e-3, marks=pytest.mark.gpu),
    ],
)
def test_compiled_run_is_close_to_uncompiled_run(verse, capsys, device, dtype, compile, tolerance):
    settings = {"device": device, "dtype": dtype, "max_iters": 12, "n_layer": 3}
    settings |= {"gradient_accumulation_steps": 2, "grad_clip": 0.1}
    losses = []
    for out_dir, value in (("plain", False), ("out", compile)):
        train.main(tiny.flags(out_dir=out_dir, compile=value, **settings))
        losses.append([event["loss"] for event in tiny.log_events(out_dir) if "loss" in event])
    assert "continuing without" not in capsys.readouterr().err
    assert losses[1] == pytest.approx(losses[0], abs=tolerance)
    assert losses[1][-1] < losses[1][0]
