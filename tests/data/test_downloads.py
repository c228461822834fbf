"""Downloads of tiny Shakespeare and datasets of the hub, from local servers."""

import hashlib
import io
import random
import socket
from pathlib import Path, PurePosixPath

import pytest
import tiny
from fake_hub import COMMIT

import prepare
from folio.cli.errors import UserError
from folio.cli.settings import ROOT
from folio.data import downloads
from folio.data.dataset import load_dataset, load_tokenizer
from folio.data.downloads import select_tables

CORPUS = b"Now is the winter of our discontent\n" * 3000  # in place of tiny Shakespeare


# Tiny Shakespeare


@pytest.fixture
def shakespeare(hub, folder, monkeypatch):
    """A path of the local hub, from which CORPUS is downloaded in place of tiny Shakespeare."""
    path = f"/resolve/{COMMIT}/input.txt"
    hub.files = {"input.txt": CORPUS}
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(downloads, "SHAKESPEARE_URL", hub.url + path)
    monkeypatch.setattr(downloads, "SHAKESPEARE_BYTES", len(CORPUS))
    monkeypatch.setattr(downloads, "SHAKESPEARE_SHA256", hashlib.sha256(CORPUS).hexdigest())
    return path


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("404", "HTTP 404"),
        ("stalls", "timed out"),
        ("is away", "the connection to 127.0.0.1 failed"),
        ("wrong bytes", "wrong sha256"),
        ("too long", "more than 108,000 bytes"),
    ],
)
def test_failed_downloads_are_explained(fault, cause, shakespeare, hub, monkeypatch):
    monkeypatch.setattr(downloads, "TIMEOUT_S", (30, 0.3 if fault == "stalls" else 30))
    bodies = {"wrong bytes": CORPUS[::-1], "too long": CORPUS * 2}
    hub.files = {"input.txt": bodies[fault]} if fault in bodies else {}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        if fault in ("stalls", "is away"):
            url = f"http://127.0.0.1:{silent.getsockname()[1]}/input.txt"
            monkeypatch.setattr(downloads, "SHAKESPEARE_URL", url)
        if fault == "is away":
            silent.close()
        message = tiny.error_of(prepare.main, [])
    assert f"save {downloads.SHAKESPEARE_URL} as data/shakespeare_char/input.txt" in message
    assert message.endswith(f"({cause})")
    assert [*Path().rglob("*")] == [Path("data"), Path("data/shakespeare_char")]


def test_shakespeare_is_downloaded_once(shakespeare, hub, capsys, gpt2_of_bytes):
    for _ in range(2):
        prepare.main([])
        summary, command = capsys.readouterr().out.splitlines()
        assert "vocabulary 16 (char), 97,200 training and 10,800 validation" in summary
        assert command == "train: python train.py config/shakespeare_char_fast.py"
    prepare.main(["--dataset=shakespeare"])
    assert hub.requests == [("GET", shakespeare)]
    assert Path("data/shakespeare_char/input.txt").read_bytes() == CORPUS
    assert load_tokenizer("shakespeare").kind == "gpt2"
    assert tiny.text_of("shakespeare_char") == tiny.text_of("shakespeare") == CORPUS.decode()
    prepare.main(["--test_fraction=0.1"])
    assert "--out_dir=out-shakespeare-char-fast --score=" in capsys.readouterr().out


# The Hugging Face hub


@pytest.mark.parametrize(
    ("names", "subset", "split", "expected"),
    [
        ("b.jsonl a.jsonl README.md", None, "train", "a.jsonl b.jsonl"),
        ("train.csv test.csv test.parquet", None, "test", "test.parquet"),
        ("test.parquet trees-1.jsonl trees-2.jsonl", None, "test", "test.parquet"),
        ("data.csv data-2.csv metadata.jsonl", None, "train", "data-2.csv data.csv"),
        ("data.arrow cache-1.arrow state.json", None, "train", "data.arrow"),
        ("train.jsonl.gz test.jsonl", None, "train", "train.jsonl.gz"),
        ("data/train-0-of-1.parquet data/validation-0-of-1.parquet", None, "validation",
         "data/validation-0-of-1.parquet"),
        ("en/train/0.parquet fr/train/0.parquet", "fr", "train", "fr/train/0.parquet"),
        ("Train.jsonl Test.jsonl", None, "train", "Train.jsonl"),
        ("training.csv Dev.csv test.csv", None, "validation", "Dev.csv"),
        ("validation.csv train.csv", None, "dev", "validation.csv"),
        ("a.jsonl", None, "Train", "a.jsonl"),
        ("dev.csv validation.csv", None, "validation", "validation.csv"),
        ("sample/10BT/0.parquet data/0.parquet", "sample/10BT", "train", "sample/10BT/0.parquet"),
        ("a/train/0.parquet b/train/0.parquet", "a", "train", "a/train/0.parquet"),
        ("info.jsonl train.csv validation.csv", None, "train", "train.csv"),
        ("test.json train.json labels.csv", None, "train", "train.json"),
        ("en/a.json fr/b.jsonl fr/c.jsonl", "en", "train", "en/a.json"),
        ("test/en/0.csv train/en/0.csv", "test/en", "test", "test/en/0.csv"),
        ("eval/0.csv train/0.csv", "eval", "train", "eval/0.csv"),
        ("de-0.csv fr-1de3.csv", None, "de", "de-0.csv"),
        ("v1.csv v2.csv", None, "v1", "v1.csv"),
        ("a.parquet test.jsonl dataset_info.json", None, "train", "a.parquet"),
        ("train/train.csv train/val.csv", None, "train", "train/train.csv"),
        ("data.json dataset_infos.json", None, "train", "data.json"),
        ("train1.csv test1.csv evaluation.csv", None, "train", "train1.csv"),
        ("csv/train.csv parquet/train.parquet", None, "train", "parquet/train.parquet"),
    ],
)  # fmt: skip
def test_files_of_a_split(names, subset, split, expected):
    sizes = dict.fromkeys(map(PurePosixPath, names.split()), 10)
    assert " ".join(map(str, select_tables(sizes, "hf:a/b", subset, split))) == expected


@pytest.mark.parametrize(
    ("names", "subset", "split", "message"),
    [
        ("a.txt b.py", None, "train", "hf:a/b has no .*jsonl.*=hf:a/b@refs/convert/parquet"),
        ("en/train.csv fr/train.csv", None, "train", "--subset from en, fr"),
        ("a/train/0.csv b/train/0.csv", None, "train", "folders; choose --subset from a, b"),
        ("test/a/0.csv train/a/0.csv train/b/0.csv", None, "train", "from train/a, train/b$"),
        ("a/0.csv", "b", "train", "no tables in b; choose --subset from a"),
        ("test.csv dev.csv metadata.jsonl", None, "train", "--split from dev, test"),
        ("a.csv test.csv", None, "train", "no split train; for --input, choose --split from test"),
        ("dev.csv test.csv", None, "train", "--split from dev, test"),
        ("a.csv", None, "dev", "no split dev; .* --split from train"),
    ],
)
def test_a_split_that_is_not_found_is_an_error_that_lists_the_others(names, subset, split, message):
    sizes = dict.fromkeys(map(PurePosixPath, names.split()), 10)
    with pytest.raises(UserError, match=message):
        select_tables(sizes, "hf:a/b", subset, split)


def table(*texts):
    """Returns the bytes of a Parquet file."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = io.BytesIO()
    others = [random.Random(text).randbytes(1000) for text in texts]  # larger than the texts
    parquet.write_table(pyarrow.table({"body": texts, "other": others}), file)
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
    documents = tiny.text_of("own").split("\n\n")
    names.sort()
    expected = [f"{name} {row}" for name in names for row in range(50)]
    assert sorted("".join(documents)) == sorted("".join(expected))
    assert hub.downloads() == names
    assert hub.requests[0][1].endswith("/api/datasets/org/data/revision/v1")
    prepare_hub(flags[0], "--val_input=hf:org/data@v1", "--dataset=with_val")
    data = load_dataset("with_val")
    assert data.tokenizer.decode(data.val) == "val 1\n\nval 2"
    other = prepare_hub(flags[0], flags[1], "--split=test")
    assert "data/own has a different text, hf:org/data@v1 (3 files)" in other
    hub.requests.clear()
    assert "(2 files)" in prepare_hub(*flags, "--max_tokens=300")
    assert not hub.downloads()  # they are in the cache
    prepare_hub("--dataset=openwebtext", "--max_tokens=300")
    commit = downloads.OPENWEBTEXT.partition("@")[2]
    path = f"/datasets/Skylion007/openwebtext/resolve/{commit}/{names[0]}"
    assert path in [path for _, path in hub.requests]


@pytest.mark.slow
def test_a_hub_that_names_no_commit_or_a_wrong_size_is_refused(hub, folder):
    pytest.importorskip("huggingface_hub")
    hub.files = {"train.csv": b"text\nfirst\nsecond\n"}
    command = [ROOT / "prepare.py", "--input=hf:org/data", "--dataset=own", "--tokenizer=byte"]
    hub.listed_bytes = -1
    assert "train.csv has 18 bytes instead of 17: delete it" in hub.run(*command)
    hub.commit = "../../../../x"
    assert "cannot download hf:org/data: its server names '../.." in hub.run(*command)
    hub.commit, hub.listed_bytes, hub.etag = COMMIT, 0, "../../../../../x"
    assert "its server names '../../../../../x' as the hash of a file: check" in hub.run(*command)
    assert not [*folder.rglob("x")]
    hub.etag = None
    assert "of hf:org/data (1 file)" in hub.run(*command)
