import dataclasses
import errno
import io
import os
import pickle
from pathlib import Path

import pytest
import tiny
import torch

import safety
from checkpoint import Checkpoint, build_model, load, newest, restore_optimizers, save, stamp_of
from config import UserError
from model import GPT, GPTConfig
from optimizers import make_optimizers

SHAPE = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 11}
IDX = torch.arange(8)[None]
NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def model_of(**changes):
    torch.manual_seed(0)
    return GPT(GPTConfig(**(SHAPE | changes)))


def step(model, optimizer):
    optimizer.zero_grad()
    model(IDX, IDX)[1].backward()
    optimizer.step()


def trained(**changes):
    """A model and its AdamW after one step."""
    model = model_of(**changes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer)
    return model, optimizer


def checkpoint_of(model, **fields):
    return Checkpoint(model.config, model.state_dict(), 3, 2.5, {"dataset": "verse"}, **fields)


def rewrite(path="ckpt.pt", **changes):
    """A sound checkpoint but for some of its entries; the value KeyError leaves one out."""
    save([path], checkpoint_of(model_of()))
    content = torch.load(path, weights_only=True) | changes
    torch.save({key: value for key, value in content.items() if value is not KeyError}, path)
    return path


def plain(value):
    """Data with numbers in place of tensors, so that == compares it."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


def same_logits(model, other):
    return torch.equal(model.eval()(IDX)[0], other.eval()(IDX)[0])


# Saving and loading


def test_everything_saved_is_loaded():
    model, optimizer = trained()
    Path("out").mkdir()
    saved = checkpoint_of(
        model,
        optimizers={"adamw": optimizer.state_dict()},
        scaler={"scale": 1024.0},
        tokenizer={"kind": "char", "characters": "\nabcdefghij"},
        seed=7,
        evaluated=3,
        data={"train": 1, "val": 2},
    )
    save(["out/ckpt.pt"], saved)
    path = Path("out/ckpt.pt")
    expected = dataclasses.replace(saved, path=path, stamp=stamp_of(path))
    assert plain(vars(load("out/ckpt.pt"))) == plain(vars(expected))


@pytest.mark.parametrize("changes", [{}, {"bias": False}, {"n_layer": 0}], ids=str)
def test_a_plain_model_is_saved_with_nanogpts_keys_alone(changes):
    save(["ckpt.pt"], checkpoint_of(model_of(**changes)))
    content = torch.load("ckpt.pt", weights_only=True)
    assert content.keys() >= {"model", "optimizer", "iter_num", "best_val_loss", "config"}
    assert content["model_args"] == SHAPE | {"bias": True, "dropout": 0.0} | changes


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "relu"},
        {"tie_weights": False},
        {"dropout": 0.3, "bias": False},
        tiny.SWITCHES,
    ],
    ids=str,
)
def test_a_model_comes_back_as_it_was(changes):
    model, optimizer = trained(**changes)
    for _ in range(2):  # after which nothing that zero_init put at zero is zero
        step(model, optimizer)
    save(["ckpt.pt"], checkpoint_of(model))
    back = build_model(load("ckpt.pt"))
    assert back.config == model.config
    assert same_logits(back, model)


def test_without_the_optimisers_the_rest_is_the_same():
    model, optimizer = trained()
    save(["ckpt.pt"], checkpoint_of(model, optimizers={"adamw": optimizer.state_dict()}))
    whole, part = load("ckpt.pt"), load("ckpt.pt", optimizers=False)
    assert plain(vars(part)) == plain(vars(dataclasses.replace(whole, optimizers={})))


def test_weights_do_not_change_with_the_file_they_came_from():
    save(["ckpt.pt"], checkpoint_of(model_of()))
    part = load("ckpt.pt", optimizers=False)
    before = plain(part.weights)
    with open("ckpt.pt", "r+b") as file:
        file.write(bytes(os.path.getsize("ckpt.pt")))
    assert plain(part.weights) == before


def test_to_build_a_model_draws_no_random_numbers():
    save(["ckpt.pt"], checkpoint_of(model_of()))
    state = torch.get_rng_state()
    build_model(load("ckpt.pt"))
    assert torch.equal(torch.get_rng_state(), state)


# nanoGPT's checkpoints


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
@pytest.mark.parametrize("masks", [False, True])
def test_a_checkpoint_of_nanogpt_loads(prefix, masks):
    model, optimizer = trained(bias=False)
    weights = dict(model.state_dict())
    if masks:  # a buffer that nanoGPT kept before PyTorch 2
        weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
    content = {
        "model": {prefix + name: tensor for name, tensor in weights.items()},
        "optimizer": optimizer.state_dict(),
        "model_args": SHAPE | {"bias": False, "dropout": 0.0},
        "iter_num": 2000,
        "best_val_loss": torch.tensor(1.5),
        "config": {"dataset": "verse"},
    }
    torch.save(content, "ckpt.pt")
    loaded = load("ckpt.pt")
    assert same_logits(build_model(loaded), model)
    assert (loaded.step, loaded.best_val_loss, loaded.config) == (2000, 1.5, {"dataset": "verse"})
    assert type(loaded.best_val_loss) is float
    assert (loaded.tokenizer, loaded.seed) == (None, None)


def test_the_biases_of_attention_are_no_masks():
    weights = trained()[0].state_dict()
    rewrite(model=weights)
    assert load("ckpt.pt").weights.keys() == weights.keys()


def test_a_model_arg_left_out_has_nanogpts_default():
    rewrite(model_args=SHAPE)
    assert load("ckpt.pt").model_config == GPTConfig(**SHAPE, bias=True, dropout=0.0)


# Which file


def test_without_any_run_a_missing_checkpoint_says_how_to_train():
    with pytest.raises(UserError, match=r"no checkpoint out/ckpt.pt; train one first: python tra"):
        load("out/ckpt.pt")


@pytest.mark.parametrize(
    ("asked", "hint"),
    [("out-shakespeer", "; did you mean out-shakespeare?"), ("zz", "; runs at hand: b, out-shak")],
)
def test_a_missing_checkpoint_is_told_with_the_runs_at_hand(asked, hint):
    for run in ("out-shakespeare", "b"):
        Path(run).mkdir()
        save([f"{run}/ckpt.pt"], checkpoint_of(model_of()))
    with pytest.raises(UserError) as caught:
        load(f"{asked}/ckpt.pt")
    assert str(caught.value).startswith(f"there is no checkpoint {asked}/ckpt.pt{hint}")


@pytest.mark.parametrize(
    ("there", "chosen"),
    [([], "ckpt.pt"), (["ckpt.pt"], "ckpt.pt"), (["ckpt.pt", "last.pt"], "last.pt")],
)
def test_a_run_resumes_from_its_last_state_else_its_best(there, chosen, folder):
    for name in there:
        (folder / name).touch()
    assert newest(folder) == folder / chosen


# Files that are not as they should be


@pytest.mark.parametrize("part", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
def test_a_file_cut_short_is_called_damaged(part):
    save(["ckpt.pt"], checkpoint_of(model_of()))
    whole = Path("ckpt.pt").read_bytes()
    Path("ckpt.pt").write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(UserError, match="ckpt.pt is damaged or not a checkpoint"):
        load("ckpt.pt")


@pytest.mark.parametrize(
    "content",
    [b"version https://git-lfs.github.com/spec/v1\n", b"PK\x03\x04" + bytes(999), bytes(999)],
    ids=["text", "like a zip", "zeros"],
)
def test_other_content_is_called_no_checkpoint(content):
    Path("ckpt.pt").write_bytes(content)
    with pytest.raises(UserError, match="ckpt.pt is damaged or not a checkpoint"):
        load("ckpt.pt")


class Hostile:
    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    "write",
    [
        lambda: rewrite(config=Hostile()),
        lambda: Path("ckpt.pt").write_bytes(pickle.dumps(Hostile())),
    ],
    ids=["checkpoint", "pickle"],
)
def test_code_in_a_file_is_refused_and_not_run(write):
    write()
    with pytest.raises(UserError, match="damaged or not a checkpoint"):
        load("ckpt.pt")
    assert not Path("ran").exists()


def test_a_folder_cannot_be_read(folder):
    with pytest.raises(UserError, match=f"cannot read {folder}"):
        load(folder)


def test_the_format_of_a_later_folio_is_named():
    with pytest.raises(UserError, match=r"ckpt.pt was written by a later folio \(format 2\)"):
        load(rewrite(format=2))


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {key: KeyError}
            for key in ("model", "model_args", "iter_num", "best_val_loss", "config")
        ),
        {"model": [1]},
        {"model_args": SHAPE | {"rope": True}},
        {"model_args": SHAPE | {"n_head": 3}},
        {"iter_num": None},
        {"iter_num": float("inf")},
        {"best_val_loss": "low"},
        {"config": 1},
        {"format": "folio"},
        {"format": torch.zeros(2)},
    ],
    ids=str,
)
def test_content_that_makes_no_checkpoint_is_told(changes):
    with pytest.raises(UserError, match="ckpt.pt is not a checkpoint that folio knows"):
        load(rewrite(**changes))


@pytest.mark.parametrize("content", [{}, [1, 2], torch.zeros(2)], ids=str)
def test_other_data_of_torch_is_no_checkpoint(content):
    torch.save(content, "ckpt.pt")
    with pytest.raises(UserError, match="ckpt.pt is not a checkpoint that folio knows"):
        load("ckpt.pt")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"transformer.wpe.weight": torch.zeros(7, 16)},
            "it has 3,600 weights, and .* 3,616",
        ),
        ({"transformer.other.weight": torch.zeros(1)}, "it has 3,617 weights, and .* 3,616"),
        ({"transformer.wpe.weight": "weights"}, "its weights are no real numbers"),
        ({"transformer.wpe.weight": None}, "its weights are no real numbers"),
        ({"transformer.wpe.weight": torch.zeros(8, 16).int()}, "its weights are no real numbers"),
        ({"transformer.wpe.weight": torch.zeros(1, 1).expand(8, 16)}, "tensors without their data"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_weights_that_cannot_be_the_models_are_refused_unread(changes, reason):
    with pytest.raises(UserError, match=f"ckpt.pt is not a checkpoint that folio knows .*{reason}"):
        load(rewrite(model=model_of().state_dict() | changes))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(8, 16) * 1j,
        torch.zeros(8, 16).to(torch.float8_e5m2),
        torch.zeros(8, 16).to_sparse(),
        torch.empty(8, 16, device="meta"),
    ],
    ids=["complex", "float8", "sparse", "meta"],
)
def test_tensors_of_other_kinds_are_not_even_loaded(tensor, monkeypatch):
    path = rewrite(model=model_of().state_dict() | {"transformer.wpe.weight": tensor})
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(UserError, match=r"ckpt.pt is damaged or not .*it wants to load torch\."):
        load(path)


def test_weights_that_do_not_fit_are_named():
    turned = {"transformer.wpe.weight": torch.zeros(16, 8)}
    loaded = load(rewrite(model=model_of().state_dict() | turned))
    with pytest.raises(UserError, match="ckpt.pt: the weights do not fit .*transformer.wpe.weight"):
        build_model(loaded)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_of_a_training_gone_wrong_are_refused(value):
    wrong = {"transformer.wpe.weight": torch.full((8, 16), value)}
    loaded = load(rewrite(model=model_of().state_dict() | wrong))
    with pytest.raises(UserError, match="ckpt.pt has weights that are no finite numbers"):
        build_model(loaded)


@pytest.mark.parametrize("changes", [{"vocab_size": 12}, {"n_layer": 2}, {"n_embd": 16.0}], ids=str)
def test_a_shape_that_is_not_that_of_the_weights_is_told(changes):
    with pytest.raises(UserError, match=r"ckpt\.pt"):
        build_model(load(rewrite(model_args=SHAPE | changes)))


# Disks that refuse


def full(file):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FullDisk(io.FileIO):
    """A file on a disk with `room` bytes left."""

    room = 0

    def write(self, data):
        if self.tell() + len(data) > self.room:
            full(self)
        return super().write(data)


def open_on_full_disk(path, mode):
    return io.BufferedWriter(FullDisk(path, mode))


def assert_a_failing_save_changes_nothing(folder, model):
    with pytest.raises(UserError, match=r"cannot write ckpt\.pt: No space left on device"):
        save(["ckpt.pt"], checkpoint_of(model))
    assert [path.name for path in folder.iterdir()] == ["ckpt.pt"]
    assert same_logits(build_model(load("ckpt.pt")), model_of())


@pytest.mark.parametrize("room", [0, 30_000, 100_000])
def test_a_disk_that_fills_up_leaves_the_old_checkpoint(room, folder, monkeypatch):
    save(["ckpt.pt"], checkpoint_of(model_of()))
    monkeypatch.setattr(FullDisk, "room", room)
    monkeypatch.setattr(safety, "open", open_on_full_disk, raising=False)
    assert_a_failing_save_changes_nothing(folder, trained(n_embd=64)[0])


def test_a_disk_that_cannot_flush_leaves_the_old_checkpoint(folder, monkeypatch):
    save(["ckpt.pt"], checkpoint_of(model_of()))
    monkeypatch.setattr(safety.os, "fsync", full)
    assert_a_failing_save_changes_nothing(folder, trained()[0])


# The optimiser's state


def test_a_restored_optimizer_goes_on_as_the_one_that_was_saved():
    model, optimizer = trained()
    save(["ckpt.pt"], checkpoint_of(model, optimizers={"adamw": optimizer.state_dict()}))
    loaded = load("ckpt.pt")
    back = build_model(loaded)
    restored = torch.optim.AdamW(back.parameters(), lr=0.01)
    restore_optimizers(loaded, {"adamw": restored}, NO_SCALER)
    step(model, optimizer)
    step(back, restored)
    assert plain(back.state_dict()) == plain(model.state_dict())


def test_a_restored_optimizer_keeps_its_own_hyperparameters_but_the_rate_of_the_last_step():
    model, optimizer = trained()
    other = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.7)
    checkpoint = checkpoint_of(model, optimizers={"adamw": optimizer.state_dict()})
    restore_optimizers(checkpoint, {"adamw": other}, NO_SCALER)
    assert [other.param_groups[0][name] for name in ("lr", "weight_decay")] == [0.01, 0.7]


@pytest.mark.parametrize(
    ("saved", "enabled", "scale"), [(True, True, 8.0), (False, True, 4.0), (True, False, 1.0)]
)
def test_the_loss_scale_is_restored_where_there_is_one(saved, enabled, scale):
    model, optimizer = trained()
    before = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=saved).state_dict()
    now = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=enabled)
    checkpoint = checkpoint_of(model, optimizers={"adamw": optimizer.state_dict()}, scaler=before)
    restore_optimizers(checkpoint, {"adamw": optimizer}, now)
    assert now.get_scale() == scale


def assert_restoring_fails(state):
    model, optimizer = trained()
    checkpoint = checkpoint_of(model, optimizers={"adamw": state}, path="ckpt.pt")
    with pytest.raises(UserError, match=r"ckpt.pt.* optimiser's state"):
        restore_optimizers(checkpoint, {"adamw": optimizer}, NO_SCALER)


@pytest.mark.parametrize("state", [None, {}, {"state": "moments"}, {"state": {0: 1}}], ids=str)
def test_what_is_no_optimizers_state_is_refused(state):
    assert_restoring_fails(state)


@pytest.mark.parametrize("changes", [{"n_layer": 2}, {"n_embd": 32}], ids=str)
def test_the_state_of_other_parameters_is_refused(changes):
    assert_restoring_fails(trained(**changes)[1].state_dict())


@pytest.mark.parametrize(
    "damage",
    [
        lambda moments: moments.pop(0),
        lambda moments: moments[0].clear(),
        lambda moments: moments[0].update(momentum_buffer=torch.zeros(16, 48)),  # turned
        lambda moments: moments[0].update(momentum_buffer=torch.full((48, 16), torch.nan)),
        lambda moments: moments[0].update(exp_avg=torch.zeros(48, 16)),
    ],
    ids=["a matrix without", "empty", "shape", "nan", "AdamW's"],
)
def test_moments_that_are_not_muons_of_these_matrices_are_refused(damage):
    model = model_of()
    optimizers = make_optimizers(model, tiny.settings(optimizer="muon"))
    model(IDX, IDX)[1].backward()
    for optimizer in optimizers.values():
        optimizer.step()
    states = {name: each.state_dict() for name, each in optimizers.items()}
    checkpoint = checkpoint_of(model, optimizers=states, path="ckpt.pt")
    restore_optimizers(checkpoint, optimizers, NO_SCALER)
    damage(states["muon"]["state"])
    with pytest.raises(UserError, match="ckpt.pt: the optimiser's state does not fit: "):
        restore_optimizers(checkpoint, optimizers, NO_SCALER)
