"""Tests of sample.py with a small trained model."""

import io
import json
import re
import shutil
import signal
import sys
from itertools import islice
from pathlib import Path
from unittest.mock import Mock

import pytest
import tiny

import prepare
import sample
import train
from folio.cli.errors import UserError
from folio.cli.process import Interrupted
from folio.data.tokenizer import CharTokenizer, from_dict

QUICK = ["--device=cpu", "--dtype=float32", "--num_samples=1", "--max_new_tokens=20"]
SEPARATOR = "---------------"


@pytest.fixture(autouse=True)
def run(folder):
    """A run in out/ of the current folder, without the dataset."""
    tiny.prepare_verse()
    train.main(tiny.flags(max_iters=3))
    shutil.rmtree("data")


def stdout_of(capsys, *flags):
    """Returns what sample.py prints on stdout."""
    capsys.readouterr()
    sample.main([*QUICK, *flags])
    return capsys.readouterr().out


def texts(capsys, *flags):
    return stdout_of(capsys, *flags).removesuffix(f"\n{SEPARATOR}\n").split(f"\n{SEPARATOR}\n")


def objects(capsys, *flags):
    return [json.loads(line) for line in stdout_of(capsys, "--json", *flags).splitlines()]


def line_scores(capsys, *flags):
    """Returns the objects of --score --by_line, of which the last, of all lines, is on stderr."""
    capsys.readouterr()
    sample.main([*QUICK, "--json", "--by_line", *flags])
    captured = capsys.readouterr()
    return [
        json.loads(line) for line in [*captured.out.splitlines(), captured.err.splitlines()[-1]]
    ]


def set_stdin(monkeypatch, content):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


@pytest.fixture
def interrupt(monkeypatch):
    """A function after whose call Ctrl-C ends each batch after `results` results of complete."""

    def interrupt(results):
        def interrupted(*args, **options):
            yield from islice(complete(*args, **options), results)
            raise Interrupted(signal.SIGINT)

        complete = sample.complete
        monkeypatch.setattr(sample, "complete", interrupted)

    return interrupt


# Prompts


def test_texts_differ_start_with_the_prompt_and_have_the_requested_length(capsys):
    samples = texts(capsys, "--start=Shall I", "--num_samples=3")
    assert [(text[:7], len(text)) for text in samples] == [("Shall I", 27)] * 3
    assert len(set(samples)) == 3
    assert samples == texts(capsys, "--start=Shall I", "--num_samples=3")


@pytest.mark.parametrize("start", ["FILE:prompt.txt", "-"])
def test_prompt_is_read_from_a_file_or_standard_input(capsys, monkeypatch, start):
    prompt = tiny.VERSE[:40]  # longer than the context
    Path("prompt.txt").write_text(prompt, encoding="utf-8")
    set_stdin(monkeypatch, prompt.encode())
    (text,) = texts(capsys, f"--start={start}")
    assert text.startswith(prompt)


def test_standard_input_must_be_utf8(monkeypatch):
    set_stdin(monkeypatch, b"ab\xff")
    with pytest.raises(UserError, match="standard input is not UTF-8 text.* 0xff in position 2"):
        sample.main([*QUICK, "--start=-"])


@pytest.mark.parametrize("size", [1, 4, 100])
def test_each_line_is_a_prompt_whose_texts_do_not_depend_on_the_others(capsys, monkeypatch, size):
    set_stdin(monkeypatch, b"Shall I\n\nthee to\r\nmore")
    monkeypatch.setattr(sample, "max_batch_size", lambda config, device: size)
    samples = objects(capsys, "--prompts=-", "--num_samples=2")
    expected = [(prompt, n) for prompt in ("Shall I", "thee to", "more") for n in (1337, 1338)]
    assert [(sampled["prompt"], sampled["seed"]) for sampled in samples] == expected
    for sampled in samples:
        (alone,) = objects(capsys, f"--start={sampled['prompt']}", f"--seed={sampled['seed']}")
        assert alone == sampled | {"logprobs": pytest.approx(sampled["logprobs"], abs=1e-5)}


def test_stop_texts_are_one_text_or_a_json_list():
    for stop in ("a", "12", '{"a": 1}', "a["):
        assert sample.parse_stop_texts(stop) == [stop]
    assert sample.parse_stop_texts('["a", "\\n"]') == ["a", "\n"]
    assert sample.parse_stop_texts(r"a\n\tb") == ["a\n\tb"]  # what a shell passes
    assert sample.parse_stop_texts("[]") == sample.parse_stop_texts(None) == []


# Output


def test_texts_end_at_stop_texts(capsys):
    (whole,) = objects(capsys)
    stop = whole["text"][10:12]
    for flag in (f"--stop={stop}", f"--stop={json.dumps([stop, 'unknown'])}"):
        (short,) = objects(capsys, flag)
        assert (short["text"], short["stopped"]) == (whole["text"].partition(stop)[0], stop)


def test_streamed_output_is_the_same(capsys):
    flags = ["--num_samples=3", "--max_new_tokens=50", "--stop=th"]
    assert stdout_of(capsys, *flags, "--stream") == stdout_of(capsys, *flags)


@pytest.mark.parametrize(
    ("flags", "printed"), [([], 2 + 16), (["--stream"], 2), (["--json"], 0), (["--logprobs"], 0)]
)
def test_ctrl_c_prints_what_there_is_of_the_first_text(capsys, interrupt, flags, printed):
    (whole,) = texts(capsys)
    interrupt(1 if flags == ["--stream"] else 2)  # otherwise, tokens come in groups
    with pytest.raises(Interrupted):
        sample.main([*QUICK, "--num_samples=2", *flags])
    assert capsys.readouterr().out == (whole[:printed] + "\n" if printed else "")


def test_json_and_logprobs_describe_the_tokens(capsys):
    flags = ["--start=Shall I", "--seed=9"]
    (sampled,) = objects(capsys, *flags)
    assert list(sampled) == ["prompt", "text", "seed", "ids", "logprobs", "stopped"]
    assert (sampled["prompt"], sampled["seed"], sampled["stopped"]) == ("Shall I", 9, "length")
    assert len(sampled["ids"]) == 20
    *lines, last = stdout_of(capsys, *flags, "--logprobs").splitlines()
    pairs = zip(sampled["logprobs"], sampled["text"], strict=True)
    assert lines == [f"{logprob:.4f}\t{piece!r}" for logprob, piece in pairs]
    assert last == SEPARATOR


def test_messages_go_to_stderr(capsys):
    sample.main(QUICK)
    captured = capsys.readouterr()
    assert re.fullmatch(
        r"out/ckpt.pt: step 3\nmachine: cpu .*\n"
        r"20 tokens in [\d.]+ s, [\d,]+ tokens/s; first token [\d.]+ s after the start\n",
        captured.err,
    )
    assert len(captured.out) == len("\n") + 20 + len(f"\n{SEPARATOR}\n")


def test_a_score_is_printed_as_tokens_a_json_object_or_a_line(capsys, monkeypatch):
    text = "Shall I compare"
    Path("poem.txt").write_text(text)
    (totals,) = objects(capsys, "--score=poem.txt")
    assert totals.keys() == {"tokens", "loss", "perplexity", "bits_per_byte"}
    set_stdin(monkeypatch, text.encode())
    sample.main([*QUICK, "--score=-", "--logprobs"])
    captured = capsys.readouterr()
    assert re.fullmatch(r"-: loss .* over 14 tokens", captured.err.splitlines()[-1])
    logprobs, pieces = zip(*(line.split("\t") for line in captured.out.splitlines()), strict=True)
    assert list(pieces) == [repr(character) for character in text]
    assert logprobs[0] == "-"
    assert -sum(map(float, logprobs[1:])) / 14 == pytest.approx(totals["loss"], abs=1e-4)


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_lines_are_scored_alone_with_their_ends(capsys, kind):
    end = "\n"
    if kind == "bpe":
        rows = [json.dumps({"text": line}) + "\n" for line in tiny.VERSE.splitlines() * 80]
        Path("v.jsonl").write_text("".join(rows))
        prepare.main(["--input=v.jsonl", "--dataset=verse", "--tokenizer=bpe"])
        train.main(tiny.flags(max_iters=3, overwrite=True))
        end = "<|endoftext|>"
    lines = ["thee to", "Shall I compare thee", "thee to"]
    Path("lines.txt").write_text("\n".join(lines) + "\n\n")
    *rows, totals = line_scores(capsys, "--score=lines.txt")
    assert [row.pop("text") for row in rows] == lines
    assert rows[0] == rows[2]
    for line, row in zip(lines[:2], rows, strict=False):
        Path("line.txt").write_text(f"{end}{line}{end}")
        (expected,) = objects(capsys, "--score=line.txt", "--allow_special")
        assert row == pytest.approx(expected, abs=1e-5)
    count = sum(row["tokens"] for row in rows)
    loss = sum(row["tokens"] * row["loss"] for row in rows) / count
    assert (totals["tokens"], totals["loss"]) == (count, pytest.approx(loss))
    table = stdout_of(capsys, "--score=lines.txt", "--by_line").splitlines()
    assert table[1] == f"{rows[1]['loss']:.4f}\t{lines[1]}"


def test_lines_cannot_be_scored_by_a_model_without_line_breaks():
    tiny.write_checkpoint("out/ckpt.pt", CharTokenizer("ab"))
    Path("lines.txt").write_text("ab\nba\n")
    with pytest.raises(UserError, match="no line break; omit --by_line"):
        sample.main(["--score=lines.txt", "--by_line"])


def test_a_bpe_model_needs_no_dataset(capsys, monkeypatch):
    Path("verse.txt").write_text(tiny.VERSE * 40, encoding="utf-8")
    prepare.main(["--input=verse.txt", "--dataset=verse", "--tokenizer=bpe"])
    train.main(tiny.flags(max_iters=3, overwrite=True))
    shutil.rmtree("data")
    (sampled,) = objects(capsys, "--start=Shall I 🦶", "--temperature=0")
    tokenizer = from_dict(tiny.load()["tokenizer"])
    assert tokenizer.decode(sampled["ids"]) == sampled["text"]
    set_stdin(monkeypatch, "naïve 🦶".encode())
    (scores,) = objects(capsys, "--score=-")
    assert scores["tokens"] == len(tokenizer.encode("naïve 🦶")) - 1


@pytest.mark.parametrize("separated", [True, False])
def test_texts_begin_like_documents(capsys, interact, separated):
    row = json.dumps({"text": tiny.VERSE * 4}) + "\n"
    Path("v.jsonl").write_text(row * 20 if separated else json.dumps({"text": tiny.VERSE * 80}))
    prepare.main(["--input=v.jsonl", "--dataset=verse", "--tokenizer=bpe"])
    train.main(tiny.flags(max_iters=3, overwrite=True, sample_interval=3))
    shutil.rmtree("data")
    (sampled,) = objects(capsys)
    assert sampled["prompt"] == ("" if separated else "\n")
    start = "<|endoftext|>" if separated else "FILE:line.txt"
    Path("line.txt").write_text("\n")
    (expected,) = objects(capsys, f"--start={start}", "--allow_special")
    assert (sampled["text"], sampled["ids"]) == (expected["text"], expected["ids"])
    assert texts(capsys) == texts(capsys, "--stream") == [sampled["prompt"] + sampled["text"]]
    assert interact("").out == sampled["text"] + "\n\n"


# Interactive


@pytest.fixture
def interact(monkeypatch, capsys):
    """A function that runs --interactive on the given lines; exceptions among them are raised."""

    def interact(*lines, flags=()):
        monkeypatch.setattr("builtins.input", Mock(side_effect=[*lines, EOFError()]))
        capsys.readouterr()
        sample.main([*QUICK, "--interactive", *flags])
        return capsys.readouterr()

    return interact


def test_each_line_is_continued_with_the_next_seed(interact, capsys):
    captured = interact("Shall I", "unknown: ü", "thee")
    first = texts(capsys, "--start=Shall I")[0].removeprefix("Shall I")
    second = texts(capsys, "--start=thee", "--seed=1338")[0].removeprefix("thee")
    assert captured.out == f"{first}\n{second}\n\n"
    assert " 1 × 'k' (U+006B), " in captured.err


def test_empty_line_continues_the_text(interact, capsys):
    flags = ["--temperature=0", "--context_stride=1"]
    whole = texts(capsys, "--start=Shall I", "--max_new_tokens=40", *flags)[0]
    out = interact("Shall I", "", flags=flags).out
    assert out == f"{whole[7:27]}\n{whole[27:47]}\n\n"


@pytest.mark.parametrize("flags", [[], ['--stop=["0", "1", "2", "a", "n", " "]']])
def test_an_empty_line_continues_the_tokens_without_the_stop_text(interact, monkeypatch, flags):
    rows = "".join(json.dumps({"text": f"{number} naïve 🦶"}) + "\n" for number in range(200))
    Path("v.jsonl").write_text(rows)
    prepare.main(["--input=v.jsonl", "--dataset=verse", "--tokenizer=bpe"])
    train.main(tiny.flags(max_iters=3, overwrite=True))
    made, real = [], sample.Completion

    def make(*args):
        made.append(real(*args))
        return made[-1]

    monkeypatch.setattr(sample, "Completion", make)
    interact("", "", flags=flags)
    first, second = made
    assert first.prompt_ids == [first.tokenizer.end]
    assert (first.stopped != "length") == bool(flags)
    ids = first.tokenizer.encode(first.text).tolist() if flags else first.ids
    assert second.prompt_ids == first.prompt_ids + ids


def test_only_ctrl_c_ends_the_text_and_not_the_script(interact, interrupt):
    interrupt(1)
    out = interact("Shall I", Interrupted(signal.SIGINT), "thee").out
    assert [len(line) for line in out.splitlines()] == [1, 0, 1, 0]
    with pytest.raises(Interrupted):
        interact(Interrupted(signal.SIGTERM))


# Errors


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--top_p=0", "--top_p"),
        ("--start=a --prompts=b", "--prompts and --start cannot be combined"),
        ("--interactive --json", "--interactive and --json cannot be combined"),
        ("--score=a --stream", "--score and --stream cannot be combined"),
        ("--start=artü", r"'ü' \(U\+00FC\)"),
        ("--start=FILE:missing.txt", "missing.txt"),
        ("--start=-", "standard input is not UTF-8 text.* 0xff in position 2"),
        ("--prompts=empty.txt", "empty.txt has no line with text"),
        ("--prompts=-", "standard input has no line with text"),
        ("--start=a --by_line", "--by_line needs --score"),
        ("--score=empty.txt --by_line", "empty.txt has no line with text"),
        ("--score=empty.txt --by_line --logprobs", "--logprobs and --by_line cannot be combined"),
        ("--out_dir=nowhere", "nowhere/ckpt.pt; available: out"),
        ("--out_dir=nowhere --score=nope", "nope"),  # before a model is loaded
        ('--stop=["a",1]', "--stop="),
        (f"--stop={'[' * 10**5}", "--stop="),
        ("--dtype=int8 --compile", "dtype=int8 needs a CPU without compilation"),
    ],
)
def test_error_names_the_flag_or_file(monkeypatch, flags, message):
    Path("empty.txt").write_text("\n\n", encoding="utf-8")
    set_stdin(monkeypatch, b"" if flags == "--prompts=-" else b"ab\xff")
    with pytest.raises(UserError, match=message):
        sample.main([*QUICK, *flags.split()])
