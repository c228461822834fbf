"""Search with Optuna's tree-structured Parzen estimator, which learns from the losses so far.

Bergstra et al. 2011, "Algorithms for Hyper-Parameter Optimization".
"""

import hashlib
import math
import warnings
from collections import defaultdict, deque
from contextlib import contextmanager
from pathlib import Path

from folio.errors import UserError, os_error
from folio.settings import names_in
from tools.grid import SEED
from train import TrainConfig

RANDOM_TRIALS = 5  # before the estimator starts
JOURNAL = "optuna.journal"  # file in the folder of a sweep


class Search:
    """A scheduler of Trainer, which asks Optuna for combinations of the values of a Grid.

    `locate` returns the combination at indices of the grid's values. A folder keeps the trials. In
    the next sweep there, complete ones count, and those that failed or were stopped are tried
    again first.
    """

    def __init__(self, grid, folder, locate):
        self.journal, self.locate = Path(folder, JOURNAL), locate
        self.indices = {name: sorted_indices(grid.values[name]) for name in grid.compared}
        with self._using_study():
            self.space = {name: distribution(grid.values[name]) for name in grid.compared}
            self.study = open_study(self.journal, study_name(grid))
            complete, failed = end_trials(self.study)
        self.retries = deque()
        for params in failed:
            if params not in (*complete, *self.retries):
                self.retries.append(params)
        self.remaining = grid.first.trials - len(complete)
        self.complete = len(complete)
        self.queue = deque(dict.fromkeys(map(self._combination, complete)))
        self.started = set(self.queue)
        self.losses = {}  # {combination: loss}
        self.waiting = defaultdict(list)  # {combination: trials without a loss}

    def next(self):
        """Returns (combination, 0), or None if there are no more trials."""
        if self.queue:
            return self.queue.popleft(), 0
        while self.remaining > 0:
            self.remaining -= 1
            trial = self._ask()
            combination = self._combination(trial.params)
            self.waiting[combination].append(trial)
            if combination in self.losses:  # Optuna may suggest a combination again
                self.report(combination, 0, self.losses[combination])
            elif combination not in self.started:
                self.started.add(combination)
                return combination, 0
        return None

    def report(self, combination, rung, loss):
        """Records the validation loss of a combination; infinity if a run failed."""
        from optuna.trial import TrialState

        self.losses[combination] = loss
        result = {"values": loss} if math.isfinite(loss) else {"state": TrialState.FAIL}
        with self._using_study():
            for trial in self.waiting.pop(combination, ()):
                self.study.tell(trial, **result)

    def _ask(self):
        with self._using_study():
            if self.retries:
                self.study.enqueue_trial(self.retries.popleft())
            return self.study.ask(self.space)

    def _combination(self, params):
        return self.locate({name: self.indices[name][place] for name, place in params.items()})

    @contextmanager
    def _using_study(self):
        """Silences Optuna's warnings. Raises UserError if the study is damaged or read-only."""
        try:
            with warnings.catch_warnings(action="ignore"):
                yield
        except OSError as error:
            raise os_error("write", self.journal, error) from error
        except (ValueError, KeyError, TypeError) as error:  # such as an incomplete last line
            message = f"{self.journal} is damaged: delete it; finished runs are kept"
            raise UserError(message) from error


# Parameters


def sorted_indices(values):
    """Returns indices of the distinct values, in the order of the values if they are numbers."""
    indices = list({value: index for index, value in enumerate(values)}.values())
    return sorted(indices, key=values.__getitem__) if are_numbers(values) else indices


def distribution(values):
    """Returns Optuna's distribution of the places in `sorted_indices`.

    Places of numbers are ordered, so that the spacing is that of the values.
    """
    from optuna.distributions import CategoricalDistribution, IntDistribution

    count = len(set(values))
    return (
        IntDistribution(0, count - 1)
        if are_numbers(values)
        else CategoricalDistribution(range(count))
    )


def are_numbers(values):
    return all(type(value) in (int, float) for value in values)


# Studies


def study_name(grid):
    """Returns a name that depends on the settings and values: losses of others do not compare."""
    names = sorted(names_in(TrainConfig, "run") - grid.values.keys())
    content = repr((grid.values, [(name, getattr(grid.first, name)) for name in names]))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def open_study(journal, name):
    """Returns a new study, or the one of an earlier sweep, which has ended."""
    import optuna
    from optuna.storages import journal as journals

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    lock = journals.JournalFileOpenLock(str(journal))
    Path(f"{journal}.lock").unlink(missing_ok=True)  # left by a sweep that was killed
    storage = journals.JournalStorage(journals.JournalFileBackend(str(journal), lock))
    study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
    seed = SEED + len(study.trials)  # the same seed would suggest the same combinations again
    study.sampler = optuna.samplers.TPESampler(
        n_startup_trials=RANDOM_TRIALS, seed=seed, multivariate=True, constant_liar=True
    )
    return study


def end_trials(study):
    """Ends trials that were stopped. Returns the parameters of complete trials and of others."""
    from optuna.trial import TrialState

    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
    complete = study.get_trials(states=(TrialState.COMPLETE,))
    failed = study.get_trials(states=(TrialState.FAIL,))
    return [trial.params for trial in complete], [trial.params for trial in failed]
