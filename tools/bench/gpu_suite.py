"""Figures of folio and nanoGPT on one GPU.

    python -m tools.bench.gpu_suite --vs_dir=../nanoGPT
    python -m tools.bench.gpu_suite --vs_dir=../nanoGPT --parts=speed,curve

Each measurement is one command. When it ends, its figures are written to out-gpu-suite/NAME.json.
If that file exists, the command is not repeated. An error is printed, and the next command runs.

Both programs need their data/shakespeare_char. Random tokens are added to both data folders.
nanoGPT's MFU is relative to an A100.
"""

import json
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from folio.cli import process
from folio.cli.errors import UserError
from folio.cli.settings import ROOT, load_settings, setting
from tools.bench.measure import describe_machine, format_figures, measure_command
from tools.plot.table import format_table

RESULTS = Path("out-gpu-suite")
TARGET_LOSS = 1.4697  # of nanoGPT's Shakespeare recipe, from its README
RANDOM_DATASET_VOCAB_SIZES = {"random_tokens": 50_304, "random_unpadded": 50_257}

# {name of the measurement: command} of each part. Placeholders: {python}; {folio}, {nanogpt}
# and {out}, folders. train.py gets --out_dir={out}/NAME.
TRAIN, SAMPLE = "{python} {folio}/train.py", "{python} {folio}/sample.py"
NANOGPT = "env -C {nanogpt} {python}"
GPT2 = (
    "config/train_gpt2.py --dataset=random_tokens --wandb_log=False --max_iters=30 "
    "--eval_interval=1000 --eval_iters=1 --log_interval=1"
)
SPEED = f"{GPT2} --batch_size=32 --gradient_accumulation_steps=6"
SMALL = "config/shakespeare_char.py --max_iters=300 --eval_iters=1"
FAST = "config/shakespeare_char_fast.py"
ONE_STEP = f"{GPT2} --max_iters=2 --gradient_accumulation_steps=1"
TEN_TEXTS = "--num_samples=10 --max_new_tokens=500"
UNTRAINED = f"{SAMPLE} --out_dir={{out}}/untrained --max_new_tokens=500"
PARTS = {
    "tests": {"tests": "{python} -m pytest -q -n8 --dist=worksteal -m gpu {folio}/tests"},
    "speed": {
        f"speed-{name}-{size}": f"{train} {GPT2} --batch_size={size} "
        f"--gradient_accumulation_steps={192 // size}"
        for size in (12, 32, 64)
        for name, train in (("folio", TRAIN), ("nanogpt", f"{NANOGPT} train.py"))
    },
    "curve": {
        "curve-folio": f"{TRAIN} config/shakespeare_char.py",
        "curve-nanogpt": f"{NANOGPT} train.py config/train_shakespeare_char.py",
    },
    "fast": {
        # with an empty cache of compiled code, with a filled one, and not compiled
        "fast": f"env TORCHINDUCTOR_CACHE_DIR={{out}}/fast/cache {TRAIN} {FAST}",
        "fast-cached": f"env TORCHINDUCTOR_CACHE_DIR={{out}}/fast/cache {TRAIN} {FAST}",
        "fast-eager": f"{TRAIN} {FAST} --compile=False",
    },
    "sampling": {
        "sampling-folio": f"{SAMPLE} --out_dir={{out}}/curve-folio {TEN_TEXTS}",
        "sampling-folio-compiled": f"{SAMPLE} --out_dir={{out}}/curve-folio {TEN_TEXTS} --compile",
        "sampling-nanogpt": f"{NANOGPT} sample.py --out_dir={{out}}/curve-nanogpt {TEN_TEXTS}",
        "untrained": f"{TRAIN} {ONE_STEP} --batch_size=1 --compile=False",
        "sampling-124M-1": f"{UNTRAINED} --num_samples=1",
        "sampling-124M-1-compiled": f"{UNTRAINED} --num_samples=1 --compile",
        "sampling-124M-64": f"{UNTRAINED} --num_samples=64",
        "sampling-124M-64-compiled": f"{UNTRAINED} --num_samples=64 --compile",
    },
    "memory": {
        "memory-124M-64": f"{TRAIN} {ONE_STEP} --batch_size=64",
        "memory-124M-128": f"{TRAIN} {ONE_STEP} --batch_size=128",
        "memory-124M-256": f"{TRAIN} {ONE_STEP} --batch_size=256",
        "memory-1.5B": f"{TRAIN} {ONE_STEP} --batch_size=16 --n_layer=48 --n_head=25 --n_embd=1600 "
        "--activation_checkpointing=True",
    },
    "lecture": {"lecture": f"{TRAIN} config/tutorials/lecture.py"},
    "candidates": {  # one change each to GPT-2 or to the Shakespeare recipe; slow to compile last
        "small-eager": f"{TRAIN} {SMALL} --compile=False",
        "small-default": f"{TRAIN} {SMALL}",
        "small-cuda-graphs": f"{TRAIN} {SMALL} --compile=reduce-overhead",
        "124M-default": f"{TRAIN} {SPEED}",
        # torch 2.11 prefers cuDNN
        "124M-flash": f"env TORCH_CUDNN_SDPA_DEPRIORITIZED=1 {TRAIN} {SPEED}",
        "124M-6-heads": f"{TRAIN} {SPEED} --n_head=6",
        "124M-unpadded": f"{TRAIN} {SPEED} --dataset=random_unpadded",
        "124M-muon": f"{TRAIN} {SPEED} --optimizer=muon",
        "124M-cuda-graphs": f"{TRAIN} {SPEED} --compile=reduce-overhead",
        "small-autotune": f"{TRAIN} {SMALL} --compile=max-autotune",
        "124M-autotune": f"{TRAIN} {SPEED} --compile=max-autotune",
    },
}


@dataclass(frozen=True)
class SuiteConfig:
    """Measure folio and nanoGPT on a GPU."""

    vs_dir: str = setting("../nanoGPT", "folder of nanoGPT")
    parts: str = setting(",".join(PARTS), "parts to measure, separated by commas")

    def __post_init__(self):
        if unknown := set(self.parts.split(",")) - PARTS.keys():
            raise ValueError(f"--parts has {unknown.pop()!r}; the parts are {', '.join(PARTS)}")


def main(argv=None):
    settings = load_settings(SuiteConfig, argv)
    for data in (Path("data"), Path(settings.vs_dir, "data")):
        for name, vocab_size in RANDOM_DATASET_VOCAB_SIZES.items():
            write_random_tokens(data / name, vocab_size)
    rows = [("measurement", "figures")]
    for part in settings.parts.split(","):
        for name, template in PARTS[part].items():
            command = build_command(name, template, settings.vs_dir)
            try:
                figures = measure_once(command, RESULTS / f"{name}.json")
                cell = outcome = format_figures(figures)
            except (UserError, OSError) as error:
                cell, outcome = "failed", error
            rows.append((name, cell))
            print(f"{name}: {outcome}", flush=True)
    print("", describe_machine(), "", *format_table(rows), sep="\n")


def build_command(name, template, nanogpt):
    """Returns the command of a measurement as a list."""
    folders = {"folio": ROOT, "nanogpt": nanogpt, "out": RESULTS.resolve()}
    command = [word.format(python=sys.executable, **folders) for word in template.split()]
    if "train.py" in template:
        command.append(f"--out_dir={folders['out']}/{name}")
    return command


def measure_once(command, path):
    """Returns the figures of a command. Writes them to a file, or reads them if it exists."""
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))["figures"]
    figures = measure_command(command, target=TARGET_LOSS)
    content = {"machine": describe_machine(), "command": command, "figures": figures}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return figures


def write_random_tokens(folder, vocab_size):
    """Writes a dataset of random token ids in nanoGPT's format. Each id is a character."""
    folder.mkdir(exist_ok=True)
    ids = np.random.default_rng(0).integers(vocab_size, size=2**21, dtype=np.uint16)
    ids.tofile(folder / "train.bin")
    ids[: 2**17].tofile(folder / "val.bin")
    meta = {"vocab_size": vocab_size, "itos": {i: chr(i) for i in range(vocab_size)}}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


if __name__ == "__main__":
    process.run(main)
