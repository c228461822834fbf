"""The figures of docs/results.md on this machine: folio and other programs, alternately.

    python -m tools.bench.suite --vs_dir=../nanoGPT
    python -m tools.bench.suite --vs_dir=../nanoGPT --parts=step,losses
    python -m tools.bench.suite --dry_run=True

suite.toml has the rows. What the commands print is read as in tools.bench, and appended to
out-suite/output.txt. After each run, its figures are written to out-suite/runs.json. Runs of this
commit that are there are not repeated, so a call continues where --minutes ended the last one. A
command that fails is reported and skipped. nanoGPT needs the data of its Shakespeare recipe.
"""

import json
import math
import pickle
import sys
import time
import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from folio.cli import process
from folio.cli.files import write_atomically
from folio.cli.settings import ROOT, load_settings, setting
from tools.bench import measure
from tools.plot.table import format_table

RESULTS = Path("out-suite")
TABLE = tomllib.loads(Path(__file__).with_name("suite.toml").read_text("utf-8"))
PARTS = {**TABLE["cpu"], **TABLE["long"], **TABLE["gpu"]}
RANDOM_DATASET_VOCAB_SIZES = {"random_tokens": 50_304, "random_unpadded": 50_257}


@dataclass(frozen=True)
class SuiteConfig:
    """Measure folio and other programs."""

    vs_dir: str = setting("../nanoGPT", "folder of nanoGPT")
    parts: str | None = setting(None, "parts of suite.toml; None: those for this machine")
    runs: int = setting(3, "runs of each command", "[1, inf)")
    minutes: float | None = setting(None, "begin no row after this time", "(0, inf)")
    dry_run: bool = setting(False, "only print the commands")

    def __post_init__(self):
        if unknown := set(self.chosen_parts) - PARTS.keys():
            raise ValueError(f"--parts has {unknown.pop()!r}; the parts are {', '.join(PARTS)}")

    @property
    def chosen_parts(self):
        if self.parts:
            return self.parts.split(",")
        return list(TABLE["gpu" if torch.cuda.is_available() else "cpu"])


def main(argv=None):
    settings = load_settings(SuiteConfig, argv)
    rows = [(part, *row) for part in settings.chosen_parts for row in PARTS[part]]
    if settings.dry_run:
        for part, _, _, *templates in rows:
            for template in templates:
                print(f"{part}: {expand(template, settings.vs_dir)}")
        return
    if TABLE["gpu"].keys() & set(settings.chosen_parts):
        for data in (Path("data"), Path(settings.vs_dir, "data")):
            for name, vocab_size in RANDOM_DATASET_VOCAB_SIZES.items():
                write_random_tokens(data / name, vocab_size)
    table = [["", "folio", "other", "ratio"]]
    end = time.monotonic() + 60 * (settings.minutes or math.inf)
    for part, name, figure, *templates in rows:
        if time.monotonic() > end:
            print(f"no time left for {part}: {name}")
            continue
        print(f"{part}: {name}")
        commands = [expand(template, settings.vs_dir) for template in templates]
        values = measure_row(commands, figure, settings.runs)
        if figure:
            row = measure.make_row(name, figure, values, missing="failed")
            table.append(row + [""] * (4 - len(row)))
    print("", measure.describe_machine(), "", *format_table(table), sep="\n")


def measure_row(commands, figure, runs):
    """Returns the median of a figure for each command; None for one that fails.

    Without a figure, the commands prepare other rows, and run once.
    """
    names = ("folio", "other")[: len(commands)]
    functions = {name: partial(measure_once, c) for name, c in zip(names, commands, strict=True)}
    medians = measure.measure_alternately(functions, runs if figure else 1, keep_going=True)
    return [medians.get(name, {}).get(figure) for name in names]


def measure_once(command, number):
    """Returns the figures of a run of a command. Saves them, or reads those of an earlier call."""
    path = RESULTS / "runs.json"
    saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    runs = saved.setdefault(measure.describe_commit(), {}).setdefault(command, [])
    if number == len(runs):
        path.parent.mkdir(exist_ok=True)
        runs.append(measure.measure_command(command.split(), output=RESULTS / "output.txt"))
        with write_atomically(path) as [file]:
            file.write(json.dumps(saved, indent=1).encode())
    return runs[number]


def expand(template, nanogpt):
    """Returns a command of suite.toml without abbreviations and placeholders."""
    names = TABLE["commands"] | {
        "python": sys.executable,
        "folio": str(ROOT),
        "torch": str(Path(torch.__file__).parent),
        "nanogpt": nanogpt,
        "out": str(RESULTS.resolve()),
    }
    while "{" in template:
        template = template.format_map(names)
    return template


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
