"""Prints where the time of a step of train.py goes, by operation."""

import dataclasses
import time

import torch

from folio.cli.settings import load_settings
from folio.distributed.world import SINGLE_PROCESS
from folio.hardware.device import resolve_device
from train import TrainConfig, make_run, train_step

STEPS = 10
MAX_ROWS = 20


def profile_training(arguments):
    """Prints the time of a step of train.py, and the operations, or kernels, that take the most."""
    settings = load_settings(TrainConfig, arguments, {"device": resolve_device})
    run = make_run(settings, SINGLE_PROCESS)
    run.machine = dataclasses.replace(run.machine, cuda_graph=False)  # it would hide operations

    def train_steps():
        for step in range(STEPS):
            train_step(run, step, settings.learning_rate)
        run.machine.synchronize()

    train_steps()  # the first call may compile
    start = time.perf_counter()
    train_steps()
    step_ms = 1e3 * (time.perf_counter() - start) / STEPS
    print(f"a step takes {step_ms:.2f} ms; operations of {STEPS} steps:")
    with torch.profiler.profile() as profiler:
        train_steps()
    device = "cuda" if run.machine.kind == "cuda" else "cpu"
    print(profiler.key_averages().table(f"self_{device}_time_total", row_limit=MAX_ROWS))
