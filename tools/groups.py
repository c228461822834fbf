"""Groups of runs that differ only in their seed, and their statistics."""

import math
import os
from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import fmean, variance

import numpy as np

from folio.settings import names_in
from train import TrainConfig

REPEATED = "seed"  # the setting whose values are repeats of one combination
IGNORED = {REPEATED} | names_in(TrainConfig, "display")
SIGNIFICANT = 0.05  # largest p-value at which two groups are said to differ


@dataclass
class Group:
    """Runs that differ only in their seed. Their losses are values of `measure`."""

    runs: list
    measure: str = "loss"  # or bits_per_byte, which compares runs with different tokenizers

    @property
    def name(self):
        """The folder of a single run, or a pattern: out-sweep/n_layer=2,seed=*."""
        folders, digits = [run.folder for run in self.runs], "0123456789"
        if len(folders) == 1:
            return folders[0]
        start = os.path.commonprefix(folders).rstrip(digits)
        rests = [folder[len(start) :][::-1] for folder in folders]
        return f"{start}*{os.path.commonprefix(rests)[::-1].lstrip(digits)}"

    @property
    def evaluated(self):
        """The runs that have been evaluated, with a value of the measure each time."""
        return [run for run in self.runs if run.val and all(self.measure in e for e in run.val)]

    @property
    def losses(self):
        """The best validation loss of each evaluated run."""
        return [run.best(self.measure)[self.measure] for run in self.evaluated]

    @property
    def mean(self):
        """The mean of the losses; infinity if there are none."""
        return fmean(self.losses) if self.losses else math.inf

    def values(self, name):
        """Returns the set of values of a setting, as text."""
        return {str(run.settings.get(name, "")) for run in self.runs}

    def differs_from(self, other):
        """Whether the mean losses differ by more than noise. False if either has one run."""
        if min(len(self.losses), len(other.losses)) < 2:
            return False
        return welch_p(self.losses, other.losses) < SIGNIFICANT

    def curve(self, split, key):
        """Returns means of `key` and the losses, and the latter's standard deviation, (3, events).

        They are over the evaluated runs, of which there must be one, for the first event of the
        split, "train" or "val", the second, and so on, as far as all runs have come.
        """
        runs = [getattr(run, split) for run in self.evaluated]
        points = [
            [(event[key], event[self.measure]) for event in each]
            for each in zip(*runs, strict=False)
        ]
        points = np.array(points, float).reshape(len(points), len(runs), 2)
        spread = points[..., 1].std(axis=1, ddof=int(len(runs) > 1))
        return np.stack([*points.mean(axis=1).T, spread])


def grouped(runs, measure="loss"):
    """Returns the groups of runs, the best mean loss first; groups without a loss come last.

    Runs of a group are in the same folder, such as that of a sweep. A run with the same seed as an
    earlier one is no repeat: it belongs to another group.
    """
    groups, seen = defaultdict(list), Counter()
    for run in runs:
        values = sorted((k, repr(v)) for k, v in run.settings.items() if k not in IGNORED)
        key = (os.path.dirname(run.folder), *values)
        seed = (*key, run.settings.get(REPEATED))
        seen[seed] += 1
        groups[*key, seen[seed]].append(run)
    return sorted((Group(each, measure) for each in groups.values()), key=lambda group: group.mean)


def welch_p(a, b):
    """Returns the two-sided p-value of Welch's t-test that two samples have the same mean.

    Welch 1947, "The generalization of 'Student's' problem when several different population
    variances are involved".
    """
    errors = variance(a) / len(a), variance(b) / len(b)  # squared standard errors of the means
    if not any(errors):
        return float(fmean(a) == fmean(b))
    t = (fmean(a) - fmean(b)) / math.sqrt(sum(errors))
    freedom = sum(errors) ** 2 / (errors[0] ** 2 / (len(a) - 1) + errors[1] ** 2 / (len(b) - 1))
    return two_sided_p(t, freedom)


def two_sided_p(t, freedom):
    """Returns the probability that Student's t is farther from zero than `t`.

    With t = √freedom · tan(angle), the density of the angle is cos(angle)^(freedom - 1) times a
    constant, which is bounded, so that the midpoint rule is accurate.
    """
    start, pieces = math.atan(abs(t) / math.sqrt(freedom)), 10_000
    width = (math.pi / 2 - start) / pieces
    angles = start + width * (np.arange(pieces) + 0.5)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return float(2 * scale * width * (np.cos(angles) ** (freedom - 1)).sum())
