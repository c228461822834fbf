"""Steps that are compiled ahead of time: cache folder, compilation, loading."""

import os
import re
import signal
import subprocess
import sys

import pytest
import tiny
import torch

import sample
from folio import aot
from folio.completion import load_trained
from folio.generate import KVCache, decode_one
from folio.initial import load_initial
from folio.settings import ROOT
from folio.tokenizers import CharTokenizer

TEXT = ["--init_from=ckpt.pt", "--device=cpu", "--dtype=float32", "--max_new_tokens=30"]
ONE = [*TEXT, "--num_samples=1"]
COMPILED = [*ONE, "--compile"]
PYTHON = sys.executable
HINT = f"{aot.HINT}\n"
posix = pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")


@pytest.fixture
def cache(folder, monkeypatch):
    """The cache folder, in a folder with the checkpoint ckpt.pt."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    tokenizer = CharTokenizer("abcdefghijklmnopqrstuvwxyz0123456789 ")
    tiny.write_checkpoint("ckpt.pt", tokenizer, **tiny.SWITCHES)
    return folder / "cache" / "folio"


@pytest.fixture
def compiler(folder, monkeypatch):
    """A function that replaces the compiling process by a shell command; $5 is its output."""
    path = folder / "compiler"
    monkeypatch.setattr(sys, "executable", str(path))

    def replace(command):
        path.write_text(f"#!/bin/sh\n{command}\n")
        path.chmod(0o700)
        return path

    return replace


def run(capsys, flags):
    """Returns what sample.py prints on stdout, and on stderr beside the usual lines."""
    capsys.readouterr()
    sample.main(flags)
    out, err = capsys.readouterr()
    usual = r"ckpt.pt.*|machine: cpu .*|.* tokens/s; first token after .*"
    lines = [line for line in err.splitlines(keepends=True) if not re.fullmatch(usual, line[:-1])]
    return out, "".join(lines)


def stored_path(dtype="float32"):
    return aot.stored_path(load_trained(load_initial("ckpt.pt"), "cpu", dtype))


def test_the_file_depends_on_checkpoint_data_type_and_threads(cache):
    paths = [stored_path(), stored_path("bfloat16")]
    torch.set_num_threads(2)
    paths.append(stored_path())
    torch.set_num_threads(1)
    os.utime("ckpt.pt", ns=(1, 1))
    paths.append(stored_path())
    assert len({*paths, stored_path()}) == len(paths)
    assert {path.parent for path in paths} == {cache}


@posix
def test_the_folder_is_the_users_and_nobody_else_can_write_to_it(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification ignores
    monkeypatch.setenv("HOME", str(folder))
    path = aot.cache_folder()
    assert path == folder / ".cache" / "folio"
    assert path.stat().st_mode & 0o777 == 0o700


@posix
@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_a_folder_that_other_users_can_write_to_is_not_used(cache, compiler, capsys, mode):
    compiler("touch compiled")
    cache.mkdir(parents=True)
    cache.chmod(mode)
    assert f"{cache}" in run(capsys, COMPILED)[1]
    assert not any(cache.iterdir())


@posix
def test_a_step_is_compiled_after_the_text_and_a_damaged_file_is_replaced(cache, compiler, capsys):
    compiler('echo code > "$5"')
    expected, _ = run(capsys, ONE)
    cache.mkdir(parents=True, mode=0o700)
    for age in range(7):
        (cache / f"{age}.pt2").touch()
        os.utime(cache / f"{age}.pt2", (10**9 - age, 10**9 - age))
    out, messages = run(capsys, COMPILED)
    assert out == expected
    assert re.fullmatch(rf"{HINT}compiled in \d+ s\n", messages)
    kept = {path.name for path in cache.iterdir()}
    assert kept == {stored_path().name, "0.pt2", "1.pt2", "2.pt2"}
    out, messages = run(capsys, COMPILED)
    assert out == expected
    assert re.fullmatch(rf"loading .* failed; .*\n{HINT}compiled in \d+ s\n", messages)


@posix
def test_batches_are_not_compiled_for_and_a_failure_is_one_line(cache, compiler, capsys):
    compiler("echo no compiler >&2; exit 1")
    assert run(capsys, [*TEXT, "--compile"])[1] == f"{aot.BATCH_HINT}\n"
    failed = f"{HINT}compilation failed; continuing without it (no compiler)\n"
    assert run(capsys, [*TEXT, "--stream", "--compile"])[1] == failed
    assert not any(cache.iterdir())


@posix
@pytest.mark.slow
def test_ctrl_c_ends_the_compilation(cache, compiler):
    path = compiler('kill -INT "$PPID"; sleep 60')
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport sample\n"
        f"from folio import process; sys.executable = {str(path)!r}\nprocess.run(sample.main)"
    )
    done = subprocess.run([PYTHON, "-c", code, *COMPILED], capture_output=True, text=True)
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr.endswith(f"{HINT}-c: interrupted\n")
    assert not any(cache.iterdir())


@pytest.mark.slow
def test_a_compiled_step_generates_the_same(cache, capsys):
    expected, _ = run(capsys, ONE)
    out, messages = run(capsys, COMPILED)
    assert out == expected
    assert re.fullmatch(rf"{HINT}compiled in \d+ s\n", messages)
    assert run(capsys, COMPILED) == (expected, "using the step that an earlier run compiled\n")
    model = load_trained(load_initial("ckpt.pt")).model
    step = aot.CompiledStep(stored_path(), model.config)
    caches = [KVCache(model.config, 1, "cpu", length=9) for _ in range(2)]
    earlier = model.config.receptive_field
    ids = torch.nn.functional.pad(tiny.random_ids(model, 1), (earlier, 0))
    for position in range(8):
        tail, place = ids[:, position : position + earlier + 1], torch.tensor([position])
        logits, theirs = (
            decode(model, each, tail, place, position + 1)
            for decode, each in zip((step, decode_one), caches, strict=True)
        )
        assert torch.allclose(logits, theirs, atol=1e-5)
