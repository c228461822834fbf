"""Training and sampling that start from the weights of a different run or of a pretrained model."""

from pathlib import Path

import pytest
import tiny
import torch

import train
from folio.cli.errors import UserError
from folio.cli.settings import load_settings
from folio.data.dataset import load_tokenizer
from folio.data.tokenizer import ByteTokenizer
from folio.distributed.world import SINGLE_PROCESS
from folio.pretrained import load as initial
from folio.pretrained.load import checkpoint_tokenizer, load_initial

CKPT = "out/ckpt.pt"
POSITIONS = "transformer.wpe.weight"


def flags(init_from=CKPT, **settings):
    """Returns tiny.SETTINGS, without the model, for a run in out-b."""
    settings = {"out_dir": "out-b", "init_from": init_from} | settings
    known = {name: value for name, value in tiny.SETTINGS.items() if name not in tiny.SHAPE}
    return [f"--{name}={value}" for name, value in (known | settings).items()]


def new_run(**settings):
    return train.make_run(load_settings(train.TrainConfig, flags(**settings)), SINGLE_PROCESS)


@pytest.fixture
def run(verse):
    """A run in out/."""
    train.main(tiny.flags(max_iters=3, eval_interval=3))


# What init_from names


@pytest.mark.parametrize(
    ("init_from", "words"),
    [
        ("resum", "resume"),
        ("out/nothing.pt", "init_from=out/nothing.pt"),
        ("../model", "init_from=../model"),
        ("out", "use out/ckpt.pt"),
        ("gpt2", "gpt2/config.json"),  # a folder comes before the hub
        ("data/verse/train.bin", "train.bin is not a checkpoint"),
    ],
)
def test_mistakes_in_init_from(init_from, words, verse):
    for folder in ("out", "gpt2"):
        Path(folder).mkdir()
    Path(CKPT).touch()
    with pytest.raises(UserError, match=f"^[^\n]*{words}[^\n]*$"):
        load_initial(init_from)


@pytest.mark.parametrize("name", ["gpt2", "org/model@v1.0"])
def test_other_names_are_those_of_models_on_the_hub(name, folder, monkeypatch):
    model = tiny.random_model(vocab_size=256)
    tiny.export(model, ByteTokenizer(), "cache")
    monkeypatch.setattr(initial, "pretrained_folder", {name: "cache"}.__getitem__)
    checkpoint = load_initial(name)
    assert (checkpoint.summary, checkpoint.config) == (name, model.config)


# Training


def test_a_run_starts_at_step_0_with_the_weights_and_a_fresh_optimizer(run):
    before = tiny.load()
    train.main(flags())
    first, last = tiny.log_events("out-b")[1], tiny.load("last.pt", "out-b")
    assert (first["step"], first["loss"]) == (0, pytest.approx(before["best_val_loss"]))
    assert last["optimizer"]["state"][0]["step"] == last["iter_num"] == 6
    assert last["model_args"] == before["model_args"]
    assert {name: last["config"][name] for name in tiny.SHAPE} == tiny.SHAPE
    assert tiny.equal(tiny.load(), before)


def test_a_run_that_started_from_weights_resumes_exactly(run):
    train.main(flags(out_dir="out-c", dropout=0.1))
    train.main(flags(dropout=0.1, stop_at=4))
    train.main(flags(dropout=0.1, init_from="resume"))
    assert not tiny.differences("out-b", "out-c")


# The model


def test_the_settings_have_the_values_of_the_checkpoint(verse):
    switches = {**tiny.SWITCHES, "bias": True, "activation": "gelu_tanh"}
    train.main(tiny.flags(max_iters=1, **switches))
    settings = new_run(dropout=0.2).settings
    expected = tiny.SHAPE | switches | {"dropout": 0.2}
    assert {name: getattr(settings, name) for name in expected} == expected


def test_a_smaller_block_size_keeps_the_first_positions(run):
    model = new_run(block_size=5).model
    positions = model.state_dict()[POSITIONS]
    assert torch.equal(positions, tiny.load()["model"][POSITIONS][:5])
    assert positions.untyped_storage().nbytes() == positions.nbytes  # all of it would be saved
    with pytest.raises(UserError, match="block_size is 8 in the checkpoint and 5"):
        new_run(out_dir="out", init_from="resume", block_size=5)  # resuming does not crop


def test_a_larger_block_size_needs_rotary_positions(run):
    with pytest.raises(UserError, match="8 .* and 9 .* cannot grow .rotary ones can.: use"):
        new_run(block_size=9)
    train.main(tiny.flags(max_iters=1, position="rotary", overwrite=True))
    assert new_run(block_size=9).model.config.block_size == 9


def test_a_folder_needs_a_tokenizer_that_fits_the_dataset(verse):
    tiny.export(tiny.random_model(vocab_size=24), verse.tokenizer, "hf")
    tiny.prepare_verse("other", "abcdefghijk" * 50)
    with pytest.raises(UserError, match="vocab_size is 24 in the checkpoint and 11 in the"):
        new_run(init_from="hf", dataset="other")
    Path("hf/tokenizer.json").unlink()
    with pytest.raises(UserError, match="hf has no tokenizer.json"):
        new_run(init_from="hf")


# Tokenizers


def test_the_tokenizer_of_nanogpts_checkpoint_is_that_of_its_dataset(folder):
    size = tiny.write_nanogpt_dataset("nano")
    tiny.write_nanogpt_checkpoint(size, dataset="nano")
    checkpoint = load_initial(CKPT)
    assert checkpoint_tokenizer(checkpoint).to_dict() == load_tokenizer("nano").to_dict()
    checkpoint.settings["dataset"] = "nowhere"
    with pytest.raises(
        UserError, match=r"of 24, .*50,257 tokens, .*copy the meta.pkl .* to data/nowhere"
    ):
        checkpoint_tokenizer(checkpoint)
