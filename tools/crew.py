"""Runs of train.py in separate processes, several at once."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from subprocess import DEVNULL, PIPE, STDOUT, Popen

import torch

from folio.errors import UserError, os_error
from folio.files import InUseError, locked
from folio.settings import ROOT, changed, names_in
from train import TrainConfig

FINISHED, STOPPED = "finished", "stopped"  # results of a run; any other one is an error message
STOP_STATUSES = (-1, -2, -15, 129, 130, 143)  # after SIGHUP, SIGINT, SIGTERM
RUN_SETTINGS = names_in(TrainConfig, "run", "machine", "display")  # that runs take from the sweep


class Crew:
    """Runs `size` processes of train.py at a time."""

    def __init__(self, size):
        self.size, self.free_slots = size, list(range(size))
        self.pool = ThreadPoolExecutor(size)  # each thread waits for a process
        self.children, self.stopping = set(), threading.Event()

    def start(self, folder, settings, stop_at):
        """Queues a run, up to a step.

        Returns the Future of its result: FINISHED, STOPPED or an error message.
        """
        command = train_command(folder, settings, stop_at)
        return self.pool.submit(self._train, folder, command, settings.device)

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

    def _train(self, folder, command, device):
        slot = self.free_slots.pop()
        try:
            self.wait_until_unused(folder)
            if self.stopping.is_set():
                return STOPPED
            variables = os.environ | environment(device, slot, self.size)
            with open(folder / "output.txt", "ab") as output:
                return self._run(command, variables, output)
        except OSError as error:
            return str(os_error("write to", folder, error))
        except UserError as error:
            return str(error)
        finally:
            self.free_slots.append(slot)

    def _run(self, command, variables, output):
        """Runs a command, and copies what it prints to the file `output`."""
        last = ""
        # With a pipe, if the sweep is killed, a run fails to print, saves its state and exits.
        with Popen(command, env=variables, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT) as child:
            self.children.add(child)
            if self.stopping.is_set():  # stop() may not have seen this child
                child.terminate()
            for line in child.stdout:
                output.write(line)
                output.flush()
                last = line.decode(errors="replace").strip() or last
        self.children.discard(child)
        if child.returncode in STOP_STATUSES:
            return STOPPED
        return f"{last} (status {child.returncode})" if child.returncode else FINISHED


def train_command(folder, settings, stop_at):
    """Returns the command that starts or resumes a run, up to a step."""
    flags = {name: value for name, value in changed(settings).items() if name in RUN_SETTINGS}
    if settings.wandb_log:
        flags = {"wandb_run_name": folder.name} | flags
    flags |= {"out_dir": folder, "init_from": "auto", "overwrite": True}
    flags |= {"stop_at": stop_at} if stop_at < settings.max_iters else {}
    return [sys.executable, str(ROOT / "train.py"), *(f"--{k}={v}" for k, v in flags.items())]


def environment(device, slot, size):
    """Returns variables that divide CPU cores or GPUs between processes in slots 0 to size - 1."""
    variables, gpus = {}, torch.cuda.device_count()
    if size > 1 and "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // size))
    if device == "cuda" and gpus > 1:  # cuda:N is one GPU for all
        ids = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        variables["CUDA_VISIBLE_DEVICES"] = ids[slot % len(ids)]
    return variables
