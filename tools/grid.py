"""Combinations of settings that have several values: which ones a sweep trains.

A flag has values separated by commas, --learning_rate=1e-3,3e-4; a config file has a list. Either
can have a range, such as log:1e-4:1e-2, which is a list of many values.
"""

import itertools
import math
import random
import re

from folio.errors import UserError
from folio.settings import load

MAX_NAME = 255  # bytes of a folder's name
SEED = 1337  # of the random choice, which is the same when a sweep continues


class Grid:
    """Settings with several values. `names` are those that vary; `first` has their first values."""

    def __init__(self, settings_class, argv, resolvers=None):
        """Raises UserError like settings.load."""
        self._arguments = settings_class, argv, resolvers
        self._sizes = {}  # name: number of values
        self.first = load(*self._arguments, choose=self._add)
        # A flag or file further to the right may have replaced a list.
        self.names = [name for name in self._sizes if self._has_effect(name)]

    @property
    def size(self):
        """The number of all combinations."""
        return math.prod(self._sizes[name] for name in self.names)

    def combinations(self, count=None):
        """Returns {name of the run: settings} of all combinations, or of `count` drawn at random.

        The last of the settings varies fastest. Equal combinations count once.
        """
        found = {}
        for indices in draw([self._sizes[name] for name in self.names], count):
            settings = self._at(dict(zip(self.names, indices, strict=True)))
            name = run_name(settings, self.names)
            if len(name.encode()) > MAX_NAME:
                raise UserError(f"the name of a run would be too long: {name[:50]}…")
            if found.setdefault(name, settings) != settings:
                raise UserError(f"two runs would share the folder {name}: change one of the values")
        return found

    def _add(self, name, values):
        self._sizes[name] = max(len(values), self._sizes.get(name, 0))
        return values[0]

    def _has_effect(self, name):
        others = [self._at({name: index}) for index in range(1, self._sizes[name])]
        return any(getattr(each, name) != getattr(self.first, name) for each in others)

    def _at(self, indices):
        """Returns the settings with the values at `indices`, and the first of every other list."""

        def choose(name, values):
            if len(values) > self._sizes.get(name, 0):
                raise UserError(f"the number of values of {name} depends on another setting")
            return values[indices.get(name, 0) % len(values)]  # a list may replace a longer one

        return load(*self._arguments, choose=choose, quiet=True)


def draw(sizes, count=None):
    """Returns the indices of all combinations, or of `count`. A larger `count` only adds some."""
    if count is None or count >= math.prod(sizes):
        return list(itertools.product(*map(range, sizes)))
    generator, drawn = random.Random(SEED), set()
    while len(drawn) < count:
        drawn.add(tuple(generator.randrange(size) for size in sizes))
    return sorted(drawn)


def run_name(settings, names):
    """Returns a folder name with the values of some settings: n_layer=4,seed=1."""
    values = ",".join(f"{name}={getattr(settings, name)}" for name in names)
    return re.sub(r"[^\w.,=+-]", "_", values)
