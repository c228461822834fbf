"""Tests of prepare.py: from files of every kind to a dataset, and errors in settings."""

import hashlib
import itertools
import json
import os
import random
import re
import socket
from pathlib import Path
from pydoc_data import topics
from types import SimpleNamespace

import pytest
import tiny

import prepare
import train
from folio.data import corpus, downloads
from folio.data.dataset import load_dataset
from folio.data.tokenizer import CharTokenizer
from prepare import main

BOM = b"\xef\xbb\xbf"
pytestmark = pytest.mark.usefixtures("folder")


def write(path, content):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def error_of(*argv):
    return tiny.error_of(main, argv)


def tokens_of(name):
    tokenizer = load_dataset(name).tokenizer
    return [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]


# Files


@pytest.mark.parametrize("source", ["./in/a.txt", "in", "in/*.txt"])
def test_a_file_becomes_a_dataset(source):
    raw = BOM + "one\r\ntwo\n🦶\x01".encode() * 10
    write("in/a.txt", raw)
    main([f"--input={source}", "--dataset=own"])
    assert tiny.text_of("own") == "one\ntwo\n🦶\x01" * 10
    meta = json.loads(Path("data/own/meta.json").read_text())
    name = "in/a.txt" if source == "./in/a.txt" else f"{source} (1 file)"
    assert (meta["source"], meta["source_sha256"]) == (name, hashlib.sha256(raw).hexdigest())


def test_control_characters_of_a_file_name_are_escaped(capsys):
    write("in/a\x1b[31m\n.txt", "rose " * 20)
    write("in/b\x1b.png", "\0")
    main(["--input=in", "--dataset=own"])
    out = capsys.readouterr().out
    assert out.startswith(r"left out 1 file (binary, or documentation of tables): b\x1b.png")
    main(["--input=in/a\x1b[31m\n.txt", "--dataset=a"])
    assert r"characters of in/a\x1b[31m\n.txt, vocabulary" in capsys.readouterr().out


def test_a_dataset_of_a_different_text_is_not_replaced():
    write("own of Python 1.txt", "rose " * 20)
    main(["--input=own of Python 1.txt", "--dataset=own"])
    write("own of Python 1.txt", "rose " * 30)  # an edited text
    main(["--input=own of Python 1.txt", "--dataset=own"])
    expected = tiny.contents("data/own")
    write("own of Python 2.txt", "lily " * 20)
    error = error_of("--input=own of Python 2.txt", "--dataset=own")
    assert "different text, own of Python 1.txt" in error
    assert tiny.contents("data/own") == expected
    write("copy.txt", "rose " * 30)
    main(["--input=copy.txt", "--dataset=own", "--tokenizer=byte"])
    tiny.write_nanogpt_dataset("nano")
    assert "data/nano has token files" in error_of("--input=copy.txt", "--dataset=nano")
    main(["--input=copy.txt", "--dataset=pydocs"])
    assert "different text, copy.txt" in error_of("--dataset=pydocs")
    write("data/nano2/val.bin", "")
    assert "data/nano2 has token files" in error_of("--input=copy.txt", "--dataset=nano2")


def test_files_that_are_added_to_a_folder_are_the_same_text(capsys):
    write("val/d.txt", "verse d " * 20)
    for name in ("a", "b", "c"):
        write(f"in/{name}.txt", f"verse {name} " * 20)
        main(["--input=in", "--val_input=val", "--dataset=own"])
    assert "of in (3 files), validation text val (1 file), vocabulary" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "separator"), [("char", "\n"), ("byte", "\n"), ("bpe", "<|endoftext|>")]
)
def test_lines_are_documents_with_one_separator_between_them(kind, separator):
    names = [f"name {number}" for number in range(200)]
    write("names.txt", "\r\n\r\n".join(names) + "\r\n")
    flags = ["--input=names.txt", "--dataset=own", "--lines=True", "--test_fraction=0.1"]
    main([*flags, f"--tokenizer={kind}"])
    data, test = load_dataset("own"), Path("data/own/test.txt").read_text().split("\n")
    train, val = (data.tokenizer.decode(ids).split(separator) for ids in (data.train, data.val))
    assert len({*train, *val, *test} & set(names)) >= 198  # the splits cut one at each boundary
    assert "name 199" not in [*val[1:], *test][-1:]  # not the last lines
    assert data.tokenizer.start == ("" if kind == "bpe" else "\n")


LIST = ["".join(letters) for letters in itertools.product("abcdefghijkl", repeat=3)]
SHUFFLED = random.Random(1).sample(LIST, len(LIST))
LOG = [f"2024-05-01 {number:05} {word}" for number, word in enumerate(SHUFFLED)]


@pytest.mark.parametrize(
    ("lines", "is_list"), [(LIST, True), (LIST[:999], False), (SHUFFLED, False), (LOG, False)]
)
def test_sorted_lines_are_reported(lines, is_list, capsys):
    write("own.txt", "\n".join(lines))
    for flags in ([], ["--lines=True"]):
        main(["--input=own.txt", "--dataset=own", *flags])
        is_reported = "lines are sorted" in capsys.readouterr().out
        assert is_reported == (is_list and not flags)


def test_end_tokens_in_rows_do_not_end_documents(gpt2_of_bytes):
    rows = [f"question {i}<|endoftext|>yes<|endoftext|>" for i in range(60)]
    write("chat.jsonl", "".join(json.dumps({"text": row}) + "\n" for row in rows))
    main(["--input=chat.jsonl", "--dataset=own", "--tokenizer=gpt2", "--allow_special=True"])
    data = load_dataset("own")
    for text in map(data.tokenizer.decode, (data.train, data.val)):
        assert text.count("yes") >= text.count("question") - 1  # the cut document


def test_empty_files_do_not_make_texts_of_tables(capsys):
    for name in ("a.json", "b.json"):
        write(f"in/{name}", '{"text": "one"}\n' * 20)
    write("in/_SUCCESS", "")
    write("in/README.md", "about it")
    main(["--input=in", "--dataset=own"])
    assert tiny.text_of("own").startswith("one\n\none")
    assert (
        "left out 1 file (binary, or documentation of tables): README.md" in capsys.readouterr().out
    )


def test_a_template_and_its_newlines_make_the_texts():
    rows = (f'{{"question": "What is {i} plus 1?", "answer": "{i + 1}"}}\n' for i in range(40))
    write("qa.jsonl", "".join(rows))
    main(["--input=qa.jsonl", "--dataset=qa", r"--text_key=Q: {question}\nA: {answer}"])
    assert tiny.text_of("qa").startswith("Q: What is 0 plus 1?\nA: 1\n\nQ: ")


def test_rows_left_out_are_counted_in_the_part_that_is_used(capsys):
    write("rows.jsonl", f'{{"text": "{"abc" * 20}"}}\n{{"text": ""}}\n' * 50)
    main(["--input=rows.jsonl", "--dataset=own", "--tokenizer=char", "--max_tokens=180"])
    assert "left out rows without text: 2\n" in capsys.readouterr().out


@pytest.mark.parametrize("length", range(30, 36))
def test_the_tokenizer_of_a_part_of_a_text_is_that_for_its_size(length, monkeypatch, capsys):
    for module in (prepare, corpus):
        monkeypatch.setattr(module, "SAMPLE_CHARACTERS", 1000)
    monkeypatch.setattr(prepare, "MIN_BPE_CHARACTERS", 1500)
    monkeypatch.setattr(prepare, "MIN_BPE_DISTINCT", 2)
    line = ("a line of words " * 4)[:length]
    write("own.txt", f"{line}\n" * 200)
    main(["--input=own.txt", "--dataset=own", "--lines=True", "--max_tokens=3000"])
    assert "(bpe, which suits" in capsys.readouterr().out
    main(["--input=own.txt", "--dataset=own", "--max_tokens=3000", "--val_fraction=0.6"])
    assert "(char, for fewer than" in capsys.readouterr().out


def test_characters_behind_the_part_of_a_text_can_be_unknown():
    settings = SimpleNamespace(max_tokens=100)  # with the tokenizer of a checkpoint
    tokenizer = CharTokenizer(" eors")
    assert prepare.estimate_characters("rose " * 50 + "lily", tokenizer, settings) == 100


# Validation and test texts


def test_the_test_text_is_written_for_scores_only(capsys):
    write("a.txt", "".join(map(chr, range(97, 117))) * 5)
    write("data/own/test.txt", "a text of the user")
    flags = ["--input=a.txt", "--dataset=own"]
    splits = ["--val_fraction=0.2", "--test_fraction=0.1"]
    assert "--test_fraction writes data/own/test.txt, which" in error_of(*flags, *splits)
    main(flags)
    assert Path("data/own/test.txt").read_text() == "a text of the user"
    Path("data/own/test.txt").unlink()
    for _ in range(2):
        main([*flags, *splits])
        out = capsys.readouterr().out
        score = "python sample.py --out_dir=out-own --score=data/own/test.txt\n"
        assert f"70 training and 20 validation tokens\ntest (10 of the characters): {score}" in out
        assert "own: 100 characters of a.txt" in out
        assert (len(load_dataset("own").train), len(load_dataset("own").val)) == (70, 20)
        assert Path("data/own/test.txt").read_text() == "klmnopqrst"
    write("texts/meta.json", "{}")
    write("texts/test.txt", "a text of the user")
    main(["--input=texts/test.txt", "--dataset=texts"])
    words = "data/own/test.txt is the test text of a dataset"
    assert words in error_of("--input=data/*/*.txt", "--dataset=new")
    main(flags)
    assert not Path("data/own/test.txt").exists()  # it belonged to other splits


@pytest.mark.parametrize(
    ("name", "flag", "separator"),
    [
        ("own.jsonl", "--allow_special", "<|endoftext|>"),
        ("own.txt --lines", "--by_line", "\n"),
        ("own.txt --lines --allow_special", "--by_line --allow_special", "\n"),
    ],
)
def test_documents_of_a_test_text_are_scored_as_in_training(name, flag, separator, capsys):
    documents = [f"document {number}" for number in range(60)]
    write("own.jsonl", "\n".join(f'{{"text": "{document}"}}' for document in documents))
    write("own.txt", "\n".join(documents))
    flags = f"--input={name} --dataset=own --tokenizer=bpe --test_fraction=0.5 --val_fraction=0.2"
    main(flags.split())
    assert f"--score=data/own/test.txt {flag}\n" in capsys.readouterr().out
    assert len(set(Path("data/own/test.txt").read_text().split(separator)) & set(documents)) >= 28


def test_special_tokens_of_a_single_test_text_are_scored_as_in_training(capsys):
    write("own.txt", "a line <|endoftext|" * 90)  # without an end token
    flags = "--input=own.txt --dataset=own --tokenizer=bpe --test_fraction=0.5 --allow_special"
    main(flags.split())
    assert "--score=data/own/test.txt --allow_special\n" in capsys.readouterr().out


def test_a_validation_text_of_its_own_is_the_whole_validation_split(capsys):
    write("train.txt", "the fox ran over the hill. " * 80)
    write("val.jsonl", '{"text": "a heron stood."}\n{"text": ""}\n{"text": "until noon!"}\n')
    flags = ["--input=train.txt", "--val_input=val.jsonl", "--dataset=own"]
    for limit, num_train in (([], 27 * 80), (["--max_tokens=100"], 100)):
        main([*flags, *limit])
        data = load_dataset("own")
        text = data.tokenizer.decode(data.train)
        assert text == ("the fox ran over the hill. " * 80)[:num_train]
        assert data.tokenizer.decode(data.val) == "a heron stood.\n\nuntil noon!"
        out = capsys.readouterr().out
        assert "train.txt, validation text val.jsonl, vocabulary" in out
        assert "left out rows without text: 1\n" in out
        assert f"{num_train:,} training and 27 validation tokens including separators of 3" in out
    main([*flags, "--tokenizer=bpe"])
    assert not any(b"heron" in token for token in tokens_of("own"))  # of the training text only
    write("val.jsonl", f'{{"text": "{"漢字" * 999}"}}\n')  # of 3 bytes each
    main([*flags, "--tokenizer=byte", "--max_tokens=100"])
    assert len(load_dataset("own").train) == 100
    write("val.jsonl", '{"text": "other"}\n')
    main(flags)  # the same names: the dataset is replaced
    write("other.jsonl", '{"text": "changed"}\n')
    assert "own has a different text" in error_of(flags[0], flags[2], "--val_input=other.jsonl")


# Tokenizers


def test_bpe_is_trained_on_the_training_split_only(monkeypatch):
    write("own.txt", "low lower lowest " * 100 + "zyx" * 50)
    main(["--input=own.txt", "--dataset=own", "--tokenizer=bpe"])
    tokens = tokens_of("own")
    assert len(tokens) <= 512
    assert b" lower" in tokens
    assert not any(len(token) > 1 and token[:1] in (b"x", b"y", b"z") for token in tokens)
    assert tiny.text_of("own") == "low lower lowest " * 100 + "zyx" * 50
    monkeypatch.setattr(prepare, "MAX_BPE_CHARACTERS", 300)  # of parts that are evenly spread
    for number, word in enumerate(["low"] * 3 + ["high"] * 3):
        write(f"in/{number}.txt", f" {word}" * 50)
    main(["--input=in", "--dataset=long", "--tokenizer=bpe"])
    assert {b" low", b" high"} <= set(tokens_of("long"))


@pytest.mark.slow
def test_text_is_prepared_with_the_tokenizer_of_a_checkpoint(capsys):
    """Otherwise, a model with its own vocabulary could not be trained on a new text."""
    write("new.txt", "fade" * 50)
    flags = ["--input=new.txt", "--dataset=new", "--tokenizer=out/ckpt.pt"]
    for text in ("abcdef", "fedcbag"):  # the second is a different tokenizer at the same path
        write("old.txt", text * 50)
        main(["--input=old.txt", "--dataset=old"])
        train.main(tiny.flags(dataset="old", max_iters=1, eval_interval=1))
        main(flags)
        assert "--init_from=out/ckpt.pt" in capsys.readouterr().out.splitlines()[-1]
        assert load_dataset("new").tokenizer.characters == "".join(sorted(text))
        assert tiny.text_of("new") == "fade" * 50
    train.main(tiny.flags(dataset="new", init_from="out/ckpt.pt", out_dir="out-new", max_iters=1))


WORDS = "The quick brown fox jumps over the lazy dog; THE QUICK BROWN FOX\n"


@pytest.mark.parametrize(
    ("text", "is_installed", "expected"),
    [
        (WORDS * 30, True, r"vocabulary \d+ \(bpe, which suits"),
        (WORDS * 30, False, r"\(char; for bpe, .* pip install tokenizers\)"),
        (WORDS * 5, True, r"\(char, for fewer than 1,000 training characters\)"),
        ("ACGTTA\n" * 300, True, r"vocabulary 5 \(char, for 5 distinct characters\)"),
    ],
)
def test_the_tokenizer_of_your_own_text_suits_it(text, is_installed, expected, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "MIN_BPE_CHARACTERS", 1000)
    if not is_installed:
        monkeypatch.setattr(prepare.importlib.util, "find_spec", lambda name: None)
    write("own.txt", text)
    main(["--input=own.txt", "--dataset=own"])
    assert re.search(expected, capsys.readouterr().out)
    assert tiny.text_of("own") == text


def test_the_vocabulary_grows_with_the_text():
    sizes = [prepare.bpe_vocab_size(size, 65) for size in (0, 150_000, 10**6, 3 * 10**6, 10**9)]
    assert sizes == [512, 512, 1024, 2048, 2048]
    assert prepare.bpe_vocab_size(10**6, num_distinct=4000) == 2048  # Chinese


@pytest.mark.parametrize(
    ("text", "flags", "advice"),
    [
        ("0" * 900 + "abc" * 100, "char", "83% of the tokens are '0': remove most"),
        (
            WORDS * 30,
            "bpe --vocab_size=300",
            "times on average, too rarely .* --vocab_size",
        ),
    ],
)
def test_tokens_that_are_hard_to_learn_from_are_reported(text, flags, advice, capsys):
    write("own.txt", text)
    main(["--input=own.txt", "--dataset=own", *f"--tokenizer={flags}".split()])
    assert re.search(advice, capsys.readouterr().out)


def test_a_vocabulary_beyond_the_text_is_refused():
    write("own.txt", WORDS * 30)
    error = error_of("--input=own.txt", "--dataset=own", "--vocab_size=5000")
    assert re.search(r"frequent pieces: use --vocab_size=\d+ or less", error)
    assert not os.path.exists("data/own/meta.json")


@pytest.mark.parametrize("kind", ["bpe", "gpt2"])
def test_literal_end_of_text_ends_a_document_only_if_allowed(kind, gpt2_of_bytes):
    text = "one<|endoftext|>two" * 20
    write("own.txt", text)
    flags = ["--input=own.txt", "--dataset=own", f"--tokenizer={kind}"]
    for count, allowed in ((0, []), (20, ["--allow_special=True"])):
        main([*flags, *allowed])
        data = load_dataset("own")
        assert [*data.train, *data.val].count(data.tokenizer.end) == count
        assert tiny.text_of("own") == text


@pytest.mark.parametrize(
    ("flags", "command"),
    [
        ("--input=own.txt --dataset=x$y",
         "config/own_text.py --minutes=2 '--dataset=x$y' '--out_dir=out-x$y'"),
        ("--input=own.txt --dataset=own --tokenizer=gpt2",
         "config/finetune_shakespeare.py --init_from=gpt2 --dataset=own --out_dir=out-own"),
        ("--input=long.txt --dataset=own --tokenizer=gpt2",
         "config/gpt2_fast.py --dataset=own --out_dir=out-own"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("gpt2_of_bytes")
def test_the_last_line_is_a_command_that_trains(flags, command, capsys, monkeypatch):
    monkeypatch.setattr(prepare, "MIN_GPT2_TOKENS", 2000)
    write("own.txt", "rose " * 100)
    write("long.txt", "rose " * 1000)
    main(flags.split())
    assert capsys.readouterr().out.splitlines()[-1] == f"train: python train.py {command}"


# Texts that folio provides


def test_pydocs_needs_no_network_and_is_reproducible(monkeypatch):
    monkeypatch.delattr(socket, "socket")
    write("data/pydocs/input.txt", "a text of the user")
    main(["--dataset=pydocs"])
    first = tiny.contents("data/pydocs")
    main(["--dataset=pydocs"])
    assert tiny.contents("data/pydocs") == first
    assert Path("data/pydocs/input.txt").read_text() == "a text of the user"
    assert tiny.text_of("pydocs") == "\n\n".join(
        topics.topics[name] for name in sorted(topics.topics)
    )


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("shakespeare_char", (1_003_854, 111_540, 65)), ("shakespeare", (301_966, 36_059, 50257))],
)
def test_shakespeare_has_the_sizes_of_nanogpts_datasets(name, sizes, request, monkeypatch):
    if name == "shakespeare":
        request.getfixturevalue("gpt2")
    if not os.environ.get("FOLIO_SHAKESPEARE"):
        pytest.skip("FOLIO_SHAKESPEARE names no file with tiny Shakespeare")
    monkeypatch.delattr(downloads, "SHAKESPEARE_URL")  # nothing is downloaded
    write("data/shakespeare_char/input.txt", Path(os.environ["FOLIO_SHAKESPEARE"]).read_bytes())
    main([f"--dataset={name}"])
    data = load_dataset(name)
    assert (len(data.train), len(data.val), data.tokenizer.vocab_size) == sizes
    assert data.byte_lengths[data.val].sum() == 111_540


def test_help_names_all_datasets(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert not set(downloads.PROVIDED_DATASETS) - set(re.findall(r"\w+", capsys.readouterr().out))


# Settings


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--input= --dataset=x", "there are no files"),
        ("--input=t/a.txt", "--dataset=a"),
        ("--input=HTTPS://a.org/b.txt --dataset=x", "download HTTPS://a.org/b.txt, and use"),
        ("--input=ftp://a.org/b.txt --dataset=x", "download ftp://a.org/b.txt, and use"),
        ("--input=t --encoding=x --dataset=x", "Python has no encoding x"),
        (f"--input=t --dataset={'x' * 300}", "cannot write to data/xxx"),
        ("--input=hf:ORG/NAME@main", "--dataset=NAMEmain"),
        ("--dataset=x", "--input=FILE_OR_FOLDER"),
        ("--input=a --dataset=b --test_fraction=0.9", "leave no training text"),
        ("--input=a --dataset=b --val_fraction=0.7 --test_fraction=0.3", "leave no training text"),
        ("--dataset=pydoc", "did you mean pydocs?"),
        ("--vocab_size=512", "--tokenizer=bpe"),
        ("--tokenizer=chars", "bpe, gpt2 or an existing path, not chars"),
        ("--dataset=own --input=t/a.txt --allow_special=True", "--tokenizer=bpe, gpt2 or a path"),
        ("--split=test --input=a --dataset=b", "--split"),
        ("--subset=en --dataset=pydocs", "--subset"),
        ("--val_input=a --dataset=b", "--val_input needs --input"),
        ("--input=t --val_input=t/../t/a.txt --dataset=x", "is in --input and in --val_input"),
        ("--text_key=a --input=t/a.txt --dataset=b", "applies to tables only"),
        ("--lines=True --input=t/rows.csv --dataset=b", "the rows of t/rows.csv are documents"),
        ("--text_key={a} --input=a --dataset=b --text_key={a}{b", "an unmatched brace"),
        ("--val_input=a --input=c --dataset=b --val_fraction=0.2", "no --val_fraction"),
    ],
)
def test_error_names_the_flag_or_file(flags, message):
    write("t/a.txt", "a text")
    write("t/rows.csv", "text\na\n")
    assert message in error_of(*flags.split())
