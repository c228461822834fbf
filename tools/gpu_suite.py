"""Figures of folio and nanoGPT on one GPU.

    python -m tools.bench --gpu_suite --vs_dir=../nanoGPT --parts=speed,curve

Each measurement is one command. When it ends, its figures are written to out-gpu-suite/NAME.json.
If that file exists, with the same command, machine and commit, the command is not repeated.
Arguments after -- are added to every command of train.py.

Replaces nanoGPT's data/shakespeare_char by folio's, and adds random tokens to both data folders.
"""

import json
import pickle
from pathlib import Path

import numpy as np

from folio.dataset import load_dataset
from folio.device import choose_machine, resolve_device
from folio.errors import UserError
from folio.files import replacing
from tools.gpu_parts import RANDOM, UNPADDED, Parts
from tools.measure import figures, measure
from tools.table import aligned

TARGET = 1.4697  # validation loss of nanoGPT's Shakespeare recipe, from its README
GPT2_TOKENS = 50_257
HIDDEN = ("last_s", "memory_gib")  # only in the JSON files


class Suite:
    """Runs the measurements of Parts and stores their figures."""

    def __init__(self, results, nanogpt, arguments, machine):
        """`machine` is tools.bench.where(): a date, which may differ, the machine, the commit."""
        self.results, self.nanogpt, self.machine = Path(results).resolve(), Path(nanogpt), machine
        self.parts = Parts(self.results, arguments)
        self.results.mkdir(parents=True, exist_ok=True)

    def run(self, parts):
        """Runs the measurements of parts, in order, and prints their figures."""
        prepare(self.nanogpt / "data")
        rows = [("measurement", "figures")]
        for part in parts:
            generator, success = getattr(self.parts, part)(), None
            try:
                while True:
                    measurement = generator.send(success)
                    success, text = self.result(measurement)
                    print(f"{measurement.name}: {text}", flush=True)
                    rows.append((measurement.name, text))
            except StopIteration:
                pass
        print("", self.machine, "", *aligned(rows), sep="\n")

    def result(self, measurement):
        """Returns whether a measurement succeeded, and its figures or the error, as text."""
        found = self.stored(measurement)
        if not found:
            try:
                found = self.measure(measurement)
            except UserError as error:
                if not measurement.may_fail:
                    raise
                return False, str(error)
            with replacing(self.results / f"{measurement.name}.json") as [file]:
                file.write(json.dumps(self.key(measurement) | found, indent=1).encode())
        shown = {name: value for name, value in found["figures"].items() if name not in HIDDEN}
        texts = (f"{value:,.0f}" if value >= 1000 else f"{value:.5g}" for value in shown.values())
        return True, ", ".join(map(" ".join, zip(shown, texts, strict=True)))

    def stored(self, measurement):
        """Returns what the JSON file of a Measurement contains; None if it must be repeated."""
        path, key = self.results / f"{measurement.name}.json", self.key(measurement)
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return found if found.items() >= key.items() else None

    def key(self, measurement):
        return {"command": list(measurement.command), "machine": self.machine.partition(", ")[2]}

    def measure(self, measurement):
        """Runs a Measurement. Returns its figures, and the validation losses with their times."""
        measurement.prepare()
        values = measure(measurement.command, self.nanogpt if measurement.is_nanogpt else ".")
        found = figures(values, TARGET)
        step_ms = found.pop("step_ms", None)  # without --log_interval=1, nanoGPT's is not exact
        found.pop("mfu", None)  # nanoGPT's is relative to an A100
        if measurement.tokens:
            if step_ms is None:
                raise UserError(f"{measurement.name} prints no time of step 10 or later")
            speed = measurement.tokens / step_ms * 1e3
            machine = choose_machine(resolve_device("auto"), "bfloat16", False)
            mfu = 100 * speed * measurement.flops / machine.peak[0]
            found |= {"step_ms": step_ms, "tokens_per_s": speed, "mfu": mfu}
        date, losses = self.machine.partition(", ")[0], values.get("val_loss", [])
        return {"date": date, "figures": found, "curve": losses}


def prepare(data):
    """Writes the datasets to nanoGPT's data folder, and the random ones to folio's."""
    random = np.random.default_rng(0).integers(GPT2_TOKENS, size=2**21, dtype=np.uint16)
    unpadded = Path("data", UNPADDED)
    for folder in (Path("data", RANDOM), data / RANDOM, unpadded):
        write_splits(folder, random, random[: 2**17])
    write_characters(unpadded, map(chr, range(GPT2_TOKENS)))
    shakespeare = load_dataset("shakespeare_char")
    if shakespeare.tokenizer.kind != "char":
        raise UserError("data/shakespeare_char does not have characters: run python prepare.py")
    folder = data / "shakespeare_char"
    write_splits(folder, shakespeare.train, shakespeare.val)
    write_characters(folder, shakespeare.tokenizer.characters)


def write_splits(folder, train, val):
    folder.mkdir(parents=True, exist_ok=True)
    for name, ids in (("train.bin", train), ("val.bin", val)):
        (folder / name).unlink(missing_ok=True)  # it may be a link to the file that is read
        ids.tofile(folder / name)


def write_characters(folder, characters):
    """Writes nanoGPT's table of the characters of a dataset."""
    itos = dict(enumerate(characters))
    meta = {"vocab_size": len(itos), "itos": itos, "stoi": {c: i for i, c in itos.items()}}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
