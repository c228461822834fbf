"""Measure a script: time per step, to a validation loss or to a text, and memory.

    python -m tools.bench -- config/shakespeare_char.py --max_iters=300
    python -m tools.bench --target=1.9 --vs="python train.py ..." --vs_dir=../nanoGPT -- config/...
    python -m tools.bench --script=sample --vs="python sample.py ..." -- --out_dir=...
    python -m tools.bench --profile -- config/shakespeare_char.py
    python -m tools.bench --count -- config/shakespeare_char.py

The arguments after -- are passed to the script. Commands run alternately as whole
processes, and the figures are medians over the runs. Instead, --profile prints the time of
each operation of a step, and --count a model's parameters and FLOPs.
"""

import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import ClassVar, Literal

from folio.cli import process
from folio.cli.errors import UserError
from folio.cli.settings import ROOT, load_settings, parse_arguments, setting

COLUMNS = {  # figure: (heading in the table, format)
    "step_ms": ("ms/step", ".2f"),
    "tokens_per_s": ("tokens/s", ",.0f"),
    "mfu": ("MFU (%)", ".1f"),
    "to_target_s": ("s to target", ".1f"),
    "val_loss": ("best val loss", ".4f"),
    "first_s": ("s to first token", ".2f"),
    "seconds": ("whole process, s", ".2f"),
    "memory_gib": ("memory, GiB", ".2f"),
    "gpu_memory_gib": ("GPU memory, GiB", ".2f"),
}
PATTERNS = (  # "iter" lines count from step 10 on, because the first steps are a warmup
    r"iter \d{2,}: loss \d+\.?\d*, time (?P<step_ms>\d+\.?\d*)ms",
    r"iter \d{2,}: .* mfu (?P<mfu>\d+\.?\d*)%",
    r"iter \d{2,}: .* (?P<tokens_per_s>[\d,]+) tokens/s",
    r"tokens per iteration will be: (?P<tokens_per_step>[\d,]+)",  # nanoGPT
    r"step \d+: train loss \d+\.?\d*, val loss (?P<val_loss>\d+\.?\d*)",
    r"tokens in \d+\.?\d* s, (?P<tokens_per_s>[\d,]+) tokens/s",
    r"; first token after (?P<first_s>\d+\.?\d*) s",
    r"^peak memory: (?P<gpu_memory_gib>\d+\.?\d*) GiB",
)
SEPARATOR = "---------------"  # printed after each text
STEPS = 10  # of training, in a profile
ROWS = 12  # of a profile's table


@dataclass(frozen=True)
class BenchConfig:
    """Measure a script, and optionally another command, alternately."""

    ARGUMENTS: ClassVar[str] = "[--name=value ...] -- ARGUMENTS OF THE SCRIPT"
    OPERANDS: ClassVar[str] = "arguments"

    arguments: tuple = setting((), "arguments of the script")
    script: Literal["train", "sample", "prepare"] = setting("train", "script to measure")
    runs: int = setting(3, "runs of each command", "[1, inf)")
    target: float | None = setting(None, "measure the time to reach this validation loss")
    vs: str | None = setting(None, "command to compare with, such as nanoGPT's script")
    vs_dir: str = setting(".", "folder of the --vs command")
    profile: bool = setting(False, "print the time of each operation of train.py or sample.py")
    count: bool = setting(False, "print the parameters and FLOPs of train.py's model")

    def __post_init__(self):
        try:
            shlex.split(self.vs or "")
        except ValueError as error:  # an open quote
            raise ValueError(f"--vs={self.vs} is not a command: {error}") from error


if __name__ == "__main__":
    process.start(parse_arguments, BenchConfig)  # --help must not wait for torch

import torch

from folio.checkpoint.format import empty_model
from folio.checkpoint.run_dir import RunDir
from folio.data.batches import Batches
from folio.data.dataset import load_tokenizer
from folio.hardware.device import device_type, resolve_device
from folio.inference.compiled import use_compiled_step
from folio.inference.completion import complete
from folio.inference.sampling import Controls
from folio.inference.trained_model import load_trained
from folio.pretrained.load import load_best
from folio.training.setup import make_plan, model_config
from sample import SampleConfig, make_completions, read_prompts
from tools.plot.table import aligned
from train import TrainConfig, Trainer


def main(argv=None):
    settings = load_settings(BenchConfig, argv)
    if settings.count:
        print_counts(settings.arguments)
    elif settings.profile:
        print(where())
        profile = profile_sampling if settings.script == "sample" else profile_training
        profile(settings.arguments)
    else:
        compare(settings)


def where():
    """Returns the date, the machine, the versions and the commit of a measurement."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    cpuinfo = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    names = re.findall(r"model name\s*: (.*)", cpuinfo)
    git = "git describe --always --dirty"  # in a shell, because git may not be installed
    found = subprocess.run(git, shell=True, cwd=ROOT, capture_output=True, text=True).stdout
    return (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores of "
        f"{names[0] if names else platform.machine()}, {gpu}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"commit {found.strip() or 'unknown'}"
    )


# Comparing


def compare(settings):
    """Measures the commands and prints a table of medians."""
    medians = {}
    for name, runs in measure_alternately(settings).items():
        known = [key for key in COLUMNS if all(key in run for run in runs)]
        medians[name] = {key: median(run[key] for run in runs) for key in known}
    print(f"\nmedians of {settings.runs} alternating runs; {where()}\n")
    print(f"    folio: {settings.script}.py {shlex.join(settings.arguments)}")
    if settings.vs:
        print(f"    other: {settings.vs}")
    print_table(medians)


def measure_alternately(settings):
    """Returns {"folio": [figures of each run]}, and likewise "other" if there is --vs.

    train.py writes to a temporary folder.
    """
    with tempfile.TemporaryDirectory() as out_dir:
        ours = [sys.executable, str(ROOT / f"{settings.script}.py"), *settings.arguments]
        if settings.script == "train":
            ours += [f"--out_dir={out_dir}", "--overwrite=True"]
        commands = {"folio": (ours, ".")}
        if settings.vs:  # runs first, because it is the command that may be mistyped
            commands = {"other": (shlex.split(settings.vs), settings.vs_dir)} | commands
        found = {name: [] for name in commands}
        for turn in range(settings.runs):
            for name, command in commands.items():
                run = measure(*command, settings.target)
                found[name].append(run)
                print(f"run {turn + 1} of {name}: {shown(run)}", flush=True)
    return found


def shown(figures):
    """Returns {name: value} as a line."""
    known = [key for key in COLUMNS if key in figures]
    return "; ".join(f"{COLUMNS[key][0]} {cell(key, figures)}" for key in known)


def print_table(medians):
    """Prints {name of a command: figures} as a Markdown table, with ratios if there are two."""
    rows = [["", *(heading for heading, _ in COLUMNS.values())]]
    rows += [[name, *(cell(key, medians[name]) for key in COLUMNS)] for name in medians]
    if "other" in medians:
        pairs = [(medians["folio"].get(key), medians["other"].get(key)) for key in COLUMNS]
        rows.append(["folio / other", *(f"{a / b:.3f}" if a and b else "" for a, b in pairs)])
    filled = [column for column in zip(*rows, strict=True) if any(column[1:])]
    print("", *aligned(list(zip(*filled, strict=True))), sep="\n")


def cell(name, figures):
    """Returns a figure as text, empty if it is missing."""
    return f"{figures[name]:{COLUMNS[name][1]}}" if name in figures else ""


def measure(command, folder=".", target=None):
    """Runs a command in a folder, and returns its figures, {name: value}.

    `target` is the validation loss of "to_target_s". Raises OSError if the command cannot be
    started, and UserError if it fails.
    """
    start, lines = time.perf_counter(), []  # of output, with the seconds since the start
    child = subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},  # times are those of printing
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        for line in child.stdout:
            lines.append((time.perf_counter() - start, line.strip()))
        _, status, usage = os.wait4(child.pid, 0)
    except BaseException:  # such as Interrupted
        child.terminate()
        raise
    seconds = time.perf_counter() - start
    if code := os.waitstatus_to_exitcode(status):
        tail = " / ".join(line for _, line in lines[-5:])
        raise UserError(f"{shlex.join(command)} ended with status {code}: {tail}")
    unit = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
    # On Linux, at least the peak of this process, which the command inherits.
    memory = {"memory_gib": usage.ru_maxrss * unit / 2**30}
    return read_figures(lines, command, target) | memory | {"seconds": seconds}


def read_figures(lines, command, target=None):
    """Returns the figures in lines of output, [(seconds, line), ...], like `measure`.

    They are the lowest validation loss, and medians of other values.
    """
    values, reached = defaultdict(list), []
    for seconds, line in lines:
        for pattern in PATTERNS:
            if match := re.search(pattern, line):
                [(name, text)] = match.groupdict().items()
                values[name].append(float(text.replace(",", "")))
                if name == "val_loss" and target is not None and values[name][-1] <= target:
                    reached.append(seconds)
    found = {name: median(each) for name, each in values.items()}
    if "val_loss" in found:
        found["val_loss"] = min(values["val_loss"])
    if reached:
        found["to_target_s"] = reached[0]
    tokens = found.pop("tokens_per_step", None)
    if tokens and "step_ms" in found:  # nanoGPT's train.py prints no speed
        found.setdefault("tokens_per_s", tokens / found["step_ms"] * 1e3)
    ends = [seconds for seconds, line in lines if line == SEPARATOR]
    if len(ends) > 1 and "tokens_per_s" not in found:  # nor does its sample.py
        length = re.search(r"--max_new_tokens[= ](\d+)", shlex.join(command))
        tokens = (len(ends) - 1) * (int(length[1]) if length else 500)  # the default
        found["tokens_per_s"] = tokens / (ends[-1] - ends[0])
    return found


# Profiling


def profile_training(arguments):
    """Prints the time of a step of train.py by operation."""
    settings = load_settings(TrainConfig, arguments, {"device": resolve_device})
    trainer = Trainer(make_plan(settings))
    batches = Batches(trainer.plan.dataset.train, settings)

    def train_steps():
        for step in range(STEPS):
            _, norm = trainer.forward_backward(batches.at(step), step)
            trainer.clip_and_step(norm, settings.learning_rate)

    print_profile(trainer.machine, train_steps, STEPS)


def profile_sampling(arguments):
    """Prints the time of a step of sample.py, one token of each text, by operation."""
    settings = load_settings(SampleConfig, arguments, {"device": resolve_device})
    checkpoint = load_best(settings.init_from, RunDir(settings.out_dir))
    trained = load_trained(checkpoint, settings.device, settings.dtype, settings.compile)
    controls, prompts = Controls.from_settings(settings), read_prompts(settings)

    def generate():
        batch = list(make_completions(trained.tokenizer, prompts, [], settings))
        for _ in complete(trained, batch, controls, settings.stream):
            pass

    one_text = len(prompts) * settings.num_samples == 1
    with use_compiled_step(trained, settings.compile, one_text):
        print_profile(trained.machine, generate, settings.max_new_tokens)


def print_profile(machine, work, steps):
    """Prints the time of work(), which runs `steps` steps, by operation and per step."""
    work()  # the first call may compile
    machine.synchronize()
    start = time.perf_counter()
    work()
    machine.synchronize()
    seconds = (time.perf_counter() - start) / steps
    with torch.profiler.profile() as profiler:
        work()
        machine.synchronize()
    kind = "device" if device_type(machine.device) == "cuda" else "cpu"
    print(profiler.key_averages().table(sort_by=f"self_{kind}_time_total", row_limit=ROWS))
    print(f"a step takes {seconds * 1e3:.2f} ms; the table has the sums over {steps} steps")


# Counting


def print_counts(arguments):
    """Prints the parameters and FLOPs of the model that train.py would train.

    A part is a kind of module, summed over the layers. Tied weights count where they are first, in
    the embedding. FLOPs are those of the forward pass, a third of GPT.flops_per_token().
    """
    settings = load_settings(TrainConfig, arguments, {"device": resolve_device})
    tokenizer = load_tokenizer(settings.dataset)  # GPT-2's, if the dataset is not prepared
    model = empty_model(model_config(settings, tokenizer), "meta")
    parameters, flops = Counter(), Counter()
    for name, parameter in model.named_parameters():
        parameters[part_of(name.rpartition(".")[0])] += parameter.numel()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            flops[part_of(name)] += 2 * module.weight.numel()
    total = model.flops_per_token() / 3
    flops["attention: scores and values"] = total - flops.total()

    config = model.config
    print(
        f"{config.n_layer} layers, width {config.n_embd}, {config.block_size:,} tokens of context, "
        f"vocabulary of {config.vocab_size:,} ({tokenizer.kind} tokenizer)\n"
    )
    counts = {part: (parameters[part], flops[part]) for part in parameters | flops}
    counts["total"] = (model.num_params(), total)
    rows = [[part, f"{size:,}", f"{work:,.0f}"] for part, (size, work) in counts.items()]
    print("\n".join(aligned([["part", "parameters", "FLOPs per token"], *rows])))


def part_of(name):
    """Returns a module's name without its layer."""
    return re.sub(r"^transformer\.|\bh\.\d+\.", "", name)


if __name__ == "__main__":
    process.run(main)
