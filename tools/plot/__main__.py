"""Compare runs in a table and a plot, or plot a model's attention or embeddings.

    python -m tools.plot out-a out-b
    python -m tools.plot out-sweep --x=seconds --out=losses.png
    python -m tools.plot --attention out-a --start="To be, or not" --layer=0
    python -m tools.plot --embeddings out-a

Runs whose folders differ only in "seed=NUMBER", as those of a sweep, are one row and one curve.
Plots are PNG files and need matplotlib.
"""

import json
from dataclasses import dataclass
from typing import Literal

from folio.cli import process
from folio.cli.errors import import_optional
from folio.cli.files import read_prompt, write_atomically
from folio.cli.settings import load_settings, setting


@dataclass(frozen=True)
class PlotConfig:
    """Compare runs in a table and a plot, or plot a model's attention or embeddings."""

    runs: tuple = setting((), "folders of runs, or of sweeps")
    x: Literal["steps", "tokens", "seconds"] = setting("steps", "x axis")
    out: str | None = setting(None, "PNG file; None: runs.png, attention.png or embeddings.png")

    json: bool = setting(False, "print the runs as JSON, instead of the table and the plot")

    attention: bool = setting(False, "plot attention and next-token probabilities", group="Model")
    embeddings: bool = setting(False, "plot the cosine similarities of token embeddings")
    start: str | None = setting(None, "prompt, or tokens of --embeddings: text, FILE:path, or -")
    layer: int | None = setting(None, "layer of --attention, from 0; None: all", "[0, inf)")

    def __post_init__(self):
        plots = self.attention + self.embeddings
        if not self.runs or plots + self.json > 1 or plots and len(self.runs) > 1:
            raise ValueError("name the runs to compare, or one with --attention or --embeddings")
        if self.out is not None and not self.out.lower().endswith(".png"):
            raise ValueError(f"--out={self.out} must be the name of a PNG file")


process.start(__name__, PlotConfig)  # --help must not wait for torch

from folio.checkpoint.run_dir import RunDir
from folio.inference.trained_model import load_trained
from tools.plot.models import draw_attention, draw_embeddings
from tools.plot.runs import compare_groups, describe_runs, draw_losses, group_runs, read_runs
from tools.table import format_table


def main(argv=None):
    settings = load_settings(PlotConfig, argv)
    if settings.attention or settings.embeddings:
        name = "attention.png" if settings.attention else "embeddings.png"
        figure = plot_model(settings.runs[0], settings)
    else:
        groups = group_runs(read_runs(settings.runs))
        if settings.json:
            print(json.dumps(describe_runs(groups), indent=2))
            return
        print("\n".join(format_table(compare_groups(groups))), flush=True)
        import_optional("matplotlib", "a plot")
        name, figure = "runs.png", draw_losses(groups, settings.x)
    path = settings.out or name
    with write_atomically(path) as [file]:
        figure.savefig(file, format="png", dpi=150)
    print(f"wrote {path}")


def plot_model(folder, settings):
    """Returns a matplotlib figure for the best model of a run. `settings` is a PlotConfig."""
    import_optional("matplotlib", "a plot")
    prompt = read_prompt(settings.start)
    trained = load_trained(RunDir(folder).load_best())
    ids = trained.tokenizer.encode_prompt(prompt or trained.tokenizer.start)
    if settings.embeddings:
        return draw_embeddings(trained, folder, ids if prompt else None)
    return draw_attention(trained, ids, folder, settings.layer)


if __name__ == "__main__":
    process.run(main)
