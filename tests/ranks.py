"""Runs functions in several connected processes, as torchrun does."""

import os
import socket
import sys
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import tiny
import torch

import train
from folio.cli import process

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch._dynamo"])
TIMEOUT_S = 60  # for a test that hangs


class Ranks:
    """Processes that call `function(*args)` in the current folder, each with its own rank.

    What rank 0 prints goes to rank0.txt, and so on.
    """

    def __init__(self, size, function, *args):
        self.receivers, self.processes = [], []
        world = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        for rank in range(size):
            environment = world | {"RANK": rank, "LOCAL_RANK": rank}
            receiver, sender = CONTEXT.Pipe(duplex=False)
            call = (os.getcwd(), environment, sender, function, args)
            self.receivers.append(receiver)
            self.processes.append(CONTEXT.Process(target=_run_rank, args=call))
            self.processes[-1].start()
            sender.close()  # only the process has it now, so that its end closes the pipe

    def wait(self, timeout_s=TIMEOUT_S):
        """Returns (exit statuses, outputs), each in the order of the ranks."""
        for child in self.processes:
            child.join(timeout_s)
            child.kill()  # without effect if it has ended
        for child in self.processes:
            child.join()
        outputs = [output_path(rank).read_text() for rank in range(len(self.processes))]
        return [child.exitcode for child in self.processes], outputs

    def results(self, timeout_s=TIMEOUT_S):
        """Returns what the functions return. All must succeed."""
        results = []
        for receiver in self.receivers:
            with suppress(EOFError):  # the process has failed
                if receiver.poll(timeout_s):
                    results.append(receiver.recv())
        statuses, outputs = self.wait(timeout_s)
        assert not any(statuses), "\n".join(outputs)
        return results


def free_port():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]


def output_path(rank):
    return Path(f"rank{rank}.txt")


def _run_rank(folder, environment, sender, function, args):
    os.chdir(folder)
    os.environ.update({name: str(value) for name, value in environment.items()})
    output = os.open(output_path(environment["RANK"]), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for stream in (1, 2):  # standard output and error
        os.dup2(output, stream)
    sys.argv = ["train.py"]
    torch.set_num_threads(1)
    process.EXIT_DELAY_S = 0.2  # in which rank 1 writes its last line
    process.run(lambda: sender.send(function(*args)))


# Functions to run


def train_ranks(size, **settings):
    """Trains in `size` processes; 1 is an ordinary process. Returns the losses of the steps."""
    flags = tiny.flags(log_interval=1, **settings)
    if size == 1:
        train.main(flags)
    else:
        Ranks(size, train.main, flags).results()
    events = tiny.log_events(settings.get("out_dir", "out"))
    return [event["loss"] for event in events if event["event"] == "train"]
