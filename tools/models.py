"""The models of the playground: at most two in memory, reloaded when their file changes."""

import os
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

from folio.completion import load_trained
from folio.errors import UserError
from folio.initial import load_initial
from folio.memory import explained_out_of_memory
from folio.run_dir import RunDir
from tools.runs import nested

MOST = 2  # models in memory
FIRST_WAIT, LONGEST_WAIT = 0.05, 0.25  # seconds between two updates of a page
ADVICE = "use --device=cpu, or a smaller model or shorter text"


class Version(NamedTuple):
    """A checkpoint file at one time."""

    path: str
    modified: int  # ns
    size: int  # bytes
    inode: int


class Models:
    """Trained models by the path of their checkpoint, and the one thread that computes with them.

    A thread that calls torch on a CPU has its own OpenMP threads. If several have, there are more
    of them than cores, and generation takes twice as long.
    """

    def __init__(self, device, dtype):
        self.device, self.dtype = device, dtype
        self._loaded = {}  # {Version: TrainedModel}, the most recently used last
        self._thread = ThreadPoolExecutor(1, "models")

    # Called from any thread

    def run(self, function, *args):
        """Returns function(*args), called in the models' thread."""
        return self.submit(function, *args).result()

    def submit(self, function, *args):
        """Returns the Future of function(*args) in the models' thread."""
        return self._thread.submit(self._call, function, *args)

    def stream(self, function, *args):
        """Calls function(stopped, *args) in the models' thread; yields its Future until it is done.

        It is done when it is yielded for the last time.
        Closing this generator sets the event `stopped`, after which `function` must soon return.
        """
        stopped = threading.Event()
        future, seconds = self.submit(function, stopped, *args), FIRST_WAIT
        try:
            is_done = False
            while not is_done:
                is_done = bool(wait([future], seconds).done)
                seconds = min(seconds + FIRST_WAIT, LONGEST_WAIT)
                yield future
        finally:
            stopped.set()
            future.cancel()  # if it has not started

    def loaded(self, path):
        """Returns the model of a checkpoint if it is in memory, else None."""
        trained = [model for version, model in list(self._loaded.items()) if version.path == path]
        return trained[-1] if trained else None

    def _call(self, function, *args):
        try:
            with explained_out_of_memory(self.device, ADVICE):
                return function(*args)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # their variables keep models in memory
            raise

    # Called in the models' thread

    def newest(self, path):
        """Returns (TrainedModel, Version) of the checkpoint file as it is now."""
        version = version_of(path)
        return self._get(version), version

    def same(self, version):
        """Returns the TrainedModel of a Version. Raises UserError if it no longer exists."""
        if version not in self._loaded and version_of(version.path) != version:
            raise UserError(
                f"{version.path} was replaced after this text was made: generate or score it again"
            )
        return self._get(version)

    def _get(self, version):
        """Returns a model, which is loaded unless it is in memory."""
        if version not in self._loaded:
            replaced = [each for each in self._loaded if each.path == version.path]
            unused = list(self._loaded)[: len(self._loaded) - (MOST - 1)]
            for each in replaced or unused:  # before loading, for its memory
                del self._loaded[each]
            self._loaded[version] = load_trained(
                load_initial(version.path), self.device, self.dtype
            )
        self._loaded[version] = self._loaded.pop(version)  # it is now the last
        return self._loaded[version]


def version_of(path):
    """Returns the Version of a file. Raises UserError if it is missing."""
    try:
        stat = os.stat(path)
    except OSError as error:
        raise UserError(f"there is no checkpoint {path} any more: choose another model") from error
    return Version(path, stat.st_mtime_ns, stat.st_size, stat.st_ino)


def checkpoints():
    """Returns (label, path) of the checkpoints in the working directory and in its sweeps."""
    found = []
    for run in map(RunDir, nested()):
        labels = {run.best: str(run.folder), run.last: f"{run.folder}, newest state"}
        found += [(label, str(path)) for path, label in labels.items() if path.is_file()]
    return found
