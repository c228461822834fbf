"""tools.grid: combinations of settings that have several values."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest

from folio.errors import UserError
from folio.fields import setting
from tools.grid import Grid, draw


@dataclass(frozen=True)
class Settings:
    seed: int = setting(1, "seed")
    device: str = setting("auto", "device")
    steps: int = setting(100, "steps")
    warmup: int | None = setting(None, "warmup steps")
    rate: float = setting(0.5, "learning rate", "(0, 1]")
    bias: bool = setting(False, "biases")
    norm: Literal["layernorm", "rmsnorm"] = setting("layernorm", "kind of norm")


@pytest.fixture(autouse=True)
def _in_folder(folder):
    pass


def write(text, name="a.py"):
    Path(name).write_text(text)


def runs(grid, count=None):
    """Returns {name: settings} of the runs of all combinations."""
    return {name: each for found in grid.combinations(count) for name, each in found.items()}


def values(*argv, **options):
    """Returns the names that vary, and their values in each combination."""
    grid = Grid(Settings, argv, **options)
    names = list(grid.values)
    return names, [tuple(getattr(each, name) for name in names) for each in runs(grid).values()]


def test_flags_and_config_files_are_combined():
    write("steps = [1, 2]\nrate = (0.1, 1)")
    expected = ["steps", "rate"], [(1, 0.1), (1, 1.0), (2, 0.1), (2, 1.0)]
    assert values("a.py") == expected
    assert values("--steps=1,2", "--rate=0.1,1") == expected


def test_rightmost_argument_takes_precedence():
    write("steps = [1, 2]\nrate = [0.1, 1]")
    assert values("a.py", "--rate=0.3") == (["steps"], [(1,), (2,)])
    assert values("--rate=0.3,0.4", "a.py", "--steps=7") == (["rate"], [(0.1,), (1.0,)])
    assert values("a.py", "--rate=1", "--steps=7,8,9") == (["steps"], [(7,), (8,), (9,)])


def test_values_of_every_type():
    assert values("--bias=True,False")[1] == [(True,), (False,)]
    assert values("--warmup=None,3")[1] == [(None,), (3,)]
    assert values("--norm=rmsnorm,layernorm")[1] == [("rmsnorm",), ("layernorm",)]
    resolved = values("--device=cpu,mps", resolvers={"device": str.upper})
    assert resolved == (["device"], [("CPU",), ("MPS",)])


def test_equal_values_make_one_combination():
    assert values("--rate=0.1,0.10,0.2")[1] == [(0.1,), (0.2,)]


def test_config_file_reads_values_of_its_combination(capsys):
    write("print('hello')\nwarmup = steps // 10")
    found = runs(Grid(Settings, ["--steps=10,20", "a.py"])).values()
    assert [(each.steps, each.warmup) for each in found] == [(10, 1), (20, 2)]
    assert capsys.readouterr().out == "hello\n"  # once


def test_values_but_not_their_number_may_depend_on_another_setting():
    write("warmup = [steps, 2 * steps]")
    names, found = values("--steps=3,5", "a.py")
    assert (names, found) == (["steps", "warmup"], [(3, 3), (3, 6), (5, 5), (5, 10)])
    write("warmup = [1] * steps")
    with pytest.raises(UserError, match="the number of values of warmup depends on another"):
        Grid(Settings, ["--steps=3,5", "a.py"])


def test_seeds_are_repeats_of_one_combination():
    grid = Grid(Settings, ["--seed=1,2,3", "--steps=10,20"])
    assert grid.size == 2
    assert [list(each) for each in grid.combinations()] == [
        [f"seed={seed},steps={steps}" for seed in (1, 2, 3)] for steps in (10, 20)
    ]
    [found] = grid.combinations(1)
    assert len(found) == 3
    [found] = Grid(Settings, ["--seed=1,2"]).combinations()
    assert [settings.seed for settings in found.values()] == [1, 2]


def test_list_may_replace_a_list_of_another_length():
    write("steps = [1, 2, 3]")
    assert values("a.py", "--steps=7,8") == (["steps"], [(7,), (8,)])
    assert values("--steps=7,8", "a.py") == (["steps"], [(1,), (2,), (3,)])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rate=0.1,0.2,7"], r"--rate must be in \(0, 1\], not 7.0"),
        (["--rate=0.1,"], "--rate must be float, not ''"),
        (["a.py"], "a.py: steps must be int, not 'x'"),
    ],
)
def test_invalid_values_are_reported_though_they_are_not_first(argv, message):
    write("steps = [1, 'x']")
    with pytest.raises(UserError, match=message):
        Grid(Settings, argv)


def test_run_names_are_folder_names():
    grid = Grid(Settings, ["--device=a b,a/c", "--steps=1,2"])
    names = ["device=a_b,steps=1", "device=a_b,steps=2", "device=a_c,steps=1", "device=a_c,steps=2"]
    assert list(runs(grid)) == names
    with pytest.raises(UserError, match="two runs would share the folder device=a_b"):
        Grid(Settings, ["--device=a b,a_b"]).combinations()


def test_random_combinations_are_reproducible_and_nested():
    counts = (1, 5, 30, 99, 100, 101)
    drawn = [set(draw([20, 5], count)) for count in counts]
    assert [len(each) for each in drawn] == [1, 5, 30, 99, 100, 100]
    assert all(few <= more for few, more in pairwise(drawn))
    assert draw([10] * 30, 5) == draw([10] * 30, 5)
    grid = Grid(Settings, ["--steps=1,2,3", "--rate=0.1,0.2"])
    assert len(grid.combinations(2)) == 2
    assert runs(grid, 2).items() <= runs(grid, 4).items()


def test_values_of_ranges_are_drawn_evenly():
    write("steps = 'uniform:10:20'")
    grid = Grid(Settings, ["a.py", "--rate=log:1e-4:1e-2"])
    assert list(grid.values) == ["rate", "steps"]
    assert grid.size == 11 * 200
    found = list(runs(grid, 200).values())
    assert len(found) == 200
    assert {each.steps for each in found} == set(range(10, 21))
    assert all(1e-4 <= each.rate <= 1e-2 for each in found)
    assert 80 < sum(each.rate < 1e-3 for each in found) < 120  # the geometric mean
    assert set(runs(grid, 3).values()) < set(found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("log:0:1", "log:0:1 is not a range: write log:LOW:HIGH, 0 < LOW < HIGH"),
        ("log:1", "log:1 is not a range: write log:LOW:HIGH"),
        ("log:a:1", "log:a:1 is not a range: write log:LOW:HIGH"),
        ("uniform:1:0", "uniform:1:0 is not a range: write uniform:LOW:HIGH, LOW < HIGH"),
        ("uniform:-1e308:1e308", "is not a range"),
        ("even:0:1", "--rate must be float"),
    ],
)
def test_invalid_range_is_an_error(text, message):
    with pytest.raises(UserError, match=message):
        Grid(Settings, [f"--rate={text}"])


def test_a_list_with_too_many_values_is_an_error():
    write("steps = range(10**9)")
    with pytest.raises(UserError, match="a.py: steps has more than 1,000 values"):
        Grid(Settings, ["a.py"])
