"""The combinations of the values of settings that a sweep trains."""

import itertools
import math
import random
from pathlib import Path
from urllib.parse import quote

import numpy as np

from folio.cli.errors import UserError
from folio.cli.settings import load_settings
from folio.hardware.device import resolve_device
from tools.sweep.workers import RUN_SETTINGS

LIMIT = 200  # most values of a range, and combinations without --trials
SEED = 1337  # of the random choice, which is the same when a sweep continues
RANGE_SPACINGS = {"uniform": np.linspace, "log": np.geomspace}


class Grid:
    """The settings of a command line that gives several values to some of them.

    Attributes:
        first: the settings with the first value of each.
        names: the settings with several values. Each combination of their values has a run for
            each value of the seed.
    """

    def __init__(self, settings_class, argv):
        """Raises UserError like load_settings, or if no setting of train.py has several values."""
        self.settings_class, self.argv = settings_class, argv
        self.sizes = {}  # {name: number of values}
        self.first = self._load({})
        self.names = [name for name, size in self.sizes.items() if size > 1]
        for name in self.names:
            if name not in RUN_SETTINGS:
                raise UserError(f"{name} has several values, but must be the same for all runs")
        if not self.names:
            raise UserError(
                "there is nothing to compare: give a setting several values, in a flag as "
                "--learning_rate=1e-3,3e-4 or in a config file as learning_rate = [1e-3, 3e-4]"
            )

    def runs(self):
        """Returns {folder: settings} of all combinations, or of --trials of them at random.

        The seed varies fastest, then the last setting. Equal combinations count once. Raises
        UserError if there are too many.
        """
        names = [name for name in self.names if name != "seed"]
        runs = {}
        for row in choose_indices([self.sizes[name] for name in names], self.first.trials):
            for seed_index in range(self.sizes.get("seed", 1)):
                settings = self._load(dict(zip(names, row, strict=True)) | {"seed": seed_index})
                values = [f"{name}={getattr(settings, name)}" for name in self.names]
                folder = quote(",".join(values), safe=",+=")  # n_layer=4,seed=1
                runs[Path(settings.sweep_dir, folder)] = settings
        return runs

    def _load(self, indices):
        """Returns the settings with the values at `indices`, and the first of every other list."""

        def choose(name, value):
            if name == "teachers" and isinstance(value, list | tuple):  # of one run
                value = ",".join(map(str, value))
            values = list_values(self.settings_class, name, value)
            self.sizes[name] = max(len(values), self.sizes.get(name, 1))
            return values[indices.get(name, 0) % len(values)]  # a list may replace a longer one

        return load_settings(self.settings_class, self.argv, {"device": resolve_device}, choose)


def list_values(settings_class, name, value):
    """Returns the values of a setting, of which `value` is a list, a range, or the only one.

    `value` is what a config file assigns, or the list of a flag's texts. A range,
    "uniform:LOW:HIGH" or "log:LOW:HIGH", has at most LIMIT values: integers, or numbers of four
    digits. They or, for "log", their logarithms are evenly spaced.
    """
    is_list = isinstance(value, list | tuple | range) and len(value) > 0
    values = value if is_list else [value]
    kind, *ends = str(values[0]).split(":")
    if len(values) > 1 or kind not in RANGE_SPACINGS:
        return values
    try:
        low, high = map(float, ends)
        if not low < high < math.inf:
            raise ValueError
        numbers = RANGE_SPACINGS[kind](low, high, LIMIT).tolist()
    except ValueError as error:
        raise UserError(
            f"{values[0]} is not a range: write uniform:0:1 or log:1e-4:1e-2"
        ) from error
    if type(getattr(settings_class, name)) is int:  # the default value
        numbers = [round(number) for number in numbers]
    else:
        numbers = [float(f"{number:.4g}") for number in numbers]
    return list(dict.fromkeys(numbers))


def choose_indices(sizes, count):
    """Returns the indices of all combinations, or of `count` at random unless it is None.

    The combinations for a smaller `count` are among those for a larger one.
    """
    total = math.prod(sizes)
    if not count and total >= LIMIT:
        raise UserError(f"there are {total:,} combinations: use --trials=N to train N of them")
    if not count or count >= total:
        return list(itertools.product(*map(range, sizes)))
    generator = random.Random(SEED)
    drawn = set()
    while len(drawn) < count:
        drawn.add(tuple(generator.randrange(size) for size in sizes))
    return sorted(drawn)
