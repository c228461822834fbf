"""The four scripts together, as a person runs them, and the house that their imports draw."""

import ast
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch

import config
import train
from model import GPT, GPTConfig, num_params

ROOT = Path(__file__).parent.parent
SCRIPTS = ("prepare.py", "train.py", "sample.py")


def call(script, *arguments, cwd, stdin=b""):
    """Run a script in a folder of its own; bytes in, decoded text out."""
    command = [sys.executable, str(ROOT / script), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, input=stdin, capture_output=True, env=environment)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.slow
def test_a_model_that_memorised_a_text_writes_it(tmp_path):
    poem = (
        "Rough winds do shake the darling buds of May,\n"
        "And summer's lease hath all too short a date;\n"
        "Sometime too hot the eye of heaven shines,\n"
        "And often is his gold complexion dimm'd;\n"
    )
    (tmp_path / "poem.txt").write_text(poem * 12, encoding="utf-8")
    (tmp_path / "tiny.py").write_text(
        "n_layer, n_head, n_embd, block_size = 2, 2, 64, 32\n"
        "batch_size, gradient_accumulation_steps, max_iters = 16, 1, 250\n"
        "learning_rate, warmup_iters, eval_interval, log_interval = 3e-3, 10, 250, 50\n"
    )
    name = ["--dataset=poem"]
    assert call("prepare.py", "--input=poem.txt", *name, cwd=tmp_path)[0] == 0
    assert call("train.py", "tiny.py", *name, "--device=cpu", cwd=tmp_path)[0] == 0
    greedy = ["--temperature=0", "--num_samples=1", f"--max_new_tokens={len(poem)}"]
    prompt = poem[:45]
    code, out, _ = call("sample.py", *greedy, f"--start={prompt}", "--device=cpu", cwd=tmp_path)
    assert code == 0
    assert out.startswith(poem + prompt)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_slips_are_answered_before_anything_slow_is_imported(script, tmp_path):
    for argument, code in (("--help", 0), ("--lerning_rate=1", 2)):
        probe = (
            "import runpy, sys\n"
            f"sys.argv = [{script!r}, {argument!r}]\n"
            f"sys.path.insert(0, {str(ROOT)!r})\n"
            f"try: runpy.run_path({str(ROOT / script)!r}, run_name='__main__')\n"
            "except SystemExit as left: print('left with', left.code)\n"
            "print('torch' in sys.modules)\n"
        )
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, cwd=tmp_path)
        assert done.stdout.decode().split()[-4:] == ["left", "with", str(code), "False"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_names_every_setting_with_its_type_and_default(script, tmp_path):
    code, out, _ = call(script, "--help", cwd=tmp_path)
    assert code == 0
    settings = re.findall(r"^  --(\w+)=.+\n      .+ \(.+\)$", out, re.M)
    assert "dataset" in settings or "start" in settings
    assert len(settings) == len(re.findall(r"^  --", out, re.M))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with a trained model."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "verse.txt").write_text(tiny.VERSE * 20, encoding="utf-8")
    assert call("prepare.py", "--input=verse.txt", "--dataset=verse", cwd=folder)[0] == 0
    assert call("train.py", *tiny.flags(max_iters=1, out_dir="run"), cwd=folder)[0] == 0
    return folder


def test_a_reader_that_leaves_is_no_error(workplace):
    command = f"{sys.executable} {ROOT}/train.py --help | head -1"
    done = subprocess.run(command, shell=True, cwd=workplace, capture_output=True)
    assert done.stderr == b""


# The house

FLOORS = (
    {"config"},
    {"safety", "untrusted"},
    {"model", "tokenizer", "device", "trackers"},
    {"batches", "checkpoint", "generation", "optimizers", "prepare", "report"},
    {"train", "sample"},
)


def own_imports(path):
    """The modules of folio that a module imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    return names & set.union(*FLOORS)


def test_imports_point_down_only():
    floor_of = {name: floor for floor, names in enumerate(FLOORS) for name in names}
    for name, floor in floor_of.items():
        path = ROOT / "config/__init__.py" if name == "config" else ROOT / f"{name}.py"
        too_high = {other for other in own_imports(path) if floor_of[other] >= floor}
        assert not too_high, f"{name} imports {too_high}"


def test_there_are_no_other_modules_at_the_top():
    assert {path.stem for path in ROOT.glob("*.py")} == set.union(*FLOORS) - {"config"}


def test_importing_a_module_runs_nothing(tmp_path):
    modules = ", ".join(sorted(set.union(*FLOORS)))
    path = f"sys.path.insert(0, {str(ROOT)!r})"
    probe = f"import sys; {path}; sys.argv = ['x', '--help']; import {modules}"
    done = subprocess.run([sys.executable, "-c", probe], cwd=tmp_path, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert not any(tmp_path.iterdir())


def test_the_model_touches_no_files_and_no_arguments():
    source = (ROOT / "model.py").read_text()
    assert not re.search(r"\b(open|print|sys|os|argv|Path)\b\s*[(.]", source)
    assert own_imports(ROOT / "model.py") == set()


# Presets

NANOGPT_ON_A_GPU = {
    "n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch_size": 64, "dropout": 0.2,
    "learning_rate": 1e-3, "max_iters": 5000, "beta2": 0.99, "warmup_iters": 100,
    "gradient_accumulation_steps": 1,
}  # fmt: skip
NANOGPT_ON_A_CPU = NANOGPT_ON_A_GPU | {
    "n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12, "dropout": 0.0,
    "max_iters": 2000,
}  # fmt: skip


@pytest.mark.parametrize(
    ("device", "recipe", "lines"), [("cuda", NANOGPT_ON_A_GPU, 0), ("cpu", NANOGPT_ON_A_CPU, 1)]
)
def test_the_shakespeare_preset_is_nanogpts_recipe_for_the_machine(device, recipe, lines, capsys):
    preset = str(ROOT / "config" / "shakespeare_char.py")
    settings = config.load(train.TrainConfig, [preset], {"device": lambda _: device})
    assert {name: getattr(settings, name) for name in recipe} == recipe
    assert train.learning_rate_at(settings.max_iters, settings) == pytest.approx(1e-4)
    assert train.learning_rate_at(settings.max_iters - 1, settings) > 1e-4
    assert len(capsys.readouterr().out.splitlines()) == lines


@pytest.mark.parametrize(("device", "place"), [("cuda", 0), ("cpu", 1)])
def test_the_fast_preset_has_the_parameters_that_it_says(device, place):
    preset = ROOT / "config" / "shakespeare_char_fast.py"
    settings = config.load(train.TrainConfig, [str(preset)], {"device": lambda _: device})
    names = {field.name for field in dataclasses.fields(GPTConfig)} - {"vocab_size"}
    shape = GPTConfig(vocab_size=65, **{name: getattr(settings, name) for name in names})
    said = re.findall(r"([\d.]+) M parameters", preset.read_text())[place]
    assert f"{num_params(shape) / 1e6:.1f}" == said
    x = torch.zeros((1, shape.block_size), dtype=torch.int64)
    assert torch.isfinite(GPT(shape)(x, x)[1])


@pytest.mark.parametrize("preset", sorted((ROOT / "config").rglob("[!_]*.py")), ids=str)
def test_every_preset_loads(preset):
    config.load(train.TrainConfig, [str(preset)], {"device": lambda _: "cuda"})


@pytest.mark.parametrize(
    ("tutorial", "vocab_size", "published", "tolerance"),
    [
        ("gpt_small", 65, 309_185, 0.02),
        ("lecture", 65, 10.79e6, 0.001),
        ("gpt2_124m", 50257, 163e6, 0.001),
    ],
)
def test_the_tutorials_have_the_published_sizes(tutorial, vocab_size, published, tolerance):
    preset = str(ROOT / "config" / "tutorials" / f"{tutorial}.py")
    settings = config.load(train.TrainConfig, [preset], {"device": lambda _: "cpu"})
    names = {field.name for field in dataclasses.fields(GPTConfig)} - {"vocab_size"}
    shape = GPTConfig(vocab_size=vocab_size, **{name: getattr(settings, name) for name in names})
    assert num_params(shape) == pytest.approx(published, rel=tolerance)
