"""Plots of the loss curves of runs."""

import numpy as np

from tools.plot.runs import mean_loss

AXES = {"steps": "step", "tokens": "tokens", "seconds": "elapsed_s"}  # key of each in the log
LEGEND = "line: validation\ndot: best model\nfaint: training\nband: deviation over seeds"
MAX_DRAWN_GROUPS = 10  # matplotlib has so many colors
SKIPPED_START_FRACTION = 0.1  # losses are high at the start of a run


def draw_losses(groups, axis):
    """Returns a matplotlib figure of the losses of the first groups, {name: runs}.

    `axis` is a key of AXES.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.add_subplot(xlabel=axis, ylabel="loss (nats per token)")
    highest = []
    for number, (name, runs) in enumerate([*groups.items()][:MAX_DRAWN_GROUPS]):
        color = f"C{number}"
        x, loss, _ = mean_curve([run.train for run in runs], AXES[axis])
        axes.plot(x, loss, color=color, alpha=0.35, linewidth=1)
        x, loss, deviation = mean_curve([run.val for run in runs], AXES[axis])
        axes.plot(x, loss, ".-", color=color, linewidth=1.8, label=name)
        axes.plot(x[loss.argmin()], mean_loss(runs), "o", color=color)  # the table's
        if len(runs) > 1:
            low, high = loss - deviation, loss + deviation
            axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
        highest.append(loss[x >= x.min() + SKIPPED_START_FRACTION * np.ptp(x)].max())
    axes.set_ylim(top=1.02 * max(highest))
    axes.grid(alpha=0.25)
    title = LEGEND
    if len(groups) > MAX_DRAWN_GROUPS:
        title += f"\nthe first {MAX_DRAWN_GROUPS} of {len(groups)}"
    axes.legend(title=title, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def mean_curve(logs, key):
    """Returns the means of `key`, and the means and standard deviations of the losses.

    They are (3, events). `logs` has a list of events per run, of which as many are used as all
    runs have.
    """
    length = min(map(len, logs))
    x = np.array([[event[key] for event in log[:length]] for log in logs])
    loss = np.array([[event["loss"] for event in log[:length]] for log in logs])
    deviation = loss.std(axis=0, ddof=int(len(logs) > 1))
    return np.stack([x.mean(axis=0), loss.mean(axis=0), deviation])
