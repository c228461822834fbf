"""Logging to Weights & Biases, which is imported only if requested."""

from folio.cli.errors import UserError, cause_of
from folio.cli.process import is_main
from folio.training.messages import warn


class WandbLog:
    """A run of Weights & Biases, if the settings request one. It is dropped if it fails later."""

    def __init__(self, settings, run_settings):
        """Starts a run that stores `run_settings`. Raises UserError if it cannot start."""
        self.run = None
        if not (settings.wandb_log and is_main()):
            return
        try:
            import wandb

            self.run = wandb.init(
                project=settings.wandb_project,
                name=settings.wandb_run_name,
                config=run_settings,
                dir=settings.out_dir,
            )
        except Exception as error:  # the package and the network can raise anything
            advice = "run pip install wandb, or set wandb_log=False"
            raise UserError(f"wandb_log cannot start: {cause_of(error)}; {advice}") from error

    def log(self, event):
        """Sends the numbers of an event of log.jsonl as EVENT/NAME, such as val/loss."""
        numbers = {
            f"{event['event']}/{name}": value
            for name, value in event.items()
            if name not in ("step", "event") and isinstance(value, int | float)
        }
        self._call("log", numbers, step=event["step"])

    def close(self):
        self._call("finish")

    def _call(self, name, *args, **kwargs):
        try:
            if self.run:
                getattr(self.run, name)(*args, **kwargs)
        except Exception as error:  # as above
            self.run = None
            cause = cause_of(error)
            warn(f"wandb_log failed and was disabled ({cause}); log.jsonl is not affected")
