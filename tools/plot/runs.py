"""Runs as recorded in their logs, and groups of those that differ only in their seed."""

import os
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev

import numpy as np

from folio.checkpoint.run_dir import RunDir
from folio.cli.errors import UserError

FOLDER_SEED_PATTERN = re.compile(r"\bseed=\d+")
FIGURES = {  # {column: function of runs that returns values, of which the table has the median}
    "at step": lambda runs: [run.result.get("best_step", run.best["step"]) for run in runs],
    "time, s": lambda runs: [run.seconds for run in runs],
    "tokens/s": lambda runs: [event["tokens_per_s"] for run in runs for event in run.train],
    "parameters": lambda runs: [run.parameters for run in runs],
    "steps": lambda runs: [run.val[-1]["step"] for run in runs],
}
AXES = {"steps": "step", "tokens": "tokens", "seconds": "elapsed_s"}  # key of each in the log
MAX_DRAWN_GROUPS = 10  # matplotlib has so many colors
SKIPPED_START_FRACTION = 0.1  # losses are high at the start of a run


@dataclass
class Run:
    """A run as recorded in its log."""

    folder: str
    settings: dict = field(default_factory=dict)  # with the changes made on resuming
    parameters: int = 0
    train: list = field(default_factory=list)  # events of training steps
    val: list = field(default_factory=list)  # events of evaluations
    result: dict = field(default_factory=dict)  # event of the best or the final evaluation
    seconds: float = 0.0  # of training so far

    @property
    def comparable(self):
        """The evaluations that cover the same text as the last one."""
        windows = self.val[-1].get("val_windows")
        return [event for event in self.val if event.get("val_windows", windows) == windows]

    @property
    def best(self):
        """The evaluation of the best model or, if it is not known, the best comparable one."""
        step = self.val[-1].get("best_step")  # not the lowest loss if a model was lost
        own = [event for event in self.comparable if event["step"] == step]
        return own[-1] if own else min(self.comparable, key=lambda event: event["loss"])

    @property
    def loss(self):
        return self.result["loss"]


def read_run(folder):
    """Returns the Run in a folder. Raises UserError if it has no log."""
    run_dir = RunDir(folder)
    if not run_dir.log.is_file():
        available = ", ".join(map(str, RunDir.find())) or "none"
        raise UserError(f"there is no log {run_dir.log}; available runs: {available}")
    run = Run(str(run_dir.folder))
    for event in run_dir.read_events():
        match event["event"]:
            case "start":
                run.settings, run.parameters = dict(event["settings"]), event["parameters"]
            case "resume":
                run.settings |= {name: new for name, (_, new) in event["changed"].items()}
            case "train":
                run.train.append(event)
            case "val":
                run.val.append(event)
                run.result = run.best
            case "final":
                run.val = run.val or [event]  # of a log that has lost its evaluations
                run.result = event
        run.seconds = event["elapsed_s"]
    return run


def read_runs(folders):
    """Returns the evaluated runs in `folders`. A folder of runs, such as a sweep's, adds its runs.

    Raises UserError if there are none.
    """
    runs = []
    for folder in dict.fromkeys(map(Path, folders)):  # each once
        paths = [] if RunDir(folder).log.is_file() else RunDir.find(folder)
        logged = [path for path in paths if RunDir(path).log.is_file()]
        runs += [read_run(path) for path in logged or [folder]]
    runs = [run for run in runs if run.val]
    if not runs:
        raise UserError("there is nothing to compare: the runs have no loss yet")
    return runs


def group_runs(runs):
    """Returns groups of runs, {name: runs}, the best mean loss first.

    Runs whose folders differ only in "seed=NUMBER" are a group, such as n_layer=2,seed=*. Names are
    relative to the innermost folder that contains all runs. Losses are compared per text.
    """
    parent = os.path.commonpath([os.path.abspath(Path(run.folder).parent) for run in runs])
    runs_of_pattern, groups = defaultdict(list), {}
    for run in runs:
        runs_of_pattern[FOLDER_SEED_PATTERN.sub("seed=*", run.folder)].append(run)
    for pattern, similar_runs in runs_of_pattern.items():
        name = pattern if len(similar_runs) > 1 else similar_runs[0].folder
        groups[os.path.relpath(name, parent)] = similar_runs
    return dict(sorted(groups.items(), key=lambda item: (text_of(item[1]), mean_loss(item[1]))))


def mean_loss(runs):
    return fmean(run.loss for run in runs)


def text_of(runs):
    """Returns the dataset and the tokenizer of runs. Losses per token of others do not compare."""
    return values_of(runs, "dataset"), values_of(runs, "tokenizer")


def values_of(runs, name):
    """Returns the values of a setting in runs, each once, as a text."""
    return ", ".join(sorted({str(run.settings.get(name, "")) for run in runs}))


def compare_groups(groups):
    """Returns the rows of a table of groups, {name: runs}, which are sorted, the best first.

    The first row is the header. The columns are the mean loss, its standard deviation over seeds,
    the mean bits per byte if datasets or tokenizers differ, else the distance from the best loss,
    medians over the runs of a group, and settings. Of several groups, those columns after the loss
    are left out that are equal in all.
    """
    names, all_runs = zip(*groups.items(), strict=True)
    losses = [[run.loss for run in runs] for runs in all_runs]
    columns = {"run": names, "best val loss": [f"{fmean(loss):.4f}" for loss in losses]}
    if max(map(len, all_runs)) > 1:
        columns["deviation"] = [f"{stdev(loss):.4f}" if len(loss) > 1 else "" for loss in losses]
        columns["seeds"] = [str(len(runs)) for runs in all_runs]
    if len(set(map(text_of, all_runs))) > 1:
        bits = [[run.result.get("bits_per_byte") for run in runs] for runs in all_runs]
        columns["bits per byte"] = [f"{fmean(b):.4f}" if all(b) else "" for b in bits]
    else:
        columns["above the best"] = [compare_losses(loss, losses[0]) for loss in losses]
    for name, values_in in FIGURES.items():
        values = [values_in(runs) for runs in all_runs]
        columns[name] = [f"{median(numbers):,.0f}" if numbers else "" for numbers in values]
    if len(groups) > 1:
        for name in dict.fromkeys(name for runs in all_runs for name in runs[0].settings):
            columns[name] = [values_of(runs, name) for runs in all_runs]
        for name in list(columns)[2:]:
            if len(set(columns[name])) == 1:
                del columns[name]
    return [list(columns), *zip(*columns.values(), strict=True)]


def compare_losses(losses, best):
    """Returns how far a mean loss is above the best one, and whether seeds differ by as much.

    `losses` and `best` are those of several seeds, else the text is empty, as for the best itself.
    """
    spread = max(max(losses) - min(losses), max(best) - min(best))
    if losses is best or not spread:
        return ""
    difference = fmean(losses) - fmean(best)
    verdict = "a result" if difference > spread else "no result"
    return f"{difference:.4f}; seeds differ by {spread:.4f}: {verdict}"


def describe_runs(groups):
    """Returns a dict for each run of groups, {name: runs}, in the order of the table."""
    keys, rows = ("loss", "parameters", "seconds", "result", "settings"), []
    for name, runs in groups.items():
        for run in runs:
            rows.append({"run": run.folder, "row": name} | {k: getattr(run, k) for k in keys})
    return rows


def draw_losses(groups, axis):
    """Returns a matplotlib figure of the losses of groups, {name: runs}. `axis`: a key of AXES."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.add_subplot(xlabel=axis, ylabel="loss (nats per token)")
    highest = []
    for number, (name, runs) in enumerate([*groups.items()][:MAX_DRAWN_GROUPS]):
        color = f"C{number}"
        x, loss, _ = mean_curve([run.train for run in runs], AXES[axis])
        axes.plot(x, loss, color=color, alpha=0.35, linewidth=1)
        x, loss, deviation = mean_curve([run.val for run in runs], AXES[axis])
        label = " " + name.replace("$", r"\$")  # "_" first would hide it, "$" begins a formula
        axes.plot(x, loss, ".-", color=color, linewidth=1.8, label=label)
        if len(runs) > 1:
            low, high = loss - deviation, loss + deviation
            axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
        highest += [*loss[x >= x[:1] + SKIPPED_START_FRACTION * (x[-1:] - x[:1])]]
        best_x = median(run.best[AXES[axis]] for run in runs)
        axes.plot(best_x, mean_loss(runs), "o", color=color)  # the table's
    axes.set_ylim(top=1.02 * max(highest) if highest else None)
    axes.grid(alpha=0.25)
    title = "line: validation\ndot: best model\nfaint: training"
    if axes.collections:
        title += "\nband: deviation over seeds"
    if len(groups) > MAX_DRAWN_GROUPS:
        title += f"\nthe first {MAX_DRAWN_GROUPS} of {len(groups)}"
    axes.legend(title=title, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def mean_curve(logs, key):
    """Returns the means of `key`, and the means and standard deviations of the losses, (3, steps).

    `logs` has a list of events per run. The steps are those of the first run, limited to the range
    of all runs. Between two events of a run, its values are interpolated.
    """
    if not all(logs):
        return np.empty((3, 0))
    own_steps = [[event["step"] for event in log] for log in logs]
    first, last = max(map(min, own_steps)), min(map(max, own_steps))
    steps = np.unique(np.clip(own_steps[0], first, last)) if first <= last else np.empty(0)

    def interpolate(log, name):
        values = [event[name] for event in log]
        return np.interp(steps, [event["step"] for event in log], values)

    x = [interpolate(log, key) for log in logs]
    losses = [interpolate(log, "loss") for log in logs]
    deviation = np.std(losses, axis=0, ddof=int(len(logs) > 1))
    return np.stack([np.mean(x, axis=0), np.mean(losses, axis=0), deviation])
