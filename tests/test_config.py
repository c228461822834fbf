import shlex
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config import UserError, answer_early, changed, load, load_each, nearest, setting

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Settings:
    """One setting of each kind."""

    device: str = setting("auto", "where to compute", group="The machine")
    compile: Literal["auto"] | bool = setting("auto", "whether to compile")
    steps: int = setting(100, "updates to make", bounds="[0, inf)", group="The run")
    warmup: int | None = setting(None, "updates until the full rate")
    rate: float = setting(0.5, "learning rate", bounds="(0, 1]")
    shift: float = setting(0.0, "added to the loss", bounds="(-inf, inf)")
    bias: bool = setting(False, "whether layers have one")
    norm: Literal["layernorm", "rmsnorm"] = setting("layernorm", "kind of norm")
    name: str | None = setting(None, "of the run")


NAMES = [field.name for field in fields(Settings)]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def config_file(text, name="a.py"):
    Path(name).write_text(text, encoding="utf-8")
    return name


def complaint(*argv):
    with pytest.raises(UserError) as caught:
        load(Settings, argv)
    return str(caught.value)


# Order and spelling


def test_without_arguments_every_setting_has_its_default():
    assert load(Settings, []) == Settings()


@pytest.mark.parametrize(
    ("order", "steps"),
    [
        (["a.py", "--steps=3"], 3),
        (["--steps=3", "a.py"], 1),
        (["a.py", "b.py"], 2),
        (["b.py", "a.py"], 1),
        (["--steps=3", "--steps=4"], 4),
    ],
)
def test_of_files_and_flags_the_rightmost_wins(order, steps):
    config_file("steps = 1", "a.py")
    config_file("steps = 2", "b.py")
    assert load(Settings, order).steps == steps


def test_files_and_flags_add_up():
    argv = [config_file("steps = 1", "a.py"), "--bias=True", config_file("rate = 1.0", "b.py")]
    assert changed(load(Settings, argv)) == {"steps": 1, "bias": True, "rate": 1.0}


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        (["--steps=7"], "steps", 7),
        (["--steps", "7"], "steps", 7),
        (["--warmup=None"], "warmup", None),
        (["--warmup=-3"], "warmup", -3),
        (["--rate=1"], "rate", 1.0),
        (["--shift", "-1.5e-3"], "shift", -1.5e-3),
        (["--bias=true"], "bias", True),
        (["--compile=False"], "compile", False),
        (["--compile=auto"], "compile", "auto"),
        (["--norm", "rmsnorm"], "norm", "rmsnorm"),
        (["--name=a=b"], "name", "a=b"),
        (["--name", "a=b"], "name", "a=b"),
        (["--name=--dashes"], "name", "--dashes"),
        (["--name", "-"], "name", "-"),
        (["--name="], "name", ""),
    ],
)
def test_a_flag_becomes_a_value_of_the_settings_type(argv, key, value):
    found = getattr(load(Settings, argv), key)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    "argv", [["--bias"], ["--bias", "--steps=3"], ["--bias", "a.py"], ["--bias", "True"]]
)
def test_a_switch_alone_is_true(argv):
    config_file("")
    assert load(Settings, argv).bias is True


def test_a_switch_may_be_told_to_be_off():
    assert load(Settings, ["--bias", "false"]).bias is False


@pytest.mark.parametrize("argv", [["--steps"], ["--steps", "--bias=True"], ["--compile"]])
def test_a_flag_without_a_value_is_told(argv):
    assert complaint(*argv).startswith(f"{argv[0]} needs a value: {argv[0]}=VALUE, ")


# Config files


@pytest.mark.parametrize(
    ("argv", "warmup"), [(["--steps=50", "a.py"], 5), (["a.py", "--steps=50"], 10)]
)
def test_a_config_file_reads_the_values_so_far(argv, warmup):
    config_file("warmup = steps // 10")
    assert load(Settings, argv).warmup == warmup


def resolve(device):
    return "mps" if device == "auto" else device


@pytest.mark.parametrize(
    ("argv", "seen"),
    [
        (["read.py"], "mps"),
        (["--device=cpu", "read.py"], "cpu"),
        (["read.py", "--device=cpu"], "cpu"),
        (["--device=auto", "read.py"], "mps"),
        (["auto.py", "read.py"], "mps"),
    ],
)
def test_the_device_is_resolved_when_a_config_file_reads_it(argv, seen):
    config_file("name = device", "read.py")
    config_file("device = 'auto'", "auto.py")
    assert load(Settings, argv, {"device": resolve}).name == seen


def refuse_cuda(device):
    if device == "cuda":
        raise UserError("no cuda here")
    return resolve(device)


def test_a_flag_rescues_a_config_file_from_a_device_that_is_not_there():
    file = config_file("device = 'cuda'")
    assert load(Settings, [file, "--device=cpu"], {"device": refuse_cuda}).device == "cpu"


def test_a_device_that_is_not_there_names_the_config_file_that_wants_it():
    with pytest.raises(UserError, match="^a.py: no cuda here$"):
        load(Settings, ["--device=cpu", config_file("device = 'cuda'")], {"device": refuse_cuda})


def test_a_preset_is_found_from_any_folder():
    with pytest.raises(UserError, match="unknown setting out_dir"):  # so it was read
        load(Settings, ["config/shakespeare_char.py"])


def test_a_device_that_a_config_file_sets_is_resolved_too():
    file = config_file("device = 'auto'")
    assert load(Settings, ["--device=cpu", file], {"device": resolve}).device == "mps"


def test_helpers_in_a_config_file_are_ignored():
    file = config_file(
        "import math\nfrom pathlib import Path\n"
        "def half(x): return x // 2\nclass Helper: pass\n_hundred = 100\n"
        "steps = half(_hundred)\n"
    )
    assert changed(load(Settings, [file])) == {"steps": 50}


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("rate = 1", "rate", 1.0),
        ("compile = False", "compile", False),
        ("warmup = None", "warmup", None),
        ("norm = 'rmsnorm'", "norm", "rmsnorm"),
        ("name = 'Füße 🦶'", "name", "Füße 🦶"),
    ],
)
def test_a_config_file_gives_values_of_the_settings_type(text, key, value):
    found = getattr(load(Settings, [config_file(text)]), key)
    assert (found, type(found)) == (value, type(value))


# Mistakes


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--stepz=1", "unknown setting --stepz; did you mean steps?"),
        ("--zzz", "unknown setting --zzz; --help lists the settings"),
        ("near.py", "near.py: unknown setting stepz; did you mean steps?"),
        (
            "far.py",
            "far.py: unknown setting zzz; --help lists them, and a helper's name starts with _",
        ),  # noqa: E501
    ],
)
def test_an_unknown_setting_is_told_with_the_nearest(argument, message):
    config_file("stepz = 1", "near.py")
    config_file("zzz = 1", "far.py")
    assert complaint(argument) == message


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--steps=1.5", "must be int, not '1.5'"),
        ("--steps=-1", "must lie in [0, inf), not -1"),
        ("--warmup=few", "must be int or None, not 'few'"),
        ("--rate=fast", "must be float, not 'fast'"),
        ("--rate=0", "must lie in (0, 1], not 0.0"),
        ("--rate=1.01", "must lie in (0, 1], not 1.01"),
        ("--rate=nan", "must lie in (0, 1], not nan"),
        ("--shift=-inf", "must lie in (-inf, inf), not -inf"),
        ("--bias=1", "must be True or False, not '1'"),
        ("--compile=1", "must be auto, True or False, not '1'"),
        ("--norm=batchnorm", "must be layernorm or rmsnorm, not 'batchnorm'"),
    ],
)
def test_a_wrong_value_names_the_flag(flag, reason):
    assert complaint(flag) == f"{flag.partition('=')[0]} {reason}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("steps = 1.0", "must be int, not 1.0"),
        ("steps = True", "must be int, not True"),
        ("steps = -1", "must lie in [0, inf), not -1"),
        ("rate = '0.1'", "must be float, not '0.1'"),
        ("rate = True", "must be float, not True"),
        ("rate = 2", "must lie in (0, 1], not 2"),
        ("bias = 1", "must be True or False, not 1"),
        ("bias = None", "must be True or False, not None"),
        ("norm = None", "must be layernorm or rmsnorm, not None"),
        ("def steps(): pass", "must be int, not <function"),
    ],
)
def test_a_wrong_value_names_the_config_file(text, reason):
    name = text.removeprefix("def ").replace("(", " ").split()[0]
    assert complaint(config_file(text)).startswith(f"a.py: {name} {reason}")


def test_a_number_too_large_for_a_float_is_told():
    assert complaint(config_file("shift = 10**400")).startswith("a.py: shift must ")


@pytest.mark.parametrize("text", ["steps = 'x' * 10**6", "name = 10**5000", "name = [10**5000]"])
def test_a_value_too_long_to_print_makes_a_short_error(text):
    message = complaint(config_file(text))
    assert message.startswith("a.py: ")
    assert len(message) < 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = 1\nrate = 1 / 0", "a.py line 2: ZeroDivisionError: division by zero"),
        ("def f():\n    return nope\nf()", "a.py line 2: NameError: name 'nope' is not defined"),
        ("import nope_nope", "a.py line 1: ModuleNotFoundError: No module named 'nope_nope'"),
        ("\nraise SystemExit('enough')", "a.py line 2: SystemExit: enough"),
        ("steps = 1\nrate = = 2", "a.py line 2: SyntaxError: invalid syntax"),
    ],
)
def test_an_error_inside_a_config_file_gives_file_and_line(text, message):
    assert complaint(config_file(text)).startswith(message)


def test_a_missing_config_file_names_the_nearest_preset():
    assert complaint("config/shakespear_char.py") == (
        "there is no config file config/shakespear_char.py; "
        "did you mean config/shakespeare_char.py?"
    )


@pytest.mark.parametrize("argument", ["zzz", "", "x" * 300])
def test_a_missing_config_file_unlike_any_lists_the_presets(argument):
    message = complaint(argument)
    assert message.startswith(f"there is no config file {argument}; at hand: ")
    assert "config/shakespeare_char.py" in message
    assert "__init__" not in message


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("notes.txt", "notes.txt is not a config file: those are Python files, *.py"),
        ("steps=5", "settings are written --key=value, not steps=5"),
        ("-v", "settings are written --key=value, not -v"),
    ],
)
def test_an_argument_that_is_neither_flag_nor_config_file_is_told(argument, message):
    config_file("steps = 1", "notes.txt")
    assert complaint(argument) == message


arguments = st.one_of(
    st.text(st.characters()),
    st.builds("--{}".format, st.sampled_from(NAMES)),
    st.builds(
        "--{}={}".format,
        st.sampled_from([*NAMES, "other"]),
        st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none()),
    ),
)


@given(st.lists(arguments.filter(lambda a: a not in ("-h", "--help")), max_size=4))
def test_any_flags_give_settings_that_flags_can_tell_again_or_a_user_error(argv):
    try:
        settings = load(Settings, argv)
    except UserError:
        return
    again = [f"--{name}={value}" for name, value in changed(settings).items()]
    assert load(Settings, again) == settings


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(st.sampled_from([*NAMES, "other"]), values)
def test_any_value_in_a_config_file_is_taken_as_it_is_or_a_user_error(name, value):
    file = config_file(f"{name} = {value!r}")
    try:
        settings = load(Settings, [file])
    except UserError:
        return
    assert getattr(settings, name) == value


# --help


def help_text(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        load(Settings, argv)
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help_tells_name_default_explanation_and_type_of_each_setting(capsys):
    text = help_text(["--help"], capsys)
    for field in fields(Settings):
        assert f"\n  --{field.name}={field.default!r}\n" in text
        assert f"      {field.metadata['explanation']} (" in text
    assert "updates until the full rate (int or None)\n" in text
    assert "learning rate (float in (0, 1])\n" in text


def test_help_keeps_the_groups_in_the_order_of_the_source(capsys):
    lines = help_text(["-h"], capsys).splitlines()
    landmarks = ["One setting of each kind.", "The machine", "  --device='auto'", "The run"]
    places = [lines.index(landmark) for landmark in landmarks]
    assert places == sorted(places)


def test_help_answers_beside_wrong_arguments(capsys):
    assert "--steps" in help_text(["--nope", "nope.py", "--help"], capsys)


@pytest.mark.parametrize("name", NAMES)
def test_what_help_prints_can_be_given_in_a_shell(name, capsys):
    lines = help_text(["--help"], capsys).splitlines()
    argv = shlex.split(next(line for line in lines if line.startswith(f"  --{name}=")))
    assert load(Settings, argv) == Settings()


def test_early_answers_do_not_run_config_files(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", config_file("1 / 0"), "--steps=3"])
    answer_early(Settings)
    monkeypatch.setattr(sys, "argv", ["train.py", "--stepz=3"])
    with pytest.raises(UserError, match="did you mean steps"):
        answer_early(Settings)


# Small helpers


def test_changed_tells_what_differs_from_the_defaults():
    assert changed(Settings(steps=1, norm="layernorm")) == {"steps": 1}


def test_nearest_finds_a_close_name_or_says_otherwise():
    assert nearest("shakespear", ["pydocs", "shakespeare"]) == "; did you mean shakespeare?"
    assert nearest("zzz", ["pydocs", "shakespeare"], "; no") == "; no"


# Several values


def each(*argv, **settings):
    """The names that have several values, and the values of their combinations."""
    names, found = load_each(Settings, argv, **settings)
    return names, [tuple(getattr(settings, name) for name in names) for settings in found]


def test_settings_with_several_values_are_combined():
    config_file("steps = [1, 2]\nrate = (0.1, 1)")
    expected = [(1, 0.1), (1, 1.0), (2, 0.1), (2, 1.0)]
    assert each("a.py") == (["steps", "rate"], expected)
    assert each("--steps=1,2", "--rate", "0.1,1") == (["steps", "rate"], expected)
    assert each("a.py", "--rate=0.3") == (["steps"], [(1,), (2,)])
    assert each("--rate=0.3,0.4", "a.py", "--steps=7") == (["rate"], [(0.1,), (1.0,)])


def test_files_to_the_right_see_the_value_of_their_combination():
    config_file("steps = range(10, 40, 10)")
    config_file("warmup = steps // 10", "b.py")
    names, found = load_each(Settings, ["a.py", "b.py"])
    assert names == ["steps"]
    assert [(s.steps, s.warmup) for s in found] == [(10, 1), (20, 2), (30, 3)]


def test_several_values_may_be_of_any_kind():
    assert each("--bias=True,False")[1] == [(True,), (False,)]
    assert each("--warmup=None,3")[1] == [(None,), (3,)]
    assert each("--norm=rmsnorm,layernorm")[1] == [("rmsnorm",), ("layernorm",)]
    assert each("--name=a,b", "--device=cpu,mps", resolvers={"device": str.upper})[1] == [
        ("a", "CPU"), ("a", "MPS"), ("b", "CPU"), ("b", "MPS"),
    ]  # fmt: skip


def test_equal_values_make_one_run():
    assert each("--rate=0.1,0.10,0.2")[1] == [(0.1,), (0.2,)]


def test_some_of_the_combinations_can_be_chosen():
    def sample(first, count):
        assert (first.steps, count) == (1, 6)
        return [1, 5]

    assert each("--steps=1,2", "--rate=0.1,0.2,0.3", sample=sample)[1] == [(1, 0.2), (2, 0.3)]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rate=0.1,7"], "--rate must lie in (0, 1], not 7.0"),
        (["--rate=0.1,"], "--rate must be float, not ''"),
        (["a.py"], "a.py: steps must be int, not 'x'"),
        (["b.py"], "b.py: steps must be int, not []"),
        (["c.py"], "c.py line 2: TypeError"),
    ],
)
def test_mistakes_among_several_values_are_told(argv, message):
    config_file("steps = [1, 'x']")
    config_file("steps = []", "b.py")
    config_file("steps = [1, 2]\nwarmup = steps // 10", "c.py")
    with pytest.raises(UserError) as caught:
        load_each(Settings, argv)
    assert message in str(caught.value)


def test_one_run_takes_no_list(capsys):
    config_file("steps = [1, 2]")
    assert complaint("a.py").endswith("not [1, 2]; several values are for tools.sweep")
    assert complaint("--steps=1,2") == "--steps must be int, not '1,2'"


def test_what_files_print_is_not_repeated_for_each(capsys):
    config_file("print('hello')\nsteps = [1, 2, 3]")
    each("a.py")
    assert capsys.readouterr().out == "hello\n"


def test_a_range_may_depend_on_another_but_not_in_its_length():
    config_file("shift = [steps, 2 * steps]")
    config_file("shift = [0.5] * steps", "b.py")
    assert each("--steps=3,5", "a.py") == (["steps", "shift"], [(3, 3), (3, 6), (5, 5), (5, 10)])
    with pytest.raises(UserError, match="how many values shift has depends on another"):
        each("--steps=3,5", "b.py")


def test_names_are_those_of_all_combinations_though_one_is_chosen():
    assert each("--steps=1,2", sample=lambda *_: [1]) == (["steps"], [(2,)])


# Operands


@dataclass(frozen=True)
class Pictured:
    """A tool that takes names."""

    OPERANDS: ClassVar[str] = "files"

    files: tuple = setting((), "what to look at")
    width: int = setting(1, "of it")


def test_operands_are_collected_instead_of_run(capsys, monkeypatch):
    found = load(Pictured, ["a.py", "--width", "3", "b"])
    assert (found.files, found.width) == (("a.py", "b"), 3)
    with pytest.raises(UserError, match="unknown setting --files; --help lists"):
        load(Pictured, ["--files=a"])
    monkeypatch.setattr(sys, "argv", ["tool", "--help"])
    with pytest.raises(SystemExit):
        answer_early(Pictured)
    assert "--files" not in capsys.readouterr().out
