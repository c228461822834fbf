"""Saves the state of a run: copied to host memory, then written by another thread."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor, wait

import torch

from folio.checkpoint import Checkpoint
from folio.errors import UserError
from folio.memory import can_gather
from folio.process import Interrupted
from folio.sharding import gathered, is_sharded
from folio.storage import write_folder


class Saver:
    """Saves the state of a run. Training waits for the copy of the state, not for the file.

    At most one write is in flight: the next save, an evaluation and the end of the context wait for
    it. If it failed, they print a warning, and the evaluation that it contained does not count, so
    that the best loss stays that of ckpt.pt.

    If the processes shard a state that is too large for the host memory of one, each writes its
    share to a new folder, for which training waits. Then rank 0 writes the file, which refers to
    it, and deletes the folder to which no file refers any longer.
    """

    def __init__(self, run, tracking):
        """`run` is a train.Run, `tracking` its Tracking."""
        self.run, self.tracking = run, tracking
        self.writer = ThreadPoolExecutor(max_workers=1)
        self.in_flight = None  # future of the UserError of a write, or of None
        self.before = None  # Progress before the evaluation that the write contains
        learner = run.learner
        gathers = not learner.is_sharded or can_gather(learner.model.config, run.settings)
        self.gathers = learner.world.from_main(gathers)

    def __enter__(self):
        self._wait_for_thread()  # starts it; Ctrl-C during its start would lead to a second one
        return self

    def __exit__(self, _, error, __):
        """Waits for the write in flight. A second Ctrl-C, before or now, cancels it.

        If the thread outlived Python, torch's writer would abort the process.
        """
        canceled = self.run.run_dir.canceled
        if isinstance(error, KeyboardInterrupt):
            canceled.set()
        try:
            failed = self._result()
            self._wait_for_thread()  # in case Ctrl-C arrived before a write was recorded
        except KeyboardInterrupt as interrupt:
            self.__exit__(None, interrupt, None)
            raise
        if failed and not canceled.is_set():
            self.tracking.warn(failed)
        self.writer.shutdown()

    def save(self):
        """Saves to last.pt."""
        self._report_previous()
        self._start(dataclasses.replace(self.run.progress), best=False)

    def evaluated(self, val_loss):
        """Saves after an evaluation: to ckpt.pt if it is the best.

        At step 0 and at the end of the run, waits and raises UserError if writing fails.
        """
        self._report_previous()
        progress, settings = self.run.progress, self.run.settings
        before = dataclasses.replace(progress)
        is_best = progress.record(val_loss)
        self._start(before, best=is_best or settings.always_save_checkpoint)
        must_succeed = progress.step == 0 or progress.is_finished(settings)
        if must_succeed and (error := self._wait()):
            raise error

    def stopped(self, stop):
        """Saves the state of a run that is not finished, and waits.

        Raises Interrupted after a stop signal, UserError if writing fails.
        """
        self.save()
        if error := self._wait():
            lost = "progress since the last save is lost"
            raise UserError(f"stopped without saving ({error}): {lost}")
        how = "--init_from=resume" if stop else "--init_from=resume, without --stop_at"
        message = f"stopped at step {self.run.progress.step}, saved in {self.run.run_dir.last}"
        message += f"; to continue, run the same command with {how}"
        if stop:
            raise Interrupted(stop.number, message)
        self.tracking.say(message)

    def _start(self, before, best):
        """Copies the state and starts to write it. Raises UserError if the run diverged."""
        run = self.run
        run.learner.divergence.check()
        run.progress.elapsed_s = self.tracking.elapsed_s()
        state, folder, self.before = run.learner.state_dict(), None, before
        if not self.gathers:
            folder = run.learner.world.from_main(run.run_dir.new_folder(run.progress.step))
            try:
                write_folder(folder, tensors_of(state), run.learner.world)
            except UserError as error:
                run.run_dir.remove_unused()
                self.in_flight = self.writer.submit(UserError, str(error))
                return
        checkpoint = Checkpoint(
            progress=dataclasses.replace(run.progress),
            settings=dataclasses.asdict(run.requested),
            tokenizer=run.dataset.tokenizer.to_dict(),
            data=run.dataset.fingerprint,
            log_bytes=run.run_dir.log_size(),
            folder=folder,
            **host_copy(state, run.learner.world.is_main, self.gathers),
        )
        self.in_flight = self.writer.submit(self._write, checkpoint, best)

    def _write(self, checkpoint, best):
        """Runs in the other thread. Returns the UserError if writing fails."""
        error = self.run.run_dir.save(checkpoint, best)
        return UserError(str(error)) if error else None  # a traceback would keep the copy in memory

    def _wait(self):
        """Waits for the write in flight, if any. Returns the UserError if it failed.

        All processes of a run must call it, because a failure changes their progress.
        """
        error = self.run.learner.world.from_main(self._result())
        if error:
            progress, before = self.run.progress, self.before
            progress.evaluated = before.evaluated
            progress.best_step, progress.best_val_loss = before.best_step, before.best_val_loss
        return error

    def _result(self):
        error = result_of(self.in_flight) if self.in_flight else None
        self.in_flight = None
        return error

    def _wait_for_thread(self):
        result_of(self.writer.submit(int))

    def _report_previous(self):
        if error := self._wait():
            self.tracking.report_save_error(error)


def result_of(future):
    """Waits for a future and returns its result. Ctrl-C ends the wait, on Windows too."""
    while wait([future], timeout=0.1).not_done:  # without a timeout, Windows handles no signal
        pass
    return future.result()


def tensors_of(state):
    """Returns the weights and moments in Learner.state_dict(), for write_folder."""
    moments = {name: each["state"] for name, each in state["optimizers"].items()}
    return {"weights": state["weights"], "optimizers": moments}


def host_copy(tree, is_main=True, gathers=True):
    """Returns a copy of nested dicts and lists, with tensors on the CPU; other values are shared.

    Tied weights, which are one object, are tied in the copy, too. Sharded tensors are gathered one
    by one, which all processes must do, but only rank 0 keeps the copies; with gathers=False, they
    become tensors on the meta device. A GPU copies to pinned memory, which torch reuses.
    """
    copies = {}

    def copy(value):
        if isinstance(value, dict):
            return {key: copy(each) for key, each in value.items()}
        if isinstance(value, list):
            return [copy(each) for each in value]
        if not isinstance(value, torch.Tensor):
            return value
        if is_sharded(value) and not gathers:
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        if id(value) not in copies:
            full = gathered(value.detach())
            copies[id(value)] = to_host(full) if is_main else None
        return copies[id(value)]

    copied = copy(tree)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # until the data has arrived
    return copied


def to_host(tensor):
    """Returns a copy on the CPU, which may still be in progress on a GPU."""
    target = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return target.copy_(tensor, non_blocking=tensor.is_cuda)
