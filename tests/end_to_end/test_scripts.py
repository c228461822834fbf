"""The scripts as a user runs them, and the imports between modules."""

import ast
import graphlib
import os
import re
import signal
import subprocess
import sys
import typing
from dataclasses import fields
from pathlib import Path

import pytest
import tiny

import folio
import model
from prepare import PrepareConfig
from sample import SampleConfig
from train import TrainConfig

ROOT = Path(__file__).parents[2]
SETTINGS = {"prepare.py": PrepareConfig, "train.py": TrainConfig, "sample.py": SampleConfig}
TOOLS = ("tools.bench", "tools.export", "tools.page", "tools.plot", "tools.sweep")


def run_process(*arguments, path=str(ROOT)):
    """Runs Python, which imports from `path`. Returns its exit status, stdout and stderr."""
    command = [sys.executable, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": path}
    ended = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8")
    return ended.returncode, ended.stdout, ended.stderr


def run_python(*arguments):
    """Runs Python in the current folder. Returns stdout."""
    status, output, error = run_process(*arguments)
    assert status == 0, error
    return output


@pytest.mark.slow
def test_a_trained_model_reproduces_a_memorized_text(folder):
    line = "Rough winds do shake the darling buds of May,\n"
    Path("poem.txt").write_text(line * 40, encoding="utf-8")
    shape = {"n_embd": 32, "block_size": 16, "batch_size": 8}
    schedule = {"max_iters": 250, "eval_interval": 250, "warmup_iters": 5}
    run_python(ROOT / "prepare.py", "--input=poem.txt", "--dataset=poem")
    run_python(ROOT / "train.py", *tiny.flags(dataset="poem", **shape, **schedule))
    flags = ["--device=cpu", "--temperature=0", "--num_samples=1", f"--max_new_tokens={len(line)}"]
    text = run_python(ROOT / "sample.py", *flags, f"--start={line}")
    assert text.startswith(line + line)


def test_constraints_pin_every_required_package():
    names = ("requirements.txt", "requirements-dev.txt", "constraints.txt")
    required, development, pinned = ((ROOT / name).read_text() for name in names)
    pins = re.findall(r"^(\w+)==.+$", pinned, re.M)
    assert set(pins) == set(re.findall(r"^\w+", required + development, re.M))


# Imports

# A module imports only from its own folder and from those before it.
ORDER = "cli model hardware distributed data checkpoint pretrained training inference scripts tools"
FILES = [ROOT / "model.py", *map(ROOT.joinpath, SETTINGS)]
FILES += [*ROOT.glob("folio/**/*.py"), *ROOT.glob("tools/**/*.py")]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in FILES
    if path.name != "__init__.py"
}


def imports_of(path):
    """Returns the names of this repository's modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names & MODULES.keys()


def position_of(module):
    """Returns the position in ORDER of a module's folder, or of model.py."""
    first, *others = module.split(".")
    if first == "folio":
        first = others[0]
    return ORDER.split().index("scripts" if f"{first}.py" in SETTINGS else first)


def test_imports_point_to_the_left_only_and_have_no_cycle():
    graph = {module: imports_of(path) for module, path in MODULES.items()}
    for module, names in graph.items():
        right = {name for name in names if position_of(name) > position_of(module)}
        assert not right, f"{module} imports {right}"
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


@pytest.mark.slow
def test_importing_a_module_runs_nothing(folder, capfd):
    exported = {"folio.pretrained.modeling_folio"}  # works only in an exported folder
    modules = sorted({name for name in MODULES if not name.startswith("tools")} - exported)
    assert run_python("-c", f"import {', '.join(modules)}", "--help") == ""
    assert capfd.readouterr().err == ""
    assert not any(folder.iterdir())


@pytest.mark.parametrize("script", [*SETTINGS, *TOOLS])
def test_help_version_and_wrong_flags_do_not_wait_for_torch(script, folder):
    command = ["-m", script] if script in TOOLS else [ROOT / script]
    for name in ("numpy", "torch"):  # importing one of them ends the process
        Path(f"{name}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)")

    def run(argument):
        return run_process(*command, argument, path=os.pathsep.join([str(folder), str(ROOT)]))

    assert run("--version") == (0, f"folio {folio.__version__}\n", "")
    status, text, error = run("--help")
    assert (status, text.split()[:2], error) == (0, ["usage:", script], "")
    assert "--version" in text
    if script in SETTINGS:
        names = re.findall(r"^  --(\w+)=.+\n      .+ \(.+\)$", text, re.M)
        assert names == [field.name for field in fields(SETTINGS[script])]
        assert re.search(r"^Examples\n    python .*\n    python ", text, re.M)
    if script == "tools.sweep":  # it has the flags of train.py, too, which imports torch
        assert run("--seed=1,2") == (-signal.SIGTERM, "", "")
    else:
        status, _, error = run("--lerning_rate=1")
        assert (status, error.count("\n")) == (2, 1)
        assert "--lerning_rate" in error


# Settings


def test_the_settings_of_the_model_have_the_types_of_gptconfig():
    types = {field.name: field.type for field in fields(TrainConfig)} | {"vocab_size": int}
    for field in fields(model.GPTConfig):
        if field.name in model.CHOICES:
            assert typing.get_args(types[field.name]) == tuple(model.CHOICES[field.name])
        else:
            assert types[field.name] == field.type


def test_the_switches_of_the_tests_are_those_of_gptconfig():
    defaults = {field.name: field.default for field in fields(model.GPTConfig)}
    assert tiny.SWITCHES.keys() == defaults.keys() - tiny.SMALL.keys() - {"bias", "dropout"}
    assert not [name for name, value in tiny.SWITCHES.items() if value == defaults[name]]
