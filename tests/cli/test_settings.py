"""Settings: parsing and checking values, config files and flags, and `--help`."""

import os
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from folio.cli.errors import UserError
from folio.cli.settings import changed_settings, load_settings, setting


@dataclass(frozen=True)
class Settings:
    """One setting of each type."""

    device: str = setting("auto", "where to compute", group="Machine", affects="machine")
    compile: Literal["auto"] | bool = setting("auto", "whether to compile", affects="machine")
    steps: int = setting(100, "updates to make", "[0, inf)", group="Run")
    warmup: int | None = setting(None, "updates until the full rate")
    rate: float = setting(0.5, "learning rate", "(0, 1]")
    shift: float = setting(0.0, "added to the loss", "(-inf, inf)")
    bias: bool = setting(False, "whether layers have one")
    norm: Literal["layernorm", "rmsnorm"] = setting("layernorm", "kind of norm")
    name: str | None = setting(None, "of the run", affects="display")

    def __post_init__(self):
        if self.warmup and self.warmup > self.steps:
            raise ValueError(f"warmup={self.warmup} is longer than steps={self.steps}")


HELPER_RULE = "is not a setting; names of helper variables start with _"
FIELDS = {field.name: field for field in fields(Settings)}


@pytest.fixture(autouse=True)
def in_folder(folder):
    """Every test runs in an empty folder."""


def config_file(text, name="a.py"):
    Path(name).write_text(text, encoding="utf-8")
    return name


def error_of(*argv):
    with pytest.raises(UserError) as caught:
        load_settings(Settings, argv)
    return str(caught.value)


# Flags and config files


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--steps=3", "--steps", "7"], {"steps": 7}),
        (["--bias", "--shift", "-1.5e-3"], {"shift": -1.5e-3, "bias": True}),
        (["--bias", "true"], {"bias": True}),
        (["--name=--a=b"], {"name": "--a=b"}),
        (["--name=~/a"], {"name": os.path.expanduser("~/a")}),
        (["--steps=100", "--name="], {"steps": 100, "name": ""}),  # a default that is given
        (["--rate=1", "--warmup=None"], {"warmup": None, "rate": 1.0}),
        (["--compile=False", "--norm=rmsnorm"], {"compile": False, "norm": "rmsnorm"}),
    ],
)
def test_a_flag_has_several_spellings_and_is_parsed_to_the_type_of_the_field(argv, expected):
    assert repr(changed_settings(load_settings(Settings, argv))) == repr(expected)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (["a.py", "--steps=3"], {"steps": 3, "bias": True}),
        (["--steps=3", "a.py", "b.py"], {"steps": 20, "bias": True, "rate": 1.0}),
        (["--steps=50", "c.py"], {"steps": 50, "warmup": 5}),
        (["c.py", "--steps=50"], {"steps": 50, "warmup": 5}),
        (["c.py", "b.py"], {"steps": 20, "warmup": 10, "rate": 1.0}),  # of the default
        (["b.py", "c.py"], {"steps": 20, "warmup": 2, "rate": 1.0}),
        (["d.py"], {"steps": 50}),
        (["e.py"], {"steps": 3, "rate": 0.5, "bias": False}),
    ],
)
def test_files_and_flags_apply_left_to_right_and_files_read_the_flags_to_their_right(
    order, expected
):
    config_file("steps = 1\nbias = True", "a.py")
    config_file("steps = 20\nrate = 1", "b.py")
    config_file("warmup = steps // 10", "c.py")
    helpers = "import math\ndef half(x): return x // 2\nclass A: pass\n_hundred = 100\n"
    config_file(helpers + "steps = half(_hundred)", "d.py")
    config_file("bias = False\nexec('steps = 3; rate = 0.5')\nif bias:\n    name = 'x'", "e.py")
    assert changed_settings(load_settings(Settings, order)) == expected


def test_a_config_file_reads_the_resolved_device():
    config_file("name = device", "read.py")
    config_file("device = 'cuda'", "cuda.py")
    resolvers = {"device": {"auto": "mps", "cpu": "cpu"}.__getitem__}
    for argv, device in (([], "mps"), (["cuda.py", "--device=cpu"], "cpu")):
        settings = load_settings(Settings, [*argv, "read.py"], resolvers)
        assert (settings.name, settings.device) == (device, device)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 'x'\nsteps = -1", "a.py: steps must be in [0, inf), not -1"),
        ("steps = 1.0", "a.py: steps must be int, not 1.0"),
        ("steps = True", "a.py: steps must be int, not True"),
        ("rate = 0", "a.py: rate must be in (0, 1], not 0.0"),
        ("compile = 1", "a.py: compile must be auto, True or False, not 1"),
        ("rate = 10**400", "a.py: rate must be less than 2**63"),
        ("steps = 10**5000", "a.py: steps must be less than 2**63"),
        ("name = [1] * 10**6", "a.py: name must be str or None, not [1, 1, 1, 1, 1, 1, ...]"),
        ("def f():\n    return nope\nf()", "a.py line 2: NameError: "),
        ("steps = 1\nrate = = 2", "a.py: SyntaxError: invalid syntax (a.py, line 2)"),
        ("exit(0)", "a.py line 1: SystemExit: 0"),
        ("step = 1", f"a.py: step {HELPER_RULE}; did you mean steps?"),
        ("steps: 5", "a.py: 'steps: VALUE' assigns nothing; write steps = VALUE"),
        ("base = 128", f"a.py: base {HELPER_RULE}"),  # no setting is similar enough
    ],
)
def test_an_error_in_a_config_file_names_the_file(text, message):
    error = error_of(config_file(text))
    assert error.startswith(message)
    assert "mean" not in error.replace(message, "")


# Invalid arguments


@pytest.mark.parametrize(
    ("argument", "names"),
    [
        ("--warmup=101", ["warmup=101 is longer than steps=100"]),
        ("--steps=1.5", ["--steps must be int, not '1.5'"]),
        (f"--steps={2**63}", ["--steps must be less than 2**63"]),
        ("--rate=nan", ["--rate must be in (0, 1], not nan"]),
        ("--shift=1e400", ["--shift must be in (-inf, inf), not inf"]),
        ("--norm=batchnorm", ["--norm must be layernorm or rmsnorm, not 'batchnorm'"]),
        ("--stepz=1", ["--stepz", "steps?"]),
        ("--gpu=0", ["--gpu", "device?"]),  # as other programs call it
        ("--lrr=1", ["--help"]),
        ("--steps", ["--steps=VALUE"]),
        ("steps=5", ["steps=5", "--name=value"]),
        ("folder", ["folder", "--out_dir=folder?"]),
        ("config/shakespear_char.py", ["config/shakespear_char.py", "config/shakespeare_char.py?"]),
        ("my_confg.py", ["there is no config file my_confg.py; did you mean my_config.py?"]),
        ("--config=a.py", ["config files are named without a flag: ", " a.py"]),
        ("x" * 300, ["x" * 300, "ls config"]),
        ("config/shakespeare_char.py", ["out_dir"]),  # a file that exists, for train.py
    ],
)
def test_an_invalid_argument_is_an_error_with_a_hint(argument, names):
    Path("folder").mkdir()
    Path("my_config.py").touch()
    message = error_of(argument)
    assert all(name in message for name in names)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
names = st.sampled_from([*FIELDS, "other"])
flags = st.builds("--{}".format, names) | st.builds("--{}={}".format, names, scalars)


@given(st.lists(st.text(st.characters()).filter(lambda text: text != "-h") | flags, max_size=4))
def test_any_arguments_give_settings_or_a_user_error(argv):
    try:
        settings = load_settings(Settings, argv)
    except UserError:
        return
    flags = [f"--{name}={value}" for name, value in changed_settings(settings).items()]
    assert load_settings(Settings, flags) == settings
    assert load_settings(Settings, shlex.split(settings.command_line)) == settings


# Help


def test_help_has_each_group_and_setting_and_defaults_are_valid_arguments(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        load_settings(Settings, ["--nope", "nope.py", "--help"])
    lines = capsys.readouterr().out.splitlines()
    positions = [lines.index(line) for line in ("One setting of each type.", "Machine", "Run")]
    assert positions == sorted(positions)
    assert lines[-1] == "Examples"  # those of this module, which has none
    assert "      updates to make (int in [0, inf))" in lines
    assert "      whether to compile (auto, True or False)" in lines
    argv = [word for line in lines if line.startswith("  --") for word in shlex.split(line)]
    assert load_settings(Settings, argv) == Settings()
