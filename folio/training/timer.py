"""The time of a run and of its steps."""

import time
from contextlib import contextmanager

from folio.checkpoint.progress import Progress
from folio.cli import process
from folio.hardware.device import Machine


class Timer:
    """Measures how long a run and its steps take. Pauses, such as evaluations, are not steps."""

    def __init__(self, machine: Machine, progress: Progress):
        self.machine, self.progress = machine, progress
        self.start()

    def start(self):
        """Begins to measure steps."""
        self.first_step = self.lap_step = self.progress.step
        self.started_at = time.monotonic()  # about when the first step began
        self.resumed_at = self.started_at  # end of the last pause
        self.steps_s = 0.0  # time of the steps until then
        self.lap_s = 0.0  # time of the steps until the last lap

    def elapsed_s(self):
        """Returns the seconds that the run has taken, including earlier processes."""
        return round(self.progress.elapsed_s + time.monotonic() - process.STARTED, 3)

    @property
    def step_s(self):
        """The mean time of a step of this process; 0 before the first."""
        steps = self.progress.step - self.first_step
        return (self.steps_s + time.monotonic() - self.resumed_at) / steps if steps else 0.0

    @contextmanager
    def pause(self):
        """A context whose time does not count as that of steps."""
        self.machine.synchronize()
        self.steps_s += time.monotonic() - self.resumed_at
        yield
        self.resumed_at = time.monotonic()
        if self.progress.step == self.first_step:  # an evaluation before the first step
            self.started_at, self.steps_s = self.resumed_at, 0.0

    def lap(self):
        """Called at the end of a step. Returns the mean time of the steps since the last call."""
        self.machine.synchronize()
        seconds, steps = self.steps_s + time.monotonic() - self.resumed_at, self.progress.step + 1
        per_step = (seconds - self.lap_s) / (steps - self.lap_step)
        self.lap_s, self.lap_step = seconds, steps
        return per_step

    def wall_step_s(self):
        """Called at the end of a step. Returns the mean time of steps, with their pauses."""
        steps = self.progress.step + 1 - self.first_step
        return (time.monotonic() - self.started_at) / steps
