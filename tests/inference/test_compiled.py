"""Steps that are compiled ahead of time: cache folder, compilation, loading."""

import os
import re

import pytest
import tiny
import torch

import sample
from folio.cli.errors import UserError
from folio.data.tokenizer import CharTokenizer
from folio.inference import compiled
from folio.inference.compiled import COMPILING_HINT, CompiledStep, cache_folder, compiled_path
from folio.inference.generate import KVCache, decode_one
from folio.inference.trained_model import load_trained
from folio.pretrained.load import load_initial

TEXT = ["--init_from=ckpt.pt", "--device=cpu", "--dtype=float32", "--max_new_tokens=30"]
ONE = [*TEXT, "--num_samples=1"]
COMPILED = [*ONE, "--compile"]


@pytest.fixture
def cache(folder, monkeypatch):
    """The cache folder, in a folder with the checkpoint ckpt.pt."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # which the compilation sets
    tokenizer = CharTokenizer("abcdefghijklmnopqrstuvwxyz0123456789 ")
    tiny.write_checkpoint("ckpt.pt", tokenizer, **tiny.SWITCHES, n_layer=1)
    return folder / "cache" / "folio"


def run(capsys, flags):
    """Returns what sample.py prints on stdout, and on stderr beside the usual lines."""
    capsys.readouterr()
    sample.main(flags)
    out, err = capsys.readouterr()
    usual_lines = r"ckpt.pt.*|machine: cpu .*|.* tokens/s; first token .* s after the start"
    return out, re.sub(rf"(?m)^({usual_lines})\n", "", err)


def path_of(dtype="float32", batch_size=1):
    return compiled_path(load_trained(load_initial("ckpt.pt"), "cpu", dtype), batch_size)


def test_the_file_depends_on_checkpoint_data_type_batch_size_and_threads(cache):
    paths = [path_of(), path_of("bfloat16"), path_of(batch_size=2)]
    torch.set_num_threads(2)
    paths.append(path_of())
    torch.set_num_threads(1)
    os.utime("ckpt.pt", ns=(1, 1))
    paths.append(path_of())
    assert len({*paths, path_of()}) == len(paths)
    assert {path.parent for path in paths} == {cache}


@pytest.mark.skipif(os.name != "posix", reason="needs permissions")
def test_the_folder_is_the_users_and_nobody_else_can_write_to_it(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification ignores
    monkeypatch.setenv("HOME", str(folder))
    path = cache_folder()
    assert path == folder / ".cache" / "folio"
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o777)
    with pytest.raises(UserError, match="other users"):
        cache_folder()


@pytest.mark.slow
def test_a_failure_is_one_line(cache, capsys, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no compiler\nwas found")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    expected, _ = run(capsys, ONE)
    path_of().write_text("damaged")
    out, messages = run(capsys, COMPILED)
    assert out == expected
    assert messages.startswith("loading the compiled step failed; continuing without it (")
    assert messages.endswith(
        f"{COMPILING_HINT}\ncompilation failed; continuing without it (no compiler)\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "max_autotune"), [(1, False), (3, True)])
def test_a_step_is_compiled_after_the_text_and_generates_the_same(
    cache, capsys, monkeypatch, batch_size, max_autotune
):
    monkeypatch.setitem(compiled.INDUCTOR_OPTIONS, "max_autotune", max_autotune)  # adds 20 s
    cache.mkdir(parents=True, mode=0o700)
    for age in range(7):
        (cache / f"{age}.pt2").touch()
        os.utime(cache / f"{age}.pt2", (10**9 - age, 10**9 - age))
    flags = [*TEXT, f"--num_samples={batch_size}"]
    expected, _ = run(capsys, flags)
    flags.append("--compile")
    out, messages = run(capsys, flags)
    assert out == expected
    assert re.fullmatch(rf"{COMPILING_HINT}\ncompiled in \d+ s\n", messages)
    path = path_of(batch_size=batch_size)
    assert {path.name for path in cache.iterdir()} == {path.name, "0.pt2", "1.pt2", "2.pt2"}
    assert run(capsys, flags) == (expected, "using the step that an earlier run compiled\n")
    model = load_trained(load_initial("ckpt.pt")).model
    step = CompiledStep(path, model.config, batch_size)
    earlier = model.config.preceding_tokens
    for rows in {batch_size, 1}:  # a smaller batch is not compiled
        caches = [KVCache(model, rows, length=9) for _ in range(2)]
        ids = torch.nn.functional.pad(tiny.random_ids(model, rows), (earlier, 0))
        for position in range(8):
            tail = ids[:, position : position + earlier + 1].contiguous()
            arguments = tail, torch.full((rows,), position), position + 1
            expected = decode_one(model, caches[0], *arguments)
            assert torch.allclose(step(model, caches[1], *arguments), expected, atol=1e-5)
