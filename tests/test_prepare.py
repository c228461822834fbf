import errno
import hashlib
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import zlib
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from pydoc_data import topics
from socketserver import ThreadingTCPServer

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import prepare
from config import UserError
from prepare import DATA, Text, download, load_dataset, load_tokenizer, main, write_dataset
from tokenizer import END_OF_TEXT, CharTokenizer

ROOT = Path(__file__).parents[1]
BARD = b"Now is the winter of our discontent\n" * 3000  # stands in for tiny Shakespeare
BOM = b"\xef\xbb\xbf"


@pytest.fixture(autouse=True)
def empty_folder_and_no_proxy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("no_proxy", "*")


def write(path, content):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def complaint(*argv):
    with pytest.raises(UserError) as caught:
        main(argv)
    return str(caught.value)


def refusal(name):
    with pytest.raises(UserError) as caught:
        load_dataset(name)
    return str(caught.value)


def text_of(name):
    """The text of a prepared dataset, as (train, val)."""
    data = load_dataset(name)
    return data.tokenizer.decode(data.train), data.tokenizer.decode(data.val)


# Downloading, from a server on this machine


class Mirror(BaseHTTPRequestHandler):
    """Serves BARD at /good; fails at each other path in the way that its name says."""

    def do_GET(self):
        self.server.seen.append(self.path)
        with suppress(ConnectionError):  # the client may leave first
            getattr(self, self.path.strip("/"))()

    def good(self):
        self.send(BARD)

    def send(self, body, size=None):
        self.send_response(200)
        self.send_header("Content-Length", str(size or len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stalls(self):
        self.server.closing.wait(30)

    def stalls_midway(self):
        self.send(BARD[:1000], len(BARD))
        self.server.closing.wait(30)

    def cuts(self):
        self.send(BARD[:1000], len(BARD))

    def broken(self):
        self.send_error(500)

    def busy(self):
        self.send_error(429)

    def missing(self):
        self.send_error(404)

    def wrong_bytes(self):
        self.send(BARD[::-1])

    def too_many_bytes(self):
        self.send(BARD + b"!")

    def recovers(self):
        self.good() if self.server.seen.count("/recovers") > 1 else self.broken()

    def log_message(self, *_):
        pass


class Server(ThreadingTCPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Mirror)
        self.seen, self.closing = [], threading.Event()

    def url(self, path):
        return f"http://127.0.0.1:{self.server_address[1]}/{path}"


@pytest.fixture
def mirror():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.closing.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def nobody():
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/good"


@pytest.fixture
def pauses(monkeypatch):
    """The pauses that would have been made."""
    made = []
    monkeypatch.setattr("prepare.time.sleep", made.append)
    return made


@pytest.fixture
def bard_for_shakespeare(monkeypatch, mirror, pauses):
    monkeypatch.setattr(prepare, "SHAKESPEARE_BYTES", len(BARD))
    monkeypatch.setattr(prepare, "SHAKESPEARE_SHA256", hashlib.sha256(BARD).hexdigest())
    monkeypatch.setattr(prepare, "SHAKESPEARE_URLS", (mirror.url("missing"), mirror.url("good")))


def fetch(*urls):
    path, sha256 = Path("data/x/input.txt"), hashlib.sha256(BARD).hexdigest()
    patience_s = 0.4 if any("stalls" in url for url in urls) else 30
    return download(urls, len(BARD), sha256, path, timeout_s=(30, patience_s), pause_s=0.01)


def failure(*urls):
    with pytest.raises(UserError) as caught:
        fetch(*urls)
    return str(caught.value)


FAILURES = [
    ("stalls", "timed out", 3),
    ("stalls_midway", "timed out", 3),
    ("cuts", "the connection broke off", 3),
    ("broken", "HTTP 500", 3),
    ("busy", "HTTP 429", 3),
    ("missing", "HTTP 404", 1),
    ("wrong_bytes", "it sent other bytes than tiny Shakespeare's", 1),
    ("too_many_bytes", "it sent other bytes than tiny Shakespeare's", 1),
]


def test_a_download_gives_the_bytes_and_leaves_no_bar_in_a_log(mirror, capsys):
    assert fetch(mirror.url("good")) == BARD
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("path", "reason", "times"), FAILURES)
def test_a_failure_is_told_and_tried_again_where_that_may_help(path, reason, times, mirror):
    url = mirror.url(path)
    assert f"({url.split('/')[2]}: {reason})" in failure(url)
    assert mirror.seen == [f"/{path}"] * times


@pytest.mark.parametrize("path", ["stalls_midway", "cuts", "broken", "missing", "wrong_bytes"])
def test_the_second_mirror_serves_where_the_first_fails(path, mirror):
    assert fetch(mirror.url(path), mirror.url("good")) == BARD
    assert mirror.seen == [f"/{path}", "/good"]


def test_the_second_mirror_serves_where_nobody_answers_at_the_first(nobody, mirror):
    assert fetch(nobody, mirror.url("good")) == BARD


def test_a_server_that_recovers_is_asked_again(mirror):
    assert fetch(mirror.url("recovers")) == BARD


def test_only_a_mirror_that_may_recover_is_asked_again(mirror):
    message = failure(mirror.url("missing"), mirror.url("broken"))
    assert mirror.seen == ["/missing", "/broken", "/broken", "/broken"]
    assert "HTTP 404; " in message
    assert "HTTP 500)" in message


def test_the_pauses_between_attempts_grow(mirror, pauses):
    failure(mirror.url("broken"))
    assert pauses == [0.01, 0.02]


def test_without_a_network_one_line_gives_three_ways_on(nobody):
    message = failure(nobody)
    assert "no connection" in message
    for way in ("put the file at data/x/input.txt", "--input=", "--dataset=pydocs"):
        assert way in message


@pytest.mark.parametrize(
    "url", ["", "nowhere", "file:///etc/hosts", "http://[", f"http://{'a' * 80}.example/"]
)
def test_an_address_that_is_none_is_told(url):
    assert message_has_ways_on(failure(url))


def message_has_ways_on(message):
    return "could not be downloaded" in message and "Three ways on" in message


# Tiny Shakespeare


@pytest.mark.usefixtures("bard_for_shakespeare")
def test_shakespeare_is_downloaded_once_and_then_read_from_its_place(mirror, capsys):
    main([])
    assert mirror.seen == ["/missing", "/good"]
    assert Path("data/shakespeare_char/input.txt").read_bytes() == BARD
    main(["--dataset=shakespeare_char"])
    assert len(mirror.seen) == 2
    assert "".join(text_of("shakespeare_char")) == BARD.decode()
    line = "data/shakespeare_char: 108,000 characters of data/shakespeare_char/input.txt, "
    line += "vocabulary 16 (char), 97,200 train and 10,800 validation tokens\n"
    assert capsys.readouterr().out == line * 2


@pytest.mark.usefixtures("bard_for_shakespeare")
def test_another_address_takes_the_mirrors_place(mirror):
    main([f"--url={mirror.url('recovers')}"])
    assert mirror.seen == ["/recovers", "/recovers"]


@pytest.mark.usefixtures("bard_for_shakespeare")
@pytest.mark.parametrize("path", ["cuts", "broken", "wrong_bytes"])
def test_a_failed_download_leaves_nothing_behind(path, mirror):
    assert message_has_ways_on(complaint(f"--url={mirror.url(path)}"))
    assert list(Path().iterdir()) == []


@pytest.mark.usefixtures("bard_for_shakespeare")
def test_a_wrong_file_in_its_place_is_named_and_kept(mirror):
    write("data/shakespeare_char/input.txt", "not the bard")
    message = complaint()
    assert message.startswith("data/shakespeare_char/input.txt is not tiny Shakespeare")
    assert "--input=data/shakespeare_char/input.txt" in message
    assert Path("data/shakespeare_char/input.txt").read_text() == "not the bard"
    assert mirror.seen == []


@pytest.mark.usefixtures("bard_for_shakespeare")
def test_a_text_that_lies_with_the_other_tokenizers_dataset_is_not_downloaded_again(
    mirror, gpt2_of_bytes
):
    write("data/shakespeare_char/input.txt", BARD)
    main(["--dataset=shakespeare"])
    assert mirror.seen == []


@pytest.mark.parametrize("argv", [["--dataset=pydocs"], ["--input=own.txt", "--dataset=own"]])
def test_an_address_is_for_shakespeare_alone(argv):
    write("own.txt", "abcdefghij" * 2)
    assert complaint("--url=http://127.0.0.1/", *argv) == "--url is for tiny Shakespeare alone"


@pytest.mark.usefixtures("bard_for_shakespeare")
def test_shakespeare_in_byte_pairs_is_the_dataset_without_char(gpt2_of_bytes):
    main(["--dataset=shakespeare"])
    assert load_tokenizer("shakespeare").kind == "gpt2"
    assert "".join(text_of("shakespeare")) == BARD.decode()


@pytest.fixture
def real_shakespeare(monkeypatch):
    """The real text in its place, and no way to download it."""
    if not os.environ.get("FOLIO_SHAKESPEARE"):
        pytest.skip("FOLIO_SHAKESPEARE names no file with tiny Shakespeare")
    monkeypatch.delattr(prepare, "download")
    raw = Path(os.environ["FOLIO_SHAKESPEARE"]).read_bytes()
    for name in ("shakespeare_char", "shakespeare"):
        write(f"data/{name}/input.txt", raw)


@pytest.mark.usefixtures("real_shakespeare")
def test_the_real_shakespeare_in_characters(capsys):
    main([])
    assert capsys.readouterr().out == (
        "data/shakespeare_char: 1,115,394 characters of data/shakespeare_char/input.txt, "
        "vocabulary 65 (char), 1,003,854 train and 111,540 validation tokens\n"
    )
    assert text_of("shakespeare_char")[0].startswith("First Citizen:\nBefore we proceed")


@pytest.mark.usefixtures("real_shakespeare", "gpt2")
def test_the_real_shakespeare_in_byte_pairs():
    main(["--dataset=shakespeare"])
    data = load_dataset("shakespeare")
    assert (len(data.train), len(data.val)) == (301_966, 36_059)
    assert data.val_bytes_per_token == 111_540 / 36_059


# Python's own reference


def test_pydocs_needs_no_network_and_is_the_same_each_time(monkeypatch):
    monkeypatch.delattr(socket, "socket")
    main(["--dataset=pydocs"])
    first = {path.name: path.read_bytes() for path in Path("data/pydocs").iterdir()}
    main(["--dataset=pydocs"])
    second = {path.name: path.read_bytes() for path in Path("data/pydocs").iterdir()}
    assert first == second
    in_order = [text for _, text in sorted(topics.topics.items())]
    assert "".join(text_of("pydocs")) == "\n\n".join(in_order)


# A person's own text


def test_a_file_becomes_a_dataset_line_ends_and_all():
    write("own.txt", "one\r\ntwo\n🦶\x01" * 10)
    main(["--input=own.txt", "--dataset=own"])
    assert "".join(text_of("own")) == "one\r\ntwo\n🦶\x01" * 10


def test_nul_is_not_text():
    write("own.txt", "hello".encode("utf-16-le") * 9)
    assert complaint("--input=own.txt", "--dataset=own").startswith(
        "own.txt is not UTF-8 text: byte 1 is NUL"
    )


def prepare_and_die_after(renames, monkeypatch):
    real, seen = os.replace, []

    def breaks_off(*paths):
        seen.append(paths)
        if len(seen) > renames:
            raise KeyboardInterrupt
        real(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", breaks_off)
        with pytest.raises(KeyboardInterrupt):
            main(["--input=own.txt", "--dataset=own"])


@pytest.mark.parametrize("renames", [1, 2])
def test_a_dataset_cut_between_two_files_is_not_taken_for_another(renames, monkeypatch):
    write("own.txt", "abcdefghij" * 9)
    main(["--input=own.txt", "--dataset=own"])
    write("own.txt", "jihgfedcba" * 9)  # as many tokens, and the same vocabulary
    prepare_and_die_after(renames, monkeypatch)
    with pytest.raises(UserError, match="prepare the dataset again"):
        load_dataset("own")


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_first_dataset_cut_between_two_files_is_not_taken_for_nanogpts(renames, monkeypatch):
    write("own.txt", "abcdefghij" * 9)
    prepare_and_die_after(renames, monkeypatch)
    with pytest.raises(UserError, match=r"train.bin is missing|cannot read data/own/val.bin"):
        load_dataset("own")


def test_a_disk_that_fills_up_leaves_the_dataset_that_was_there(monkeypatch):
    write("own.txt", "abcdefghij" * 9)
    main(["--input=own.txt", "--dataset=own"])

    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    write("own.txt", "abcdefgh" * 99)
    assert "val.bin: No space left on device" in complaint("--input=own.txt", "--dataset=own")
    assert text_of("own") == ("abcdefghij" * 8 + "a", "bcdefghij")
    assert len(list(Path("data/own").iterdir())) == 3


def test_a_byte_order_mark_is_not_text():
    write("own.txt", BOM + b"abcdefghij" * 2)
    main(["--input=own.txt", "--dataset=own"])
    assert text_of("own") == ("abcdefghijabcdefgh", "ij")


def make_folder():
    """Files of a folder, written out of order, some of them hidden."""
    write("own/b.txt", "[second]")
    write("own/c/d.txt", BOM + b"[fourth]")
    write("own/c/a.txt", "[third]")
    write("own/a.md", "[first]")
    write("own/.hidden", "no")
    write("own/.git/no.txt", b"\xff")


def test_a_folder_is_read_in_order_without_what_is_hidden():
    make_folder()
    main(["--input=own", "--dataset=own"])
    assert "".join(text_of("own")) == "[first]\n\n[second]\n\n[third]\n\n[fourth]"


def test_byte_pairs_mark_the_end_of_each_file_of_a_folder(gpt2_of_bytes):
    make_folder()
    main(["--input=own", "--dataset=own", "--tokenizer=gpt2"])
    data = load_dataset("own")
    assert [*data.train, *data.val].count(256) == 3
    assert "".join(text_of("own")).split(END_OF_TEXT)[1:3] == ["[second]", "[third]"]


@pytest.mark.parametrize(
    ("raw", "offset", "byte"),
    [
        (b"ab\xff", "2", "0xff"),
        (BOM + b"ab\xff", "5", "0xff"),
        (b"ab\xe2\x82", "2", "0xe2"),
        (b"a" * 1_000_000 + b"\x80b", "1,000,000", "0x80"),
    ],
)
def test_text_that_is_not_utf8_is_told_with_the_first_wrong_byte(raw, offset, byte):
    write("own/latin.txt", raw)
    message = f"own/latin.txt is not UTF-8 text: byte {offset} is {byte}; "
    assert complaint("--input=own/latin.txt", "--dataset=own").startswith(message)
    assert complaint("--input=own", "--dataset=own").startswith(message)


@pytest.mark.parametrize("content", [b"", BOM, None])
def test_an_empty_text_is_told(content):
    if content is None:
        Path("own").mkdir()  # a folder without files
    else:
        write("own", content)
    message = complaint("--input=own", "--dataset=own")
    assert message in ("own is empty", "own (0 files) is empty")
    assert not DATA.exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a", "its 1 characters leave 0 of the 2 tokens that train needs at least"),
        ("abcdefghij", "its 10 characters leave 1 of the 2 tokens that val needs at least"),
    ],
)
def test_a_text_too_short_to_split_is_told(text, reason):
    write("own.txt", text)
    message = complaint("--input=own.txt", "--dataset=own")
    assert message == f"own.txt is too short to split: {reason}"
    assert not DATA.exists()


def test_more_characters_than_uint16_can_tell_apart_are_refused():
    write("own.txt", "".join(map(chr, range(0x10000, 0x10000 + 65537))))
    message = complaint("--input=own.txt", "--dataset=own")
    assert "65,537 distinct characters" in message
    assert "--tokenizer=gpt2" in message


@pytest.mark.parametrize("name", ["nope.txt", "x" * 300])
def test_a_missing_input_is_told(name):
    assert complaint(f"--input={name}", "--dataset=own").startswith(f"cannot read {name}: ")


def test_an_input_that_may_not_be_read_is_told(monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    write("own.txt", "text")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    message = complaint("--input=own.txt", "--dataset=own")
    assert message == "cannot read own.txt: Permission denied"


def test_a_place_that_cannot_be_written_is_told():
    write("data", "a file where the folder should be")
    message = complaint("--dataset=pydocs")
    assert message == "cannot write to data/pydocs: Not a directory"


# Names


@pytest.mark.parametrize("name", [".", "..", "../x", "a/b", "/tmp/x", "a\\b", "c:x"])
def test_a_name_that_is_a_path_is_refused(name):
    write("own.txt", "abcdefghij" * 2)
    message = complaint("--input=own.txt", f"--dataset={name}")
    assert message == f"a dataset's name is a plain folder name, not {name!r}"
    with pytest.raises(UserError, match="plain folder name"):
        load_dataset(name)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("shakespeare_chars", "did you mean shakespeare_char?"), ("zzz", "pydocs")],
)
def test_an_unknown_dataset_asks_for_its_text_and_names_what_is_known(name, hint):
    message = complaint(f"--dataset={name}")
    assert message.startswith(f"dataset {name} needs its text, --input=FILE_OR_FOLDER; ")
    assert hint in message


def test_an_input_needs_a_name():
    assert complaint("--input=texts/speech.txt").endswith("--dataset=speech")


@pytest.mark.parametrize("ready", [True, False])
def test_a_missing_dataset_names_the_command_that_makes_it(ready):
    if ready:
        write("data/own/train.bin", b"\0\0")
    rest = ", or choose from own" if ready else ""
    assert refusal("pydocs") == (
        f"data/pydocs/train.bin is missing; make it by python prepare.py --dataset=pydocs{rest}"
    )
    assert "python prepare.py --dataset=speech --input=FILE_OR_FOLDER" in refusal("speech")


# The folder's format


def test_the_files_of_a_dataset():
    write_dataset(DATA / "own", Text("abcabcabcabca\u0113", "own.txt", "5a"), CharTokenizer("abcē"))
    assert Path("data/own/train.bin").read_bytes() == b"\0\0\1\0\2\0" * 4
    assert Path("data/own/val.bin").read_bytes() == b"\0\0\3\0"
    meta = json.loads(Path("data/own/meta.json").read_bytes())
    checksum = meta.pop("crc32")
    assert checksum == zlib.crc32(json.dumps(meta, sort_keys=True).encode())
    assert meta == {
        "format": 1,
        "tokenizer": {"kind": "char", "characters": "abcē"},
        "vocab_size": 4,
        "source": "own.txt",
        "source_sha256": "5a",
        "train": {"tokens": 12, "bytes": 12, "crc32": zlib.crc32(b"\0\0\1\0\2\0" * 4)},
        "val": {"tokens": 2, "bytes": 3, "crc32": zlib.crc32(b"\0\0\3\0")},
    }
    assert {path.name for path in Path("data/own").iterdir()} == {
        "meta.json",
        "train.bin",
        "val.bin",
    }


@given(st.text(min_size=11))
@example("\r\n\0 é🦶\ufeff\u2028\U0010ffff--")
def test_any_text_comes_back_from_its_dataset(text):
    write_dataset(DATA / "own", Text(text, "own.txt", "5a"), CharTokenizer.from_text(text))
    data, cut = load_dataset("own"), int(0.9 * len(text))
    assert data.train.dtype == np.uint16
    assert text_of("own") == (text[:cut], text[cut:])
    assert data.val_bytes_per_token == len(text[cut:].encode()) / len(text[cut:])


def own_dataset():
    text = "abcdefghij" * 2
    write_dataset(DATA / "own", Text(text, "own.txt", "5a"), CharTokenizer.from_text(text))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train.bin", b"\0\0\1", "data/own/train.bin is damaged: its 3 bytes"),
        ("val.bin", b"", "data/own/val.bin is damaged: its 0 bytes"),
        (
            "val.bin",
            b"\0\0",
            "data/own/val.bin is damaged: it holds other tokens",
        ),
        ("meta.json", b"", "data/own/meta.json is damaged"),
        ("meta.json", b'{"format": 1', "data/own/meta.json is damaged"),
        ("meta.json", b"\xff", "data/own/meta.json is damaged"),
        ("meta.json", b"[]", "data/own/meta.json is damaged"),
        ("meta.json", b"{}", "data/own/meta.json is damaged"),
        ("meta.json", b'{"format": 2}', "data/own/meta.json was written by a later folio"),
    ],
)
def test_a_damaged_file_is_named(file, content, message):
    own_dataset()
    write(f"data/own/{file}", content)
    assert refusal("own").startswith(message)


def test_a_split_that_is_missing_is_named():
    own_dataset()
    Path("data/own/val.bin").unlink()
    assert refusal("own") == "cannot read data/own/val.bin: No such file or directory"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer", {"kind": "words"}, "data/own: its tokenizer is damaged or unknown"),
        ("val", {"tokens": 2}, "data/own/meta.json is damaged"),
        ("train", {"tokens": 18.0, "bytes": 18}, "data/own/meta.json is damaged"),
    ],
)
def test_a_wrong_entry_of_the_meta_is_refused(key, value, message):
    own_dataset()
    path = Path("data/own/meta.json")
    meta = json.loads(path.read_bytes()) | {key: value}
    write(path, json.dumps(meta | {"crc32": prepare._checksum(meta)}))
    assert refusal("own").startswith(message)


# nanoGPT's folders


def nanogpt_folder(meta=None):
    """data/nano as nanoGPT writes it; `meta` is what its meta.pkl holds, if there is one."""
    ids = np.array([2, 0, 1, 1], dtype=np.uint16)
    Path("data/nano").mkdir(parents=True)
    ids.tofile("data/nano/train.bin")
    ids[::-1].tofile("data/nano/val.bin")
    if meta is not None:
        write("data/nano/meta.pkl", pickle.dumps(meta))


def char_table(characters):
    """nanoGPT's meta of a character dataset."""
    itos = dict(enumerate(characters))
    return {
        "vocab_size": len(itos),
        "itos": itos,
        "stoi": {character: i for i, character in itos.items()},
    }


def test_nanogpts_character_dataset_is_read():
    nanogpt_folder(char_table("\nab"))
    assert text_of("nano") == ("b\naa", "aa\nb")
    assert load_dataset("nano").val_bytes_per_token is None


def test_nanogpts_dataset_without_a_table_holds_gpt2_tokens():
    nanogpt_folder()
    data = load_dataset("nano")
    assert data.tokenizer.kind == "gpt2"
    assert (data.train.tolist(), data.val.tolist()) == ([2, 0, 1, 1], [1, 1, 0, 2])


class Hostile:
    """Unpickled by an ordinary unpickler, it makes a folder."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("meta", [Hostile(), char_table("ab") | {"extra": [Hostile()]}])
def test_a_hostile_table_is_refused_and_not_run(meta):
    nanogpt_folder(meta)
    assert "it is more than plain data" in refusal("nano")
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "raw",
    [
        pickle.dumps([]),
        pickle.dumps(char_table("ab") | {"vocab_size": 3}),
        pickle.dumps(char_table("ab") | {"vocab_size": -1}),
        pickle.dumps(char_table(["ab", "c"])),
        pickle.dumps(char_table("aa")),
        pickle.dumps(char_table("ab"))[:-20],
    ],
)
def test_a_table_that_is_not_nanogpts_is_refused(raw):
    nanogpt_folder()
    write("data/nano/meta.pkl", raw)
    assert refusal("nano").startswith("data/nano: ")


# As a command


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--input=nope.txt", "--dataset=own"], "cannot read nope.txt: No such file or directory"),
        (["--datasets=own"], "unknown setting --datasets; did you mean dataset?"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_status_2(argv, message):
    command = [sys.executable, ROOT / "prepare.py", *argv]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"prepare.py: {message}\n"


def test_importing_prepare_waits_for_no_slow_library():
    script = "import prepare, sys; print({'torch', 'requests', 'tiktoken'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True)
    assert result.stdout.strip() == b"set()"
