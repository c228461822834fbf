"""The scripts as a user runs them, and the imports between modules."""

import ast
import graphlib
import re
import subprocess
import sys
import typing
from dataclasses import fields
from pathlib import Path

import pytest

import model
from prepare import PrepareConfig
from sample import SampleConfig
from train import TrainConfig

ROOT = Path(__file__).parent.parent
SCRIPTS = ("prepare.py", "train.py", "sample.py")


def output_of(script, *arguments, cwd):
    """Runs a script in a process. Returns stdout."""
    command = [sys.executable, str(ROOT / script), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, check=True).stdout.decode()


@pytest.mark.slow
def test_a_trained_model_reproduces_a_memorized_text(tmp_path):
    line = "Rough winds do shake the darling buds of May,\n"
    (tmp_path / "poem.txt").write_text(line * 40, encoding="utf-8")
    (tmp_path / "tiny.py").write_text(
        "n_layer, n_head, n_embd, block_size = 1, 2, 32, 16\n"
        "batch_size, gradient_accumulation_steps, max_iters = 8, 1, 250\n"
        "learning_rate, warmup_iters, eval_interval, eval_iters = 1e-2, 5, 250, 2\n"
    )
    output_of("prepare.py", "--input=poem.txt", "--dataset=poem", cwd=tmp_path)
    output_of("train.py", "tiny.py", "--dataset=poem", "--device=cpu", cwd=tmp_path)
    flags = ["--device=cpu", "--temperature=0", "--num_samples=1", f"--max_new_tokens={len(line)}"]
    found = output_of("sample.py", *flags, f"--start={line}", cwd=tmp_path)
    assert found.startswith(line + line)


def test_constraints_pin_every_required_package():
    files = (ROOT / name for name in ("requirements.txt", "requirements-dev.txt"))
    required = {name for file in files for name in re.findall(r"^\w+", file.read_text(), re.M)}
    pinned = dict(re.findall(r"^(\w+)==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.M))
    assert pinned.keys() == required
    for name, least in re.findall(
        r"^([a-z_]+)>=([\d.]+)$", (ROOT / "requirements.txt").read_text(), re.M
    ):
        version = lambda text: [int(part) for part in text.split(".")]  # noqa: E731
        assert version(pinned[name]) >= version(least), name


# Imports

# A module imports only from its own folder and from those before it.
ORDER = "cli model hardware distributed data checkpoint pretrained training inference scripts tools"
FILES = [*ROOT.glob("*.py"), *ROOT.glob("folio/**/*.py"), *ROOT.glob("tools/**/*.py")]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in FILES
    if path.name != "__init__.py"
}


def imports_of(path):
    """Returns the names of the modules of this repository that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found & MODULES.keys()


def position_of(module):
    """Returns the position in ORDER of a module's folder, or of model.py."""
    first, *others = module.split(".")
    if first == "folio":
        first = others[0]
    return ORDER.split().index("scripts" if f"{first}.py" in SCRIPTS else first)


def test_imports_point_to_the_left_only():
    for module, path in MODULES.items():
        right = {name for name in imports_of(path) if position_of(name) > position_of(module)}
        assert not right, f"{module} imports {right}"


def test_no_modules_import_each_other():
    graph = {module: imports_of(path) for module, path in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_the_top_level_has_the_four_scripts():
    assert {*SCRIPTS, "model.py"} == {path.name for path in ROOT.glob("*.py")}


def python(code, folder):
    """Runs code with the repository on the path. Returns exit status, stdout and stderr."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.slow
def test_importing_a_module_runs_nothing(tmp_path):
    needs = {"folio.pretrained.modeling_folio"}  # part of an exported folder, beside model.py
    modules = sorted({name for name in MODULES if not name.startswith("tools")} - needs)
    code = f"sys.argv = ['x', '--help']; import {', '.join(modules)}"
    assert python(code, tmp_path) == (0, "", "")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("--lerning_rate=1", 2)])
def test_help_and_invalid_flags_are_answered_without_torch(script, argument, status, tmp_path):
    code = (
        f"import runpy; sys.argv = [{script!r}, {argument!r}]\n"
        f"try: runpy.run_path({str(ROOT / script)!r}, run_name='__main__')\n"
        "except SystemExit as exit: print(exit.code, {'torch', 'numpy'} & set(sys.modules))\n"
    )
    lines = python(code, tmp_path)[1].splitlines()
    assert lines[-1] == f"{status} set()"
    if argument == "--help":
        found = re.findall(r"^  --(\w+)=.+\n      .+ \(.+\)$", "\n".join(lines), re.M)
        settings = {"prepare.py": PrepareConfig, "train.py": TrainConfig, "sample.py": SampleConfig}
        assert found == [field.name for field in fields(settings[script])]


# Settings


def test_the_settings_of_the_model_are_those_of_gptconfig():
    groups, found = {None: []}, {field.name: field.type for field in fields(TrainConfig)}
    for field in fields(TrainConfig):
        groups.setdefault(field.metadata["group"] or [*groups][-1], []).append(field.name)
    expected = {field.name: field.type for field in fields(model.GPTConfig)}
    del expected["vocab_size"]
    assert {"block_size", *groups["Model"]} == expected.keys()
    for name, kind in expected.items():
        if name in model.CHOICES:
            assert typing.get_args(found[name]) == tuple(model.CHOICES[name])
        else:
            assert found[name] == kind
