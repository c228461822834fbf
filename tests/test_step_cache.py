"""Steps that are compiled ahead of time: cache folder, compilation, loading."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import tiny
import torch

import sample
from folio import step_cache
from folio.checkpoint import Checkpoint, Progress, save
from folio.completion import load_trained
from folio.errors import UserError
from folio.generate import KVCache, decode_one
from folio.initial import load_initial
from folio.process import Interrupted
from folio.settings import ROOT
from folio.tokenizers import CharTokenizer

TEXT = ["--init_from=ckpt.pt", "--device=cpu", "--dtype=float32", "--max_new_tokens=30"]
ONE, COMPILED = [*TEXT, "--num_samples=1"], [*TEXT, "--num_samples=1", "--compile"]
HINT = f"{step_cache.HINT}\n"


@pytest.fixture
def cache(folder, monkeypatch):
    """The cache folder, in a folder with the checkpoint ckpt.pt."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    save_model()
    return folder / "cache" / "folio"


def save_model(**changes):
    model = tiny.random_model(**changes)
    tokenizer = CharTokenizer("abcdefghijklmnopqrstuvwxyz0123456789 ")
    weights, saved = model.state_dict(), tokenizer.to_dict()
    save("ckpt.pt", Checkpoint(model.config, weights, Progress(), {}, tokenizer=saved))


def loaded(dtype="float32"):
    return load_trained(load_initial("ckpt.pt"), "cpu", dtype)


def run(capsys, flags):
    """Returns what sample.py prints on stdout, and on stderr beside the usual lines."""
    capsys.readouterr()
    sample.main(flags)
    out, err = capsys.readouterr()
    usual = r"ckpt.pt|machine: cpu .*|.* tokens/s; first token after .*"
    lines = [line for line in err.splitlines(keepends=True) if not re.fullmatch(usual, line[:-1])]
    return out, "".join(lines)


@pytest.fixture
def compiler(monkeypatch):
    """Replaces the compiler by one that writes a file which cannot be loaded."""

    def compile(source, dtype, threads, folder):
        file = Path(folder, "step.so")
        file.write_text("code")
        return file

    fake = Mock(side_effect=compile)
    monkeypatch.setattr(step_cache, "compile_in_process", fake)
    return fake


# Which file


def test_the_file_depends_on_checkpoint_data_type_threads_and_code(cache, monkeypatch):
    paths = [step_cache.path_of(loaded())]
    assert step_cache.path_of(loaded()) == paths[0]
    paths.append(step_cache.path_of(loaded("bfloat16")))
    os.utime("ckpt.pt", ns=(1, 1))
    paths.append(step_cache.path_of(loaded()))
    trained = loaded()
    for target, name, value in (
        (torch, "get_num_threads", lambda: 7),
        (torch, "__version__", "9.9"),
        (torch.cpu, "get_capabilities", lambda: {"avx512_f": False}),
        (step_cache, "CODE", ("model.py",)),
    ):
        monkeypatch.setattr(target, name, value)
        paths.append(step_cache.path_of(trained))
    assert len({*paths}) == len(paths)
    assert {path.parent for path in paths} == {cache}


def test_a_folder_of_weights_is_a_checkpoint(cache):
    trained, folder = loaded(), Path("weights")
    folder.mkdir()
    trained.checkpoint.path = folder
    before = step_cache.path_of(trained)
    (folder / "model.safetensors").touch()
    assert step_cache.path_of(trained) != before


@pytest.mark.parametrize("variable", ["", "relative"])  # the specification ignores both
def test_the_folder_is_that_of_the_user(folder, monkeypatch, variable):
    monkeypatch.setenv("XDG_CACHE_HOME", variable)
    monkeypatch.setattr(Path, "home", lambda: folder)
    assert step_cache.cache_folder() == folder / ".cache" / "folio"
    assert os.name != "posix" or step_cache.cache_folder().stat().st_mode & 0o777 == 0o700


def test_only_the_newest_files_are_kept(cache):
    step_cache.cache_folder()
    for age in range(7):
        (cache / f"{age}.so").touch()
        os.utime(cache / f"{age}.so", (10**9 - age, 10**9 - age))
    step_cache.prune(cache)
    kept = [f"{age}.so" for age in range(step_cache.KEPT)]
    assert sorted(path.name for path in cache.iterdir()) == kept


@pytest.mark.skipif(os.name != "posix", reason="needs owners and modes of files")
@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_a_file_that_other_users_can_write_is_not_loaded(cache, monkeypatch, capsys, mode):
    monkeypatch.setattr(step_cache, "CompiledStep", Mock(side_effect=AssertionError))
    path = step_cache.path_of(loaded())
    path.touch()
    path.chmod(mode)
    assert step_cache.load(path, None) is None
    assert f"other users own or can write to {path}" in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="needs owners and modes of files")
def test_a_folder_of_another_user_is_not_used(cache, compiler, monkeypatch, capsys):
    monkeypatch.setattr(os, "getuid", Mock(return_value=os.getuid() + 1))
    reason = f"other users own or can write to {cache}"
    assert run(capsys, COMPILED)[1] == f"compilation failed; continuing without it ({reason})\n"
    assert not compiler.called


# When it is compiled


def test_a_step_is_compiled_after_the_text_is_printed(cache, compiler, capsys):
    expected, _ = run(capsys, ONE)
    printed = []
    write = compiler.side_effect

    def compile(*arguments):
        printed.append(capsys.readouterr())
        return write(*arguments)

    compiler.side_effect = compile
    out, messages = run(capsys, COMPILED)
    assert out == ""
    assert re.fullmatch(r"compiled in \d+ s\n", messages)
    ((text, before),) = printed
    assert text == expected
    assert before.endswith(HINT)
    assert [path.read_text() for path in cache.iterdir()] == ["code"]


@pytest.mark.parametrize("flags", [["--stream"], ["--num_samples=1"]])
def test_single_texts_are_compiled_for(cache, compiler, capsys, flags):
    assert HINT in run(capsys, [*TEXT, *flags, "--compile"])[1]
    assert compiler.call_count == 1


def test_batches_are_not_compiled_for(cache, compiler, capsys):
    _, messages = run(capsys, [*TEXT, "--compile"])
    assert messages == f"{step_cache.BATCH_HINT}\n"
    assert not compiler.called


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("no compiler"), "compilation failed; continuing without it (no compiler)\n"),
        (KeyboardInterrupt(), ""),
        (Interrupted(signal.SIGINT), ""),
    ],
)
def test_a_failed_or_interrupted_compilation_leaves_no_files(
    cache, compiler, capsys, error, message
):
    compiler.side_effect = error
    assert run(capsys, COMPILED)[1] == HINT + message
    assert not any(cache.iterdir())


def test_other_signals_end_the_script(cache, compiler, capsys):
    compiler.side_effect = Interrupted(signal.SIGTERM)
    with pytest.raises(Interrupted):
        run(capsys, COMPILED)


def test_a_step_of_a_checkpoint_that_was_replaced_meanwhile_is_not_stored(cache, compiler, capsys):
    compiler.side_effect = lambda *_: os.utime("ckpt.pt", ns=(1, 1))
    assert f"({Path('ckpt.pt').resolve()} has changed)" in run(capsys, COMPILED)[1]
    assert not any(cache.iterdir())


def test_a_damaged_file_is_replaced(cache, compiler, capsys):
    expected, _ = run(capsys, COMPILED)
    out, messages = run(capsys, COMPILED)
    assert out == expected
    assert re.match(r"loading the compiled step failed; continuing without it \(.*\)\n", messages)
    assert HINT in messages


# With a compiler


@pytest.mark.slow
@pytest.mark.parametrize("changes", [tiny.SWITCHES, {"n_layer": 0, "bias": False}], ids=str)
def test_a_compiled_step_generates_the_same(cache, capsys, changes):
    save_model(**changes)
    expected, _ = run(capsys, ONE)
    out, messages = run(capsys, COMPILED)
    assert out == expected
    assert re.fullmatch(rf"{HINT}compiled in \d+ s\n", messages)
    assert run(capsys, COMPILED) == (expected, "using the step that an earlier run compiled\n")
    trained = loaded()
    step = step_cache.load(step_cache.path_of(trained), trained.model.config)
    caches = [KVCache(trained.model.config, 1, "cpu", length=9) for _ in range(2)]
    earlier = trained.model.config.receptive_field
    ids = torch.nn.functional.pad(tiny.random_ids(trained.model, 1), (earlier, 0))
    for position in range(8):
        tail, place = ids[:, position : position + earlier + 1], torch.tensor([position])
        logits, theirs = (
            decode(trained.model, each, tail, place, position + 1)
            for decode, each in zip((step, decode_one), caches, strict=True)
        )
        assert torch.allclose(logits, theirs, atol=1e-5)


@pytest.mark.slow
def test_a_missing_compiler_is_reported_in_one_line(cache, capsys, monkeypatch):
    monkeypatch.setenv("CXX", "missing-compiler")
    messages = run(capsys, COMPILED)[1].removeprefix(HINT)
    assert re.fullmatch(r"compilation failed; continuing without it \(.*\)\n", messages)
    assert not any(cache.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_ctrl_c_ends_the_compilation(cache, monkeypatch):
    Path("temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(Path("temporary").resolve()))
    script = subprocess.Popen(
        [sys.executable, str(ROOT / "sample.py"), *COMPILED],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert HINT in iter(script.stderr.readline, "")
    while not any(Path("temporary").glob("*/*")) and script.poll() is None:  # the compiler's files
        time.sleep(0.05)
    script.send_signal(signal.SIGINT)
    assert script.communicate()[1] == ""
    assert script.returncode == 0
    assert not any(cache.iterdir())
    assert not any(Path("temporary").iterdir())
