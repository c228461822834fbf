"""Running one command and reading the lines that folio's and nanoGPT's scripts print."""

import os
import re
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from statistics import median

from folio.errors import UserError

PATTERNS = (  # "iter" lines count from step 10 on, because the first steps are a warmup
    r"iter \d{2,}: loss \d+\.?\d*, time (?P<step_ms>\d+\.?\d*)ms",
    r"iter \d{2,}: .* mfu (?P<mfu>\d+\.?\d*)%",
    r"iter \d{2,}: .* (?P<tokens_per_s>[\d,]+) tokens/s",
    r"step \d+: train loss \d+\.?\d*, val loss (?P<val_loss>\d+\.?\d*)",
    r"tokens in \d+\.?\d* s, (?P<tokens_per_s>[\d,]+) tokens/s",
    r"; first token after (?P<first_s>\d+\.?\d*) s",
    r"^compiled in (?P<compile_s>\d+) s",
    r"estimated (?P<estimated_mib>[\d,]+) MiB, peak .* (?P<peak_mib>[\d,]+) MiB, ratio",
    r"\b(?P<passed>\d+) passed",
    r"\b(?P<skipped>\d+) skipped",
)
SEPARATOR = "---------------"  # printed after each text


def measure(command, folder):
    """Runs a command in a folder, and returns {name: [(seconds, value), ...]}.

    Seconds count from the start of the process to the line with the value. Raises UserError if
    the command cannot be started or fails. An exception, such as Interrupted, ends the command too.
    """
    start, lines = time.perf_counter(), []
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},  # times are those of printing
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise UserError(f"cannot run {shlex.join(command)} in {folder}: {error}") from error
    try:
        for line in process.stdout:
            lines.append((time.perf_counter() - start, line.strip()))
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    seconds = time.perf_counter() - start
    if code := os.waitstatus_to_exitcode(status):
        tail = " / ".join(line for _, line in lines[-5:])
        raise UserError(f"{shlex.join(command)} ended with status {code}: {tail}")
    unit = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
    values = read(lines, command)
    values["seconds"] = [(seconds, seconds)]
    # On Linux, at least the peak of this process, which the command inherits.
    values["memory_gib"] = [(seconds, usage.ru_maxrss * unit / 2**30)]
    return values


def read(lines, command):
    """Returns the values in lines of output, [(seconds, line), ...], like `measure`."""
    values = defaultdict(list)
    for seconds, line in lines:
        for pattern in PATTERNS:
            if found := re.search(pattern, line):
                for name, text in found.groupdict().items():
                    values[name].append((seconds, float(text.replace(",", ""))))
        values["last_s"] = [(seconds, seconds)]
    ends = [seconds for seconds, line in lines if line == SEPARATOR]
    if len(ends) > 1 and "tokens_per_s" not in values:  # nanoGPT's sample.py
        length = re.search(r"--max_new_tokens[= ](\d+)", shlex.join(command))
        tokens = (len(ends) - 1) * (int(length[1]) if length else 500)  # the default
        values["tokens_per_s"] = [(ends[-1], tokens / (ends[-1] - ends[0]))]
    return values


def figures(values, target=None):
    """Returns {name: value} of one run: the lowest validation loss, medians of other values.

    `target` is the validation loss of "to_target_s".
    """
    found = {name: median(value for _, value in pairs) for name, pairs in values.items()}
    losses = values.get("val_loss", [])
    if losses:
        found["val_loss"] = min(loss for _, loss in losses)
    reached = [seconds for seconds, loss in losses if target is not None and loss <= target]
    if reached:
        found["to_target_s"] = reached[0]
    return found
