"""Training and sampling that start from the weights of another run or of a pretrained model."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch

import sample
import train
from folio import checkpoint as checkpoints
from folio import initial
from folio.checkpoint import Progress
from folio.completion import checkpoint_tokenizer
from folio.errors import UserError
from folio.hf import write_pretrained
from folio.initial import load_best, load_initial
from folio.run_dir import RunDir
from folio.settings import load

CKPT = "out/ckpt.pt"
POSITIONS = "transformer.wpe.weight"


def flags(init_from=CKPT, **settings):
    """Returns tiny.SETTINGS, without the model, for a run in out-b."""
    settings = {"out_dir": "out-b", "init_from": init_from} | settings
    known = {name: value for name, value in tiny.SETTINGS.items() if name not in tiny.SHAPE}
    return [f"--{name}={value}" for name, value in (known | settings).items()]


def setup(**settings):
    return train.setup(load(train.TrainConfig, flags(**settings)))


@pytest.fixture
def run(verse):
    """A run in out/."""
    train.main(tiny.flags(max_iters=3, eval_interval=3))


# What init_from names


@pytest.mark.parametrize(
    ("init_from", "message"),
    [
        ("resum", "init_from=resum is not a file, a folder or a hub id; did you mean resume?"),
        ("gpt2-xxl", "did you mean gpt2-xl?"),
        ("bert", "a folder or a hub id; known names: scratch, resume, auto, gpt2, gpt2-medium"),
        ("out/nothing.pt", "init_from=out/nothing.pt is not a file, a folder or a hub id"),
        ("../model", "init_from=../model is not a file, a folder or a hub id"),
        ("a/b/c", "init_from=a/b/c is not a file, a folder or a hub id"),
        ("", "init_from= is not a file, a folder or a hub id"),
        ("out", "out is the folder of a run: use --init_from=out/ckpt.pt"),
        ("data/verse/train.bin", "train.bin is damaged or not a checkpoint"),
        ("a" * 300, "cannot read a*: File name too long"),
    ],
)
def test_mistakes_in_init_from(init_from, message, run, monkeypatch):
    monkeypatch.setattr(initial, "pretrained_folder", None)  # the hub is not asked
    with pytest.raises(UserError, match=message):
        load_initial(init_from)


@pytest.mark.parametrize("init_from", ["scratch", "auto"])
def test_sampling_needs_trained_weights(init_from):
    with pytest.raises(UserError, match=f"init_from={init_from} has no trained weights"):
        load_best(init_from, RunDir("out"))


@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl", "gpt2@main", "org/model", "org/model@v1.0"])
def test_other_names_are_those_of_models_on_the_hub(name, run, monkeypatch):
    monkeypatch.setattr(initial, "pretrained_folder", {name: "cache"}.__getitem__)
    found = {"cache": checkpoints.load(CKPT)}
    monkeypatch.setattr(initial, "read_pretrained", found.__getitem__)
    assert load_initial(name).path == Path(name)


def test_a_local_folder_comes_before_the_hub(folder, monkeypatch):
    Path("gpt2").mkdir()
    monkeypatch.setattr(initial, "pretrained_folder", None)
    monkeypatch.setattr(initial, "read_pretrained", {"gpt2": "local"}.__getitem__)
    assert load_initial("gpt2") == "local"


# Training


def test_a_run_starts_at_step_0_with_the_weights_and_a_fresh_optimizer(run):
    before = tiny.saved()
    train.main(flags())
    first, last = tiny.log_events("out-b")[1], tiny.saved("last.pt", "out-b")
    assert (first["step"], first["loss"]) == (0, pytest.approx(before["best_val_loss"]))
    assert last["optimizer"]["state"][0]["step"] == last["iter_num"] == 6
    assert last["model_args"] == before["model_args"]
    assert {name: last["config"][name] for name in tiny.SHAPE} == tiny.SHAPE
    assert tiny.same(tiny.saved(), before)


def test_a_run_starts_from_nanogpts_checkpoint(folder):
    model = tiny.write_nanogpt_checkpoint(tiny.write_nanogpt_dataset())
    started = setup()
    assert started.progress == Progress()
    assert tiny.same(started.learner.model.state_dict(), model.state_dict())
    assert not started.learner.optimizers["adamw"].state


def test_a_run_that_started_from_weights_resumes_exactly(run):
    train.main(flags(out_dir="out-c", dropout=0.1))
    train.main(flags(dropout=0.1, stop_at=4))
    train.main(flags(dropout=0.1, init_from="resume"))
    assert not tiny.differences("out-b", "out-c")


def test_a_run_can_start_from_a_checkpoint_in_its_own_folder(run):
    before = tiny.saved()
    train.main(flags(out_dir="out"))
    assert tiny.same(tiny.saved(out_dir="out.1"), before)
    assert tiny.saved("last.pt")["iter_num"] == 6


def test_evaluation_writes_nothing(run, capsys):
    capsys.readouterr()
    train.main([*flags(), "--eval_only"])
    loss = tiny.saved()["best_val_loss"]
    assert f"val loss {loss:.4f}" in capsys.readouterr().out
    assert not Path("out-b").exists()


def test_an_exported_run_continues_with_the_same_weights(run):
    pytest.importorskip("tokenizers")
    checkpoint = checkpoints.load(CKPT)
    write_pretrained("exported", checkpoint, checkpoint_tokenizer(checkpoint))
    started = setup(init_from="exported")
    weights = started.learner.model.state_dict()
    assert all(torch.equal(weights[name], each) for name, each in tiny.saved()["model"].items())
    assert started.settings.block_size == 8


# The model


def test_the_settings_have_the_values_of_the_checkpoint(verse):
    switches = {**tiny.SWITCHES, "bias": True, "activation": "gelu_tanh"}
    train.main(tiny.flags(max_iters=1, **switches))
    settings = setup(dropout=0.2).settings
    expected = tiny.SHAPE | switches | {"dropout": 0.2}
    assert {name: getattr(settings, name) for name in expected} == expected


def test_a_smaller_block_size_keeps_the_first_positions(run):
    model = setup(block_size=5).learner.model
    assert model.config.block_size == 5
    positions = model.state_dict()[POSITIONS]
    assert torch.equal(positions, tiny.saved()["model"][POSITIONS][:5])
    assert positions.untyped_storage().nbytes() == positions.nbytes  # all of it would be saved
    train.main(flags(block_size=5, max_iters=1))
    assert tiny.saved("last.pt", "out-b")["model"][POSITIONS].shape == (5, 16)


def test_a_larger_block_size_needs_rotary_positions(run):
    with pytest.raises(UserError, match="block_size is 8 in the checkpoint and 9 in the settings"):
        setup(block_size=9)
    train.main(tiny.flags(max_iters=1, position="rotary", overwrite=True))
    assert setup(block_size=9).learner.model.config.block_size == 9


def test_resuming_does_not_crop(run):
    with pytest.raises(UserError, match="block_size is 8 in the checkpoint and 5 in the settings"):
        setup(out_dir="out", init_from="resume", block_size=5)


def test_every_difference_is_named(run):
    tiny.prepare_verse("other", "abcdefghijk" * 50)
    with pytest.raises(UserError) as caught:
        setup(n_layer=3, bias=True, dataset="other")
    for words in (
        "out/ckpt.pt cannot be trained further: ",
        "n_layer is 1 in the checkpoint and 3 in the settings",
        "bias is False in the checkpoint and True in the settings",
        "the tokenizer is char with 24 tokens in the checkpoint and char with 11 tokens in the",
    ):
        assert words in str(caught.value)


def test_a_vocabulary_of_the_same_size_can_differ(run):
    tiny.prepare_verse("other", (tiny.VERSE * 20).replace("S", "Z"))
    with pytest.raises(UserError, match="in the checkpoint and another char with 24 tokens"):
        setup(dataset="other")


def test_weights_without_a_tokenizer_need_a_vocabulary_of_their_size(run):
    torch.save(tiny.saved() | {"tokenizer": None}, CKPT)
    assert setup().progress.step == 0
    tiny.prepare_verse("other", "abcdefghijk" * 50)
    with pytest.raises(UserError, match="vocab_size is 24 in the checkpoint and 11 in the"):
        setup(dataset="other")


def test_damaged_positions_are_a_user_error(run):
    content = tiny.saved()
    content["model"][POSITIONS] = 3
    torch.save(content, CKPT)
    with pytest.raises(UserError, match="out/ckpt.pt: the weights do not fit the model"):
        setup(block_size=5)


# Sampling


@pytest.mark.parametrize("action", [["--start=Shall", "--num_samples=1"], ["--score=verse.txt"]])
def test_sampling_from_a_file_equals_sampling_from_its_run(action, run, capsys):
    def output_of(*arguments):
        capsys.readouterr()
        sample.main([*arguments, "--device=cpu", "--dtype=float32", *action])
        return capsys.readouterr()

    expected = output_of("--out_dir=out")
    shutil.move(CKPT, "other.pt")
    found = output_of("--init_from=other.pt")
    assert found.out == expected.out
    assert found.err.startswith("other.pt: step 3, best val loss")


def test_the_summary_of_a_pretrained_model_has_no_step(run):
    checkpoint = replace(checkpoints.load(CKPT), progress=Progress(), path=Path("gpt2"))
    assert checkpoint.summary == "gpt2"
