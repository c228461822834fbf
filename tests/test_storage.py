"""Folders of tensors, and runs whose state is too large for the memory of one process."""

import os
import pickle
import shutil
import signal
import struct
from pathlib import Path

import pytest
import tiny
import torch
from ranks import Ranks, in_setup, in_world, trained

import sample
import train
from folio import checkpoint as checkpoints
from folio import memory, saving, storage
from folio.checkpoint import build_model
from folio.completion import load_trained
from folio.errors import UserError
from folio.run_dir import RunDir
from folio.storage import INDEX, check_folder, read_folder, write_folder
from tools import export

FOLDER = Path("tensors")
SHAPES = {"matrix": (5, 3), "bias": (7,), "row": (1, 4)}  # the row is on one process only

pytestmark = pytest.mark.usefixtures("folder")


def numbers():
    sizes = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    return {name: torch.arange(float(size)).view(SHAPES[name]) for name, size in sizes.items()}


def sharded(world, tensors):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world.size,))
    return {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in tensors.items()}


def write(world):
    moments = {0: {"step": torch.tensor(3.0)}}
    write_folder(FOLDER, {"weights": sharded(world, numbers()), "moments": moments}, world)


def read(world):
    found = sharded(world, {name: torch.zeros(shape) for name, shape in SHAPES.items()})
    read_folder(FOLDER, {"weights": found})
    return {name: tensor.full_tensor().tolist() for name, tensor in found.items()}


def read_alone():
    found = {name: torch.full(shape, -1.0) for name, shape in SHAPES.items()}
    read_folder(FOLDER, {"weights": found})
    return found


# Folders


@pytest.mark.slow
def test_any_number_of_processes_reads_what_another_wrote():
    Ranks(2, in_world, write).results()
    expected = {name: tensor.tolist() for name, tensor in numbers().items()}
    assert Ranks(3, in_world, read).results() == [expected] * 3
    assert [Path(f"rank{rank}.txt").read_text() for rank in range(3)] == [""] * 3
    assert tiny.same(read_alone(), numbers())
    step = torch.tensor(0.0)
    read_folder(FOLDER, {"moments": {0: {"step": step}}})
    assert step == 3


def test_one_process_reads_without_warnings(recwarn, capfd):
    write_alone()
    read_alone()
    assert not recwarn.list
    assert capfd.readouterr() == ("", "")


def write_alone():
    Ranks(1, in_world, write).results()
    [file] = FOLDER.glob("*.distcp")
    return file


def shorten(file):
    os.truncate(file, file.stat().st_size - 1)


def change_a_value(file, value=7.0):
    content = bytearray(file.read_bytes())
    content[content.index(struct.pack("f", value))] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shorten, "tensors is damaged .*distcp has .* instead of"),
        (Path.unlink, r"distcp is missing: .* must be on a disk that all processes share"),
        (lambda file: (FOLDER / INDEX).unlink(), r"metadata is missing: the folder belongs to"),
        (lambda file: (FOLDER / INDEX).write_bytes(b"index"), "tensors is damaged"),
        (lambda file: shorten(FOLDER / INDEX), "tensors is damaged"),
        (lambda file: shutil.rmtree(FOLDER), "metadata is missing"),
        (change_a_value, "cannot read tensors: the checksum of .* is wrong"),
    ],
    ids=["short", "missing", "no index", "no pickle", "short index", "no folder", "one bit"],
)
def test_damaged_folder_is_an_error(damage, message, capfd):
    damage(write_alone())
    with pytest.raises(UserError, match=message):
        read_alone()
    assert capfd.readouterr().err == ""


def test_tensors_that_are_not_in_the_folder_are_an_error():
    write_alone()
    for tensors in ({"weight": torch.zeros(2)}, {"weights": {"matrix": torch.zeros(5, 4)}}):
        with pytest.raises(UserError, match="cannot read tensors: .*weight"):
            read_folder(FOLDER, tensors)


class Call:
    """A pickle that calls a function."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_content_of_an_index_is_not_executed():
    FOLDER.mkdir()
    (FOLDER / INDEX).write_bytes(pickle.dumps(Call()))
    with pytest.raises(UserError, match="mkdir, which was not executed"):
        check_folder(FOLDER)
    assert not Path("executed").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_write_that_fails_on_one_process_is_an_error_on_all(rank):
    message = Ranks(2, in_world, write_to_a_full_disk, rank).results()
    assert message == ["cannot write tensors: File too large"] * 2


def write_to_a_full_disk(world, rank):
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if world.rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    try:
        write(world)
    except UserError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        return str(error)


# Runs

SETTINGS = {
    "gradient_accumulation_steps": 4,
    "batch_size": 1,
    "learning_rate": 1e-3,
    "n_layer": 2,
    "n_embd": 18,  # not divisible by 4 processes
    "parallel": "fsdp",
}


def train_divided(flags):
    """train.main on a machine whose memory has no room for a copy of the state."""
    memory.GATHERED_SHARE = 0
    train.main(flags)


def divided(size, **settings):
    """Like ranks.trained, with train_divided."""
    Ranks(size, train_divided, tiny.flags(log_interval=1, **SETTINGS | settings)).results()


def state_folders(out_dir="out"):
    return sorted(path.name for path in Path(out_dir).glob("state-*"))


def referenced(name, out_dir="out"):
    return tiny.saved(name, out_dir)["folder"]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_is_exact(verse, optimizer):
    trained(2, out_dir="whole", optimizer=optimizer, **SETTINGS)
    divided(2, stop_at=4, optimizer=optimizer)
    assert (state_folders(), referenced("last.pt")) == (["state-3", "state-4"], "state-4")
    assert tiny.saved("last.pt")["format"] == 2
    trained(2, init_from="resume", optimizer=optimizer, **SETTINGS)
    assert not tiny.differences("out", "whole")
    assert state_folders() == []


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_divided_state_is_read_by_every_kind_of_run_and_the_reverse(verse, optimizer):
    settings = SETTINGS | {"optimizer": optimizer, "max_iters": 12, "eval_interval": 4}
    whole = trained(1, out_dir="whole", **settings)
    divided(2, **settings | {"stop_at": 2})
    trained(1, **settings | {"stop_at": 3, "init_from": "resume"})
    divided(2, **settings | {"stop_at": 5, "init_from": "resume"})
    trained(2, **settings | {"stop_at": 6, "init_from": "resume", "parallel": "ddp"})
    divided(4, **settings | {"stop_at": 9, "init_from": "resume"})
    divided(2, **settings | {"stop_at": 10, "init_from": "resume"})
    losses = trained(4, **settings | {"init_from": "resume"})
    assert losses == pytest.approx(whole, abs=1e-5)


@pytest.mark.slow
def test_only_folders_of_the_best_and_the_newest_state_are_kept(verse):
    divided(2, max_iters=5, checkpoint_interval=1, out_dir="first", eval_interval=4)
    assert state_folders("first") == ["state-5"]
    assert referenced("ckpt.pt", "first") == referenced("last.pt", "first") == "state-5"
    divided(2, learning_rate=0.5, decay_lr=False, max_iters=7, checkpoint_interval=2)  # gets worse
    assert referenced("ckpt.pt") != referenced("last.pt")
    assert state_folders() == sorted({referenced("ckpt.pt"), referenced("last.pt")})
    best, newest = RunDir("out").load_best(), RunDir("out").load_newest()
    assert best.progress.step < newest.progress.step == 7
    assert not tiny.same(build_model(best).state_dict(), build_model(newest).state_dict())
    assert Path("rank1.txt").read_text() == ""
    assert "Warning" not in Path("rank0.txt").read_text()


@pytest.mark.slow
def test_two_saves_at_the_same_step_have_different_folders(verse):
    divided(2, stop_at=3)
    assert referenced("last.pt") == "state-3.1"
    assert state_folders() == ["state-3", "state-3.1"]
    divided(2, stop_at=3, init_from="resume")
    assert state_folders() == ["state-3", "state-3.2"]


@pytest.mark.slow
def test_scripts_read_the_weights(verse, capsys):
    trained(2, out_dir="whole", **SETTINGS)
    divided(2)
    texts = []
    for out_dir in ("out", "whole"):
        flags = ["--num_samples=1", "--max_new_tokens=30", "--device=cpu", f"--out_dir={out_dir}"]
        capsys.readouterr()
        sample.main(flags)
        texts.append(capsys.readouterr().out)
        export.main([f"--out_dir={out_dir}", f"--to={out_dir}-hf"])
    assert texts[0] == texts[1]
    weights = [Path(f"{name}-hf", "model.safetensors").read_bytes() for name in ("out", "whole")]
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_a_run_can_start_from_the_weights_and_a_shorter_context(verse, size):
    divided(2, out_dir="first")
    trained(2, out_dir="second", **SETTINGS)
    settings = SETTINGS | {"block_size": 6, "max_iters": 2}
    for name in ("first", "second"):
        trained(size, out_dir=f"from-{name}", init_from=f"{name}/ckpt.pt", **settings)
    assert not tiny.differences("from-first", "from-second")


@pytest.mark.slow
def test_a_run_that_is_killed_before_it_writes_the_file_keeps_the_old_state(verse):
    settings = SETTINGS | {"checkpoint_interval": 2}
    trained(2, out_dir="whole", **settings)
    statuses, _ = Ranks(2, killed_at_step_4, tiny.flags(log_interval=1, **settings)).wait()
    assert statuses[0] == -signal.SIGKILL
    assert state_folders() == ["state-3", "state-4"]
    assert (referenced("ckpt.pt"), referenced("last.pt")) == ("state-3", "state-3")
    trained(2, init_from="resume", **settings)
    assert not tiny.differences("out", "whole")
    assert state_folders() == []


def killed_at_step_4(flags):
    save = checkpoints.save

    def save_or_die(path, checkpoint, canceled):
        if checkpoint.progress.step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        save(path, checkpoint, canceled)

    checkpoints.save = save_or_die
    train_divided(flags)


@pytest.mark.slow
def test_folder_that_could_not_be_written_is_reported_and_removed(verse):
    Ranks(2, fail_at_step_3, tiny.flags(**SETTINGS)).results()
    message = "train.py: cannot write out/state-3: no space; training continues and retries"
    assert message in Path("rank0.txt").read_text()
    assert state_folders() == ["state-6"]
    assert tiny.saved()["best_step"] == 6


def fail_at_step_3(flags):
    real = saving.write_folder

    def write_or_fail(folder, tensors, world):
        real(folder, tensors, world)
        if folder.name == "state-3":
            raise UserError(f"cannot write {folder}: no space")

    saving.write_folder = write_or_fail
    train_divided(flags)


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_new_run_removes_or_moves_the_folders_of_an_earlier_one(verse, overwrite):
    divided(2, out_dir="out")
    Path("out/state-of-mind").mkdir()
    Path("out/state-9").mkdir()  # of a killed process
    trained(1, overwrite=overwrite, max_iters=1)
    assert state_folders() == ["state-of-mind"]
    assert state_folders("out.1") == ([] if overwrite else ["state-6"])
    if not overwrite:
        RunDir("out.1").load_newest()


@pytest.mark.slow
def test_missing_folder_ends_a_resumed_run_with_a_message(verse):
    divided(2)
    shutil.rmtree("out/state-6")
    statuses, errors = Ranks(2, train.main, tiny.flags(init_from="resume", **SETTINGS)).wait()
    assert statuses == [2, 2]
    assert "out/state-6/.metadata is missing: the folder belongs to a checkpoint" in errors[0]
    with pytest.raises(UserError, match="state-6/.metadata is missing"):
        train.main(tiny.flags(init_from="resume", **SETTINGS))


@pytest.mark.slow
def test_damaged_share_of_one_process_ends_all(verse):
    divided(2)
    file = Path("out/state-6/__1_0.distcp")
    weight = build_model(RunDir("out").load_best()).transformer.ln_f.weight
    change_a_value(file, weight[-1].item())  # of the second process
    statuses, errors = Ranks(2, train.main, tiny.flags(init_from="resume", **SETTINGS)).wait()
    assert statuses == [2, 2]
    assert "rank 1: cannot read out/state-6" in errors[0]
    assert errors[1] == ""


@pytest.mark.slow
def test_file_without_its_folder_is_refused(verse):
    divided(2)
    content = tiny.saved() | {"folder": None}
    torch.save(content, "out/ckpt.pt")
    with pytest.raises(UserError, match="the weights do not fit the model"):
        load_trained(RunDir("out").load_best())
    with pytest.raises(UserError, match="the weights do not fit the model"):
        train.main(tiny.flags(init_from="out/ckpt.pt", out_dir="other", **SETTINGS))


@pytest.mark.slow
def test_state_that_fits_is_gathered(verse):
    assert Ranks(2, in_setup, gathers, tiny.flags(**SETTINGS)).results() == [[True, False]] * 2
    ddp = tiny.flags(**SETTINGS | {"parallel": "ddp"})
    assert Ranks(2, in_setup, gathers, ddp).results() == [[True, True]] * 2


def gathers(run):
    found = []
    for memory.GATHERED_SHARE in (1 / 2, 0):
        found.append(saving.Saver(run, None).gathers)
    return found


# Files that are replaced


@pytest.fixture
def replacing(folder, monkeypatch):
    """A function with which reading a.pt replaces it, some times: torch opens it repeatedly."""

    def replacing(times):
        left, real = list(range(1, times + 1)), torch.UntypedStorage.from_file

        def from_file(*arguments):
            if left:
                number = left.pop(0)
                write(number)
            return real(*arguments)

        monkeypatch.setattr(torch.UntypedStorage, "from_file", from_file)
        write(0)

    def write(number):
        content = {"pad": "p" * 5000 * number, "x": torch.full((1000,), float(number))}
        torch.save(content, "new.pt")
        os.replace("new.pt", "a.pt")

    return replacing


@pytest.mark.parametrize("times", [0, 1, 3])
def test_a_file_that_is_replaced_while_it_is_read_is_read_again(replacing, times):
    replacing(times)
    content = storage.read_file("a.pt", mapped=True)
    assert len(content["pad"]) == 5000 * times
    assert content["x"].tolist() == [times] * 1000


def test_a_file_that_is_replaced_each_time_it_is_read_is_an_error(replacing):
    replacing(1000)
    with pytest.raises(UserError, match="^a.pt is replaced again and again while it is read"):
        storage.read_file("a.pt", mapped=True)
