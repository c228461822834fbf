"""Settings from config files and flags, and `--help`."""

import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_fields import Settings

from folio.cli.errors import UserError
from folio.cli.settings import changed_settings, load_settings

NAMES = [field.name for field in fields(Settings)]


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


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--steps=3", "--steps=7"], {"steps": 7}),
        (["--steps", "7"], {"steps": 7}),
        (["--shift", "-1"], {"shift": -1.0}),
        (["--bias", "--steps=7"], {"bias": True, "steps": 7}),
        (["--bias", "true"], {"bias": True}),
        (["--name=--a=b"], {"name": "--a=b"}),
    ],
)
def test_spellings_of_a_flag(argv, expected):
    assert changed_settings(load_settings(Settings, argv)) == expected


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (["a.py", "--steps=3"], {"steps": 3, "bias": True}),
        (["--steps=3", "a.py"], {"steps": 1, "bias": True}),
        (["a.py", "b.py"], {"steps": 20, "bias": True, "rate": 1.0}),
        (["--steps=50", "c.py"], {"steps": 50, "warmup": 5}),
        (["c.py", "--steps=50"], {"steps": 50, "warmup": 5}),
        (["c.py", "b.py"], {"steps": 20, "warmup": 10, "rate": 1.0}),  # of the default
        (["b.py", "c.py"], {"steps": 20, "warmup": 2, "rate": 1.0}),
        (["d.py"], {"steps": 50}),
    ],
)
def test_files_and_flags_apply_left_to_right_and_files_read_the_flags_to_their_right(
    order, expected
):
    config_file("steps = 1\nbias = True", "a.py")
    config_file("steps = 20\nrate = 1", "b.py")
    config_file("warmup = steps // 10", "c.py")
    helpers = "import math as bias\ndef half(x): return x // 2\nclass A: pass\n_hundred = 100\n"
    config_file(helpers + "steps = half(_hundred)", "d.py")
    assert changed_settings(load_settings(Settings, order)) == expected


def resolve(device):
    if device == "cuda":
        raise UserError("no CUDA GPU")
    return "mps" if device == "auto" else device


@pytest.mark.parametrize(
    ("argv", "seen"),
    [
        (["read.py"], "mps"),
        (["read.py", "--device=cpu"], "cpu"),
        (["cuda.py", "--device=cpu", "read.py"], "cpu"),
    ],
)
def test_a_config_file_reads_the_resolved_device(argv, seen):
    config_file("name = device", "read.py")
    config_file("device = 'cuda'", "cuda.py")
    settings = load_settings(Settings, argv, {"device": resolve})
    assert (settings.name, settings.device) == (seen, seen)
    with pytest.raises(UserError, match="^no CUDA GPU$"):
        load_settings(Settings, [*argv, "--device=cuda"], {"device": resolve})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = -1", "a.py: steps must be in [0, inf), not -1"),
        ("def f():\n    return nope\nf()", "a.py line 2: NameError: "),
        ("\nraise SystemExit('enough')", "a.py line 2: SystemExit: enough"),
        ("steps = 1\nrate = = 2", "a.py: SyntaxError: invalid syntax (a.py, line 2)"),
        ("step = 1", "a.py: unknown setting step; did you mean steps?; "),
    ],
)
def test_an_error_in_a_config_file_has_its_file_and_line(text, message):
    assert error_of(config_file(text)).startswith(message)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()


# Unknown names


@pytest.mark.parametrize(
    ("argument", "names"),
    [
        ("--stepz=1", ["--stepz", "steps?"]),
        ("--steps", ["--steps=VALUE"]),
        ("notes.txt", ["notes.txt", ".py"]),
        ("steps=5", ["steps=5", "--name=value"]),
        ("config/shakespear_char.py", ["config/shakespear_char.py", "config/shakespeare_char.py?"]),
        ("x" * 300, ["x" * 300, "config/eval_gpt2.py"]),
        ("config/shakespeare_char.py", ["out_dir"]),  # found, but of train.py
    ],
)
def test_an_unknown_argument_is_an_error_with_a_hint(argument, names):
    Path("notes.txt").touch()
    message = error_of(argument)
    assert all(name in message for name in names)


arguments = (
    st.text(st.characters())
    | st.builds("--{}".format, st.sampled_from(NAMES))
    | st.builds("--{}={}".format, st.sampled_from([*NAMES, "other"]), scalars)
)


@given(st.lists(arguments.filter(lambda a: a not in ("-h", "--help")), max_size=4))
def test_any_arguments_give_settings_or_a_user_error(argv):
    try:
        settings = load_settings(Settings, argv)
    except UserError:
        return
    again = [f"--{name}={value}" for name, value in changed_settings(settings).items()]
    assert load_settings(Settings, again) == settings


# Help


def test_help_has_each_group_and_setting_and_defaults_are_valid_arguments(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        load_settings(Settings, ["--nope", "nope.py", "--help"])
    lines = capsys.readouterr().out.splitlines()
    expected = ["One setting of each type.", "Machine"]
    for field in fields(Settings):
        expected += ["Run"] if field.name == "steps" else []
        expected.append(f"  --{field.name}={field.default!r}")
    assert [line for line in lines[1:] if line and not line.startswith("      ")] == expected
    assert "      updates to make (int in [0, inf))" in lines
    assert "      whether to compile (auto, True or False)" in lines
    argv = [word for line in lines if line.startswith("  --") for word in shlex.split(line)]
    assert load_settings(Settings, argv) == Settings()
