"""Tests of train.py: steps, evaluation, whole runs, and nanoGPT's files."""

import copy
import math
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import tiktoken
import tiny
import torch
import torch.nn.functional as F

import sample
import train
from folio.checkpoint.format import Checkpoint, build_model
from folio.checkpoint.progress import Progress
from folio.checkpoint.run_dir import RunDir
from folio.data.batches import Batches, Split, window_starts
from folio.data.dataset import load_dataset
from folio.data.tokenizer import GPT2Tokenizer
from folio.training import evaluation
from folio.training.evaluation import evaluation_iters, evaluation_starts
from folio.training.setup import model_config
from model import GPTConfig


def new_run(settings=None, dropout=0.0):
    """Returns a Run for 65 tokens, without a dataset."""
    config = GPTConfig(**tiny.SHAPE, vocab_size=65, dropout=dropout)
    return train.make_run(tiny.plan_of(config, settings or tiny.settings()))


def random_ids(count):
    return np.random.default_rng(0).integers(0, 65, count).astype(np.uint16)


def rows_at(ids, starts):
    """Returns inputs and targets of the windows of 8 tokens at `starts`."""
    rows = torch.tensor(np.stack([ids[start : start + 9] for start in starts]).astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


# One step


@pytest.mark.parametrize("grad_clip", [0.0, 0.05])
def test_step_is_adamw_on_the_clipped_gradient_of_the_mean_loss(grad_clip):
    ids = random_ids(200)
    settings = tiny.settings(gradient_accumulation_steps=2, grad_clip=grad_clip, seed=3)
    run = new_run(settings)
    reference = copy.deepcopy(run.model)
    batches = Batches(Split(ids, "cpu"), settings, run.world)
    loss, norm = train.train_step(run, batches.at(0), step=0, lr=0.01)

    expected = reference(*rows_at(ids, window_starts(3, 0, 8, len(ids) - 8)))
    expected.backward()
    gradient = torch.cat([p.grad.flatten() for p in reference.parameters()])
    assert norm == pytest.approx(gradient.norm())
    clip = grad_clip / norm if grad_clip else 1.0
    assert clip <= 1
    for parameter in reference.parameters():  # AdamW's first step is the sign of the gradient
        g = parameter.grad * clip
        decay = 1 - 0.01 * (settings.weight_decay if parameter.dim() > 1 else 0.0)
        parameter.data = parameter.data * decay - 0.01 * g / (g.abs() + 1e-8)
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    for mine, other in zip(run.model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-4)


def test_the_temperature_divides_the_logits_in_training_only():
    run = new_run(tiny.settings(train_temperature=0.5))
    split = Split(random_ids(200), "cpu")
    run.model.lm_head.weight.data *= 20  # predictions far from uniform
    starts = evaluation_starts(split, run.settings, 4)
    whole = run.model(*split.windows(starts, 8)).item()
    assert evaluation.split_loss(run, split, 4).item() == pytest.approx(whole)
    x, y = next(iter(Batches(split, run.settings, run.world).at(0)))
    logits = run.model.logits(x).flatten(0, 1)
    expected = F.cross_entropy(logits / 0.5, y.flatten()).item()
    assert expected > F.cross_entropy(logits, y.flatten()).item() + 0.1
    loss, _ = train.train_step(run, [(x, y)], step=0, lr=0.1)
    assert loss.item() == pytest.approx(expected)


# Evaluation


def test_evaluations_take_a_twentieth_of_the_time_and_the_final_one_covers_the_split(verse, capsys):
    changes = {"eval_iters": None, "max_iters": 40, "eval_interval": 20}
    train.main(tiny.flags(**changes))
    settings, split = tiny.settings(**changes), verse.val
    assert sum(evaluation_iters(settings)) / 3 <= 0.05 * 20  # a forward pass is 1/3 of a step
    _, part = evaluation_iters(settings)
    starts = evaluation_starts(split, settings, evaluation_iters(settings, 40)[1])
    assert len(evaluation_starts(split, settings, part)) < len(starts) == (len(split) - 1) // 8
    *_, last, final = tiny.log_events()
    assert (last["event"], final["event"], final["step"]) == ("val", "final", 40)
    best = build_model(RunDir("out").load_best()).eval()
    assert final["loss"] == pytest.approx(best(*rows_at(split.astype(int), starts)).item())
    assert final["loss"] != last["loss"]
    assert f"done; best val loss {final['loss']:.4f} at step 40;" in capsys.readouterr().out


def test_the_final_evaluation_is_that_of_the_best_model(verse, monkeypatch, capsys):
    weights = []

    def evaluate(run, steps=None):
        weights.append(copy.deepcopy(run.model.state_dict()))
        return evaluation.evaluate(run, steps)

    monkeypatch.setattr(tiny, "evaluate", evaluate)
    tiny.fake_losses(monkeypatch, 9.0, 2.0, 3.0, 2.5)
    train.main(tiny.flags(eval_iters=None))
    assert tiny.equal(weights[3], weights[1])
    assert not tiny.equal(weights[3], weights[2])
    assert "done; best val loss 2.5000 at step 3;" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("n_tokens", "iters", "windows"),  # up to 4 windows per batch
    [(9, 100, 1), (40, 100, 4), (41, 100, 5), (201, 100, 25), (201, 2, 8)],
)
def test_evaluation_is_the_mean_loss_of_windows_spread_over_the_split(n_tokens, iters, windows):
    ids, run = random_ids(n_tokens), new_run(tiny.settings(), dropout=0.5)
    starts = np.linspace(0, n_tokens - 9, windows).astype(int)
    assert (np.diff(starts) >= 8).all()
    expected = run.model.eval()(*rows_at(ids, starts)).item()
    assert evaluation.split_loss(run, Split(ids, "cpu"), iters).item() == pytest.approx(expected)
    assert run.model.training


def test_perplexity_and_bits_per_byte_are_those_of_the_evaluated_targets(folder):
    tiny.prepare_verse(text="ä" * 3600 + "ab" * 180 + "äu" * 19 + "uä")
    run = tiny.new_run(eval_iters=1, batch_size=2)
    dataset = run.dataset
    starts, ids = [0, len(dataset.val) - 9], dataset.val.ids
    text = "".join(dataset.tokenizer.decode(ids[at + 1 : at + 9]) for at in starts)
    losses = evaluation.evaluate(run)
    expected = 16 * losses["loss"] / math.log(2) / len(text.encode())
    assert len(text) == 16
    assert len(text.encode()) == 20
    assert losses["bits_per_byte"] == pytest.approx(expected)
    assert losses["perplexity"] == pytest.approx(math.exp(losses["loss"]))


def test_without_the_files_of_gpt2s_vocabulary_bits_per_byte_are_omitted(folder, monkeypatch):
    tiny.write_nanogpt_dataset()
    Path("data/verse/meta.pkl").unlink()  # GPT-2's tokens, if there is no table
    monkeypatch.setattr(tiktoken, "get_encoding", Mock(side_effect=OSError))
    train.main(tiny.flags(max_iters=1))
    assert "bits_per_byte" not in tiny.log_events()[-1]
    assert tiktoken.get_encoding.call_count == 1


def test_run_with_uint32_ids(folder):
    characters = "".join(map(chr, range(0x10000, 0x10000 + 65537)))
    tiny.prepare_verse(text=characters)
    train.main(tiny.flags(max_iters=1, eval_iters=1, n_embd=2))
    assert load_dataset("verse").train.dtype == np.uint32
    sample.main(["--out_dir=out", "--device=cpu", f"--start={characters[-1]}", "--num_samples=1",
                 "--max_new_tokens=2"])  # fmt: skip


# Whole runs


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
def test_ckpt_is_the_best_state_and_patience_ends_a_run(verse, monkeypatch, capsys, always):
    tiny.fake_losses(monkeypatch, 9.0, 2.0, 3.0, 2.0)
    train.main(tiny.flags(max_iters=30, patience=2, always_save_checkpoint=always))
    assert tiny.load("ckpt.pt")["iter_num"] == (9 if always else 3)
    assert (tiny.load("last.pt")["iter_num"], tiny.load("last.pt")["best_step"]) == (9, 3)
    lines = capsys.readouterr().out.splitlines()
    assert "stopped at step 9: no improvement since step 3" in lines
    kept = "newest" if always else "best"
    best = f"done; best val loss 2.0000 at step 3; the {kept} model is in out/ckpt.pt"
    assert best in lines
    assert lines[-1] == "generate text: python sample.py --out_dir=out"


def test_resuming_counts_patience_and_says_how_to_continue(verse, monkeypatch, capsys):
    tiny.fake_losses(monkeypatch, 9.0, 2.0, 3.0)
    train.main(tiny.flags())
    tiny.fake_losses(monkeypatch, 3.0)
    resumed = tiny.flags(max_iters=30, init_from="resume")
    train.main([*resumed, "--patience=2"])
    assert tiny.load("last.pt")["iter_num"] == 9
    train.main([*resumed, "--patience=2"])
    end = "finished at step 9; to continue, increase --patience\n"
    assert capsys.readouterr().out.endswith(end)


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
    assert "parameters; random weights\n" in out
    assert not (folder / "out").exists()
    train.main(tiny.flags(max_iters=3))
    train.main(tiny.flags(init_from="auto", eval_only=True))
    assert "parameters; from out/last.pt: step 3\n" in capsys.readouterr().out


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
    last = tiny.load("last.pt")
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
    train.main(tiny.flags(out_dir="plain"))
    fail, compile = Mock(side_effect=RuntimeError("\n  no compiler here\nand more")), torch.compile
    failing = {"torch.compile": fail, "backend": lambda f, **_: compile(f, backend=fail)}
    monkeypatch.setattr(torch, "compile", failing[part])
    train.main(tiny.flags(compile=True))
    [line] = capsys.readouterr().err.splitlines()
    cause = "no compiler here)" if part == "torch.compile" else "backend="
    assert line.startswith(f"compilation failed; continuing without it ({cause}")
    assert tiny.equal(tiny.load()["model"], tiny.load(out_dir="plain")["model"])


@pytest.mark.slow
def test_compiled_run_equals_uncompiled_run(verse, capsys):
    train.main(tiny.flags(out_dir="plain", max_iters=3, n_layer=3))
    train.main(tiny.flags(compile=True, max_iters=3, n_layer=3))
    assert "continuing without" not in capsys.readouterr().err
    plain = tiny.load("last.pt", "plain")["model"]
    for name, tensor in tiny.load("last.pt")["model"].items():
        assert torch.allclose(tensor, plain[name], atol=1e-4), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("compile", [True, "max-autotune"])
def test_compiled_run_on_a_gpu_is_close_to_uncompiled_run(verse, capsys, compile, dtype):
    from torch._dynamo.utils import counters  # slow to import

    settings = {"device": "cuda", "dtype": dtype, "max_iters": 12, "log_interval": 1}
    settings |= {"gradient_accumulation_steps": 2, "grad_clip": 0.1}
    counters["inductor"].clear()
    losses = []
    for out_dir, value in (("plain", False), ("out", compile)):
        train.main(tiny.flags(out_dir=out_dir, compile=value, **settings))
        losses.append([event["loss"] for event in tiny.log_events(out_dir) if "loss" in event])
    assert "continuing without" not in capsys.readouterr().err
    assert losses[1] == pytest.approx(losses[0], abs=5e-3)
    assert losses[1][-1] < losses[1][0]
