"""Look at runs: curves of their losses, a table of how they differ, what attention looks at.

    python -m tools.plot out-a out-b
    python -m tools.plot out-a out-b --x=seconds --out=losses.png
    python -m tools.plot out-a --text
    python -m tools.plot --attention --out_dir=out-a --start="To be, or not"

A picture is a PNG, drawn by matplotlib; without it, curves are drawn in the terminal.
"""

import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import get_terminal_size
from typing import ClassVar, Literal

import numpy as np

from config import UserError, load, setting
from safety import replacing, run
from tools import runs as runs_of

BINS = 100  # of a curve's steps, each drawn as their mean: single batches tell little
FALLING = 0.1  # the share of a run in which losses only fall from where they begin
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class PlotConfig:
    """Draw the losses of runs and list them by the best; or draw a model's attention."""

    ARGUMENTS: ClassVar[str] = "[OUT_DIR ...] [--key=value ...]"
    OPERANDS: ClassVar[str] = "runs"

    runs: tuple = setting((), "folders of runs")
    x: Literal["steps", "tokens", "seconds"] = setting("steps", "what losses are drawn over")
    out: str | None = setting(
        None, "the picture; None is runs.png, or attention.png of --attention"
    )
    text: bool = setting(False, "draw in the terminal instead")

    attention: bool = setting(
        False, "draw what each head looks at, and what comes next", group="Attention"
    )
    out_dir: str | None = setting(None, "the run whose best model that is")
    start: str | None = setting(None, "the prompt, as sample.py has it")

    def __post_init__(self):
        others = self.runs or self.text or self.x != "steps"
        if self.attention and (others or self.out_dir is None):
            raise UserError("--attention takes a run by --out_dir, no others, no --text and no --x")
        if not self.attention and (self.out_dir or self.start) is not None:
            raise UserError("--out_dir and --start are for --attention; runs come without a name")
        if not self.attention and not self.runs:
            found = ", ".join(runs_of.at_hand()) or "none here"
            raise UserError(f"name the folders of the runs to draw: {found}")
        if self.out is not None and not self.out.endswith(".png"):
            raise UserError(f"--out={self.out}: the picture is a PNG, so let its name end in .png")


def main(argv=None):
    config = load(PlotConfig, sys.argv[1:] if argv is None else argv)
    if config.attention:
        from tools import attention  # torch, which curves do without

        save(attention.picture(config.out_dir, config.start), config.out or "attention.png")
        return
    runs = runs_of.best_first(runs_of.read_all(config.runs))
    if config.text or not has_matplotlib():
        print("\n".join(drawn_in_text(runs, config.x, get_terminal_size((100, 24)).columns)))
    else:
        save(picture(runs, config.x), config.out or "runs.png")
    print()
    print("\n".join(runs_of.table(runs)))


def has_matplotlib():
    with suppress(ImportError):
        import matplotlib  # noqa: F401

        return True
    print(
        "matplotlib is missing, so curves are drawn here: pip install matplotlib", file=sys.stderr
    )
    return False


def save(figure, path):
    """Write a picture. Raises UserError where the disk refuses."""
    with replacing(path) as [file]:
        figure.savefig(file, format="png", dpi=150)
    print(f"wrote {path}")


def curves_of(run, axis):
    """{split: (x, loss)} as they are drawn, arrays; training as means of neighbouring steps."""
    curves = {split: np.array(run.curve(split, axis), float) for split in ("train", "val")}
    x, loss = curves["train"]
    pieces = [np.array_split(each, BINS) if len(each) > BINS else each for each in (x, loss)]
    curves["train"] = np.array([[np.mean(piece) for piece in each] for each in pieces])
    return curves


def losses_to_show(runs, axis):
    """The lowest and the highest loss of a picture, which leaves out how runs begin.

    From the loss of guessing they fall so fast that all that matters would be at the bottom.
    """
    curves = [curve for run in runs for curve in curves_of(run, axis).values() if curve.size]
    if not curves:
        raise UserError("these runs have no losses yet: there is nothing to draw")
    later = [loss[x >= x[0] + (x[-1] - x[0]) * FALLING] for x, loss in curves]
    low, high = min(loss.min() for _, loss in curves), max(loss.max() for loss in later)
    margin = (high - low) * 0.04 or 0.1
    return low - margin, high + margin


def labels_of(runs):
    """The folders of runs, without a folder that all of them are in."""
    paths = [Path(each.folder) for each in runs]
    shared = {path.parent for path in paths}
    return [path.name if len(shared) == 1 < len(runs) else str(path) for path in paths]


def picture(runs, axis):
    """A matplotlib figure of the runs' losses, validation strong and training faint."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # which needs no screen
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    validation = []
    for number, each in enumerate(runs):
        colour = f"C{number}" if len(runs) <= 10 else colormaps["turbo"](number / len(runs))
        curves = curves_of(each, axis)
        axes.plot(*curves["train"], color=colour, alpha=0.35, linewidth=1)
        validation += axes.plot(*curves["val"], ".-", color=colour, linewidth=1.8)
        if best := each.best:
            axes.plot(best[runs_of.AXES[axis]], best["loss"], "o", color=colour, markersize=8)
    axes.set(xlabel=axis, ylabel="loss, nats per token", ylim=losses_to_show(runs, axis))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    labels = labels_of(runs)  # given, as a label that begins with _ is hidden else
    legend = axes.legend(
        validation, labels, title="validation; faint: training; dot: the best", frameon=False
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def drawn_in_text(runs, axis, width, height=20):
    """Lines that show the runs' losses: validation by letters A, B, …, training by small ones."""
    low, high = losses_to_show(runs, axis)
    labels = [f"{high - (high - low) * row / (height - 1):.3f} " for row in range(height)]
    margin = max(map(len, labels))
    curves = [curves_of(run, axis) for run in runs]
    last = max(x[-1] for each in curves for x, _ in each.values() if x.size)
    columns = np.linspace(0, last, max(width - margin - 1, 20))
    canvas = np.full((height, len(columns)), " ")
    for split in ("train", "val"):  # which is drawn over the other
        for number, each in enumerate(curves):
            letter = LETTERS[number % len(LETTERS)]
            draw(
                canvas,
                columns,
                *each[split],
                low,
                high,
                letter if split == "val" else letter.lower(),
            )
    lines = [
        f"{label if row % 4 == 0 else '':>{margin}}|{''.join(line)}"
        for row, (label, line) in enumerate(zip(labels, canvas, strict=True))
    ]
    lines.append(f"{'':>{margin}}+{'-' * len(columns)}")
    end = f"{last:,.0f} {axis}"
    lines.append(f"{'':>{margin}} 0{end:>{len(columns) - 1}}")
    names = (f"{LETTERS[n % len(LETTERS)]} {name}" for n, name in enumerate(labels_of(runs)))
    return [*lines, "", f"losses, nats per token; capitals are validation: {', '.join(names)}"]


def draw(canvas, columns, x, loss, low, high, letter):
    """Put a letter where a curve is, in each column that it comes to."""
    if not x.size:
        return
    height = len(canvas)
    rows = (high - np.interp(columns, x, loss)) / (high - low) * (height - 1)
    for column in np.flatnonzero((columns >= x[0]) & (columns <= x[-1])):
        if 0 <= (row := round(rows[column])) < height:
            canvas[row, column] = letter


if __name__ == "__main__":
    run(main)
