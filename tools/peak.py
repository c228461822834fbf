"""Peak memory of training steps, and the estimate of folio.memory."""

import sys
from dataclasses import replace

import torch

from folio.batches import Batches
from folio.device import kind_of, resolve_device
from folio.memory import estimate
from folio.settings import load
from train import TrainConfig, setup

STEPS = 2  # the optimizer's moments exist from the first on


def print_peak(arguments):
    """Prints the estimate and the measured peak of some steps of train.py with `arguments`."""
    run = setup(load(TrainConfig, arguments, {"device": resolve_device}))
    peak = peak_bytes(run)
    found = replace(estimate(run.learner.model.config, run.settings), saving=0)  # nothing is saved
    print(
        f"without saving: estimated {found.total / 2**20:,.0f} MiB, peak of the tensors in {STEPS} "
        f"steps {peak / 2**20:,.0f} MiB, ratio {found.total / peak:.2f}"
    )
    if kind_of(run.settings.device) == "cpu" and sys.platform == "linux":
        print(f"peak of the process: {peak_resident_bytes() / 2**20:,.0f} MiB, with torch's code")


def peak_bytes(run):
    """Runs some steps. Returns the largest sum of the sizes of all tensors."""
    learner, batches = run.learner, Batches(run.dataset.train, run.settings)

    def train_steps():
        for step in range(STEPS):
            _, norm = learner.gradient(batches.at(step), step)
            learner.update(norm, run.settings.learning_rate)

    if kind_of(run.settings.device) == "cuda":
        torch.cuda.reset_peak_memory_stats()
        train_steps()
        return torch.cuda.max_memory_allocated()
    return sum(p.nbytes for p in learner.model.parameters()) + peak_allocated_bytes(train_steps)


def peak_allocated_bytes(work):
    """Calls work() and returns the peak of the memory that torch allocates meanwhile on the CPU."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    allocated = peak = 0
    for _, size in changes:  # negative if freed
        allocated += size
        peak = max(peak, allocated)
    return peak


def peak_resident_bytes():
    """Returns the largest memory that this process has had, on Linux."""
    import resource  # not on Windows

    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
