import io
import sys
from pathlib import Path

import pytest
import tiny
import torch

import sample
import train
from config import UserError

QUICK = ["--device=cpu", "--dtype=float32", "--num_samples=1", "--max_new_tokens=20"]
BREAK = "---------------"


@pytest.fixture(autouse=True)
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.prepare_verse()
    train.main(tiny.flags(max_iters=3))


def texts(capsys, *flags):
    """What sample.py writes, text by text."""
    capsys.readouterr()
    sample.main([*QUICK, *flags])
    return capsys.readouterr().out.removesuffix(f"\n{BREAK}\n").split(f"\n{BREAK}\n")


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
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"thee to")))
    assert texts(capsys, "--start=-")[0].startswith("thee to")


def test_the_same_seed_writes_the_same_texts(capsys):
    first = texts(capsys, "--seed=5", "--num_samples=2")
    assert texts(capsys, "--seed=5", "--num_samples=2") == first
    assert texts(capsys, "--seed=6", "--num_samples=2") != first


def test_the_texts_of_one_run_differ(capsys):
    assert len(set(texts(capsys, "--num_samples=3"))) == 3


@pytest.mark.parametrize("flag", ["--temperature=0", "--top_k=1", "--temperature=1e-30"])
def test_greedy_texts_do_not_depend_on_the_seed(capsys, flag):
    assert texts(capsys, flag, "--seed=1") == texts(capsys, flag, "--seed=2")


def test_the_checkpoint_is_all_that_sampling_needs(capsys):
    for path in Path("data/verse").iterdir():
        path.unlink()
    assert texts(capsys, "--start=Shall")[0].startswith("Shall")


def test_a_long_prompt_does_not_look_like_a_broken_compiler(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "compile", lambda model: seen.append("compiled") or model)
    prompt = f"--start={tiny.VERSE[:40]}"
    sample.main([*QUICK, prompt, "--compile=True"])
    assert seen == ["compiled"]
    assert "compiling failed" not in capsys.readouterr().err


def test_notes_do_not_mix_with_the_text(capsys):
    capsys.readouterr()
    sample.main(QUICK)
    captured = capsys.readouterr()
    assert "out/ckpt.pt: step 3" in captured.err
    assert "step 3" not in captured.out


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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--start=art ü"], r"character 'ü' \(U\+00FC\) at position 4 .* 24 characters"),
        (["--start="], "the prompt is empty"),
        (["--start=FILE:missing.txt"], "cannot read missing.txt"),
        (["--out_dir=nowhere"], r"no checkpoint nowhere/ckpt.pt; runs at hand: out"),
        (["--temperature=-1"], "--temperature must lie in"),
        (["--top_k=0"], "--top_k must lie in"),
        (["--device=cuda:99"], "device=cuda:99, but"),
    ],
)
def test_mistakes_are_answered(flags, message):
    with pytest.raises(UserError, match=message):
        sample.main([*QUICK, *flags])


def test_standard_input_that_is_not_text_is_told_by_its_byte(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    with pytest.raises(UserError, match="standard input is not UTF-8 text: byte 2 is 0xff"):
        sample.main([*QUICK, "--start=-"])
