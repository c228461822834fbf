"""Write the tables of docs/settings.md, which list the settings of all scripts.

    python -m tools.settings_table

The texts are those of `--help`. The page above the tables is kept.
"""

from folio.cli.settings import ROOT, describe_settings
from prepare import PrepareConfig
from sample import SampleConfig
from tools.bench.__main__ import BenchConfig
from tools.export import ExportConfig
from tools.page.__main__ import PageConfig
from tools.plot.__main__ import PlotConfig
from tools.sweep.__main__ import SweepSettings
from train import TrainConfig

PAGE = ROOT / "docs" / "settings.md"
MARKER = "<!-- The rest of this page is written by: python -m tools.settings_table -->\n"
SCRIPTS = {
    "train.py": TrainConfig,
    "sample.py": SampleConfig,
    "prepare.py": PrepareConfig,
    "tools.sweep": SweepSettings,
    "tools.plot": PlotConfig,
    "tools.page": PageConfig,
    "tools.export": ExportConfig,
    "tools.bench": BenchConfig,
}


def with_tables(page):
    """Returns a page with the tables after the marker, in place of what was there."""
    lines = [page.partition(MARKER)[0] + MARKER]
    for script, settings_class in SCRIPTS.items():
        lines += [f"## {script}", ""]
        for number, (group, *cells) in enumerate(describe_settings(settings_class)):
            if group:
                lines += [*[""] * (number > 0), f"### {group}", ""]
            if group or number == 0:
                lines += ["| setting | default | type | explanation |", "| --- | --- | --- | --- |"]
            name, default, *texts = cells
            kind, explanation = (t.replace("|", "\\|").replace("<", "\\<") for t in texts)
            lines.append(f"| `{name}` | `{default}` | {kind} | {explanation} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
