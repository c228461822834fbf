"""Tests of prepare.py: sources of text, and downloads from a server on this computer."""

import errno
import hashlib
import json
import os
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from pydoc_data import topics

import pytest
import tiny

import train
from folio import files, known_texts
from folio.dataset import load_dataset
from folio.errors import UserError
from folio.tokenizers import END_OF_TEXT
from prepare import main

CORPUS = b"Now is the winter of our discontent\n" * 3000  # in place of tiny Shakespeare
BOM = b"\xef\xbb\xbf"
NO_DOWNLOAD = "tiny Shakespeare could not be downloaded"
BODIES = {
    "cut": CORPUS[:1000],
    "stalls_in_body": CORPUS[:1000],
    "wrong_bytes": CORPUS[::-1],
}


@pytest.fixture(autouse=True)
def clean_folder(folder, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("no_proxy", "*")


def write(path, content):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def error_of(*argv):
    with pytest.raises(UserError) as caught:
        main(argv)
    return str(caught.value)


def text_of(name):
    """Returns the text of a prepared dataset."""
    data = load_dataset(name)
    return data.tokenizer.decode(data.train) + data.tokenizer.decode(data.val)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("data/mine", "data/mine is inside the folder of the text: move the text elsewhere"),
        ("data", "data/mine is inside the folder of the text"),
        (".", "data/mine is inside the folder of the text"),
        ("data/mine/train.bin", "data/mine/train.bin would be replaced by the dataset: rename it"),
    ],
)
def test_a_dataset_does_not_replace_its_text(source, message):
    write("data/mine/train.bin", CORPUS)
    write("data/mine/meta.json", "{}")
    assert message in error_of(f"--input={source}", "--dataset=mine")
    assert Path("data/mine/train.bin").read_bytes() == CORPUS
    assert sorted(os.listdir("data/mine")) == ["meta.json", "train.bin"]


@pytest.mark.parametrize("source", ["./in/a.txt", "in", "in/*.txt"])
def test_the_hash_of_one_file_is_that_of_its_content(source):
    write("in/a.txt", CORPUS)
    main([f"--input={source}", "--dataset=mine"])
    meta = json.loads(Path("data/mine/meta.json").read_text())
    expected = hashlib.sha256(Path("in/a.txt").read_bytes()).hexdigest()
    assert (meta["source"], meta["source_sha256"]) == ("in/a.txt", expected)


def test_links_to_folders_are_followed_once():
    write("in/a.txt", "first\n" * 20)
    write("elsewhere/b.txt", "second\n" * 20)
    os.symlink("../elsewhere", "in/linked")
    os.symlink("../in", "in/loop")
    main(["--input=in", "--dataset=mine"])
    assert text_of("mine") == "first\n" * 20 + "\n\n" + "second\n" * 20


# Download


class Handler(BaseHTTPRequestHandler):
    """Serves CORPUS at /good; a number is a status, and other paths fail as their names say."""

    def do_GET(self):
        path = self.path.strip("/")
        self.server.paths.append(path)
        if path == "stalls":
            self.server.closing.wait(30)
            return
        self.send_response(int(path) if path.isdecimal() else 200)
        body = BODIES.get(path, CORPUS)
        self.send_header("Content-Length", str(max(len(body), len(CORPUS))))
        self.end_headers()
        with suppress(ConnectionError):  # the client may close the connection first
            self.wfile.write(body)
        if path == "stalls_in_body":
            self.server.closing.wait(30)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    """A server of CORPUS, which prepare.py takes for tiny Shakespeare."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        server.paths, server.closing = [], threading.Event()
        server.url = f"http://127.0.0.1:{server.server_port}/"
        server.refusing_url = f"http://127.0.0.1:{closed.getsockname()[1]}/"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setattr(known_texts, "SHAKESPEARE_SHA256", hashlib.sha256(CORPUS).hexdigest())
        yield server
        server.closing.set()
        server.shutdown()
        thread.join()


def url_of(server, path):
    return server.refusing_url if path == "refused" else f"{server.url}{path}"


@pytest.mark.parametrize(
    ("path", "reason", "count"),
    [
        ("stalls", "ConnectionError", 3),
        ("stalls_in_body", "ConnectionError", 1),
        ("cut", "ChunkedEncodingError", 1),
        ("refused", "ConnectionError", 0),
        ("500", "RetryError", 3),
        ("404", "HTTPError", 1),
        ("wrong_bytes", "unexpected content", 1),
    ],
)
def test_failed_download_is_explained_and_leaves_no_files(path, reason, count, server, monkeypatch):
    monkeypatch.setattr(known_texts, "TIMEOUT_S", (30, 0.3 if "stalls" in path else 30))
    url = url_of(server, path)
    assert error_of(f"--url={url}") == (
        f"{NO_DOWNLOAD} ({url}: {reason}). Put the file at "
        "data/shakespeare_char/input.txt, or use your own text with --input=FILE --dataset=NAME, "
        "or --dataset=pydocs"
    )
    assert server.paths == [path] * count
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("path", ["cut", "500", "404", "wrong_bytes", "refused"])
def test_second_address_is_used_if_the_first_fails(path, server, monkeypatch, capsys):
    urls = [url_of(server, path), url_of(server, "good")]
    monkeypatch.setattr(known_texts, "SHAKESPEARE_URLS", urls)
    main([])
    assert server.paths[-1] == "good"
    assert text_of("shakespeare_char") == CORPUS.decode()
    assert capsys.readouterr().err == ""


def test_password_in_a_url_is_not_printed(server):
    url = url_of(server, "404").replace("//", "//user:secret@")
    message = error_of(f"--url={url}")
    assert "secret" not in message
    assert f"({url_of(server, '404')}: HTTPError)" in message


# Tiny Shakespeare


def test_shakespeare_is_downloaded_once_for_all_tokenizers(
    server, capsys, monkeypatch, gpt2_of_bytes
):
    monkeypatch.setattr(known_texts, "SHAKESPEARE_URLS", [url_of(server, "good")])
    for _ in range(2):
        main([])
        assert capsys.readouterr().out == (
            "data/shakespeare_char: 108,000 characters of data/shakespeare_char/input.txt, "
            "vocabulary 16 (char), 97,200 training and 10,800 validation tokens\n"
        )
    main(["--dataset=shakespeare"])
    assert server.paths == ["good"]
    assert Path("data/shakespeare_char/input.txt").read_bytes() == CORPUS
    assert load_dataset("shakespeare").tokenizer.kind == "gpt2"
    assert text_of("shakespeare_char") == text_of("shakespeare") == CORPUS.decode()
    main([f"--url={url_of(server, 'good')}"])
    assert server.paths == ["good", "good"]


def test_data_folder_that_cannot_be_accessed_is_named(monkeypatch):
    def stat(path, **_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(files.os, "stat", stat)
    expected = "cannot read data/shakespeare_char/input.txt: Permission denied"
    assert error_of("--dataset=shakespeare_char") == expected
    with pytest.raises(UserError, match="cannot read data/own/train.bin: Permission denied"):
        load_dataset("own")


def test_other_file_in_place_of_shakespeare_is_refused_and_kept(server):
    write("data/shakespeare_char/input.txt", "another text")
    message = error_of()
    assert message.startswith("data/shakespeare_char/input.txt is not tiny Shakespeare")
    assert "--input=data/shakespeare_char/input.txt" in message
    assert Path("data/shakespeare_char/input.txt").read_text() == "another text"
    assert server.paths == []


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("shakespeare_char", (1_003_854, 111_540, 65)), ("shakespeare", (301_966, 36_059, 50257))],
)
def test_shakespeare_has_the_sizes_of_nanogpts_datasets(name, sizes, request, monkeypatch):
    if name == "shakespeare":
        request.getfixturevalue("gpt2")
    if not os.environ.get("FOLIO_SHAKESPEARE"):
        pytest.skip("FOLIO_SHAKESPEARE names no file with tiny Shakespeare")
    monkeypatch.delattr(known_texts, "download")
    write("data/shakespeare_char/input.txt", Path(os.environ["FOLIO_SHAKESPEARE"]).read_bytes())
    main([f"--dataset={name}"])
    data = load_dataset(name)
    assert (len(data.train), len(data.val), data.tokenizer.vocab_size) == sizes
    assert data.byte_lengths[data.val].sum() == 111_540


# Other sources


def test_bpe_is_trained_on_the_training_split_only():
    write("own.txt", "low lower lowest " * 100 + "zyx" * 50)
    main(["--input=own.txt", "--dataset=own", "--tokenizer=bpe", "--vocab_size=280"])
    tokenizer = load_dataset("own").tokenizer
    pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    assert b" lower" in pieces
    assert not any(len(piece) > 1 and piece[:1] in (b"x", b"y", b"z") for piece in pieces)
    assert text_of("own") == "low lower lowest " * 100 + "zyx" * 50


def test_text_is_prepared_with_the_tokenizer_of_a_checkpoint():
    """Otherwise, a model with its own vocabulary could not be trained further on another text."""
    write("old.txt", "abcdef" * 50)
    write("new.txt", "fade" * 50)
    main(["--input=old.txt", "--dataset=old"])
    train.main(tiny.flags(dataset="old", max_iters=1, eval_interval=1))
    main(["--input=new.txt", "--dataset=new", "--tokenizer=out/ckpt.pt"])
    assert load_dataset("new").tokenizer.characters == "abcdef"
    assert text_of("new") == "fade" * 50
    train.main(tiny.flags(dataset="new", init_from="out/ckpt.pt", out_dir="out-new", max_iters=1))


def test_bpe_vocabulary_has_the_requested_size(capsys):
    write("own.txt", "".join(topics.topics.values()))
    main(["--input=own.txt", "--dataset=own", "--tokenizer=bpe", "--vocab_size=512"])
    assert "vocabulary 512 (bpe)" in capsys.readouterr().out
    assert load_dataset("own").tokenizer.vocab_size == 512


@pytest.mark.parametrize("kind", ["bpe", "gpt2"])
def test_literal_end_of_text_ends_a_document_only_if_allowed(kind, gpt2_of_bytes):
    text = "one<|endoftext|>two" * 20
    write("own.txt", text)
    flags = ["--input=own.txt", "--dataset=own", f"--tokenizer={kind}"]
    main(flags)
    data = load_dataset("own")
    assert text_of("own") == text
    assert data.tokenizer.end not in [*data.train, *data.val]
    main([*flags, "--allow_special=True"])
    data = load_dataset("own")
    assert [*data.train, *data.val].count(data.tokenizer.end) == 20
    assert text_of("own") == text


def test_pydocs_needs_no_network_and_is_reproducible(monkeypatch):
    monkeypatch.delattr(socket, "socket")
    main(["--dataset=pydocs"])
    first = {path.name: path.read_bytes() for path in Path("data/pydocs").iterdir()}
    main(["--dataset=pydocs"])
    assert {path.name: path.read_bytes() for path in Path("data/pydocs").iterdir()} == first
    assert text_of("pydocs") == "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


def test_file_becomes_a_dataset():
    write("own.txt", BOM + "one\r\ntwo\n🦶\x01".encode() * 10)
    main(["--input=own.txt", "--dataset=own"])
    assert text_of("own") == "one\r\ntwo\n🦶\x01" * 10


def test_folder_is_read_in_order_of_paths_without_hidden_files(gpt2_of_bytes):
    write("own/b.txt", "[second]")
    write("own/c/d.txt", BOM + b"[fourth]")
    write("own/c/a.txt", "[third]")
    write("own/a.md", "[first]")
    write("own/.hidden", "no")
    write("own/.git/no.txt", b"\xff")
    parts = ["[first]", "[second]", "[third]", "[fourth]"]
    main(["--input=own", "--dataset=own"])
    assert text_of("own") == "\n\n".join(parts)
    main(["--input=own", "--dataset=tokens", "--tokenizer=gpt2"])
    assert text_of("tokens") == END_OF_TEXT.join(parts)
    data = load_dataset("tokens")
    assert [*data.train, *data.val].count(data.tokenizer.end) == 3
    Path("own/link").symlink_to("missing")
    assert error_of("--input=own", "--dataset=own").startswith("own/link is not a regular file")


@pytest.mark.parametrize(
    ("raw", "byte"),
    [
        (b"ab\xff", "2 is 0xff"),
        (BOM + b"ab\xff", "5 is 0xff"),
        (b"ab\xe2\x82", "2 is 0xe2"),
        (b"a" * 1_000_000 + b"\x80b", "1,000,000 is 0x80"),
        ("hello".encode("utf-16"), "0 is 0xff"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "0 is 0x89"),
    ],
)
def test_text_must_be_utf8(raw, byte):
    write("own/latin.txt", raw)
    for path in ("own/latin.txt", "own"):
        message = error_of(f"--input={path}", "--dataset=own")
        assert message.startswith(f"own/latin.txt is not UTF-8 text: byte {byte}")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--input=missing.txt --dataset=x", "cannot read missing.txt: No such file"),
        (f"--input={'x' * 300} --dataset=x", f"cannot read {'x' * 300}: File name too long"),
        ("--input=empty --dataset=x", "empty contains no files; hidden files are skipped"),
        ("--input=t/a.txt", "--input needs a name for the dataset, such as --dataset=a"),
        ("--dataset=x", "dataset x needs --input=FILE_OR_FOLDER; datasets that do not need it: "),
        ("--dataset=pydoc", "dataset pydoc needs --input=FILE_OR_FOLDER; did you mean pydocs?"),
        ("--dataset=pydocs", "cannot write to data/pydocs: Not a directory"),
        ("--url=nowhere", f"{NO_DOWNLOAD} (nowhere: MissingSchema)"),
        ("--url=file:///etc/hosts", f"{NO_DOWNLOAD} (file:///etc/hosts: InvalidSchema)"),
        ("--url=http://[", f"{NO_DOWNLOAD} (http://[: InvalidURL)"),
        (f"--url=http://{'a' * 80}.example/", f"{NO_DOWNLOAD} (http://{'a' * 80}.example/: "),
        ("--vocab_size=512", "--vocab_size needs --tokenizer=bpe; the tokenizer is char"),
        ("--tokenizer=bpe --vocab_size=256", "--vocab_size must be in [257, 1000000], not 256"),
        ("--tokenizer=bpe --vocab_size=10000000000", "--vocab_size must be in [257, 1000000]"),
        ("--tokenizer=chars", "--tokenizer must be char, byte, bpe, gpt2 or an existing path, not"),
        ("--allow_special=True", "--allow_special needs --tokenizer=bpe or gpt2"),
        ("--url=x --dataset=pydocs", "--url applies to tiny Shakespeare only"),
        ("--url=x --input=a --dataset=b", "--url applies to tiny Shakespeare only"),
    ],
)
def test_error_names_the_flag_or_file(flags, message):
    write("data", "a file in place of the folder")
    Path("empty").mkdir()
    assert error_of(*flags.split()).startswith(message)


def test_verify_checks_an_existing_dataset(capsys):
    write("own.txt", "rose " * 100)
    main(["--input=own.txt", "--dataset=own"])
    capsys.readouterr()
    main(["--dataset=own", "--verify"])
    assert "data/own" in capsys.readouterr().out
    raw = Path("data/own/val.bin").read_bytes()
    Path("data/own/val.bin").write_bytes(raw[:-2] + b"\1\0")
    assert "data/own/val.bin" in error_of("--dataset=own", "--verify")
    assert "data/shakespeare_char" in error_of("--verify")


def test_json_lines_with_another_key_become_a_dataset():
    write("own.jsonl", "".join(f'{{"body": "rose {n}"}}\n' for n in range(100)))
    main(["--input=own.jsonl", "--dataset=own", "--text_key=body"])
    documents = text_of("own").split("\n\n")
    assert len(documents) == 99  # one is joined to the last of the other split
    assert "text_key" in error_of("--input=own.jsonl", "--dataset=own")


@pytest.mark.parametrize("source", ["data/own/unfinished.json", "data/*/train.bin"])
def test_files_of_the_dataset_are_no_input(source):
    write("data/own/train.bin", "rose")
    write("data/own/unfinished.json", "rose")
    assert "would be replaced by the dataset" in error_of(f"--input={source}", "--dataset=own")


@pytest.mark.parametrize("text", ["", BOM])
def test_a_text_must_not_be_empty(text):
    write("empty.txt", text)
    error = error_of("--input=empty.txt", "--dataset=x")
    assert error.startswith("empty.txt is too short to split: its 0 bytes")
