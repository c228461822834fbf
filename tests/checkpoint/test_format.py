"""Checkpoint files: saving, loading, nanoGPT's format, refusals, optimizer state."""

from argparse import Namespace
from dataclasses import fields, replace
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
from folio.training.optimizers import make_optimizers, restore_optimizers
from model import GPT, GPTConfig

SHAPE = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 11}
IDX = torch.arange(8)[None]
GUIDE = Path(__file__).parents[2] / "docs/from-nanogpt.md"

pytestmark = pytest.mark.usefixtures("folder")


def make_model(**changes):
    torch.manual_seed(0)
    return GPT(GPTConfig(**(SHAPE | changes))).init_weights()


def train_one_step(kind="adamw", **changes):
    """Returns a model and its optimizers after one step."""
    model = make_model(**changes)
    optimizers = make_optimizers(model, tiny.settings(optimizer=kind))
    model(IDX, IDX).backward()
    for optimizer in optimizers.values():
        optimizer.step()
    return model, optimizers


def checkpoint_of(model, optimizers=None, **fields):
    states = {name: optimizer.state_dict() for name, optimizer in (optimizers or {}).items()}
    progress = Progress(step=3, evaluated_at=2, best_step=1, best_val_loss=2.5, elapsed_s=4.5)
    weights = model.state_dict()
    return Checkpoint(model.config, weights, progress, {"dataset": "verse"}, states, **fields)


def have_same_logits(model, other):
    return torch.equal(model.eval().logits(IDX), other.eval().logits(IDX))


# Saving and loading


@pytest.mark.parametrize("optimizers", [True, False])
def test_every_field_is_saved_and_loaded(optimizers):
    saved = checkpoint_of(
        *train_one_step(),
        scaler={"scale": 1024.0},
        tokenizer={"kind": "char", "characters": "\nabcdefghij"},
        data={"train": 1, "val": 2},
        log_bytes=17,
    )
    save_checkpoint("ckpt.pt", saved)
    saved = replace(saved, path=Path("ckpt.pt"))
    if not optimizers:
        saved = replace(saved, optimizers={})
    loaded = load_checkpoint("ckpt.pt", optimizers)
    for field in fields(Checkpoint):
        assert tiny.equal(getattr(loaded, field.name), getattr(saved, field.name)), field.name


@pytest.mark.parametrize(
    "changes", [{}, {"tie_weights": False}, {"dropout": 0.3, "bias": False}, tiny.SWITCHES], ids=str
)
def test_loaded_model_equals_saved_one(changes):
    model, _ = train_one_step(**changes)
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
    assert loaded.progress == Progress(3, 0, 3, 3, 3, 2.5)
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


# Refusals


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (tiny.LFS_POINTER, "is a Git LFS pointer: .* git lfs pull"),
        (b"\n\x0e\n\x05<unk>\x15", "is not a checkpoint"),  # of sentencepiece
        (b"\x48\0\0\0\0\0\0\0{}", "is not a checkpoint: .* the folder of a Hugging Face"),
        (b"", "is not a checkpoint"),
        (b"PK\3\4\0\0", "is damaged .*File is not a zip file; copy or download it again"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_named(content, words):
    Path("ckpt.pt").write_bytes(content)
    with pytest.raises(UserError, match=f"^ckpt.pt {words}"):
        load_checkpoint("ckpt.pt")


def test_state_of_other_optimizers_is_refused():
    checkpoint = checkpoint_of(*train_one_step("muon"), path="ckpt.pt")
    with pytest.raises(UserError, match=r"ckpt.pt.* adamw and muon"):
        restore_optimizers(train_one_step()[1], checkpoint)
