import io
import json
import math
import signal
import sys
from pathlib import Path

import pytest
import tiny
import torch

import checkpoint as ckpt
import sample
import train
from config import UserError, load
from safety import Interrupted
from sample import Text, stop_texts
from tokenizer import CharTokenizer

QUICK = ["--device=cpu", "--dtype=float32", "--num_samples=1", "--max_new_tokens=20"]
BREAK = "---------------"


@pytest.fixture(autouse=True)
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.prepare_verse()
    train.main(tiny.flags(max_iters=3))


def printed(capsys, *flags):
    """What sample.py prints."""
    capsys.readouterr()
    sample.main([*QUICK, *flags])
    return capsys.readouterr().out


def texts(capsys, *flags):
    """The same, text by text."""
    return printed(capsys, *flags).removesuffix(f"\n{BREAK}\n").split(f"\n{BREAK}\n")


def objects(capsys, *flags):
    return [json.loads(line) for line in printed(capsys, "--json", *flags).splitlines()]


def standard_input(monkeypatch, content):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_each_text_begins_with_the_prompt_and_has_the_length_asked_for(capsys):
    written = texts(capsys, "--start=Shall I", "--num_samples=3")
    assert [(text[:7], len(text)) for text in written] == [("Shall I", 27)] * 3


def test_without_a_prompt_the_text_begins_on_a_new_line(capsys):
    assert texts(capsys)[0].startswith("\n")


def test_a_prompt_may_be_longer_than_the_context(capsys):
    prompt = tiny.VERSE[:40]
    assert texts(capsys, f"--start={prompt}")[0].startswith(prompt)


def test_a_prompt_comes_from_a_file_whole(capsys):
    Path("prompt.txt").write_text("thee to\n", encoding="utf-8")
    assert texts(capsys, "--start=FILE:prompt.txt")[0].startswith("thee to\n")


def test_a_prompt_comes_from_standard_input(capsys, monkeypatch):
    standard_input(monkeypatch, b"thee to")
    assert texts(capsys, "--start=-")[0].startswith("thee to")


@pytest.mark.parametrize("source", ["prompts.txt", "-"])
def test_each_line_of_a_file_is_a_prompt(capsys, monkeypatch, source):
    lines = b"Shall I\n\nthee to\r\nmore"  # and lines end so, and not at other separators
    Path("prompts.txt").write_bytes(lines)
    standard_input(monkeypatch, lines)
    written = objects(capsys, f"--prompts={source}", "--num_samples=2")
    assert [each["prompt"] for each in written] == [
        prompt for prompt in ("Shall I", "thee to", "more") for _ in range(2)
    ]


# Chance


def test_the_same_seed_writes_the_same_texts(capsys):
    first = texts(capsys, "--seed=5", "--num_samples=2")
    assert texts(capsys, "--seed=5", "--num_samples=2") == first
    assert texts(capsys, "--seed=6", "--num_samples=2") != first


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_a_seed_may_be_any_that_fits_64_bits(capsys, seed):
    assert len(set(texts(capsys, f"--seed={seed}", "--num_samples=2"))) == 2


def test_the_texts_of_one_run_differ(capsys):
    assert len(set(texts(capsys, "--num_samples=3"))) == 3


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_texts_do_not_depend_on_how_many_are_written_at_once(capsys, monkeypatch, rows):
    Path("prompts.txt").write_text("Shall I\nthee\n", encoding="utf-8")
    flags = ["--prompts=prompts.txt", "--num_samples=3"]
    together = texts(capsys, *flags)
    monkeypatch.setattr(sample, "rows_at_once", lambda model: rows)
    assert texts(capsys, *flags) == together


def test_any_text_can_be_written_again_alone(capsys):
    Path("prompts.txt").write_text("Shall I\nthee\n", encoding="utf-8")
    for each in objects(capsys, "--prompts=prompts.txt", "--num_samples=3", "--seed=7"):
        again = [f"--start={each['prompt']}", f"--seed={each['seed']}", "--num_samples=1"]
        assert objects(capsys, *again) == [each]


@pytest.mark.parametrize("flag", ["--temperature=0", "--top_k=1", "--temperature=1e-30"])
def test_greedy_texts_do_not_depend_on_the_seed(capsys, flag):
    assert texts(capsys, flag, "--seed=1") == texts(capsys, flag, "--seed=2")


@pytest.mark.parametrize(
    "flag", ["--top_p=1e-9", "--min_p=1", "--repetition_penalty=100", "--context_stride=1"]
)
def test_each_control_reaches_the_drawing(capsys, flag):
    flags = ["--temperature=5", "--max_new_tokens=40"]
    assert texts(capsys, *flags, flag) != texts(capsys, *flags)


def test_as_many_texts_at_once_as_a_share_of_the_memory_has_room_for(monkeypatch):
    model = ckpt.build_model(ckpt.load("out/ckpt.pt"))  # 1 layer, 8 columns, width 16, 24 ids
    row = 4 * (2 * 8 * 16 + 8 * 24)  # bytes
    for memory, rows in ((4 * row, 1), (8 * row - 1, 1), (8 * row, 2), (1, 1)):
        monkeypatch.setattr(sample, "memory_bytes", lambda device, memory=memory: memory)
        assert sample.rows_at_once(model) == rows


# The end of a text


def drawn_text(characters, stops=(), prompt="a", tokenizer=None):
    """A Text to which the ids of `characters` were added, as if drawn."""
    tokenizer = tokenizer or CharTokenizer("\nabcdé")
    text = Text(prompt, tokenizer.encode(prompt).tolist(), 1, tokenizer, list(stops))
    for token in tokenizer.encode(characters).tolist():
        text.add(token, -1.0)
    return text


@pytest.mark.parametrize(
    ("characters", "stops", "left", "stopped", "count"),
    [
        ("abcd", ["c"], "ab", "c", 3),
        ("abcd", ["bc", "c"], "a", "bc", 3),
        ("abcd", ["cd", "b"], "a", "b", 2),
        ("aabab", ["abab"], "a", "abab", 5),
        ("aaab", ["aab"], "a", "aab", 4),
        ("bcd", ["abc"], "bcd", None, 3),  # the prompt is not searched
        ("abcd", ["é"], "abcd", None, 4),
        ("a\n\nb", ["\n\n"], "a", "\n\n", 3),
        ("é", ["é"], "", "é", 1),
    ],
)
def test_a_text_ends_where_a_stop_text_comes_first(characters, stops, left, stopped, count):
    text = drawn_text(characters, stops)
    assert (text.text, text.stopped) == (left, stopped)
    assert len(text.ids) == len(text.logprobs) == len(text.pieces) == count


def test_a_text_ends_with_the_end_of_text_token(gpt2_of_bytes):
    text = drawn_text("ab<|endoftext|>cd", tokenizer=gpt2_of_bytes)
    assert (text.text, text.stopped, text.ids) == ("ab", "end of text", [97, 98, 256])


@pytest.mark.parametrize("content", ["ab", "é", "🦶🏽", "a\ud7ff"])
def test_a_character_is_shown_when_it_is_whole(gpt2_of_bytes, content):
    text = Text("x", [120], 1, gpt2_of_bytes, [])
    for byte in content.encode():
        text.add(byte, 0.0)
        assert "\N{REPLACEMENT CHARACTER}" not in text.certain()
    assert text.certain() == "x" + content


def test_bytes_that_never_become_a_character_are_shown_at_the_end(gpt2_of_bytes):
    text = Text("x", [120], 1, gpt2_of_bytes, [])
    text.add(0xC3, 0.0)
    assert text.certain() == "x"
    text.finish("length")
    assert (text.certain(), text.stopped) == ("x\N{REPLACEMENT CHARACTER}", "length")


def test_what_may_become_a_stop_text_is_not_shown_before_it_is_known():
    tokenizer = CharTokenizer("abc")
    text, shown = Text("a", [0], 1, tokenizer, ["bbc", "cc"]), []
    for token in tokenizer.encode("abbabbcab").tolist():
        text.add(token, 0.0)
        shown.append(text.certain())
    assert shown == ["aa", "aa", "aa", "aabba", "aabba", "aabba", "aabba", "aabba", "aabba"]


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, []),
        ("a", ["a"]),
        ("12", ["12"]),
        ('{"a": 1}', ['{"a": 1}']),
        ("[a", ["[a"]),
        ("[" * 100_000, ["[" * 100_000]),
        ('["a", "\\n"]', ["a", "\n"]),
        ("[]", []),
    ],
)
def test_stop_texts_are_one_or_a_list(stop, expected):
    assert stop_texts(stop) == expected


def test_texts_end_at_stop_texts_and_say_so(capsys):
    flags = ["--num_samples=5", "--max_new_tokens=60", '--stop=["e", "th"]', "--temperature=3"]
    written = objects(capsys, *flags)
    whole = objects(capsys, *[flag for flag in flags if "stop" not in flag])
    for short, long in zip(written, whole, strict=True):
        assert long["text"].startswith(short["text"])
        if short["stopped"] == "length":
            assert "e" not in long["text"]
            assert "th" not in long["text"]
        else:
            assert long["text"].startswith(short["text"] + short["stopped"])
            assert "e" not in short["text"]
            assert "th" not in short["text"]
    assert {"e"} <= {each["stopped"] for each in written} <= {"e", "th", "length"}


# What is printed


def test_a_text_that_is_streamed_is_the_same(capsys):
    flags = ["--num_samples=3", "--max_new_tokens=50", "--stop=th"]
    assert printed(capsys, *flags, "--stream") == printed(capsys, *flags)


def test_a_stream_comes_token_by_token(capsys, monkeypatch):
    shown = []
    monkeypatch.setattr(
        "builtins.print",
        lambda *parts, file=None, **rest: file or shown.append(parts[0]),
    )
    sample.main([*QUICK, "--stream", "--start=Shall I"])
    assert [len(part) for part in shown[:20]] == [len("Shall I") + 1] + [1] * 19


def test_an_object_has_all_there_is_to_know(capsys):
    each = objects(capsys, "--start=Shall I", "--seed=9")[0]
    tokenizer = CharTokenizer(tiny.saved()["tokenizer"]["characters"])
    assert each.keys() == {"prompt", "text", "seed", "ids", "logprobs", "stopped"}
    assert (each["prompt"], each["seed"], each["stopped"]) == ("Shall I", 9, "length")
    assert tokenizer.decode(each["ids"]) == each["text"]
    model = ckpt.build_model(ckpt.load("out/ckpt.pt")).eval()
    ids = [*tokenizer.encode("Shall I").tolist(), *each["ids"]]
    for place, logprob in zip(range(7, 9), each["logprobs"], strict=False):
        expected = model(torch.tensor([ids[:place]]))[0][0, -1].log_softmax(0)[ids[place]]
        assert logprob == pytest.approx(expected.item(), abs=1e-5)


def test_log_probabilities_come_one_token_a_line(capsys):
    each = objects(capsys)[0]
    *lines, last = printed(capsys, "--logprobs").splitlines()
    assert last == BREAK
    assert lines == [
        f"{logprob:.4f}\t{piece!r}"
        for logprob, piece in zip(each["logprobs"], each["text"], strict=True)
    ]


def test_notes_do_not_mix_with_the_text(capsys):
    capsys.readouterr()
    sample.main(QUICK)
    captured = capsys.readouterr()
    assert "out/ckpt.pt: step 3" in captured.err
    assert "20 tokens in " in captured.err
    assert "step 3" not in captured.out
    assert "tokens" not in captured.out


# Asking for prompts


@pytest.fixture
def typed(monkeypatch, capsys):
    """Run --interactive on lines typed one after the other; an exception is raised in its place."""

    def converse(*lines, flags=()):
        left = [*lines, EOFError()]

        def answer(prompt):
            line = left.pop(0)
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", answer)
        capsys.readouterr()
        sample.main([*QUICK, "--interactive", *flags])
        return capsys.readouterr()

    return converse


def test_each_line_typed_is_continued(typed, capsys):
    out = typed("Shall I", "thee").out
    first = texts(capsys, "--start=Shall I")[0].removeprefix("Shall I")
    second = texts(capsys, "--start=thee", "--seed=1338")[0].removeprefix("thee")
    assert out == f"{first}\n{second}\n\n"


def test_an_empty_line_goes_on_with_the_text(typed, capsys):
    flags = ["--temperature=0", "--context_stride=1"]
    whole = texts(capsys, "--start=Shall I", "--max_new_tokens=40", *flags)[0]
    out = typed("Shall I", "", flags=flags).out
    assert out == f"{whole[7:27]}\n{whole[27:47]}\n\n"


def test_a_character_that_the_model_does_not_know_is_told_and_asked_on(typed):
    captured = typed("ü", "Shall I")
    assert "character 'ü'" in captured.err
    assert len(captured.out) > 20


def test_ctrl_c_stops_a_text_and_not_the_program(typed, monkeypatch):
    count = []

    def interrupted(text):
        count.append(text)
        if len(count) == 5:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sample, "print_more", interrupted)
    typed("Shall I", KeyboardInterrupt(), "thee")
    assert len({id(text) for text in count}) == 2
    assert len(count) == 5 + 21


def test_other_signals_end_the_program(typed):
    with pytest.raises(Interrupted):
        typed(Interrupted(signal.SIGTERM))


# Scores


@pytest.mark.parametrize("stride", [1, 3, 8, 100])
def test_a_score_is_that_of_the_model_reading_the_text(capsys, stride):
    Path("poem.txt").write_text(tiny.VERSE, encoding="utf-8")
    model = ckpt.build_model(ckpt.load("out/ckpt.pt")).eval()
    tokenizer = CharTokenizer(tiny.saved()["tokenizer"]["characters"])
    ids, begin, nats = tokenizer.encode(tiny.VERSE).astype("int64").tolist(), 0, []
    for at in range(1, len(ids)):
        if at - begin > 8:
            begin = min(begin + min(stride, 8), len(ids) - 9)
        logits = model(torch.tensor([ids[begin:at]]))[0][0, -1]
        nats.append(-logits.log_softmax(0)[ids[at]].item())
    loss = sum(nats) / len(nats)
    found = objects(capsys, "--score=poem.txt", f"--context_stride={stride}")[0]
    assert found["tokens"] == len(nats) == len(tiny.VERSE) - 1
    assert found["loss"] == pytest.approx(loss, abs=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(loss / math.log(2), rel=1e-4)


def test_only_the_bytes_that_are_foretold_count(gpt2_of_bytes, monkeypatch, capsys):
    monkeypatch.setattr(sample, "surprisals", lambda model, ids, stride: torch.ones(len(ids) - 1))
    model = tiny.random_model()
    for content, count in (("éa", 2), ("🦶", 3), ("ab", 1)):
        Path("poem.txt").write_text(content, encoding="utf-8")
        config = load(sample.SampleConfig, ["--score=poem.txt", "--json"])
        sample.print_score(model, gpt2_of_bytes, config)
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert found["tokens"] == count
        assert found["bits_per_byte"] == pytest.approx(1 / math.log(2))


def test_a_score_comes_in_one_line(capsys, monkeypatch):
    standard_input(monkeypatch, b"Shall I")
    line = printed(capsys, "--score=-")
    assert line.startswith("-: loss ")
    assert line.endswith(", over 6 tokens\n")


# What sampling needs


def test_the_checkpoint_is_all_that_sampling_needs(capsys):
    for path in Path("data/verse").iterdir():
        path.unlink()
    assert texts(capsys, "--start=Shall")[0].startswith("Shall")


def test_a_long_prompt_does_not_look_like_a_broken_compiler(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "compile", lambda step: seen.append("compiled") or step)
    prompt = f"--start={tiny.VERSE[:40]}"
    sample.main([*QUICK, prompt, "--compile=True"])
    assert seen == ["compiled"]
    assert "compiling failed" not in capsys.readouterr().err


def test_nanogpts_checkpoint_writes_with_the_table_of_its_dataset(capsys):
    size = tiny.write_nanogpt_dataset("nano")
    Path("out").rename("out-folio")
    tiny.write_nanogpt_checkpoint(size, dataset="nano")
    assert texts(capsys, "--start=Shall")[0].startswith("Shall")


def test_nanogpts_checkpoint_without_its_table_says_where_to_put_it():
    Path("out").rename("out-folio")
    tiny.write_nanogpt_checkpoint(65, dataset="nowhere")
    with pytest.raises(
        UserError, match=r"has 65 tokens.*50,257.*meta.pkl it began with into data/nowhere"
    ):
        sample.main(QUICK)


@pytest.mark.parametrize("flags", [[], ["--score=poem.txt"]])
def test_a_model_without_finite_numbers_is_told(monkeypatch, flags):
    Path("poem.txt").write_text(tiny.VERSE, encoding="utf-8")
    build = ckpt.build_model

    def broken(checkpoint):
        model = build(checkpoint)
        model.transformer.ln_f.weight.data.fill_(math.inf)
        return model

    monkeypatch.setattr(ckpt, "build_model", broken)
    with pytest.raises(UserError, match="no finite numbers: try --dtype=float32"):
        sample.main([*QUICK, *flags])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--start=art ü"], r"character 'ü' \(U\+00FC\) at position 4 .* 24 characters"),
        (["--start="], "the prompt is empty"),
        (["--start=FILE:missing.txt"], "cannot read missing.txt"),
        (["--start=FILE:"], "lacks the name of the file"),
        (["--prompts=missing.txt"], "cannot read missing.txt"),
        (["--prompts=empty.txt"], "empty.txt has no prompt in it"),
        (["--score=missing.txt"], "cannot read missing.txt"),
        (["--score=short.txt"], "short.txt has 1 tokens; to foretell one takes two"),
        (["--out_dir=nowhere"], r"no checkpoint nowhere/ckpt.pt; runs at hand: out"),
        (["--temperature=-1"], "--temperature must lie in"),
        (["--top_k=0"], "--top_k must lie in"),
        (["--top_p=0"], "--top_p must lie in"),
        (["--top_p=1.1"], "--top_p must lie in"),
        (["--min_p=-0.1"], "--min_p must lie in"),
        (["--min_p=1.1"], "--min_p must lie in"),
        (["--repetition_penalty=0"], "--repetition_penalty must lie in"),
        (["--score="], "the name of the file to read is empty"),
        (["--prompts="], "the name of the file to read is empty"),
        (["--score=a", "--compile"], "--score and --compile do not go together"),
        (["--context_stride=0"], "--context_stride must lie in"),
        (["--stop="], "--stop=: it takes a text, or a JSON list of texts, none empty"),
        (['--stop=["a", 1]'], "it takes a text, or a JSON list"),
        (["--start=a", "--prompts=b"], "--prompts and --start do not go together: give one"),
        (["--score=a", "--interactive"], "--score and --interactive do not go together"),
        (["--stream", "--json"], "--stream and --json do not go together"),
        (["--interactive", "--json"], "--interactive and --json do not go together"),
        (["--score=a", "--logprobs"], "--score and --logprobs do not go together"),
        (["--device=cuda:99"], "device=cuda:99, but"),
    ],
)
def test_mistakes_are_answered(flags, message):
    Path("empty.txt").write_text("\n\n", encoding="utf-8")
    Path("short.txt").write_text("S", encoding="utf-8")
    with pytest.raises(UserError, match=message):
        sample.main([*QUICK, *flags])


def test_standard_input_that_is_not_text_is_told_by_its_byte(monkeypatch):
    standard_input(monkeypatch, b"ab\xff")
    with pytest.raises(UserError, match="standard input is not UTF-8 text: byte 2 is 0xff"):
        sample.main([*QUICK, "--start=-"])
