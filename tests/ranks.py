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
from folio.distributed.world import process_group

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["ranks", "torch._dynamo"])
LIMIT_S = 60  # for a test that hangs


class Ranks:
    """Processes that run `function(*args)` in the current folder, each with its own rank."""

    def __init__(self, size, function, *args):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.pipes, self.processes = [], []
        for rank in range(size):
            receiver, sender = CONTEXT.Pipe(duplex=False)
            call = (sender, os.getcwd(), rank, size, port, function, args)
            self.pipes.append(receiver)
            self.processes.append(CONTEXT.Process(target=_run, args=call))
            self.processes[-1].start()
            sender.close()

    def wait(self, limit_s=LIMIT_S):
        """Returns (exit statuses, errors), each in the order of the ranks."""
        for each in self.processes:
            each.join(limit_s)
            each.kill()  # without effect if it has ended
        for each in self.processes:
            each.join()
        errors = [error_path(rank).read_text() for rank in range(len(self.processes))]
        return [each.exitcode for each in self.processes], errors

    def results(self, limit_s=LIMIT_S):
        """Returns what the functions return. All must succeed."""
        found = []
        for pipe in self.pipes:
            with suppress(EOFError):  # the process has failed
                found += [pipe.recv()] if pipe.poll(limit_s) else []
        statuses, errors = self.wait(limit_s)
        assert not any(statuses), "\n".join(errors)
        return found


def error_path(rank):
    return Path(f"rank{rank}.txt")


def _run(sender, folder, rank, size, port, function, args):
    os.chdir(folder)
    descriptor = os.open(error_path(rank), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
    sys.argv = ["train.py"]
    torch.set_num_threads(1)
    process.run(lambda: sender.send(function(*args)))


# Functions to run


def in_world(function, *args):
    """Calls function(world, *args)."""
    with process_group("cpu") as world:
        return function(world, *args)


def trained(size, **settings):
    """Trains in `size` processes; 1 is an ordinary process. Returns the losses of the steps."""
    flags = tiny.flags(log_interval=1, **settings)
    if size == 1:
        train.main(flags)
    else:
        Ranks(size, train.main, flags).results()
    events = tiny.log_events(settings.get("out_dir", "out"))
    return [event["loss"] for event in events if event["split"] == "train"]
