"""Settings from config files and flags, and `--help`."""

import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_fields import Settings

from folio.errors import UserError
from folio.fields import setting
from folio.settings import SYNONYMS, changed, load, names_in, parse_arguments
from prepare import PrepareConfig
from sample import SampleConfig
from train import TrainConfig

NAMES = [field.name for field in fields(Settings)]


@pytest.fixture(autouse=True)
def in_folder(folder):
    """Every test runs in an empty folder."""


def config_file(text, name="a.py"):
    Path(name).write_text(text, encoding="utf-8")
    return name


def error_of(*argv):
    with pytest.raises(UserError) as caught:
        load(Settings, argv)
    return str(caught.value)


# Flags


@pytest.mark.parametrize(
    ("order", "steps"),
    [
        ([], 100),
        (["a.py", "--steps=3"], 3),
        (["--steps=3", "a.py"], 1),
        (["a.py", "b.py"], 2),
        (["--steps=3", "--steps=4"], 4),
    ],
)
def test_the_rightmost_file_or_flag_takes_precedence(order, steps):
    config_file("steps = 1", "a.py")
    config_file("steps = 2", "b.py")
    assert load(Settings, order).steps == steps


def test_files_and_flags_accumulate():
    argv = [config_file("steps = 1", "a.py"), "--bias=True", config_file("rate = 1", "b.py")]
    assert changed(load(Settings, argv)) == {"steps": 1, "bias": True, "rate": 1.0}


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        (["--steps=7"], "steps", 7),
        (["--steps", "7"], "steps", 7),
        (["--shift", "-1"], "shift", -1.0),
        (["--bias", "--steps=7"], "bias", True),
        (["--bias", "false"], "bias", False),
        (["--shift=-1"], "shift", -1.0),
        (["--name=--a=b"], "name", "--a=b"),
        (["--name="], "name", ""),
        (["--bias"], "bias", True),
        (["--bias=false"], "bias", False),
    ],
)
def test_spellings_of_a_flag(argv, key, value):
    assert getattr(load(Settings, argv), key) == value


def test_a_flag_without_a_value_is_an_error():
    for argv in (["--steps"], ["--steps", "--bias"]):
        assert error_of(*argv) == "--steps needs a value: --steps=VALUE, int"


# Config files


@pytest.mark.parametrize("value", ["10**5000", "'a\\0b'"])
def test_values_that_python_cannot_print_or_open_are_errors(value):
    name = "steps" if value[0] == "1" else "name"
    assert f"a.py: {name} must" in error_of(config_file(f"{name} = {value}"))


def test_a_value_that_is_replaced_need_not_be_valid():
    file = config_file("steps = 'many'\nnorm = 'unknown'", "mine.py")
    settings = load(Settings, [file, "--steps=3", "--norm=rmsnorm"])
    assert (settings.steps, settings.norm) == (3, "rmsnorm")
    assert error_of(file, "--norm=rmsnorm").startswith("mine.py: steps must be int, not 'many'")


@pytest.mark.parametrize("error", ["GeneratorExit", "SystemExit(3)", "BaseException('odd')"])
def test_a_config_file_may_raise_anything(error):
    assert error_of(config_file(f"raise {error}")).startswith(f"a.py line 1: {error[:10]}")


def test_the_file_that_sets_an_invalid_value_is_named():
    files = [config_file("steps = 2.5", "a.py"), config_file("shift = 1", "b.py")]
    assert error_of(*files).startswith("a.py: steps must be int")


def test_imported_modules_are_ignored_even_if_named_like_a_setting():
    assert load(Settings, [config_file("import json as steps\nshift = 1")]).steps == 100


def test_text_that_is_not_unicode_is_an_error():
    expected = "a.py: name must be valid Unicode, not '\\ud800x'"
    assert error_of(config_file(r"name = '\ud800x'")) == expected


@pytest.mark.parametrize(
    ("name", "setting"), [("lr", "learning_rate"), ("epochs", "max_iters"), ("d-model", "n_embd")]
)
def test_names_of_other_tools_are_suggested(name, setting):
    with pytest.raises(UserError, match=f"unknown setting --{name}; use --{setting} \\("):
        load(TrainConfig, [f"--{name}=1"])


def test_synonyms_belong_to_settings_and_are_not_settings():
    known = {
        field.name for each in (PrepareConfig, TrainConfig, SampleConfig) for field in fields(each)
    }
    assert SYNONYMS.keys() <= known
    for settings_class in (PrepareConfig, TrainConfig, SampleConfig):
        names = {field.name for field in fields(settings_class)}
        for name in SYNONYMS.keys() & names:
            assert not names & set(SYNONYMS[name].split()), name


def test_a_config_file_reads_the_values_so_far_and_those_of_flags_to_its_right():
    file, other = config_file("warmup = steps // 10"), config_file("steps = 70", "b.py")
    assert load(Settings, ["--steps=50", file]).warmup == 5
    assert load(Settings, [file, "--steps=50"]).warmup == 5
    assert load(Settings, [other, file]).warmup == 7
    assert load(Settings, [file, other]).warmup == 10  # the default's tenth


def resolve(device):
    if device == "cuda":
        raise UserError("no CUDA GPU")
    return "mps" if device == "auto" else device


@pytest.mark.parametrize(
    ("argv", "seen"),
    [
        (["read.py"], "mps"),
        (["--device=cpu", "read.py"], "cpu"),
        (["read.py", "--device=cpu"], "cpu"),
        (["auto.py", "read.py"], "mps"),
        (["--device=cpu", "auto.py", "read.py"], "mps"),
    ],
)
def test_a_config_file_reads_the_resolved_device(argv, seen):
    config_file("name = device", "read.py")
    config_file("device = 'auto'", "auto.py")
    settings = load(Settings, argv, {"device": resolve})
    assert (settings.name, settings.device) == (seen, seen)


def test_an_unavailable_device_is_an_error_unless_it_is_overridden():
    file = config_file("device = 'cuda'")
    with pytest.raises(UserError, match="^no CUDA GPU$"):
        load(Settings, ["--device=cpu", file], {"device": resolve})
    with pytest.raises(UserError, match="^no CUDA GPU$"):
        load(Settings, ["--device=cuda"], {"device": resolve})
    assert load(Settings, [file, "--device=cpu"], {"device": resolve}).device == "cpu"


def test_a_preset_is_found_from_any_folder():
    with pytest.raises(UserError, match="unknown setting out_dir"):  # it was executed
        load(Settings, ["config/shakespeare_char.py"])


def test_modules_functions_and_underscored_names_are_not_settings():
    text = "import math\ndef half(x): return x // 2\nclass Helper: pass\n_hundred = 100\n"
    assert load(Settings, [config_file(text + "steps = half(_hundred)")]).steps == 50


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = -1", "a.py: steps must be in [0, inf), not -1"),
        ("steps = 1\nrate = 1 / 0", "a.py line 2: ZeroDivisionError: division by zero"),
        ("def f():\n    return nope\nf()", "a.py line 2: NameError: name 'nope' is not defined"),
        ("\nraise SystemExit('enough')", "a.py line 2: SystemExit: enough"),
        ("steps = 1\nrate = = 2", "a.py: SyntaxError: invalid syntax (a.py, line 2)"),
    ],
)
def test_an_error_in_a_config_file_has_its_file_and_line(text, message):
    assert error_of(config_file(text)).startswith(message)


def test_a_flag_is_checked_before_a_config_file_computes_with_it():
    file = config_file("warmup = steps // 10")
    assert error_of("--steps=1e4", file) == "--steps must be int, not '1e4'"


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
values = scalars | st.lists(scalars) | st.dictionaries(st.text(), scalars)


@given(st.sampled_from([*NAMES, "other"]), values)
def test_any_value_in_a_config_file_is_used_or_a_user_error(name, value):
    file = config_file(f"{name} = {value!r}")
    try:
        settings = load(Settings, [file])
    except UserError:
        return
    assert getattr(settings, name) == value


# Unknown names


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--stepz=1", "unknown setting --stepz; did you mean --steps?"),
        ("--zzz", "unknown setting --zzz; --help lists the settings"),
        ("far.py", "far.py: unknown setting zzz; names of helper variables start with _"),
        ("notes.txt", "notes.txt is not a config file: their names end in .py"),
        ("steps=5", "write settings as --name=value, not steps=5"),
        (
            "config/shakespear_char.py",
            "there is no config file config/shakespear_char.py; did you mean "
            "config/shakespeare_char.py?",
        ),
    ],
)
def test_an_unknown_argument_is_an_error_with_a_hint(argument, message):
    config_file("zzz = 1", "far.py")
    config_file("steps = 1", "notes.txt")
    assert error_of(argument).startswith(message)


def test_the_error_for_a_missing_config_file_lists_the_presets():
    for name in ("zzz", "", "x" * 300):
        start = f"there is no config file {name}; available: config/eval_gpt2.py, config/"
        assert error_of(name).startswith(start)


arguments = (
    st.text(st.characters())
    | st.builds("--{}".format, st.sampled_from(NAMES))
    | st.builds("--{}={}".format, st.sampled_from([*NAMES, "other"]), scalars)
)


@given(st.lists(arguments.filter(lambda a: a not in ("-h", "--help")), max_size=4))
def test_any_arguments_give_settings_or_a_user_error(argv):
    try:
        settings = load(Settings, argv)
    except UserError:
        return
    again = [f"--{name}={value}" for name, value in changed(settings).items()]
    assert load(Settings, again) == settings


# --help and early checks


def help_text(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        load(Settings, argv)
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help_has_each_group_and_setting_in_order(capsys):
    lines = help_text(["--nope", "nope.py", "--help"], capsys).splitlines()
    expected = ["One setting of each type.", "Machine"]
    for field in fields(Settings):
        expected += ["Run"] if field.name == "steps" else []
        expected.append(f"  --{field.name}={field.default!r}")
    assert [line for line in lines[1:] if line and not line.startswith("      ")] == expected
    assert "      updates to make (int in [0, inf))" in lines
    assert "      whether to compile (auto, True or False)" in lines


def test_defaults_as_help_prints_them_are_valid_arguments(capsys):
    lines = help_text(["-h"], capsys).splitlines()
    argv = [word for line in lines if line.startswith("  --") for word in shlex.split(line)]
    assert load(Settings, argv) == Settings()


def test_parsing_arguments_runs_no_config_files():
    file = config_file("1 / 0")
    assert parse_arguments(Settings, ["--steps=3", file]) == [("steps", 3), (None, Path(file))]
    with pytest.raises(UserError, match="^--steps must be in"):
        parse_arguments(Settings, ["--steps=-1", file])


# Scopes, several values, operands


def test_names_in_returns_the_settings_of_scopes():
    assert names_in(Settings, "run", "display") == set(NAMES) - {"device", "compile"}


def test_choose_replaces_values_and_quiet_suppresses_output(capsys):
    config_file("print('hello')\nsteps = [1, 2]")
    offered = {}

    def choose(name, value):
        offered[name] = value
        return value[-1] if isinstance(value, list) else value

    settings = load(Settings, ["a.py", "--rate=0.1,1"], choose=choose, quiet=True)
    assert (offered["steps"], offered["rate"]) == ([1, 2], ["0.1", "1"])
    assert (settings.steps, settings.rate) == (2, 1.0)
    assert capsys.readouterr().out == ""


@dataclass(frozen=True)
class Tool:
    OPERANDS: ClassVar[str] = "files"

    files: tuple = setting((), "to read")
    width: int = setting(1, "of the output")


def test_operands_are_collected(capsys):
    found = load(Tool, ["a.py", "--width=3", "b"])
    assert (found.files, found.width) == (("a.py", "b"), 3)
    with pytest.raises(UserError, match="unknown setting --files; --help lists"):
        load(Tool, ["--files=a"])
    with pytest.raises(SystemExit):
        parse_arguments(Tool, ["--help"])
    assert "--files" not in capsys.readouterr().out
