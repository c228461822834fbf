"""Train with every combination of settings that are given several values, and compare the runs.

    python -m tools.sweep config/shakespeare_char.py --learning_rate=1e-3,3e-4 --n_layer=4,6
    python -m tools.sweep config/shakespeare_char.py config/mine.py --random=10 --jobs=2

In a config file several values are a list: learning_rate = [1e-3, 3e-4]. The same command goes on
with a sweep that was stopped: what is finished stays, what was killed resumes, what failed is tried
again. `python -m tools.plot out-sweep` compares the runs at any time.
"""

import dataclasses
import json
import os
import queue
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from config import UserError, changed, load_each, setting
from device import resolve_device
from report import settings_of
from safety import Claim, Interrupted, cause_of, refusal, replacing, run
from tools import runs as runs_of
from train import TrainConfig

ROOT = Path(__file__).parent.parent
RECORD, OUTPUT = "sweep.json", "output.txt"
FINISHED = "finished"
SEED = 1337  # of the choice of combinations, which is the same when a sweep goes on
MAY_CHANGE = (  # between the parts of a sweep, as no loss depends on them
    "log_interval", "checkpoint_interval", "sample_interval", "wandb_log", "wandb_project",
    "wandb_run_name", "tensorboard", "device", "compile", "backend",
)  # fmt: skip


@dataclass(frozen=True)
class SweepConfig(TrainConfig):
    """Train with every combination of the settings that have several values, each in a folder."""

    sweep_dir: str = setting("out-sweep", "folder for the runs' folders", group="Sweep")
    jobs: int = setting(1, "runs at a time, which share the cores or GPUs", bounds="[1, inf)")
    random: int | None = setting(
        None, "as many combinations, chosen by chance; None is all", bounds="[1, inf)"
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("overwrite", "eval_only", "init_from"):
            if name in changed(self):
                raise UserError(f"a sweep begins and resumes its runs by itself: leave {name} out")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if any(re.match(r"--out_dir\b", argument) for argument in argv):
        raise UserError("each run of a sweep has a folder of its own: name that of all --sweep_dir")
    names, combinations = load_each(SweepConfig, argv, {"device": resolve_device}, chosen)
    check_names(names)
    sweep, jobs = combinations[0], {name_of(names, each): each for each in combinations}
    with Claim(sweep.sweep_dir):
        record = Record(Path(sweep.sweep_dir, RECORD), jobs)
        train_all(record, jobs, sweep.jobs)
        begun = [path.parent for path in Path(sweep.sweep_dir).glob(f"*/{runs_of.LOG}")]
        runs = [runs_of.read(folder) for folder in begun if folder.name in jobs]
        print("\n" + "\n".join(runs_of.table(runs)))
    if failed := [f"{name}: {why}" for name, why in record.failed().items()]:
        raise UserError(
            f"{len(failed)} of {len(jobs)} runs failed: {'; '.join(failed)}; the same command "
            "tries them again"
        )


def chosen(settings, count):
    """The numbers of the combinations that are to run."""
    number = min(settings.random or count, count)
    return sorted(random.Random(SEED).sample(range(count), number))


def check_names(names):
    """Raise UserError unless settings of train.py alone have several values, one at least."""
    known = {field.name for field in dataclasses.fields(TrainConfig)} - {"out_dir"}
    if wrong := [name for name in names if name not in known]:
        raise UserError(f"{wrong[0]} has several values, but is not what a training differs in")
    if not names:
        raise UserError(
            "there is nothing to compare: give a setting several values, by a flag as "
            "--learning_rate=1e-3,3e-4 or in a config file as learning_rate = [1e-3, 3e-4]"
        )


def name_of(names, settings):
    """What a run's folder is called: the settings in which it differs from others."""
    name = ",".join(f"{name}={getattr(settings, name)}" for name in names)
    return re.sub(r"[^\w.,=+-]", "_", name)


# What is done already


class Record:
    """sweep.json: of each run that began its settings, and how it ended.

    Raises UserError where a run of another sweep has the name of one of these, or the disk refuses.
    """

    def __init__(self, path, jobs):
        self.path, self.runs = path, read_record(path)
        self.wanted = {name: told(settings) for name, settings in jobs.items()}
        for name, now in self.wanted.items():
            before = self.runs.get(name, {}).get("settings", now)
            wrong = [
                f"{key} was {before.get(key)!r} and is {now[key]!r}"
                for key in now
                if before.get(key) != now[key] and not may_change(key, before.get(key), now[key])
            ]
            if wrong:
                raise UserError(
                    f"{path.parent} has a run {name} of another sweep: {'; '.join(wrong)}; choose "
                    "another --sweep_dir"
                )

    def is_finished(self, name):
        before = self.runs.get(name, {})
        grew = before.get("settings", {}).get("max_iters") != self.wanted[name]["max_iters"]
        return before.get("why") == FINISHED and not grew

    def put(self, name, why):
        """Keep how a run stands, on disk."""
        self.runs[name] = {"why": why, "settings": self.wanted[name]}
        with replacing(self.path) as [file]:
            file.write(json.dumps(self.runs, indent=1).encode())

    def failed(self):
        """{name: why} of this sweep's runs that did not come to their end."""
        return {
            name: self.runs[name]["why"]
            for name in self.wanted
            if self.runs[name]["why"] != FINISHED
        }


def read_record(path):
    """{name: {"why": …, "settings": …}} of the runs so far."""
    try:
        record = json.loads(path.read_bytes())
        if all(type(each["why"]) is str and dict(each["settings"]) for each in record.values()):
            return record
        raise ValueError("it is no record of a sweep")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise refusal("read", path, error) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged ({cause_of(error)}): with it removed, runs are resumed without it"
        ) from error


def told(settings):
    """The settings of one run that its record has."""
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    return {name: value for name, value in settings_of(settings).items() if name in names}


def may_change(key, before, now):
    return key in MAY_CHANGE or (key == "max_iters" and now > before)


# Training


def train_all(record, jobs, at_once):
    """Train what is not finished, so many at once; one that fails does not end the others."""
    left = {name: each for name, each in jobs.items() if not record.is_finished(name)}
    print(f"{len(jobs)} runs, {len(jobs) - len(left)} of them finished before", flush=True)
    crew = Crew(at_once)
    pool = ThreadPoolExecutor(at_once)
    try:
        for name in left:
            record.put(name, "stopped")
        futures = {
            pool.submit(crew.train, record.path.parent / name, each): name
            for name, each in left.items()
        }
        for number, future in enumerate(as_completed(futures), start=len(jobs) - len(left) + 1):
            name, why = futures[future], future.result()
            record.put(name, why)
            line = in_a_line(record.path.parent / name, why)
            print(f"{number} of {len(jobs)}: {name}: {line}", flush=True)
    except BaseException as error:
        crew.stop()
        pool.shutdown(cancel_futures=True)
        if isinstance(error, Interrupted):
            error.args = ("stopped, each run at its last step; the same command goes on",)
        raise
    pool.shutdown()


class Crew:
    """Runs of train.py in processes of their own, so many at once."""

    def __init__(self, at_once):
        self.at_once, self.stopping, self.children = at_once, False, set()
        self.slots = queue.SimpleQueue()
        for slot in range(at_once):
            self.slots.put(slot)

    def stop(self):
        """Let each save what it has, and end."""
        self.stopping = True
        for child in list(self.children):
            child.terminate()

    def train(self, folder, settings):
        """Begin a run, or go on with it; return FINISHED, or why it failed, in a line."""
        slot = self.slots.get()
        try:
            folder.mkdir(exist_ok=True)
            with open(folder / OUTPUT, "ab") as output:
                return self.watch(command_of(folder, settings), slot, output)
        except OSError as error:
            return str(refusal("write", folder / OUTPUT, error))
        finally:
            self.slots.put(slot)

    def watch(self, command, slot, output):
        """Run a command to its end and keep what it prints; return like `train`."""
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # where the sweep is killed, they cannot print, save and end
            stderr=subprocess.STDOUT,
            env=os.environ | environment(slot, self.at_once),
        )
        self.children.add(child)
        if self.stopping:  # meanwhile
            child.terminate()
        last = ""
        for line in child.stdout:
            output.write(line)
            output.flush()
            last = line.decode(errors="replace").strip() or last
        status = child.wait()
        self.children.discard(child)
        return FINISHED if status == 0 else f"{last} (status {status})"


def command_of(folder, settings):
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    flags = {name: value for name, value in changed(settings).items() if name in names}
    flags |= {"out_dir": folder, "init_from": "auto", "overwrite": True}
    return [
        sys.executable,
        str(ROOT / "train.py"),
        *(f"--{name}={value}" for name, value in flags.items()),
    ]


def environment(slot, at_once):
    """Variables that share cores, or else GPUs, between processes; `slot` counts them from 0."""
    shared, cards = {}, torch.cuda.device_count()
    if at_once > 1 and "OMP_NUM_THREADS" not in os.environ:
        shared["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // at_once))
    if cards > 1:
        ids = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(cards)))).split(",")
        shared["CUDA_VISIBLE_DEVICES"] = ids[slot % len(ids)]
    return shared


def in_a_line(folder, why):
    """How a run ended, for people."""
    if why != FINISHED:
        return f"failed: {why}"
    each = runs_of.read(folder)
    best, seconds = each.best, each.newest["elapsed_s"]
    return f"best val loss {best['loss']:.4f} at step {best['step']:,}, {seconds:,.0f} s"


if __name__ == "__main__":
    run(main)
