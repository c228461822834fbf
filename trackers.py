"""Where the figures of a run go beside log.jsonl, if asked: Weights & Biases and TensorBoard.

Each gets the events of log.jsonl with their names and units: `loss` of an event whose split is
"val" is val/loss there, over `step`. Their packages are imported only when asked for.
"""

import importlib
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

from config import UserError
from safety import cause_of


def check_packages(config):
    """Raise UserError where a package is missing that the settings ask for."""
    wanted = {"wandb": config.wandb_log, "torch.utils.tensorboard": config.tensorboard}
    for module in (name for name, is_wanted in wanted.items() if is_wanted):
        try:
            importlib.import_module(module)
        except ImportError as error:
            package = module.split(".")[-1]
            setting = "wandb_log" if package == "wandb" else package
            raise UserError(
                f"{setting}=True needs the package {package} ({cause_of(error)}): pip install "
                f"{package}, or leave {setting} out"
            ) from error


class Trackers:
    """The trackers that the settings ask for, started.

    Raises UserError where one cannot start. One that fails later is told of and left; training
    goes on, and log.jsonl has its figures.
    """

    def __init__(self, config, settings, resumed, tell):
        """`settings` are shown with the run, which `resumed`, a Checkpoint or None, is one of.

        `tell` is given lines of what went wrong.
        """
        self.tell, self.running = tell, {}
        starts = {"wandb": (config.wandb_log, Wandb), "tensorboard": (config.tensorboard, Board)}
        for name, (is_wanted, kind) in starts.items():
            if is_wanted:
                try:
                    self.running[name] = kind(config, settings, resumed)
                except Exception as error:
                    self.close()
                    raise UserError(
                        f"{name} does not start: {cause_of(error)}; without it, training would"
                    ) from error

    def log(self, event):
        """Pass on the numbers of an event of log.jsonl."""
        leave_out = ("step", "split")
        figures = {
            f"{event['split']}/{name}": value
            for name, value in event.items()
            if name not in leave_out and isinstance(value, int | float)
        }
        for name, tracker in list(self.running.items()):
            try:
                tracker.log(event, figures)
            except Exception as error:
                del self.running[name]
                self.tell(
                    f"{name} failed, and gets no more figures; log.jsonl has them all: "
                    f"{cause_of(error)}"
                )

    def close(self):
        """Let each send what it has; whatever fails, the run is at its end."""
        while self.running:
            name, tracker = self.running.popitem()
            try:
                tracker.close()
            except Exception as error:
                self.tell(f"{name} did not end well: {cause_of(error)}")


class Wandb:
    """A run of Weights & Biases; one that is resumed goes on there, too."""

    def __init__(self, config, settings, resumed):
        wandb = sys.modules["wandb"]
        self.run = wandb.init(
            project=config.wandb_project,
            name=config.wandb_run_name,
            config=settings,
            dir=config.out_dir,
            id=_last_id(Path(config.out_dir, "wandb")) if resumed else None,
            resume="allow",
        )
        # Its own count of steps takes none twice, as a run that was killed makes some.
        self.run.define_metric("*", step_metric="step")

    def log(self, event, figures):
        self.run.log({"step": event["step"], **figures})

    def close(self):
        self.run.finish()


def _last_id(folder):
    """The id of the newest run in a folder of wandb: of [offline-]run-DATE-ID; None of none."""
    with suppress(OSError):
        names = (re.search(r"run-(\d+_\d+)-(.+)", path.name) for path in folder.iterdir())
        return max((found.groups() for found in names if found), default=(None, None))[1]
    return None


class Board:
    """Events for TensorBoard, in a folder of out_dir/tensorboard for each start from scratch."""

    def __init__(self, config, settings, resumed):
        tensorboard = sys.modules["torch.utils.tensorboard"]
        root = Path(config.out_dir, "tensorboard")
        folder = root / time.strftime("%Y%m%d-%H%M%S")
        if resumed:
            folder = max(root.glob("*-*"), default=folder)
        # What an earlier process told of later steps does not count any more.
        first = {"train": resumed.step, "val": resumed.evaluated + 1} if resumed else {}
        self.writers = {
            split: tensorboard.SummaryWriter(folder / split, purge_step=first.get(split, 0))
            for split in ("train", "val")
        }
        rows = "\n".join(f"| {name} | {value} |" for name, value in settings.items())
        text = f"| setting | value |\n| --- | --- |\n{rows}"
        self.writers["train"].add_text("settings", text, first.get("train", 0))

    def log(self, event, figures):
        writer = self.writers[event["split"]]
        for name, value in figures.items():
            writer.add_scalar(name, value, event["step"])
        writer.flush()

    def close(self):
        for writer in self.writers.values():
            writer.close()
