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
from tools.groups import REPEATED

MAX_NAME = 255  # bytes of a folder's name
SEED = 1337  # of the random choice, which is the same when a sweep continues


class Grid:
    """Settings with several values. `first` has the first value of each.

    `values` has the values of each setting that varies, with the first of every other list. Those
    of the seed are repeats of a combination of the others, `compared`.
    """

    def __init__(self, settings_class, argv, resolvers=None):
        """Raises UserError like settings.load."""
        self._arguments = settings_class, argv, resolvers
        self._sizes = {}  # name: number of values
        self._found = {}  # name of a run: settings
        self.first = load(*self._arguments, choose=self._add)
        values = {name: self._values_of(name) for name in self._sizes}
        # A flag or file further to the right may have replaced a list.
        self.values = {name: each for name, each in values.items() if len(set(each)) > 1}
        self.compared = [name for name in self.values if name != REPEATED]

    @property
    def size(self):
        """The number of all combinations."""
        return math.prod(len(self.values[name]) for name in self.compared)

    def combinations(self, count=None):
        """Returns all combinations, or `count` drawn at random, as a list of `runs_at`.

        The last of the settings varies fastest. Equal combinations count once.
        """
        rows = draw([len(self.values[name]) for name in self.compared], count)
        found = [self.runs_at(dict(zip(self.compared, row, strict=True))) for row in rows]
        return list({tuple(runs): runs for runs in found}.values())

    def runs_at(self, indices):
        """Returns {name of the run: settings} for each seed and the values at `indices`."""
        runs = {}
        for seed in range(len(self.values.get(REPEATED, [None]))):
            settings = self._at(indices | {REPEATED: seed})
            name = run_name(settings, self.values)
            if len(name.encode()) > MAX_NAME:
                raise UserError(f"the name of a run would be too long: {name[:50]}…")
            if self._found.setdefault(name, settings) != settings:
                raise UserError(f"two runs would share the folder {name}: change one of the values")
            runs[name] = settings
        return runs

    def _add(self, name, values):
        self._sizes[name] = max(len(values), self._sizes.get(name, 0))
        return values[0]

    def _values_of(self, name):
        others = [self._at({name: index}) for index in range(1, self._sizes[name])]
        return [getattr(each, name) for each in (self.first, *others)]

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
