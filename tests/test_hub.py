"""Downloads with the real client from a local server that behaves like the Hugging Face hub."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import COMMIT, FILES, WEIGHTS

ROOT = Path(__file__).parent.parent
pytest.importorskip("huggingface_hub")

CODE = """
import sys
from folio.errors import UserError
from folio.hub import pretrained_folder
try:
    print(pretrained_folder(sys.argv[1]))
except UserError as error:
    sys.exit(f"error: {error}")
"""
FULL_DISK = """
import errno, os
from huggingface_hub import file_download
class Full:
    def __init__(self, file):
        self.file = file
    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
get = file_download.http_get
file_download.http_get = lambda url, file, **rest: get(url, Full(file), **rest)
"""


@pytest.fixture
def download(hub, folder):
    """A function that calls pretrained_folder in a process, with the cache in `folder`.

    Returns the folder, or the error line.
    """

    def run(name="org/model", before="", **variables):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        environment |= {"HF_HOME": str(folder), "HF_ENDPOINT": hub.url, "NO_PROXY": "*"}
        environment |= {"HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)} | variables
        command = [sys.executable, "-c", before + CODE, name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode == 0:
            return Path(done.stdout.strip())
        assert "Traceback" not in done.stderr
        error = done.stderr.strip().split("error: ")[-1]
        assert "\n" not in error
        return error

    return run


def contents(path):
    return {each.name: each.read_bytes() for each in path.iterdir()}


EXPECTED = {name: FILES[name] for name in ("config.json", WEIGHTS, "merges.txt")}


@pytest.mark.slow
def test_first_download_has_no_pickles_and_the_second_use_no_downloads(hub, download):
    assert contents(download()) == EXPECTED
    assert hub.downloads() == sorted(EXPECTED)
    hub.requests.clear()
    assert contents(download()) == EXPECTED
    assert not hub.downloads()
    hub.requests.clear()
    assert contents(download(HF_HUB_OFFLINE="1")) == EXPECTED
    assert not hub.requests
    assert contents(download(HF_ENDPOINT="http://127.0.0.1:1")) == EXPECTED  # no network


def test_names_and_revisions(hub, download):
    assert contents(download("gpt2@v1")) == EXPECTED
    assert hub.requests[0][1] == "/api/models/openai-community/gpt2/revision/v1"


def test_a_download_that_breaks_off_continues(hub, download):
    hub.cut_at = 100_000
    before = "from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 1000\n"
    assert contents(download(before=before)) == EXPECTED
    assert "bytes=100000-" in [range for *_, range in hub.requests]


@pytest.mark.slow
def test_a_failed_download_keeps_the_complete_files(hub, download):
    path = f"/org/model/resolve/{COMMIT}/{WEIGHTS}"
    hub.answers[path] = (403, None)
    assert "403 Forbidden" in download()
    hub.answers.clear()
    hub.requests.clear()
    assert contents(download()) == EXPECTED
    assert hub.downloads().count(WEIGHTS) == 1


@pytest.mark.slow
def test_wrong_bytes_are_not_kept(hub, download):
    hub.bodies[WEIGHTS] = bytes(len(FILES[WEIGHTS]))
    assert download() == "model.safetensors was damaged in the download (wrong sha256); try again"
    hub.bodies.clear()
    assert contents(download()) == EXPECTED


def test_a_wrong_size_is_an_error(hub, download):
    hub.bodies[WEIGHTS] = b"short"
    assert "file should be of size 256000 but has size 5" in download()


def test_full_disk(hub, download):
    expected = "cannot download org/model: No space left on device; try again"
    assert download(before=FULL_DISK).startswith(expected)


@pytest.mark.parametrize(
    ("name", "variables", "message"),
    [
        ("org/nothing", {}, "the hub has no such model"),
        ("org/model@v9", {}, "the model has no revision v9; omit @v9"),
        ("org/model", {"HF_HUB_OFFLINE": "1"}, "it is not in the cache; unset HF_HUB_OFFLINE"),
        ("org/model", {"HF_ENDPOINT": "http://127.0.0.1:1"}, "127.0.0.1:1 cannot be reached"),
        ("org/model", {"HF_ENDPOINT": "nowhere"}, "cannot download org/model: "),
        ("org--x/model", {}, "cannot download org--x/model: "),
    ],
)
def test_models_that_cannot_be_had(name, variables, message, download):
    assert message in download(name, **variables)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/models/org/model/revision/main", 403),
        (f"/org/model/resolve/{COMMIT}/{WEIGHTS}", 401),
    ],
)
def test_gated_models(path, status, hub, download):
    hub.answers[path] = (status, "GatedRepo")
    assert f"it is gated; request access at {hub.url}/org/model and set HF_TOKEN" in download()


def test_without_the_client(download):
    before = "import sys; sys.modules['huggingface_hub'] = None\n"
    assert download(before=before) == "org/model needs: pip install huggingface_hub safetensors tokenizers"
