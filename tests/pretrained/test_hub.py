"""Downloads with the real client from a local server that behaves like the Hugging Face hub."""

from pathlib import Path

import pytest
import tiny
from fake_hub import COMMIT, FILES, WEIGHTS

pytest.importorskip("huggingface_hub")

CODE = """
import sys
from folio.cli.errors import UserError
from folio.pretrained.load import pretrained_folder
for name in sys.argv[1:]:
    try:
        print(pretrained_folder(name))
    except UserError as error:
        print(error)
"""
EXPECTED = {name: FILES[name] for name in ("config.json", WEIGHTS)}


@pytest.fixture
def download(hub, folder):
    """A function that returns the folder, or the error line, of each name."""
    hint = "Using cached commit hash"  # the client's, where the hub cannot be reached

    def run(*names, **variables):
        output = hub.run("-c", CODE, *names, **variables)
        lines = [line for line in output.splitlines() if hint not in line]
        assert len(lines) == len(names), lines
        return lines

    return run


@pytest.mark.slow
def test_downloads_have_no_pickles_and_are_kept(hub, download):
    folder, other = download("org/model", "gpt2@v1")
    assert tiny.contents(folder) == tiny.contents(other) == EXPECTED
    assert hub.downloads() == sorted([*EXPECTED, *EXPECTED])
    assert hub.requests[-1][1].startswith("/openai-community/gpt2/")
    hub.requests.clear()
    assert tiny.contents(*download("org/model", HF_HUB_OFFLINE="1")) == EXPECTED
    assert tiny.contents(*download("org/model", HF_ENDPOINT="http://127.0.0.1:1")) == EXPECTED
    assert not hub.requests


@pytest.mark.slow
def test_models_that_cannot_be_downloaded(download):
    names = ["org/nothing", "org/model@v9", "org--x/model"]
    for name, line in zip(names, download(*names), strict=True):
        assert line.startswith(f"cannot download {name}: ")
    [line] = download("org/model", HF_HUB_OFFLINE="1")
    assert line.startswith("cannot download org/model: ")


@pytest.mark.slow
def test_only_a_commit_becomes_a_path_of_the_cache(hub, download):
    victim = Path("notes.json")
    victim.write_text("mine")
    for revision in ("../../../../notes", "main", COMMIT + "/../x"):
        hub.commit = revision
        [line] = download("org/model")
        assert line.startswith(f"cannot download org/model: its server names '{revision}'")
    assert victim.read_text() == "mine"
    assert not list(Path("hf").rglob("*.json"))
