"""Compare runs in a table and a plot of their loss curves, or plot a model's attention.

    python -m tools.plot out-a out-b
    python -m tools.plot out-sweep --x=seconds --out=losses.png
    python -m tools.plot --attention out-a --start="To be, or not" --layer=0

Runs whose folders differ only in "seed=NUMBER", as those of a sweep, are one row and one curve.
Plots are PNG files and need matplotlib.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar, Literal

from folio.cli import process
from folio.cli.errors import UserError
from folio.cli.files import write_atomically
from folio.cli.settings import load_settings, parse_arguments, setting

AXES = {"steps": "step", "tokens": "tokens", "seconds": "elapsed_s"}  # key of each in the log
LABELS = {"loss": "loss (nats per token)", "bits_per_byte": "bits per byte"}
POINTS = 100  # of a training curve; more steps are averaged, because losses of batches are noisy
START = 0.1  # fraction of a run whose high losses are cut off


@dataclass(frozen=True)
class PlotConfig:
    """Compare runs in a table and a plot of their loss curves, or plot a model's attention."""

    ARGUMENTS: ClassVar[str] = "[OUT_DIR ...] [--name=value ...]"
    OPERANDS: ClassVar[str] = "runs"

    runs: tuple = setting((), "folders of runs, or of sweeps")
    x: Literal["steps", "tokens", "seconds"] = setting("steps", "x axis")
    y: Literal["loss", "bits_per_byte"] = setting(
        "loss", "y axis and table; bits per byte compare runs with different tokenizers"
    )
    out: str | None = setting(None, "PNG file; None: runs.png or attention.png")

    attention: bool = setting(
        False, "plot attention weights and next-token probabilities", group="Attention"
    )
    start: str | None = setting(None, "prompt: text, FILE:path, or - for standard input")
    layer: int | None = setting(None, "layer to plot; None: all", "[0, inf)")

    def __post_init__(self):
        if not self.runs or self.attention and len(self.runs) > 1:
            raise ValueError("specify the run folders to compare, or one with --attention")


if __name__ == "__main__":
    process.start(parse_arguments, PlotConfig)  # --help must not wait for torch

import numpy as np

from folio.checkpoint.run_dir import RunDir
from folio.inference.completion import load_trained, read_prompt
from tools.plot import attention
from tools.plot.runs import grouped, read_all
from tools.plot.table import aligned, compared


def main(argv=None):
    settings = load_settings(PlotConfig, argv)
    if not settings.attention:
        groups = grouped(read_all(settings.runs), settings.y)
        print("\n".join(aligned(compared(groups))), flush=True)
    if not find_spec("matplotlib"):
        raise UserError("plots need matplotlib: pip install matplotlib")
    if settings.attention:
        path, figure = "attention.png", draw_attention(*settings.runs, settings)
    else:
        path, figure = "runs.png", draw_losses(groups, settings.x)
    path = settings.out or path
    with write_atomically(path) as [file]:
        figure.savefig(file, format="png", dpi=150)
    print(f"wrote {path}")


def draw_attention(folder, settings):
    """Returns a matplotlib figure for the best model of a run. `settings` is a PlotConfig."""
    prompt = read_prompt(settings.start)
    trained = load_trained(RunDir(folder).load_best())
    ids = trained.tokenizer.encode(prompt or trained.tokenizer.start).tolist()
    layers = None if settings.layer is None else [settings.layer]
    return attention.draw(trained, ids, folder, layers)


def draw_losses(groups, axis):
    """Returns a matplotlib figure of the groups' losses. `axis` is a key of AXES.

    Training has no bits per byte, and thus no curve.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    measure = groups[0].measure
    groups = [group for group in groups if group.evaluated]
    if not groups:
        name = measure.replace("_", " ")
        raise UserError(f"there is nothing to draw: the runs have no {name} yet")
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot(xlabel=axis, ylabel=LABELS[measure])
    highest = []
    for number, group in enumerate(groups):
        color = f"C{number}" if len(groups) <= 10 else colormaps["turbo"](number / len(groups))
        if measure == "loss":
            train = averaged(group.curve("train", AXES[axis])[:2])
            axes.plot(*train, color=color, alpha=0.35, linewidth=1)
        val = group.curve("val", AXES[axis])
        draw_validation(axes, *val, color=color, label=group.name)
        x, loss, _ = val
        highest.append(loss[x >= x.min() + START * np.ptp(x)].max())
    axes.set_ylim(top=1.02 * max(highest))
    axes.grid(alpha=0.25)
    faint = "faint: training; " * (measure == "loss")
    title = f"line: validation; {faint}dot: best"
    is_repeated = any(len(group.runs) > 1 for group in groups)
    title += "\nmeans over seeds; band: ± standard deviation" * is_repeated
    legend = axes.legend(title=title, frameon=False)
    for name in legend.get_texts():
        name.set_parse_math(False)  # a folder's name can contain $
    return figure


def draw_validation(axes, x, loss, spread, color, label):
    """Draws the validation losses of a group, means and standard deviations, (evaluations,)."""
    best = loss.argmin()
    axes.plot(x, loss, ".-", color=color, linewidth=1.8, label=label)
    axes.plot(x[best], loss[best], "o", color=color)
    if spread.any():
        axes.fill_between(x, loss - spread, loss + spread, color=color, alpha=0.2, linewidth=0)


def averaged(points):
    """Returns a curve, (2, points), with neighboring points averaged so that POINTS remain."""
    if points.shape[1] <= POINTS:
        return points
    pieces = np.array_split(points, POINTS, axis=1)
    return np.stack([piece.mean(axis=1) for piece in pieces], axis=1)


if __name__ == "__main__":
    process.run(main)
