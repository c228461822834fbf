import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F

import batches
import checkpoint as ckpt
import train
from config import UserError
from device import choose_machine
from model import GPT, GPTConfig
from optimizers import make_optimizers
from prepare import load_dataset
from tokenizer import GPT2Tokenizer

ROOT = Path(__file__).parent.parent
CPU = choose_machine("cpu", "float32", False)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tiny_model(vocab_size=65, dropout=0.0, seed=0):
    torch.manual_seed(seed)
    return GPT(GPTConfig(**tiny.SHAPE, vocab_size=vocab_size, dropout=dropout))


def new_state(model, config):
    no_scaler = torch.amp.GradScaler("cpu", enabled=False)
    return train.State(model, make_optimizers(model, config), no_scaler, torch.zeros(4))


def same_tensors(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Batches


@pytest.mark.parametrize(("batch_size", "accumulation"), [(4, 2), (2, 4), (1, 8)])
def test_a_run_does_not_depend_on_how_its_batches_are_cut(verse, batch_size, accumulation):
    def weights(out_dir, batch_size, accumulation):
        cut = {"batch_size": batch_size, "gradient_accumulation_steps": accumulation}
        train.main(tiny.flags(out_dir=out_dir, max_iters=3, **cut))
        return tiny.saved("last.pt", out_dir)["model"]

    whole = weights("out-whole", 8, 1)
    for name, tensor in weights("out-cut", batch_size, accumulation).items():
        assert torch.allclose(tensor, whole[name], rtol=0, atol=1e-5), name


# One step


@pytest.mark.parametrize("grad_clip", [0.0, 0.05])
def test_a_step_is_adamw_on_the_clipped_gradient_of_the_mean_loss(grad_clip):
    ids = np.random.default_rng(0).integers(0, 65, 200).astype(np.uint16)
    config = tiny.settings(gradient_accumulation_steps=2, grad_clip=grad_clip, seed=3)
    model, reference = tiny_model(), tiny_model()
    state = new_state(model, config)
    micro_batches = batches.Batches(batches.Split(ids, "cpu"), config).of(0)
    loss, norm = train.gradient(model, state, micro_batches, config, CPU)
    train.update(state, norm, 0.01, config)

    starts = batches.batch_starts(3, 0, 8, len(ids) - 8)
    rows = torch.tensor(np.stack([ids[s : s + 9] for s in starts]).astype(np.int64))
    expected = reference(rows[:, :-1], rows[:, 1:])[1]
    expected.backward()
    assert norm == pytest.approx(
        torch.cat([p.grad.flatten() for p in reference.parameters()]).norm()
    )
    if grad_clip:
        assert norm > grad_clip  # or the test would not clip
        for parameter in reference.parameters():
            parameter.grad *= grad_clip / norm
    for parameter in reference.parameters():  # AdamW's first step moves by the sign of the gradient
        g = parameter.grad
        decay = 1 - 0.01 * (config.weight_decay if parameter.dim() > 1 else 0.0)
        parameter.data = parameter.data * decay - 0.01 * g / (g.abs() + 1e-8)
    assert float(loss) == pytest.approx(expected.item(), abs=1e-6)
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-4)


def test_dropout_is_another_at_every_step_and_the_same_in_every_run(verse):
    def losses(out_dir):
        train.main(tiny.flags(out_dir=out_dir, dropout=0.5, max_iters=3))
        return [e["loss"] for e in tiny.log_events(out_dir) if e["split"] == "train"]

    first = losses("out-a")
    torch.manual_seed(99)
    assert losses("out-b") == first
    seeds = {train.dropout_seed(seed, step) for seed in range(10) for step in range(10)}
    assert len(seeds) == 100


def test_float16_trains_with_a_scaler_whose_state_is_kept(verse):
    train.main(tiny.flags(dtype="float16", max_iters=3))
    assert tiny.saved("last.pt")["scaler"]["_growth_tracker"] == 3


# Evaluation


@pytest.mark.parametrize(("n_tokens", "windows"), [(9, 1), (40, 4), (41, 5), (201, 25)])
def test_evaluation_is_the_mean_over_the_whole_split_in_windows_that_do_not_overlap(
    n_tokens, windows
):
    ids = np.random.default_rng(1).integers(0, 65, n_tokens).astype(np.uint16)
    model = tiny_model()
    starts = np.linspace(0, n_tokens - 9, windows).astype(int)
    assert (np.diff(starts) >= 8).all()
    rows = torch.tensor(np.stack([ids[s : s + 9] for s in starts]).astype(np.int64))
    logits, _ = model(rows[:, :-1], rows[:, 1:])
    expected = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()
    assert float(
        train.split_loss(model, batches.Split(ids, "cpu"), tiny.settings(), CPU)
    ) == pytest.approx(expected)


def test_eval_iters_limits_the_windows_and_spreads_them_over_the_split():
    ids = np.zeros(1000, dtype=np.uint16)
    ids[500:] = 1
    seen = []
    model = tiny_model()
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    train.split_loss(model, batches.Split(ids, "cpu"), tiny.settings(eval_iters=2), CPU)
    assert [tuple(x.shape) for x in seen] == [(4, 8), (4, 8)]
    assert (seen[0] == 0).all()
    assert (seen[1] == 1).all()


def test_evaluation_is_without_dropout_and_training_goes_on_with_it():
    ids = np.random.default_rng(1).integers(0, 65, 100).astype(np.uint16)
    model = tiny_model(dropout=0.5)
    losses = {
        float(train.split_loss(model, batches.Split(ids, "cpu"), tiny.settings(), CPU))
        for _ in range(3)
    }
    assert len(losses) == 1
    assert model.training


def test_perplexity_and_bits_per_byte_come_from_the_validation_loss(folder):
    tiny.prepare_verse(text="äö ü" * 200)  # 7 bytes in 4 characters
    dataset = batches.on_device(load_dataset("verse"), "cpu")
    losses = train.evaluate(tiny_model(), dataset, tiny.settings(), CPU)
    assert losses["perplexity"] == pytest.approx(math.exp(losses["val"]))
    assert losses["bits_per_byte"] == pytest.approx(losses["val"] / math.log(2) * 4 / 7)


# The run


def test_a_run_leaves_its_best_its_last_and_its_log(verse, folder):
    train.main(tiny.flags())
    assert sorted(path.name for path in (folder / "out").iterdir()) == [
        "ckpt.pt",
        "last.pt",
        "log.jsonl",
    ]
    last = tiny.saved("last.pt")
    assert last["iter_num"] == 6
    assert last["tokenizer"] == verse.tokenizer.to_dict()
    assert last["config"]["learning_rate"] == 1e-2
    assert last["config"]["dtype"] == "float32"


def test_the_console_keeps_the_shapes_that_people_parse(verse, capsys):
    train.main(tiny.flags())
    out = capsys.readouterr().out
    steps = re.findall(r"^step (\d+): train loss (\d+\.\d{4}), val loss (\d+\.\d{4})", out, re.M)
    iters = re.findall(
        r"^iter (\d+): loss (\d+\.\d{4}), time (\d+\.\d\d)ms, mfu (\d+\.\d\d)%", out, re.M
    )
    assert [int(step) for step, *_ in steps] == [0, 3, 6]
    assert [int(step) for step, *_ in iters] == [0, 1, 2, 3, 4, 5]
    assert float(steps[-1][2]) < float(steps[0][2])


def test_the_log_has_a_line_for_each_event(verse):
    train.main(tiny.flags(log_interval=2))
    events = tiny.log_events()
    assert [(e["step"], e["split"]) for e in events] == [
        (0, "start"), (0, "val"), (0, "train"), (2, "train"), (3, "val"), (4, "train"), (6, "val"),
    ]  # fmt: skip
    figures = {"step", "split", "loss", "lr", "tokens", "elapsed_s"}
    assert events[0]["settings"]["log_interval"] == 2
    assert "out_dir" not in events[0]["settings"]
    assert set(events[2]) == figures | {"tokens_per_s", "mfu", "grad_norm"}
    assert events[-1]["tokens"] == 6 * 4 * 8
    assert {"lr", "train_loss", "perplexity", "bits_per_byte"} < set(events[-1])


def test_the_machine_and_what_differs_from_the_defaults_are_told(verse, capsys):
    train.main(tiny.flags(learning_rate=0.02))
    out = capsys.readouterr().out
    assert "learning_rate=0.02" in out
    assert "weight_decay" not in out
    assert re.search(r"machine: cpu \(.*\), float32 \(as set\), not compiled \(as set\)", out)


def fake_losses(monkeypatch, *val_losses):
    losses = iter(val_losses)
    monkeypatch.setattr(
        train, "evaluate", lambda *_: {"train": 1.0, "val": next(losses), "perplexity": 1.0}
    )


def test_ckpt_is_the_best_on_validation_and_last_the_newest(verse, monkeypatch):
    fake_losses(monkeypatch, 9.0, 3.0, 2.0, 4.0)  # the first is before training
    train.main(tiny.flags(max_iters=9))
    assert (tiny.saved("ckpt.pt")["iter_num"], tiny.saved("last.pt")["iter_num"]) == (6, 9)
    assert tiny.saved("last.pt")["best_val_loss"] == 2.0


def test_the_best_is_written_together_with_the_last(verse, monkeypatch):
    written = []
    monkeypatch.setattr(
        ckpt, "save", lambda paths, checkpoint: written.append([path.name for path in paths])
    )
    fake_losses(monkeypatch, 9.0, 3.0, 4.0)
    train.main(tiny.flags())
    assert written == [["ckpt.pt", "last.pt"], ["ckpt.pt", "last.pt"], ["last.pt"]]


def test_always_save_checkpoint_keeps_the_newest_in_ckpt_too(verse, monkeypatch, capsys):
    fake_losses(monkeypatch, 9.0, 2.0, 3.0)
    train.main(tiny.flags(always_save_checkpoint=True))
    assert tiny.saved("ckpt.pt")["iter_num"] == 6
    end = "done; best val loss 2.0000 at step 3; the newest model is in out/ckpt.pt"
    assert end in capsys.readouterr().out


def test_patience_ends_a_run_that_gets_no_better(verse, monkeypatch, capsys):
    fake_losses(monkeypatch, 9.0, 2.0, 3.0, 2.0)
    train.main(tiny.flags(max_iters=30, patience=2))
    assert tiny.saved("ckpt.pt")["iter_num"] == 3
    assert (tiny.saved("last.pt")["iter_num"], tiny.saved("last.pt")["best_step"]) == (9, 3)
    out = capsys.readouterr().out
    assert "stopped at step 9: no better val loss since step 3" in out
    assert "done; best val loss 2.0000 at step 3; the best model is in out/ckpt.pt" in out


def test_patience_that_ends_where_the_disk_refuses_is_an_error(verse, folder, monkeypatch):
    fake_losses(monkeypatch, 9.0, 2.0, 3.0)
    real = ckpt.save

    def save(paths, checkpoint):
        if checkpoint.step == 6:
            raise UserError("cannot write out/last.pt: No space left on device")
        real(paths, checkpoint)

    monkeypatch.setattr(ckpt, "save", save)
    with pytest.raises(UserError, match="No space left"):
        train.main(tiny.flags(max_iters=30, patience=1))


def test_patience_outlives_resuming(verse, monkeypatch, capsys):
    fake_losses(monkeypatch, 9.0, 2.0, 3.0)
    train.main(tiny.flags())
    fake_losses(monkeypatch, 3.0)
    resumed = ["--init_from=resume", "--patience=2"]
    train.main([*tiny.flags(max_iters=30), *resumed])
    assert tiny.saved("last.pt")["iter_num"] == 9
    capsys.readouterr()
    train.main([*tiny.flags(max_iters=30), *resumed])
    assert "at step 9; train on with a larger --patience" in capsys.readouterr().out
    fake_losses(monkeypatch, 1.0)
    train.main([*tiny.flags(max_iters=12), "--init_from=resume"])
    assert tiny.saved("last.pt")["iter_num"] == 12


def test_a_run_writes_short_texts_and_trains_as_without(verse, capsys):
    train.main(tiny.flags(dropout=0.1))
    train.main(tiny.flags(dropout=0.1, sample_interval=4, out_dir="out-written"))
    texts = re.findall(r"^written at step (\d+):\n([^\0]+?)\n\n", capsys.readouterr().out, re.M)
    assert [step for step, _ in texts] == ["0", "4", "6"]
    assert len({text for _, text in texts}) == 3
    for name in tiny.saved()["model"]:
        assert torch.equal(
            tiny.saved()["model"][name], tiny.saved(out_dir="out-written")["model"][name]
        )


def test_time_goes_on_where_a_run_does(verse):
    train.main(tiny.flags(max_iters=3))
    before = tiny.saved("last.pt")["elapsed_s"]
    train.main(tiny.flags(init_from="resume"))
    events = tiny.log_events()
    times = [event["elapsed_s"] for event in events]
    assert times == sorted(times)
    assert events[-1]["elapsed_s"] > before + events[0]["elapsed_s"]


@pytest.mark.slow
def test_on_a_terminal_a_bar_says_what_lines_say_elsewhere(verse, folder):
    flags = tiny.flags(max_iters=400, eval_interval=400)
    command = [sys.executable, str(ROOT / "train.py"), *flags]
    shown = on_a_terminal(command)
    assert "iter " not in shown
    assert re.search(r"step \d+/400, loss [\d.]+, [\d,]+ tokens/s, \d\d:\d\d left \|", shown)
    assert "step 400: train loss" in shown
    piped = subprocess.run(command, capture_output=True, text=True)
    assert len(re.findall(r"^iter \d+: loss", piped.stdout, re.M)) == 400
    assert "|" not in piped.stdout + piped.stderr


@pytest.mark.slow
def test_a_terminal_of_unknown_size_gets_lines(verse, folder):
    flags = tiny.flags(max_iters=20, eval_interval=20)
    shown = on_a_terminal([sys.executable, str(ROOT / "train.py"), *flags], size=(0, 0))
    assert len(re.findall(r"^iter \d+: loss", shown, re.M)) == 20


def on_a_terminal(command, size=(24, 100)):
    """What a command shows on a terminal of so many lines and columns."""
    pty = pytest.importorskip("pty")
    reader, terminal = pty.openpty()
    pytest.importorskip("termios").tcsetwinsize(terminal, size)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    shown = b""
    try:
        while piece := os.read(reader, 4096):
            shown += piece
    except OSError:  # how Linux tells that the other end is closed
        pass
    os.close(reader)
    assert process.wait() == 0
    return shown.decode()


def test_eval_only_tells_the_loss_and_writes_nothing(verse, folder, capsys):
    train.main(tiny.flags(eval_only=True))
    assert "step 0: train loss" in capsys.readouterr().out
    assert not (folder / "out").exists()


def test_a_finished_run_says_how_to_go_on(verse, capsys):
    train.main(tiny.flags())
    train.main(tiny.flags(init_from="resume"))
    assert "out/last.pt is at step 6; train on" in capsys.readouterr().out


def test_resuming_takes_hyperparameters_from_the_settings(verse):
    train.main(tiny.flags(max_iters=3))
    train.main(tiny.flags(init_from="resume", weight_decay=0.5, dropout=0.2))
    assert tiny.saved("last.pt")["optimizer"]["param_groups"][0]["weight_decay"] == 0.5
    assert tiny.saved("last.pt")["model_args"]["dropout"] == 0.2


def test_resuming_another_model_names_each_difference(verse):
    train.main(tiny.flags(max_iters=3))
    with pytest.raises(
        UserError, match=r"block_size 8 there and 4 here.*n_embd 16 there and 32 here"
    ):
        train.main(tiny.flags(init_from="resume", n_embd=32, block_size=4))


def test_resuming_on_another_vocabulary_is_refused(verse):
    train.main(tiny.flags(max_iters=3))
    tiny.prepare_verse("other", (tiny.VERSE * 20).replace("S", "Z"))
    with pytest.raises(UserError, match="another vocabulary"):
        train.main(tiny.flags(init_from="resume", dataset="other"))


def test_resuming_nothing_says_that_there_is_no_checkpoint(verse):
    with pytest.raises(UserError, match="no checkpoint out/ckpt.pt"):
        train.main(tiny.flags(init_from="resume"))


# What is refused before training


def test_a_split_shorter_than_the_context_is_named(verse):
    with pytest.raises(UserError, match=r"val.bin of verse has \d+ tokens.*--block_size=\d+"):
        train.main(tiny.flags(block_size=1024))


def test_tokens_beyond_the_vocabulary_are_named(verse, folder):
    bin_path = folder / "data" / "verse" / "val.bin"
    ids = np.fromfile(bin_path, np.uint16)
    ids[5] = 999
    ids.tofile(bin_path)
    with pytest.raises(UserError, match=r"data/verse/val.bin holds token 999"):
        train.main(tiny.flags())


def test_a_shape_that_cannot_be_built_is_an_error_of_one_line(verse):
    with pytest.raises(UserError, match="n_embd=15 is not divisible by n_head=2"):
        train.main(tiny.flags(n_embd=15))


def test_an_out_dir_that_cannot_be_written_is_named(verse, folder):
    (folder / "out").write_text("a file")
    with pytest.raises(UserError, match="cannot write to out: File exists"):
        train.main(tiny.flags())


def test_a_rate_that_would_decay_upwards_is_refused(verse):
    with pytest.raises(UserError, match=r"min_lr=0.1 is above learning_rate=0.01"):
        train.main(tiny.flags(min_lr=0.1))


def test_many_processes_are_refused(verse, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="one process"):
        train.main(tiny.flags())


# nanoGPT's files


NANOGPT_CONFIG = """
out_dir = 'out'
eval_interval = 3
eval_iters = 5
log_interval = 1
always_save_checkpoint = False
wandb_log = False
wandb_project = 'verse'
wandb_run_name = 'tiny'
dataset = 'verse'
gradient_accumulation_steps = 1
batch_size = 4
block_size = 8
n_layer = 1
n_head = 2
n_embd = 16
dropout = 0.0
learning_rate = 1e-2
max_iters = 6
lr_decay_iters = 6
min_lr = 1e-3
beta2 = 0.99
warmup_iters = 2
device = 'cpu'
compile = False
"""


def test_nanogpts_config_and_dataset_train_unchanged(folder):
    tiny.write_nanogpt_dataset()
    (folder / "nano.py").write_text(NANOGPT_CONFIG)
    train.main(["nano.py"])
    assert tiny.saved("last.pt")["iter_num"] == 6


def test_a_vocabulary_that_is_not_rounded_up_is_kept_on_resuming():
    model_config = train.make_model_config(tiny.settings(), GPT2Tokenizer(), None)
    assert model_config.vocab_size == 50304
    exact = ckpt.Checkpoint(replace(model_config, vocab_size=50257), {}, 0, 1.0, {})
    resumed = train.make_model_config(tiny.settings(), GPT2Tokenizer(), exact)
    assert resumed.vocab_size == 50257


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_nanogpts_checkpoint_is_resumed_with_its_moments(folder, prefix):
    size = tiny.write_nanogpt_dataset()
    model = tiny.write_nanogpt_checkpoint(size, prefix=prefix)
    (folder / "nano.py").write_text(NANOGPT_CONFIG)
    train.main(["nano.py", "--init_from=resume"])
    last = tiny.saved("last.pt")
    assert last["iter_num"] == 6
    assert last["optimizer"]["state"][0]["step"] == 4  # one there, three here
    assert tiny.log_events()[0]["settings"]["n_embd"] == 16
    assert not same_tensors(last["model"], model.state_dict())


def test_folios_checkpoint_has_what_nanogpt_reads(verse):
    train.main(tiny.flags())
    checkpoint = tiny.saved("ckpt.pt")
    assert {"model", "optimizer", "model_args", "iter_num", "best_val_loss", "config"} < set(
        checkpoint
    )
    assert set(checkpoint["model_args"]) == set(ckpt.NANOGPT_ARGS)


# The compiler


def test_a_compiler_that_fails_leaves_the_run_as_if_it_were_off(verse, monkeypatch, capsys):
    def broken(model):
        raise RuntimeError("no compiler here\nand more")

    train.main(tiny.flags(out_dir="out-plain"))
    monkeypatch.setattr(torch, "compile", broken)
    train.main(tiny.flags(compile=True))
    assert "not compiled (no compiler here)" in capsys.readouterr().err
    assert same_tensors(tiny.saved("last.pt")["model"], tiny.saved("last.pt", "out-plain")["model"])


def test_a_trial_that_fails_while_evaluating_leaves_the_model_in_training():
    model = tiny_model(dropout=0.5)
    model.register_forward_pre_hook(lambda *_: print(1 / torch.is_grad_enabled()))
    ids = np.zeros(100, dtype=np.uint16)
    with pytest.raises(ZeroDivisionError):
        train.warm_up_compiler(tiny.settings(), CPU, batches.Split(ids, "cpu"), model)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_a_compiled_run_learns_what_a_plain_one_does(verse, capsys):
    train.main(tiny.flags(out_dir="out-plain", dropout=0.0))
    train.main(tiny.flags(compile=True))
    assert "compiling failed" not in capsys.readouterr().err
    plain = tiny.saved("last.pt", "out-plain")["model"]
    for name, tensor in tiny.saved("last.pt")["model"].items():
        assert torch.allclose(tensor, plain[name], atol=1e-4), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", ["auto", "float16", "float32"])
def test_a_gpu_learns_too(verse, dtype):
    train.main(tiny.flags(device="cuda", dtype=dtype, compile="auto"))
    losses = [e["loss"] for e in tiny.log_events() if e["split"] == "val"]
    assert losses[-1] < losses[0]
