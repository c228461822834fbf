"""Plots of the loss curves of runs."""

import numpy as np

from folio.cli.errors import UserError

AXES = {"steps": "step", "tokens": "tokens", "seconds": "elapsed_s"}  # key of each in the log
LABELS = {"loss": "loss (nats per token)", "bits_per_byte": "bits per byte"}
MAX_LABELED_GROUPS = 15  # a longer legend would be higher than the plot
MAX_TRAINING_POINTS = 100  # more are averaged, because losses of batches are noisy
SKIPPED_START_FRACTION = 0.1  # losses are high at the start of a run


def draw_losses(groups, axis):
    """Returns a matplotlib figure of the groups' losses. `axis` is a key of AXES.

    There is no training curve of bits per byte, which only evaluations measure.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    measure = groups[0].measure
    groups = [group for group in groups if group.evaluated_runs]
    if not groups:
        name = measure.replace("_", " ")
        raise UserError(f"there is nothing to draw: the runs have no {name} yet")
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.add_subplot(xlabel=axis, ylabel=LABELS[measure])
    highest = []
    for number, group in enumerate(groups):
        color = f"C{number}" if len(groups) <= 10 else colormaps["turbo"](number / len(groups))
        if measure == "loss":
            x, loss, _ = group.curve("train", AXES[axis])
            axes.plot(shorten(x), shorten(loss), color=color, alpha=0.35, linewidth=1)
        x, loss, deviation = group.curve("val", AXES[axis])
        name = group.name.replace("$", r"\$")  # a mathematical formula otherwise
        label = name if number < MAX_LABELED_GROUPS else None
        axes.plot(x, loss, ".-", color=color, linewidth=1.8, label=label)
        axes.plot(x[loss.argmin()], group.mean_loss, "o", color=color)  # the table's
        if deviation.any():
            low, high = loss - deviation, loss + deviation
            axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
        highest.append(loss[x >= x.min() + SKIPPED_START_FRACTION * np.ptp(x)].max())
    axes.set_ylim(top=1.02 * max(highest))
    axes.grid(alpha=0.25)
    training = "\nfaint: training" if measure == "loss" else ""
    title = f"line: validation{training}\ndot: best model"
    if any(len(group.runs) > 1 for group in groups):
        title += "\nmeans over seeds\nband: ± standard deviation"
    if len(groups) > MAX_LABELED_GROUPS:
        title += f"\nthe first {MAX_LABELED_GROUPS} of {len(groups)}"
    axes.legend(title=title, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def shorten(values):
    """Returns values, (points,), as the means of at most MAX_TRAINING_POINTS neighboring ones."""
    if len(values) <= MAX_TRAINING_POINTS:
        return values
    return np.array([part.mean() for part in np.array_split(values, MAX_TRAINING_POINTS)])
