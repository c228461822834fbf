"""Workers, which are processes of train.py that train the runs of a sweep, several at a time."""

import ctypes
import os
import signal
import sys
import time
from subprocess import DEVNULL, STDOUT, Popen

import torch

from folio.checkpoint.run_dir import RunDir
from folio.cli.files import lock_folder
from folio.cli.process import Interrupted, StopSignal, printable
from folio.cli.settings import ROOT, changed_settings, names_affecting
from tools.plot.runs import read_run
from train import TrainConfig

# Settings that a sweep passes on to train.py. Only they can have several values.
RUN_SETTINGS = names_affecting(TrainConfig, "results", "machine", "display")
OUTPUT_FILE = "output.txt"  # what train.py prints, in the run directory
POLL_INTERVAL_S = 0.1
SAVING_TIMEOUT_S = 60


def train_runs(runs, jobs):
    """Trains runs, {folder: settings}, up to `jobs` at a time, even if one fails.

    Returns the folders of the runs that failed. After a stop signal, waits until the workers have
    saved their state, and raises Interrupted.
    """
    waiting, failed, jobs = list(runs), [], min(jobs, len(runs))
    workers = {}  # {number below jobs: (folder, process)}
    with StopSignal("waiting until the runs are saved") as stop:
        try:
            while (waiting or workers) and not stop:
                for number in range(jobs):
                    if number in workers and workers[number][1].poll() is not None:
                        folder, process = workers.pop(number)
                        if process.returncode:
                            failed.append(folder)
                        ended = len(runs) - len(waiting) - len(workers)
                        outcome = describe_outcome(folder, process.returncode)
                        print(f"{ended} of {len(runs)}: {folder.name}: {outcome}", flush=True)
                    if number not in workers and waiting:
                        folder = waiting.pop(0)
                        print(f"{folder.name}: training, see {folder / OUTPUT_FILE}", flush=True)
                        workers[number] = folder, start_worker(folder, runs[folder], number, jobs)
                time.sleep(POLL_INTERVAL_S)
        finally:
            for _, process in workers.values():
                process.terminate()
            for _, process in workers.values():
                process.wait()
    if stop:
        raise Interrupted(stop.number, "stopped; to continue, run the same command")
    return failed


def start_worker(folder, settings, number, jobs):
    """Starts train.py for a run, as worker `number` of `jobs`. Returns the Popen.

    What it prints is appended to OUTPUT_FILE.
    """
    with lock_folder(folder, SAVING_TIMEOUT_S):  # a worker of a killed sweep may still be saving
        command = [sys.executable, str(ROOT / "train.py"), *train_flags(folder, settings)]
    env = os.environ | worker_environment(settings.device, number, jobs)
    end = end_with_parent if sys.platform == "linux" else None
    with open(folder / OUTPUT_FILE, "ab") as output:
        return Popen(command, stdin=DEVNULL, stdout=output, stderr=STDOUT, env=env, preexec_fn=end)


def end_with_parent():
    """Makes Linux send SIGTERM to this process when its parent ends, even if that is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def train_flags(folder, settings):
    """Returns the flags of train.py that start or resume a run."""
    changed = changed_settings(settings)
    flags = {name: value for name, value in changed.items() if name in RUN_SETTINGS}
    if settings.wandb_log:
        flags.setdefault("wandb_run_name", folder.name)
    flags["out_dir"] = folder
    flags["init_from"] = "resume" if RunDir(folder).exists() else settings.init_from
    flags["overwrite"] = True
    return [f"--{name}={value}" for name, value in flags.items()]


def worker_environment(device, number, jobs):
    """Returns environment variables that give worker `number` of `jobs` its cores or its GPU."""
    variables = {}
    if jobs > 1 and "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // jobs))
    if device == "cuda":  # cuda:N is one GPU for all
        all_gpus = ",".join(map(str, range(torch.cuda.device_count())))
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", all_gpus).split(",")
        variables["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    return variables


def describe_outcome(folder, status):
    """Returns the loss of a run whose worker has ended, or why it failed.

    `status`: of the worker; -9 if signal 9 has ended it.
    """
    if status:
        output = (folder / OUTPUT_FILE).read_text(errors="replace")
        cause = printable(output.strip().rpartition("\n")[2])
        return f"failed with status {status}: {cause}"
    return f"val loss {read_run(folder).loss:.4f}"
