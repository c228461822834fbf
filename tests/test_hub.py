"""Downloads with the real client from a local server that behaves like the Hugging Face hub."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parent.parent
pytest.importorskip("huggingface_hub")

COMMIT = "a" * 40
KNOWN = r"/api/models/(org/model|openai-community/gpt2)/revision/(main|v1)"
UNRELATED = "/api/agent-harnesses"  # which the client reads to name itself
WEIGHTS = "model.safetensors"
FILES = {
    "config.json": b"{}",
    WEIGHTS: bytes(range(256)) * 1000,
    "merges.txt": b"#version: 0.2\n",
    "pytorch_model.bin": b"a pickle",
    "onnx/model.safetensors": b"a variant",
}
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


class Hub(ThreadingHTTPServer):
    """A hub with the model org/model, which is also openai-community/gpt2.

    Its attributes describe what goes wrong; {} or None: nothing.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests = []  # (method, path, range)
        self.answers = {}  # {path: (status, X-Error-Code)}
        self.bodies = {}  # {file: other content of a download}
        self.cut_at = None  # bytes after which the first download of the weights breaks off

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def downloads(self):
        """Returns the names of the files that were downloaded, sorted."""
        paths = [path for method, path, _ in self.requests if method == "GET"]
        return sorted(path.split(f"/{COMMIT}/")[1] for path in paths if "/resolve/" in path)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):  # noqa: N802
        self.respond()

    def do_GET(self):  # noqa: N802
        self.respond()

    def respond(self):
        hub, path = self.server, urlsplit(self.path).path
        if path == UNRELATED:
            self.send(404, b"")
            return
        hub.requests.append((self.command, path, self.headers.get("Range")))
        status, code = hub.answers.get(path, (200, None))
        if code or status != 200:
            self.send(status, b"", {"X-Error-Code": code} if code else {})
        elif re.fullmatch(KNOWN, path):
            self.send(200, json.dumps({"id": "org/model", "sha": COMMIT}).encode())
        elif "/tree/" in path:
            self.send(200, json.dumps([entry(name) for name in FILES]).encode())
        elif f"/resolve/{COMMIT}/" in path:
            self.send_file(path.split(f"/{COMMIT}/")[1])
        elif "/revision/" in path and "/org/model/" in path:
            self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            self.send(401, b"", {"X-Error-Code": "RepoNotFound"})

    def send(self, status, body, headers=()):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def send_file(self, name):
        hub, body = self.server, FILES[name]
        headers = {"ETag": f'"{etag(name)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if self.command == "GET":
            body = hub.bodies.get(name, body)
            if found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
                first, size = int(found[1]), len(body)
                headers["Content-Range"] = f"bytes {first}-{size - 1}/{size}"
                return self.send(206, body[first:], headers)
            if name == WEIGHTS and hub.cut_at:
                self.send_response(200)
                for key, value in (headers | {"Content-Length": str(len(body))}).items():
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(body[: hub.cut_at])
                hub.cut_at = None
                self.close_connection = True
                return None
        return self.send(200, body, headers)


def etag(name):
    """The sha256 of large files, which are stored apart, and git's SHA-1 of the others."""
    body = FILES[name]
    if name == WEIGHTS:
        return hashlib.sha256(body).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def entry(name):
    size = len(FILES[name])
    found = {
        "type": "file",
        "path": name,
        "size": size,
        "oid": hashlib.sha1(name.encode()).hexdigest(),
    }
    if name == WEIGHTS:
        found["lfs"] = {"oid": etag(name), "size": size, "pointerSize": 134}
    return found


@pytest.fixture
def hub():
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


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
    assert download(before=before) == "org/model needs: pip install huggingface_hub safetensors"
