"""Checkpoint files: saving, loading, nanoGPT's format, refusals, optimizer state."""

import copy
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import tiny
import torch

from folio import __version__
from folio.checkpoint.format import Checkpoint, build_model, load_checkpoint, save_checkpoint
from folio.checkpoint.progress import Progress
from folio.cli.errors import UserError
from folio.training.optimizers import load_optimizers, make_optimizers
from model import GPT, GPTConfig

SHAPE = tiny.SHAPE | {"vocab_size": 11}
IDX = torch.arange(8)[None]
GUIDE = Path(__file__).parents[2] / "docs/from-nanogpt.md"

pytestmark = pytest.mark.usefixtures("folder")


def make_model(**changes):
    torch.manual_seed(0)
    return GPT(GPTConfig(**(SHAPE | changes))).init_weights()


def train_one_step(kind="adamw"):
    """Returns a model and its optimizers after one step."""
    model = make_model()
    optimizers = make_optimizers(model, tiny.settings(optimizer=kind))
    model(IDX, IDX).backward()
    for optimizer in optimizers.values():
        optimizer.step()
    return model, optimizers


def checkpoint_of(model, optimizers=None, **fields):
    states = {name: optimizer.state_dict() for name, optimizer in (optimizers or {}).items()}
    progress = Progress(step=3, evaluated_step=2, best_step=1, best_val_loss=2.5, elapsed_s=4.5)
    weights = model.state_dict()
    return Checkpoint(model.config, weights, progress, {"dataset": "verse"}, states, **fields)


def have_same_logits(model, other):
    return torch.equal(model.eval().logits(IDX), other.eval().logits(IDX))


# Saving and loading


def test_every_field_is_saved_and_loaded():
    saved = checkpoint_of(
        *train_one_step(),
        scaler={"scale": 1024.0},
        tokenizer={"kind": "char", "characters": "\nabcdefghij"},
        data={"train": 1, "val": 2},
    )
    save_checkpoint("ckpt.pt", saved)
    saved = vars(replace(saved, path=Path("ckpt.pt")))
    assert tiny.equal(vars(load_checkpoint("ckpt.pt")), saved)
    mapped = vars(load_checkpoint("ckpt.pt", optimizers=False))
    assert tiny.equal(mapped, saved | {"optimizers": {}})


@pytest.mark.parametrize("changes", [{"dropout": 0.3, "bias": False}, tiny.SWITCHES], ids=str)
def test_loaded_model_equals_saved_one(changes):
    model = make_model(**changes)
    save_checkpoint("ckpt.pt", checkpoint_of(model))
    loaded = build_model(load_checkpoint("ckpt.pt", optimizers=False))
    assert loaded.config == model.config
    assert have_same_logits(loaded, model)


# nanoGPT's format


def test_plain_gpt2_is_saved_with_nanogpts_model_args_only():
    save_checkpoint("ckpt.pt", checkpoint_of(make_model(bias=False)))
    content = tiny.load("ckpt.pt", ".")
    assert content.keys() >= {"model", "optimizer", "iter_num", "best_val_loss", "config"}
    assert content["version"] == __version__
    assert content["model_args"] == SHAPE | {"bias": False, "dropout": 0.0}


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "module._orig_mod."])
def test_nanogpts_checkpoint_loads(prefix):
    model = tiny.write_nanogpt_checkpoint(11, prefix=prefix)
    content = tiny.load()
    del content["model_args"]["dropout"]
    # A buffer that nanoGPT stored before PyTorch 2.
    content["model"][f"{prefix}transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
    torch.save(content, "ckpt.pt")
    loaded = load_checkpoint("ckpt.pt")
    assert have_same_logits(build_model(loaded), model)
    assert loaded.config == GPTConfig(**SHAPE, bias=False, dropout=0.0)
    assert loaded.progress == Progress(3, 0, -1.0, 3, 3, 2.5)
    assert type(loaded.progress.best_val_loss) is float


def test_what_older_files_of_nanogpt_lack_follows_from_the_weights():
    model = tiny.write_nanogpt_checkpoint(11)
    content = tiny.load()
    args = {name: content["model_args"][name] for name in ("n_layer", "n_head", "n_embd")}
    old = {"model": content["model"], "model_args": args | {"block_size": 8, "use_rope": False}}
    torch.save(old, "old.pt")
    loaded = load_checkpoint("old.pt", optimizers=False)
    assert have_same_logits(build_model(loaded), model)
    assert loaded.progress.step == 0
    torch.save(old | {"model_args": args | {"use_rope": True}}, "old.pt")
    with pytest.raises(UserError, match="model_args has use_rope=True, which this GPT"):
        load_checkpoint("old.pt")


def test_the_code_that_converts_a_file_with_objects_of_numpy_works():
    model = tiny.write_nanogpt_checkpoint(11)
    content = tiny.load()
    content["model_args"]["n_layer"] = np.int64(1)
    torch.save(content | {"config": Namespace(dataset="verse")}, "objects.pt")
    with pytest.raises(UserError, match=r"contains (numpy|argparse)\..*docs/from-nanogpt.md"):
        load_checkpoint("objects.pt")
    code = GUIDE.read_text().split("    import torch\n")[1].split("\n\n")[0]
    exec(dedent(code).replace("FILE", "objects.pt"), {"torch": torch})
    loaded = load_checkpoint("plain.pt")
    assert have_same_logits(build_model(loaded), model)
    assert loaded.settings == {"dataset": "verse"}


def test_a_model_with_an_own_head_is_not_tied_whatever_its_arguments_say():
    """As forks of nanoGPT save it, which has no argument for it."""
    model = make_model(tie_weights=False)
    weights = model.state_dict()
    save_checkpoint("ckpt.pt", replace(checkpoint_of(make_model()), weights=weights))
    assert have_same_logits(build_model(load_checkpoint("ckpt.pt")), model)


# Optimizer state


def test_state_of_other_optimizers_is_refused():
    checkpoint = checkpoint_of(*train_one_step("muon"), path="ckpt.pt")
    with pytest.raises(UserError, match=r"ckpt.pt.* does not fit"):
        load_optimizers(train_one_step()[1], None, checkpoint)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_moments_are_loaded_whatever_their_strides_and_refused_unless_dense(optimizer):
    model, optimizers = train_one_step(optimizer)
    checkpoint = checkpoint_of(model)
    name = "exp_avg" if optimizer == "adamw" else "momentum_buffer"
    saved = {key: copy.deepcopy(value.state_dict()) for key, value in optimizers.items()}
    moments = saved[optimizer]["state"][0]
    moments[name] = moment = moments[name].T.contiguous().T
    load_optimizers(optimizers, None, replace(checkpoint, optimizers=copy.deepcopy(saved)))
    loaded = optimizers[optimizer].state_dict()["state"][0][name]
    assert torch.equal(loaded, moment)
    assert loaded.is_contiguous()
    for wrong in (torch.zeros(1, 1).expand(moment.shape), moment.to_sparse(), moment.int()):
        moments[name] = wrong
        with pytest.raises(UserError, match=r"optimizer state does not fit"):
            load_optimizers(optimizers, None, replace(checkpoint, optimizers=dict(saved)))
