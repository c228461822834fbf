"""A local server that behaves like the Hugging Face hub."""

import hashlib
import json
import os
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "a" * 40
REPOSITORIES = (
    r"/api/models/(org/model|openai-community/gpt2)(/revision/v1)?"
    r"|/api/datasets/[\w.-]+/[\w.-]+(/revision/.+)?"
)
USER_AGENT_PATH = "/api/agent-harnesses"  # which the client reads for its user agent
WEIGHTS = "model.safetensors"
FILES = {
    "config.json": b"{}",
    WEIGHTS: bytes(range(256)) * 1000,
    "merges.txt": b"#version: 0.2\n",
    "pytorch_model.bin": b"a pickle",
    "onnx/model.safetensors": b"a variant",
}


class Hub(ThreadingHTTPServer):
    """A hub with the model org/model, which is also openai-community/gpt2, or with a dataset.

    Attributes:
        files: {name: content} of the model or the dataset.
        requests: (method, path) of each request.
        commit: what it names as the commit of each revision.
        listed_bytes: added to the size of each file in its list.
        etag: what it names as the hash of each file; None: the hash.
    """

    commit, listed_bytes, etag = COMMIT, 0, None

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.requests = FILES, []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def run(self, *command, **variables):
        """Runs a Python command whose client uses this hub, with its cache in the current folder.

        Returns stdout and stderr.
        """
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        environment |= {"HF_HOME": "hf", "HF_ENDPOINT": self.url, "NO_PROXY": "*"}
        environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        environment |= {"PYTHONPATH": str(Path(__file__).parent.parent)} | variables
        process = subprocess.run(
            [sys.executable, *command], env=environment, text=True, capture_output=True
        )
        return process.stdout + process.stderr

    def downloads(self):
        """Returns the names of the files that were downloaded, sorted."""
        paths = [path for method, path in self.requests if method == "GET"]
        return sorted(path.split(f"/{COMMIT}/")[1] for path in paths if "/resolve/" in path)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):  # noqa: N802
        hub, path = self.server, urlsplit(self.path).path
        name = path.partition(f"/resolve/{COMMIT}/")[2]
        if path != USER_AGENT_PATH:
            hub.requests.append((self.command, path))
        if re.fullmatch(REPOSITORIES, path):
            self.send(200, json.dumps({"id": "org/name", "sha": hub.commit}).encode())
        elif "/tree/" in path:
            infos = [file_info(*item, hub.listed_bytes) for item in hub.files.items()]
            self.send(200, json.dumps(infos).encode())
        elif name in hub.files:
            self.send(200, hub.files[name])
        else:
            self.send(404, b"")

    do_HEAD = do_GET  # noqa: N815

    def send(self, status, body):
        self.send_response(status)
        self.send_header("ETag", f'"{self.server.etag or digest(body)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def digest(body):
    """Returns git's SHA-1 of a file."""
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def file_info(name, body, more_bytes):
    """Returns the entry of a file in the list of a repository's files."""
    return {"type": "file", "path": name, "size": len(body) + more_bytes, "oid": digest(body)}
