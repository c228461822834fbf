"""Experiment trackers: Weights & Biases and TensorBoard, imported only if requested.

Both receive the numbers of log.jsonl's events as EVENT/NAME, such as val/loss.
"""

import time
from pathlib import Path

from folio.cli.errors import UserError, cause_of
from folio.cli.process import is_main
from folio.training.messages import warn


class Trackers:
    """The trackers that the settings request. One that fails after its start is dropped."""

    def __init__(self, settings, run_settings, resumed):
        """Starts the trackers, which store `run_settings`. Raises UserError if one cannot start.

        `resumed` is the Checkpoint that the run continues from, or None.
        """
        self.running = {}  # {name: (log, close)}
        for name, start in TRACKERS.items():
            if not (getattr(settings, name) and is_main()):
                continue
            continues = resumed and resumed.settings.get(name)
            try:
                self.running[name] = start(settings, run_settings, resumed if continues else None)
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
        for name, (log, _) in list(self.running.items()):
            self._call(name, log, event["step"], numbers)

    def close(self):
        for name, (_, close) in list(self.running.items()):
            self._call(name, close)

    def _call(self, name, function, *args):
        try:
            function(*args)
        except Exception as error:  # as above
            del self.running[name]
            cause = cause_of(error)
            warn(f"{name} failed and was disabled ({cause}); log.jsonl is not affected")


# Each function starts a tracker and returns log(step, numbers) and close(). `resumed` is the
# Checkpoint of a run that had the same tracker, or None.


def start_wandb(settings, run_settings, resumed):
    """Starts a run of Weights & Biases, or continues the newest one in out_dir."""
    import wandb

    paths = Path(settings.out_dir, "wandb").glob("*run-*")  # [offline-]run-DATE-ID
    newest = max((path.name.partition("run-")[2] for path in paths), default="")
    run = wandb.init(
        project=settings.wandb_project,
        name=settings.wandb_run_name,
        config=run_settings,
        dir=settings.out_dir,
        id=(newest.partition("-")[2] or None) if resumed else None,
        resume="allow",
    )
    # wandb's own step counter would drop the steps that a killed run repeats.
    run.define_metric("*", step_metric="step")
    return lambda step, numbers: run.log({"step": step, **numbers}), run.finish


def start_tensorboard(settings, run_settings, resumed):
    """Writes event files to out_dir/tensorboard, in a new folder for each start from scratch."""
    from torch.utils.tensorboard import SummaryWriter

    parent, purge_step = Path(settings.out_dir, "tensorboard"), None
    folder = parent / time.strftime("%Y%m%d-%H%M%S")
    if resumed:
        folder = max(parent.glob("*-*"), default=folder)
        # Hides what an earlier process logged after the checkpoint, except at its step: an
        # evaluation there is not repeated.
        purge_step = resumed.progress.step + 1
    writer = SummaryWriter(folder, purge_step=purge_step)

    def log(step, numbers):
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


TRACKERS = {"wandb_log": start_wandb, "tensorboard": start_tensorboard}
