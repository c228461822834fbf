"""trackers.py: figures of a run to TensorBoard for real, and to a wandb that notes its calls."""

import json
import sys
from types import ModuleType

import pytest
import tiny

import train
from config import UserError


class NotingWandb(ModuleType):
    """As much of wandb as folio calls; `fails` names the call that raises."""

    def __init__(self, fails=None):
        super().__init__("wandb")
        self.fails, self.calls, self.folders = fails, [], []

    def note(self, call, content=None):
        self.calls.append((call, content))
        if self.fails == call:
            raise RuntimeError(f"{call} is broken\nand more")

    def init(self, **settings):
        self.note("init", settings)
        return self

    def define_metric(self, *names, **settings):
        self.note("define_metric", names)

    def log(self, figures):
        self.note("log", figures)

    def finish(self):
        self.note("finish")

    def of(self, call):
        return [content for name, content in self.calls if name == call]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def wandb(monkeypatch):
    module = NotingWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


WANDB = {"wandb_log": True, "wandb_project": "verses", "wandb_run_name": "first"}


def test_wandb_gets_the_figures_of_the_log_under_its_names(verse, wandb):
    train.main(tiny.flags(**WANDB))
    (settings,) = wandb.of("init")
    assert (settings["project"], settings["name"]) == ("verses", "first")
    assert settings["config"]["n_embd"] == 16
    events = [event for event in tiny.log_events() if event["split"] in ("train", "val")]
    expected = [
        {"step": event["step"]}
        | {f"{event['split']}/{k}": v for k, v in event.items() if k not in ("step", "split")}
        for event in events
    ]
    assert wandb.of("log") == expected
    assert {"train/loss", "train/lr", "train/mfu", "train/tokens_per_s"} < set(expected[1])
    assert wandb.calls[-1][0] == "finish"


def test_a_run_that_is_resumed_is_the_same_run_of_wandb(verse, wandb, folder):
    train.main(tiny.flags(**WANDB, max_iters=3))
    for name in ("run-20260101_000000-older", "offline-run-20260102_000000-a-b", "latest-run"):
        (folder / "out" / "wandb" / name).mkdir(parents=True)
    train.main(tiny.flags(**WANDB, init_from="resume"))
    train.main(tiny.flags(**WANDB))
    assert [settings["id"] for settings in wandb.of("init")] == [None, "a-b", None]


def test_wandb_that_does_not_start_is_told_before_training(verse, wandb):
    wandb.fails = "init"
    with pytest.raises(UserError, match="wandb does not start: init is broken; without"):
        train.main(tiny.flags(**WANDB))


@pytest.mark.parametrize("overwrite", [False, True])
def test_wandb_that_does_not_start_leaves_an_earlier_run_alone(verse, wandb, folder, overwrite):
    train.main(tiny.flags())
    before = {path.name: path.read_bytes() for path in (folder / "out").glob("*.*")}
    wandb.fails = "init"
    with pytest.raises(UserError, match="wandb does not start"):
        train.main(tiny.flags(**WANDB, overwrite=overwrite))
    assert {path.name: path.read_bytes() for path in (folder / "out").glob("*.*")} == before
    assert not (folder / "out.1").exists()


@pytest.mark.parametrize("call", ["log", "finish"])
def test_wandb_that_fails_later_does_not_end_a_run(verse, wandb, call, capsys):
    wandb.fails = call
    train.main(tiny.flags(**WANDB))
    captured = capsys.readouterr()
    assert f"{call} is broken" in captured.err
    assert captured.err.count("wandb") == 1
    assert "done; best val loss" in captured.out
    assert tiny.log_events()[-1]["step"] == 6


@pytest.mark.parametrize(
    ("module", "setting", "package"),
    [
        ("wandb", "wandb_log", "wandb"),
        ("torch.utils.tensorboard", "tensorboard", "tensorboard"),
    ],
)
def test_a_missing_package_is_told_before_anything_is_written(
    verse, folder, monkeypatch, module, setting, package
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"{setting}=True needs .* pip install {package}, or leave"):
        train.main(tiny.flags(**{setting: True}))
    assert not (folder / "out").exists()


def scalars(folder):
    """{name: [(step, value)]} as TensorBoard reads what is in a folder."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = {}
    for split in ("train", "val"):
        read = accumulators.EventAccumulator(str(folder / split))
        read.Reload()
        for name in read.Tags()["scalars"]:
            found[name] = [(each.step, each.value) for each in read.Scalars(name)]
    return found


def test_tensorboard_reads_the_figures_of_the_log(verse, folder):
    train.main(tiny.flags(tensorboard=True))
    (started,) = (folder / "out" / "tensorboard").iterdir()
    read = scalars(started)
    for event in tiny.log_events():
        for name, value in event.items():
            if event["split"] != "start" and name not in ("step", "split"):
                values = dict(read[f"{event['split']}/{name}"])
                assert values[event["step"]] == pytest.approx(value, rel=1e-6)


def test_tensorboard_shows_each_step_once_where_a_run_went_back(verse, folder):
    train.main(tiny.flags(tensorboard=True, max_iters=3))
    state = (folder / "out" / "last.pt").read_bytes()
    train.main(tiny.flags(tensorboard=True, init_from="resume"))
    (folder / "out" / "last.pt").write_bytes(state)  # as if it had been killed there
    train.main(tiny.flags(tensorboard=True, init_from="resume"))
    (started,) = (folder / "out" / "tensorboard").iterdir()
    read = scalars(started)
    assert [step for step, _ in read["train/loss"]] == list(range(6))
    assert [step for step, _ in read["val/loss"]] == [0, 3, 6]


def test_nothing_is_imported_that_was_not_asked_for(verse, monkeypatch):
    for module in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    train.main(tiny.flags(max_iters=1))
    assert json.dumps(tiny.log_events())
