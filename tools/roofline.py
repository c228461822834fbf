"""Profile of a step of training or sampling, and a lower bound on its time.

The bounds are those of the roofline model (Williams et al. 2009): matrix products at peak speed
for training, reading the weights at the bandwidth of a large sum for sampling.
"""

import time
from contextlib import nullcontext
from dataclasses import replace
from statistics import median

import torch

from folio.aot import compiled_step
from folio.batches import Batches
from folio.completion import load_trained
from folio.device import DTYPES, kind_of, resolve_device
from folio.errors import UserError
from folio.initial import load_best
from folio.run_dir import RunDir
from folio.settings import load
from sample import SampleConfig, completions_of, continued, read_inputs
from tools.count import SCORES, parts
from train import TrainConfig, setup

STEPS = 10  # of training
REPEATS = 5  # of each measurement
ROWS = 12  # of the table
LARGE = 256 * 2**20  # bytes of an array that does not fit into caches


def profile_training(arguments):
    """Prints the time of a step of train.py by operation, and its bound."""
    run = setup(load(TrainConfig, arguments, {"device": resolve_device}))
    learner, batches = run.learner, Batches(run.dataset.train, run.settings)

    def train_steps():
        for step in range(STEPS):
            _, norm = learner.gradient(batches.at(step), step)
            learner.update(norm, run.settings.learning_rate)

    print_profile(learner.machine, train_steps, STEPS)


def profile_sampling(arguments):
    """Prints the time of a step of sample.py, one token of each text, and its bound."""
    settings = replace(load(SampleConfig, arguments, {"device": resolve_device}), stop=None)
    if settings.score or settings.interactive:
        raise UserError("--profile measures sampling: remove --score and --interactive")
    checkpoint = load_best(settings.init_from, RunDir(settings.out_dir))
    trained = load_trained(checkpoint, settings.device, settings.dtype, settings.compile)
    machine, prompts = trained.machine, read_inputs(settings)

    def generate():
        batch = list(completions_of(prompts, settings, trained.tokenizer))
        for _ in continued(trained, settings, batch):
            pass

    single = len(prompts) * settings.num_samples == 1
    with compiled_step(trained, single) if settings.compile else nullcontext():
        print_profile(machine, generate, settings.max_new_tokens)
    products = {part: flops for part, (_, flops) in parts(trained.model.config).items()}
    weights = (sum(products.values()) - products[SCORES]) // 2  # of linear layers
    size, bandwidth = weights * DTYPES[machine.dtype].itemsize, bandwidth_of(machine)
    print(
        f"lower bound: {size / 1e6:.4g} MB of weights, read at {bandwidth / 1e9:.3g} GB/s: "
        f"{size / bandwidth * 1e3:.2f} ms"
    )


def print_profile(machine, work, steps):
    """Prints the time of work(), which runs `steps` steps, by operation and per step."""
    work()  # the first call may compile
    seconds = timed(machine, work) / steps
    with torch.profiler.profile() as profiler:
        work()
        machine.synchronize()
    kind = "device" if kind_of(machine.device) == "cuda" else "cpu"
    print(profiler.key_averages().table(sort_by=f"self_{kind}_time_total", row_limit=ROWS))
    print(f"a step takes {seconds * 1e3:.2f} ms; the table has the sums over {steps} steps")


def timed(machine, work):
    """Returns the median of the seconds that work() takes, until the device has finished."""
    times = []
    for _ in range(REPEATS):
        machine.synchronize()
        start = time.perf_counter()
        work()
        machine.synchronize()
        times.append(time.perf_counter() - start)
    return median(times)


def bandwidth_of(machine):
    """Returns the bytes/s of reading a large array."""
    array = torch.ones(LARGE // 4, device=machine.device)
    return array.nbytes / timed(machine, array.sum)
