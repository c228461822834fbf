"""Prints the time of each operation of a step of train.py or sample.py."""

import time

import torch

from folio.checkpoint.run_dir import RunDir
from folio.cli.settings import load_settings
from folio.data.batches import Batches
from folio.hardware.device import device_type, resolve_device
from folio.inference.compiled import use_compiled_step
from folio.inference.completion import complete
from folio.inference.trained_model import load_trained
from folio.pretrained.load import load_best
from folio.training.run import Run
from folio.training.setup import make_plan
from sample import SampleConfig, make_completions, read_prompts
from train import TrainConfig, train_step

TRAINING_STEPS = 10
MAX_TABLE_ROWS = 12


def profile_training(arguments):
    """Prints the time of a step of train.py by operation."""
    settings = load_settings(TrainConfig, arguments, {"device": resolve_device})
    run = Run(make_plan(settings))
    batches = Batches(run.dataset.train, settings)

    def train_steps():
        for step in range(TRAINING_STEPS):
            train_step(run, batches.at(step), step, settings.learning_rate)

    print_profile(run.machine, train_steps, TRAINING_STEPS)


def profile_sampling(arguments):
    """Prints the time of a step of sample.py, one token of each text, by operation."""
    settings = load_settings(SampleConfig, arguments, {"device": resolve_device})
    checkpoint = load_best(settings.init_from, RunDir(settings.out_dir))
    trained = load_trained(checkpoint, settings.device, settings.dtype, settings.compile)
    prompts = read_prompts(settings)

    def generate():
        batch = list(make_completions(trained.tokenizer, prompts, [], settings))
        for _ in complete(trained, batch, settings, settings.stream):
            pass

    batch_size = len(prompts) * settings.num_samples
    with use_compiled_step(trained, settings.compile, batch_size):
        print_profile(trained.machine, generate, settings.max_new_tokens)


def print_profile(machine, run_steps, steps):
    """Prints the time of run_steps(), which runs `steps` steps, by operation and per step."""
    run_steps()  # the first call may compile
    machine.synchronize()
    start = time.perf_counter()
    run_steps()
    machine.synchronize()
    seconds = (time.perf_counter() - start) / steps
    with torch.profiler.profile() as profiler:
        run_steps()
        machine.synchronize()
    kind = "device" if device_type(machine.device) == "cuda" else "cpu"
    averages = profiler.key_averages()
    print(averages.table(sort_by=f"self_{kind}_time_total", row_limit=MAX_TABLE_ROWS))
    print(f"a step takes {seconds * 1e3:.2f} ms; the table has the sums over {steps} steps")
