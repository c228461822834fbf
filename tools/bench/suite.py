"""The figures of docs/results.md on this machine: folio and other programs, alternately.

    python -m tools.bench.suite --vs_dir=../nanoGPT
    python -m tools.bench.suite --vs_dir=../nanoGPT --parts=step,losses

suite.toml has the rows. What the commands print is read as in tools.bench, and appended to
out-suite/output.txt. After each run, its figures are written to out-suite/runs.json. Runs of this
commit that are there are not repeated, so a call continues where --minutes ended the last one. A
command that fails is reported and skipped. nanoGPT needs the data of its Shakespeare recipe.
docs/lab-notebook.md prepares what the parts `compile`, `tuning` and `opponents` need.
"""

import json
import math
import pickle
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from folio.cli import process
from folio.cli.errors import UserError
from folio.cli.files import write_atomically
from folio.cli.settings import ROOT, load_settings, setting
from tools.bench import measure
from tools.table import format_table

RESULTS = Path("out-suite")
TABLE = tomllib.loads(Path(__file__).with_name("suite.toml").read_text("utf-8"))
PARTS = {**TABLE["cpu"], **TABLE["long"], **TABLE["gpu"]}
DEFAULT_PARTS = TABLE["gpu" if torch.cuda.is_available() else "cpu"]
VOCAB_SIZE = 50_304  # GPT-2's, padded


@dataclass(frozen=True)
class SuiteConfig:
    """Measure folio and other programs."""

    vs_dir: str = setting("../nanoGPT", "folder of nanoGPT")
    parts: str = setting(",".join(DEFAULT_PARTS), f"parts of suite.toml: {', '.join(PARTS)}")
    runs: int = setting(3, "runs of each command", "[1, inf)")
    minutes: float = setting(math.inf, "begin no row after this time", "(0, inf]")

    def __post_init__(self):
        if unknown := set(self.parts.split(",")) - PARTS.keys():
            raise ValueError(f"--parts has {unknown.pop()!r}; the parts are {', '.join(PARTS)}")


def main(argv=None):
    settings = load_settings(SuiteConfig, argv)
    parts = settings.parts.split(",")
    rows = [(part, *row) for part in parts for row in PARTS[part]]
    if TABLE["gpu"].keys() & set(parts):
        write_random_tokens(Path("data", "random_tokens"))
        write_random_tokens(Path(settings.vs_dir, "data", "random_tokens"))
    table = [measure.HEADER]
    end = time.monotonic() + 60 * settings.minutes
    for part, name, figure, *templates in rows:
        if time.monotonic() > end:
            print(f"no time left for {part}: {name}")
            continue
        print(f"{part}: {name}")
        commands = [expand(template, settings.vs_dir) for template in templates]
        programs = dict(zip(measure.PROGRAMS, commands, strict=False))
        runs = settings.runs if figure else 1
        measured = measure.measure_alternately(programs, runs, measure_once)
        if figure:  # other rows prepare these
            table.append(measure.make_row(name, figure, measured))
    print("", measure.describe_machine(), "", *format_table(table), sep="\n")


def measure_once(command, number):
    """Returns the figures of a run, saved or new, or {} if it or one before it has failed."""
    path = RESULTS / "runs.json"
    saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    runs = saved.setdefault(measure.describe_commit(), {}).setdefault(command, [])
    if number < len(runs):
        return runs[number]
    if number > len(runs):
        return {}
    path.parent.mkdir(exist_ok=True)
    try:
        runs.append(measure.measure_command(command.split(), output=RESULTS / "output.txt"))
    except UserError as error:
        print(error, flush=True)
        return {}
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


def write_random_tokens(folder):
    """Writes a dataset of random token ids in nanoGPT's format."""
    folder.mkdir(exist_ok=True)
    ids = np.random.default_rng(0).integers(VOCAB_SIZE, size=2**21, dtype=np.uint16)
    ids.tofile(folder / "train.bin")
    ids[: 2**17].tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": VOCAB_SIZE}))


if __name__ == "__main__":
    process.run(main)
