"""docs/tutorial.ipynb, with few training steps and another text."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from folio.cli.settings import ROOT

NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"
TEXT = "MENENIUS:\nWhat is grace? Zeus and Hermes set a hollow B before the sea, to no avail.\n"


@pytest.mark.slow
def test_the_tutorial_runs(folder):
    for name in ("config", "folio", "model.py", "prepare.py", "sample.py", "tools", "train.py"):
        Path(name).symlink_to(ROOT / name)
    Path("docs").mkdir()
    Path("data/shakespeare_char").mkdir(parents=True)
    Path("data/shakespeare_char/input.txt").write_text(100 * TEXT)  # so that nothing is downloaded

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("fraction = 1.0", "fraction = 0.002")
        cell.source = cell.source.replace(", 2048, 4096, 8192]", "]")  # measured lengths
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": "docs"}}).execute()


def test_the_stored_outputs_are_complete():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]
