"""Runs of train.py in separate processes, several at once.

Where the system can fork a process, a run is forked from one that has already imported torch.
"""

import multiprocessing
import os
import runpy
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait

import torch

from folio.errors import UserError, os_error
from folio.files import InUseError, locked
from folio.run_dir import RunDir
from folio.settings import ROOT, changed, names_in
from train import TrainConfig

FINISHED, STOPPED = "finished", "stopped"  # results of a run; any other one is an error message
STOP_STATUSES = (-1, -2, -15, 129, 130, 143)  # after SIGHUP, SIGINT, SIGTERM
RUN_SETTINGS = names_in(TrainConfig, "run", "machine", "display")  # that runs take from the sweep
METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
PRELOADED = ["train", "torch._dynamo"]  # the second one is imported by torch's optimizers
SERVER_SIGNALS = {getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)}


class Crew:
    """Runs `size` processes of train.py at a time."""

    def __init__(self, size):
        self.size, self.free_slots = size, list(range(size))
        self.pool = ThreadPoolExecutor(size)  # each thread waits for a process
        self.children, self.stopping = set(), threading.Event()
        self.context = multiprocessing.get_context(METHOD)
        if METHOD == "forkserver":
            start_server()
        self.lock = threading.Lock()  # start() of one process reads the exit status of others

    def start(self, folder, settings, stop_at):
        """Queues a run, up to a step.

        Returns the Future of its result: FINISHED, STOPPED or an error message.
        """
        return self.pool.submit(self._train, folder, settings, stop_at)

    def stop(self):
        """Cancels queued runs, and waits until the others have saved their state."""
        self.stopping.set()
        for child in list(self.children):
            child.terminate()
        self.pool.shutdown(cancel_futures=True)

    def wait_until_unused(self, folder):
        """Waits for a process of an earlier, killed sweep that is still training there."""
        while not self.stopping.is_set():
            with suppress(InUseError), locked(folder):
                return
            self.stopping.wait(0.5)

    def _train(self, folder, settings, stop_at):
        slot = self.free_slots.pop()
        try:
            self.wait_until_unused(folder)
            if self.stopping.is_set():
                return STOPPED
            flags = train_flags(folder, settings, stop_at)
            variables = environment(settings.device, slot, self.size)
            return self._run(folder / "output.txt", flags, variables)
        except OSError as error:
            return str(os_error("write to", folder, error))
        except UserError as error:
            return str(error)
        finally:
            self.free_slots.append(slot)

    def _run(self, output, *args):
        with open(output, "ab"):  # an error is reported here
            child = self.context.Process(target=run_train, args=(output, *args))
        with self.lock:
            child.start()
        self.children.add(child)
        if self.stopping.is_set():  # stop() may not have seen this child
            child.terminate()
        wait([child.sentinel])
        self.children.discard(child)
        with self.lock:
            child.join()
        if child.exitcode in STOP_STATUSES:
            return STOPPED
        if child.exitcode:
            lines = output.read_text(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
            return f"{last} (status {child.exitcode})"
        return FINISHED


def start_server():
    """Starts the process that forks runs, with SIGTERM and SIGHUP blocked.

    It reports the exit status of the runs, so it must outlive them. They unblock the signals.
    """
    resource_tracker.ensure_running()  # otherwise the server starts it, which unblocks signals
    forkserver.set_forkserver_preload(PRELOADED)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SERVER_SIGNALS)
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_train(output, flags, variables):
    """Runs train.py in this process, which `multiprocessing` has started.

    `output` is the file to which the run appends what it prints.
    """
    if METHOD == "forkserver":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SERVER_SIGNALS)
    os.environ.update(variables)
    if "OMP_NUM_THREADS" in variables:  # torch, already imported, does not read it again
        torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    with open(output, "ab") as file:
        for handle in (1, 2):
            os.dup2(file.fileno(), handle)
    threading.Thread(target=stop_with_parent, daemon=True).start()
    sys.argv = [str(ROOT / "train.py"), *flags]
    runpy.run_path(sys.argv[0], run_name="__main__")


def stop_with_parent():
    """Waits for the end of the parent process; if the sweep is killed, the run saves and exits."""
    multiprocessing.parent_process().join()
    os.kill(os.getpid(), signal.SIGTERM)


def train_flags(folder, settings, stop_at):
    """Returns the flags of train.py that start or resume a run, up to a step."""
    flags = {name: value for name, value in changed(settings).items() if name in RUN_SETTINGS}
    if settings.wandb_log:
        flags = {"wandb_run_name": folder.name} | flags
    init_from = "resume" if RunDir(folder).exists() else settings.init_from
    flags |= {"out_dir": folder, "init_from": init_from, "overwrite": True}
    flags |= {"stop_at": stop_at} if stop_at < settings.max_iters else {}
    return [f"--{name}={value}" for name, value in flags.items()]


def environment(device, slot, size):
    """Returns variables that divide CPU cores or GPUs between processes in slots 0 to size - 1."""
    variables, gpus = {}, torch.cuda.device_count()
    if size > 1 and "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // size))
    if device == "cuda" and gpus > 1:  # cuda:N is one GPU for all
        ids = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        variables["CUDA_VISIBLE_DEVICES"] = ids[slot % len(ids)]
    return variables
