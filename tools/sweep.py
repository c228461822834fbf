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
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

import checkpoint as ckpt
from config import UserError, changed, load_each, setting
from device import resolve_device
from report import settings_of
from safety import Claim, Interrupted, InUseError, cause_of, refusal, replacing, run
from tools import runs as runs_of
from train import TrainConfig

ROOT = Path(__file__).parent.parent
RECORD, OUTPUT = "sweep.json", "output.txt"
FINISHED, STOPPED = "finished", "stopped"
SEED = 1337  # of the choice of combinations, which is the same when a sweep goes on
OF_TRAINING = {field.name for field in dataclasses.fields(TrainConfig)}
MAY_CHANGE = {  # between the parts of a sweep, as no loss depends on them
    "log_interval", "checkpoint_interval", "sample_interval", "wandb_log", "wandb_project",
    "wandb_run_name", "tensorboard", "device", "compile", "backend",
}  # fmt: skip


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
        if not self.sweep_dir:
            raise UserError("sweep_dir is empty: it names a folder")
        for name in ("overwrite", "eval_only", "init_from"):
            if name in changed(self):
                raise UserError(f"a sweep begins and resumes its runs by itself: leave {name} out")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if any(re.match(r"--out_dir\b", argument) for argument in argv):
        raise UserError("each run of a sweep has a folder of its own: name that of all --sweep_dir")
    names, combinations = load_each(SweepConfig, argv, {"device": resolve_device}, chosen)
    check_names(names)
    sweep = combinations[0]
    jobs = named(names, combinations)
    with Claim(sweep.sweep_dir):
        check_begun(Path(sweep.sweep_dir), jobs)
        record = Record(Path(sweep.sweep_dir, RECORD))
        train_all(record, jobs, sweep.jobs)
        begun = [each for each in runs_of.inside(sweep.sweep_dir) if each.name in jobs]
        print("\n" + "\n".join(runs_of.table([runs_of.read(folder) for folder in begun])))
    if failed := [f"{name}: {record.runs[name]}" for name in jobs if not record.finished(name)]:
        raise UserError(
            f"{len(failed)} of {len(jobs)} runs failed: {'; '.join(failed)}; the same command "
            "tries them again"
        )


def chosen(settings, count):
    """The numbers of the combinations that are to run: with a larger --random, these and more."""
    if settings.random is None or settings.random >= count:
        return range(count)
    draw, numbers = random.Random(SEED), set()
    while len(numbers) < settings.random:
        numbers.add(draw.randrange(count))
    return sorted(numbers)


def check_names(names):
    """Raise UserError unless settings of train.py alone have several values, one at least."""
    if wrong := [name for name in names if name not in OF_TRAINING - {"out_dir"}]:
        raise UserError(f"{wrong[0]} has several values, but is not what a training differs in")
    if not names:
        raise UserError(
            "there is nothing to compare: give a setting several values, by a flag as "
            "--learning_rate=1e-3,3e-4 or in a config file as learning_rate = [1e-3, 3e-4]"
        )


def named(names, combinations):
    """{name of a run's folder: its settings}; what differs is in the name."""
    jobs = {}
    for settings in combinations:
        name = ",".join(f"{name}={getattr(settings, name)}" for name in names)
        name = re.sub(r"[^\w.,=+-]", "_", name)
        if name in jobs:
            raise UserError(f"two runs would share the folder {name}: rename what they differ in")
        jobs[name] = settings
    return jobs


# What is done already


def check_begun(sweep_dir, jobs):
    """Raise UserError where a folder has a run of other settings, which would pass for this one."""
    for name, settings in jobs.items():
        if not Path(sweep_dir, name, runs_of.LOG).exists():
            continue
        before, now = runs_of.read(sweep_dir / name).settings, settings_of(settings)
        wrong = [
            f"{key} was {value!r} and is {now[key]!r}"
            for key, value in before.items()
            if key in now and value != now[key] and not may_change(key, value, now[key])
        ]
        if wrong:
            raise UserError(
                f"{sweep_dir} has a run {name} of another sweep: {'; '.join(wrong)}; choose "
                "another --sweep_dir"
            )


def may_change(key, before, now):
    more_steps = key == "max_iters" and isinstance(before, int) and now > before
    return key in MAY_CHANGE or now == "auto" or more_steps


class Record:
    """sweep.json: {name of a run: how it ended}. Raises UserError where it cannot be read."""

    def __init__(self, path):
        self.path, self.runs = path, {}
        try:
            self.runs = json.loads(path.read_bytes())
            if not all(type(why) is str for why in self.runs.values()):
                raise ValueError("it is no record of a sweep")
        except FileNotFoundError:
            pass
        except OSError as error:
            raise refusal("read", path, error) from error
        except (ValueError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{path} is damaged ({cause_of(error)}): remove it, and each run goes on from what "
                "its folder has"
            ) from error

    def finished(self, name, steps=0):
        """Whether a run ended well, is still there, and was to make no less than these steps."""
        folder = self.path.parent / name
        there = all(Path(folder, file).exists() for file in (ckpt.BEST, runs_of.LOG))
        if self.runs.get(name) != FINISHED or not there:
            return False
        return not steps or runs_of.read(folder).settings.get("max_iters", 0) >= steps

    def put(self, runs):
        """Keep how runs ended, on disk."""
        self.runs |= runs
        with replacing(self.path) as [file]:
            file.write(json.dumps(self.runs, indent=1).encode())


# Training


def train_all(record, jobs, at_once):
    """Train what is not finished, so many at once; one that fails does not end the others."""
    left = {k: each for k, each in jobs.items() if not record.finished(k, each.max_iters)}
    done = len(jobs) - len(left)
    print(f"{len(jobs)} runs, {done} of them finished before", flush=True)
    record.put(dict.fromkeys(left, STOPPED))
    crew, pool = Crew(at_once), ThreadPoolExecutor(at_once)
    folders = {name: record.path.parent / name for name in left}
    futures = {pool.submit(crew.train, folders[k], each): k for k, each in left.items()}
    try:
        for number, future in enumerate(as_completed(futures), start=done + 1):
            name, why = futures[future], future.result()
            record.put({name: why})
            print(f"{number} of {len(jobs)}: {name}: {in_a_line(folders[name], why)}", flush=True)
    except BaseException as error:
        crew.stop()
        pool.shutdown(cancel_futures=True)
        ended = {futures[each]: each.result() for each in futures if not each.cancelled()}
        record.put(ended)
        if isinstance(error, Interrupted):
            failed = [f"{k}: {why}" for k, why in ended.items() if why not in (FINISHED, STOPPED)]
            how = f"; but {'; '.join(failed)}" if failed else ", each run at its last step"
            error.args = (f"stopped{how}; the same command goes on",)
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
            self.wait_for(folder)
            if self.stopping:
                return STOPPED
            with open(folder / OUTPUT, "ab") as output:
                return self.watch(command_of(folder, settings), slot, output)
        except OSError as error:
            return str(refusal("write", folder / OUTPUT, error))
        except UserError as error:
            return str(error)
        finally:
            self.slots.put(slot)

    def wait_for(self, folder):
        """Wait for a process that an earlier sweep left training there when it was killed."""
        while not self.stopping:
            with suppress(InUseError), Claim(folder):
                return
            time.sleep(0.5)

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
        if status in (130, 143, -signal.SIGINT, -signal.SIGTERM):  # saved, or not yet begun
            return STOPPED
        return f"{last} (status {status})" if status else FINISHED


def command_of(folder, settings):
    flags = {name: value for name, value in changed(settings).items() if name in OF_TRAINING}
    if settings.wandb_log:
        flags = {"wandb_run_name": folder.name} | flags
    flags |= {"out_dir": folder, "init_from": "auto", "overwrite": True}
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    return [sys.executable, str(ROOT / "train.py"), *arguments]


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
    try:
        each = runs_of.read(folder)
    except UserError as error:
        return f"finished, but {error}"
    if not each.best:
        return "finished, but its log has no evaluation"
    best, seconds = each.best, each.newest["elapsed_s"]
    return f"best val loss {best['loss']:.4f} at step {best['step']:,}, {seconds:,.0f} s"


if __name__ == "__main__":
    run(main)
