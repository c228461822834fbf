"""Tests of folio/hub_corpora.py with the real client and a local server."""

import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
from fake_hub import COMMIT

ROOT = Path(__file__).parent.parent
pytest.importorskip("huggingface_hub")
parquet = pytest.importorskip("pyarrow.parquet")

CODE = """
import json, shutil, sys
from collections import namedtuple
from dataclasses import replace
from folio import hub_corpora
from folio.errors import UserError
name, max_tokens, opened, free = json.loads(sys.argv[1])
if free is not None:
    hub_corpora.shutil.disk_usage = lambda path: namedtuple("Usage", "free")(free)
for key, corpus in hub_corpora.CORPORA.items():
    hub_corpora.CORPORA[key] = replace(corpus, revision="a" * 40, tokens=3000)
try:
    sources = hub_corpora.hub_sources(name, max_tokens)
    paths = [str(source.local_path()) for source in sources[:opened]]
except UserError as error:
    sys.exit(f"error: {error}")
about = [[each.name, each.size, each.sha256(), each.is_cached()] for each in sources]
print(json.dumps([about, paths]))
"""


def table(*texts):
    """Returns the bytes of a Parquet file."""
    import pyarrow

    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": texts, "id": list(texts)}), file)
    return file.getvalue()


FILES = {f"plain_text/{n}.parquet": table(f"text {n}", "é") for n in (1, 0, 2)}


@pytest.fixture
def corpus(hub, folder):
    """A function that calls hub_sources in a process, with the cache in `folder`.

    Returns what is known about the sources and the paths of those that are opened, or the error
    line.
    """
    hub.files = FILES | {"plain_text/README.md": b"none"}

    def run(name="openwebtext", max_tokens=None, opened=0, free=None, before="", **variables):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        environment |= {"HF_HOME": str(folder), "HF_ENDPOINT": hub.url, "NO_PROXY": "*"}
        environment |= {"HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)} | variables
        argument = json.dumps([name, max_tokens, opened, free])
        command = [sys.executable, "-c", before + CODE, argument]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode == 0:
            return json.loads(done.stdout)
        assert "Traceback" not in done.stderr, done.stderr
        error = done.stderr.strip().split("error: ")[-1]
        assert "\n" not in error
        return error

    return run


def expected(cached=()):
    """Returns what is known about the sources of FILES."""
    return [
        [f"Skylion007/openwebtext/{name}", len(raw), hashlib.sha256(raw).hexdigest(), n in cached]
        for n, (name, raw) in enumerate(sorted(FILES.items()))
    ]


def test_files_are_downloaded_when_they_are_opened(hub, corpus):
    about, [path] = corpus(opened=1)
    assert about == expected(cached=[0])
    assert hub.downloads() == ["plain_text/0.parquet"]
    assert parquet.read_table(path)["text"].to_pylist() == ["text 0", "é"]
    hub.requests.clear()
    assert corpus(opened=1) == [about, [path]]
    tree = f"/api/datasets/Skylion007/openwebtext/tree/{COMMIT}/plain_text"
    assert [request[1] for request in hub.requests] == [tree]


@pytest.mark.parametrize(("max_tokens", "count"), [(1, 1), (700, 1), (801, 2), (9000, 3)])
def test_max_tokens_needs_the_first_files_only(max_tokens, count, corpus):
    assert corpus(max_tokens=max_tokens)[0] == expected()[:count]


def test_fineweb_edu_is_in_another_repository(hub, corpus):
    hub.files = {"sample/10BT/000_00000.parquet": b"x"}
    name = "HuggingFaceFW/fineweb-edu/sample/10BT/000_00000.parquet"
    assert corpus("fineweb_edu")[0][0][:2] == [name, 1]
    tree = f"/api/datasets/HuggingFaceFW/fineweb-edu/tree/{COMMIT}/sample/10BT"
    assert unquote(hub.requests[0][1]) == tree


def test_the_disk_must_have_room_for_downloads_and_tokens(corpus):
    needed = sum(map(len, FILES.values())) + 2 * 3000
    assert corpus(free=needed)[0] == expected()
    error = corpus(free=needed - 1)
    assert error.startswith("openwebtext needs 0.0 GB of disk space in ")
    assert error.endswith(
        "hub and data/openwebtext, but 0.0 GB are free; use a smaller --max_tokens, or set HF_HOME "
        "to a folder on another disk for the downloads"
    )
    assert corpus(opened=3, free=needed)[0] == expected(cached=[0, 1, 2])
    assert corpus(free=2 * 3000)[0] == expected(cached=[0, 1, 2])
    Path("data/openwebtext").mkdir(parents=True)
    Path("data/openwebtext/train_00000.bin.part").write_bytes(bytes(5000))
    assert corpus(free=1000)[0] == expected(cached=[0, 1, 2])


def test_wrong_bytes_are_not_kept(hub, corpus):
    name = "plain_text/0.parquet"
    hub.bodies[name] = bytes(len(FILES[name]))
    assert corpus(opened=1) == "0.parquet was damaged in the download (wrong sha256); try again"
    hub.bodies.clear()
    assert corpus(opened=1)[0] == expected(cached=[0])


def test_offline(corpus):
    error = corpus(HF_HUB_OFFLINE="1")
    assert error.startswith("cannot download openwebtext: it is not in the cache; unset HF_HUB_OFF")


def test_a_dataset_that_the_hub_does_not_have(hub, corpus):
    tree = f"/api/datasets/Skylion007/openwebtext/tree/{COMMIT}/plain_text"
    hub.answers[tree] = (401, "RepoNotFound")
    assert corpus().startswith("cannot download openwebtext: the hub has no such dataset")


def test_a_download_that_is_refused_names_the_file(hub, corpus):
    path = f"/datasets/Skylion007/openwebtext/resolve/{COMMIT}/plain_text/0.parquet"
    hub.answers[path] = (403, None)
    error = corpus(opened=1)
    assert error.startswith("cannot download Skylion007/openwebtext/plain_text/0.parquet: ")


def test_without_the_client(corpus):
    before = "import sys; sys.modules['huggingface_hub'] = None\n"
    assert corpus(before=before) == "openwebtext needs: pip install huggingface_hub pyarrow"
