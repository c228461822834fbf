"""Experiment trackers: Weights & Biases and TensorBoard, imported only if requested.

Both receive the numbers of log.jsonl's events under their names: `loss` of an event with split
"val" is val/loss.
"""

import importlib
import sys
import time
from pathlib import Path

from folio.errors import UserError, cause_of


def check_packages(settings):
    """Raises UserError if a package is missing that the settings need."""
    for name, (_, module) in TRACKERS.items():
        try:
            if getattr(settings, name):
                importlib.import_module(module)
        except ImportError as error:
            package, cause = module.split(".")[-1], cause_of(error)
            what = f"{name}=True needs the package {package} ({cause})"
            raise UserError(f"{what}: pip install {package}, or omit {name}") from error


class Trackers:
    """The requested trackers, started. One that fails later is reported and dropped."""

    def __init__(self, settings, run_settings, resumed, warn):
        """Raises UserError if a tracker cannot start.

        Args:
            settings: a TrainConfig.
            run_settings: dict to store with the run.
            resumed: the Checkpoint that the run continues from, or None.
            warn: function that prints a line.
        """
        self.warn, self.running = warn, []
        for name, (kind, _) in TRACKERS.items():
            try:
                if getattr(settings, name):
                    self.running.append(kind(settings, run_settings, resumed))
            except Exception as error:
                self.close()
                raise UserError(f"{name}: it cannot start ({cause_of(error)})") from error

    def log(self, event):
        """Sends the numbers of an event."""
        numbers = {
            f"{event['split']}/{name}": value
            for name, value in event.items()
            if name not in ("step", "split") and isinstance(value, int | float)
        }
        self._call("log", event, numbers)

    def close(self):
        self._call("close")

    def _call(self, method, *args):
        for tracker in list(self.running):
            try:
                getattr(tracker, method)(*args)
            except Exception as error:
                self.running.remove(tracker)
                name, cause = type(tracker).__name__, cause_of(error)
                self.warn(f"{name} failed and is now off ({cause}); log.jsonl is complete")


class Wandb:
    """A run of Weights & Biases; a resumed run continues there, too."""

    def __init__(self, settings, run_settings, resumed):
        # Folders are named run-DATE-ID or offline-run-DATE-ID.
        paths = Path(settings.out_dir, "wandb").glob("*run-*")
        newest = max((path.name.partition("run-")[2] for path in paths), default="")
        self.run = sys.modules["wandb"].init(
            project=settings.wandb_project,
            name=settings.wandb_run_name,
            config=run_settings,
            dir=settings.out_dir,
            id=newest.partition("-")[2] or None if resumed else None,
            resume="allow",
        )
        # wandb's own step counter would drop the steps that a killed run repeats.
        self.run.define_metric("*", step_metric="step")

    def log(self, event, numbers):
        self.run.log({"step": event["step"], **numbers})

    def close(self):
        self.run.finish()


class TensorBoard:
    """Event files in out_dir/tensorboard, in a new folder for each start from scratch."""

    def __init__(self, settings, run_settings, resumed):
        root = Path(settings.out_dir, "tensorboard")
        folder, first = root / time.strftime("%Y%m%d-%H%M%S"), {"train": 0, "val": 0}
        if resumed:  # purge what an earlier process logged after the checkpoint
            folder = max(root.glob("*-*"), default=folder)
            first = {"train": resumed.progress.step, "val": resumed.progress.evaluated + 1}
        writer = sys.modules["torch.utils.tensorboard"].SummaryWriter
        self.writers = {
            split: writer(folder / split, purge_step=step) for split, step in first.items()
        }

    def log(self, event, numbers):
        writer = self.writers[event["split"]]
        for name, value in numbers.items():
            writer.add_scalar(name, value, event["step"])
        writer.flush()

    def close(self):
        for writer in self.writers.values():
            writer.close()


TRACKERS = {  # setting: (class, module that it needs)
    "wandb_log": (Wandb, "wandb"),
    "tensorboard": (TensorBoard, "torch.utils.tensorboard"),
}
