"""Downloads of tiny Shakespeare and datasets of the hub, from local servers."""

import hashlib
import io
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath

import pytest
from fake_hub import COMMIT

import prepare
from folio.cli.errors import UserError
from folio.cli.settings import ROOT
from folio.data import downloads
from folio.data.dataset import load_dataset, load_tokenizer
from folio.data.downloads import select_tables

CORPUS = b"Now is the winter of our discontent\n" * 3000  # in place of tiny Shakespeare
ANSWERS = {  # {path: (status, body)}
    "good": (200, CORPUS),
    "404": (404, b""),
    "stalls": (200, CORPUS[:1000]),
    "wrong_bytes": (200, CORPUS[::-1]),
}


def error_of(*argv):
    with pytest.raises(UserError) as caught:
        prepare.main(argv)
    return str(caught.value)


def text_of(name):
    """Returns the text of a prepared dataset."""
    data = load_dataset(name)
    return data.tokenizer.decode(data.train) + data.tokenizer.decode(data.val)


# Tiny Shakespeare


class Handler(BaseHTTPRequestHandler):
    """Serves ANSWERS. Those with a body claim to have the length of CORPUS."""

    def do_GET(self):
        path = self.path.strip("/")
        self.server.paths.append(path)
        status, body = ANSWERS[path]
        self.send_response(status)
        self.send_header("Content-Length", str(len(CORPUS) if body else 0))
        self.end_headers()
        with suppress(ConnectionError):  # the client may close the connection first
            self.wfile.write(body)
        if path == "stalls":
            self.server.closing.wait(30)

    def log_message(self, *_):
        pass


@pytest.fixture
def serve(folder, monkeypatch):
    """A function that lets prepare.py download tiny Shakespeare from a path of a server.

    It returns the server. CORPUS takes the place of tiny Shakespeare.
    """
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.paths, server.closing = [], threading.Event()
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("NO_PROXY", "*")
        monkeypatch.setenv("no_proxy", "*")
        digest = hashlib.sha256(CORPUS).hexdigest()
        monkeypatch.setattr(downloads, "SHAKESPEARE_SHA256", digest)

        def serve_path(path):
            url = f"http://127.0.0.1:{server.server_port}/{path}"
            monkeypatch.setattr(downloads, "SHAKESPEARE_URL", url)
            return server

        yield serve_path
        server.closing.set()
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("path", ["404", "stalls", "wrong_bytes"])
def test_failed_downloads_are_explained_and_leave_no_files(path, serve, monkeypatch):
    monkeypatch.setattr(downloads, "TIMEOUT_S", (30, 0.3))
    server = serve(path)
    message = error_of()
    assert f"{server.server_port}/{path}" in message
    assert "data/shakespeare_char/input.txt" in message
    assert not [*Path().rglob("*")]


def test_shakespeare_is_downloaded_once(serve, capsys, gpt2_of_bytes):
    server = serve("good")
    for _ in range(2):
        prepare.main([])
        assert capsys.readouterr() == (
            "data/shakespeare_char: 108,000 characters of data/shakespeare_char/input.txt, "
            "vocabulary 16 (char), 97,200 training and 10,800 validation tokens\n"
            "train: python train.py config/shakespeare_char_fast.py\n",
            "",
        )
    prepare.main(["--dataset=shakespeare"])
    assert server.paths == ["good"]
    assert Path("data/shakespeare_char/input.txt").read_bytes() == CORPUS
    assert load_tokenizer("shakespeare").kind == "gpt2"
    assert text_of("shakespeare_char") == text_of("shakespeare") == CORPUS.decode()


# The Hugging Face hub


@pytest.mark.parametrize(
    ("names", "subset", "split", "expected"),
    [
        ("b.jsonl a.jsonl README.md", None, "train", "a.jsonl b.jsonl"),
        ("train.csv test.csv test.parquet", None, "test", "test.parquet"),
        ("data/train-0-of-1.parquet data/validation-0-of-1.parquet", None, "validation",
         "data/validation-0-of-1.parquet"),
        ("en/train/0.parquet fr/train/0.parquet", "fr", "train", "fr/train/0.parquet"),
        ("sample/10BT/0.parquet data/0.parquet", "sample/10BT", "train", "sample/10BT/0.parquet"),
    ],
)  # fmt: skip
def test_files_of_a_split(names, subset, split, expected):
    paths = [PurePosixPath(name) for name in names.split()]
    assert " ".join(map(str, select_tables(paths, "hf:a/b", subset, split))) == expected


@pytest.mark.parametrize(
    ("names", "subset", "split", "message"),
    [
        ("a.txt b.py", None, "train", "hf:a/b has no .*jsonl.*=hf:a/b@refs/convert/parquet"),
        ("en/train.csv fr/train.csv", None, "train", "--subset from en, fr"),
        ("dev.csv test.csv", None, "train", "--split from dev, test"),
        ("a.csv", None, "dev", "split dev; .* --split from train"),
    ],
)
def test_a_split_that_is_not_found_is_an_error_that_lists_the_others(names, subset, split, message):
    with pytest.raises(UserError, match=message):
        select_tables([PurePosixPath(name) for name in names.split()], "hf:a/b", subset, split)


def table(*texts):
    """Returns the bytes of a Parquet file."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"body": texts, "id": list(texts)}), file)
    return file.getvalue()


@pytest.mark.slow
def test_a_dataset_of_the_hub(hub, folder):
    pytest.importorskip("huggingface_hub")

    def prepare_hub(*flags):
        return hub.run(ROOT / "prepare.py", "--text_key=body", "--tokenizer=byte", *flags)

    names = [f"plain_text/train-{n}.parquet" for n in (1, 0, 2)]
    hub.files = {name: table(*(f"{name} {row}" for row in range(50))) for name in names}
    hub.files |= {"plain_text/test.parquet": table("no"), "README.md": b"no"}
    hub.files["plain_text/validation.parquet"] = table("val 1", "val 2")
    flags = ["--input=hf:org/data@v1", "--dataset=own"]
    assert "hf:org/data@v1 (3 files)" in prepare_hub(*flags)
    documents = text_of("own").split("\n\n")
    names.sort()
    expected = [f"{name} {row}" for name in names for row in range(50)]
    assert sorted("".join(documents)) == sorted("".join(expected))
    assert hub.downloads() == names
    assert hub.requests[0][1].endswith("/api/datasets/org/data/revision/v1")
    prepare_hub(flags[0], "--val_input=hf:org/data@v1", "--dataset=with_val")
    data = load_dataset("with_val")
    assert data.tokenizer.decode(data.val) == "val 1\n\nval 2"
    hub.requests.clear()
    assert "(2 files)" in prepare_hub(*flags, "--max_tokens=300")
    assert not hub.downloads()  # they are in the cache
    prepare_hub("--dataset=openwebtext", "--max_tokens=300")
    path = f"/datasets/Skylion007/openwebtext/resolve/{COMMIT}/{names[0]}"
    assert path in [path for _, path in hub.requests]
