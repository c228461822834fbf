"""Experiment trackers: Weights & Biases and TensorBoard, imported only if requested.

Both receive the numbers of log.jsonl's events as EVENT/NAME, such as val/loss.
"""

import time
from pathlib import Path

from folio.cli.errors import UserError, cause_of
from folio.cli.process import is_main


class Trackers:
    """The trackers that the settings request. One that fails after its start is dropped."""

    def __init__(self, settings, run_settings, resumed, warn):
        """Starts the trackers, which store `run_settings`. Raises UserError if one cannot start.

        `resumed` is the Checkpoint that the run continues from, or None.
        """
        self.warn, self.running = warn, []
        requested = [name for name in TRACKERS if getattr(settings, name) and is_main()]
        for name in requested:
            tracker, earlier, purge_step = TRACKERS[name], None, None
            if resumed and resumed.settings.get(name):
                earlier, purge_step = tracker.find(settings.out_dir), resumed.progress.step + 1
            try:
                self.running.append(tracker(settings, run_settings, earlier, purge_step))
            except Exception as error:  # the package and the network can raise anything
                self.close()
                package = name.removesuffix("_log")
                advice = f"; run pip install {package}, or set {name}=False"
                advice = advice if isinstance(error, ImportError) else ""
                raise UserError(f"{name} cannot start: {cause_of(error)}{advice}") from error

    def log(self, event):
        """Sends the numbers of an event."""
        numbers = {
            f"{event['event']}/{name}": value
            for name, value in event.items()
            if name not in ("step", "event") and isinstance(value, int | float)
        }
        self._call("log", event, numbers)

    def close(self):
        self._call("close")

    def _call(self, method, *args):
        for tracker in list(self.running):
            try:
                getattr(tracker, method)(*args)
            except Exception as error:  # as above
                self.running.remove(tracker)
                name, cause = type(tracker).__name__, cause_of(error)
                self.warn(f"{name} failed and was disabled ({cause}); log.jsonl is not affected")


class Wandb:
    """A run of Weights & Biases. A resumed training run continues the same W&B run."""

    @staticmethod
    def find(out_dir):
        """Returns the ID of the newest run, which is in the names of folders, or None."""
        paths = Path(out_dir, "wandb").glob("*run-*")  # [offline-]run-DATE-ID
        newest = max((path.name.partition("run-")[2] for path in paths), default="")
        return newest.partition("-")[2] or None

    def __init__(self, settings, run_settings, earlier, purge_step):
        import wandb

        self.run = wandb.init(
            project=settings.wandb_project,
            name=settings.wandb_run_name,
            config=run_settings,
            dir=settings.out_dir,
            id=earlier,
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

    @staticmethod
    def find(out_dir):
        """Returns the newest folder, or None."""
        return max(Path(out_dir, "tensorboard").glob("*-*"), default=None)

    def __init__(self, settings, run_settings, earlier, purge_step):
        from torch.utils.tensorboard import SummaryWriter

        new = Path(settings.out_dir, "tensorboard", time.strftime("%Y%m%d-%H%M%S"))
        # Hides what an earlier process logged after the checkpoint, except at its step: an
        # evaluation there is not repeated.
        self.writer = SummaryWriter(earlier or new, purge_step=purge_step)

    def log(self, event, numbers):
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, event["step"])
        self.writer.flush()

    def close(self):
        self.writer.close()


TRACKERS = {"wandb_log": Wandb, "tensorboard": TensorBoard}
