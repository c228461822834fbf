"""The time of a run's steps in this process, without evaluations, saves and samples."""

import time
from contextlib import contextmanager


class Timer:
    """Measures how long steps take. Pauses do not count, nor does the time before the first step.

    step_s: mean time of a step, as of the last lap.
    """

    def __init__(self, machine, progress):
        self.machine, self.progress, self.step_s = machine, progress, 0.0
        self.start()

    def start(self):
        self.first_step = self.lap_step = self.progress.step
        self.started_at, self.paused_s, self.lap_s = time.perf_counter(), 0.0, 0.0

    def seconds(self):
        """Waits for the device. Returns the time of all steps of this process."""
        self.machine.synchronize()
        return time.perf_counter() - self.started_at - self.paused_s

    def lap(self):
        """Called at the end of a step. Returns the mean time of the steps since the last call."""
        steps, seconds = self.progress.step + 1, self.seconds()
        per_step = (seconds - self.lap_s) / (steps - self.lap_step)
        self.lap_step, self.lap_s = steps, seconds
        self.step_s = seconds / (steps - self.first_step)
        return per_step

    def wall_step_s(self):
        """Returns the mean time of a step, with its share of the pauses, as of the last lap."""
        return (self.lap_s + self.paused_s) / (self.lap_step - self.first_step)

    @contextmanager
    def pause(self):
        """A context whose time does not count as that of steps."""
        seconds = self.seconds()
        yield
        now = time.perf_counter()
        if self.progress.step == self.first_step:
            self.started_at, seconds = now, 0.0  # excludes the time before the first step
        self.paused_s = now - self.started_at - seconds
