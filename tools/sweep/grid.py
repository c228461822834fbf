"""The combinations of the values of settings that a sweep trains."""

import itertools
from functools import partial
from pathlib import Path
from urllib.parse import quote

from folio.cli.errors import UserError
from folio.cli.settings import load_settings, names_with_scope
from folio.hardware.device import resolve_device
from train import TrainConfig

# Settings that a sweep passes on to train.py. Only they can have several values.
RUN_SETTINGS = names_with_scope(TrainConfig, "run", "machine", "display")


def combine_values(settings_class, argv):
    """Returns {folder: settings} of all combinations of the values in a command line.

    The setting that is named last varies fastest. Equal combinations count once. Raises UserError
    like load_settings, or if no setting of train.py has several values.
    """
    counts, indices = {}, {}  # {name: number of values} and {name: index of the value to use}

    def choose(name, value):
        if name == "teachers" and isinstance(value, list | tuple):  # of one run
            value = ",".join(map(str, value))
        is_list = isinstance(value, list | tuple | range) and len(value) > 0
        values = value if is_list else [value]
        counts[name] = max(len(values), counts.get(name, 1))
        return values[indices.get(name, 0) % len(values)]  # a list may replace a longer one

    load = partial(load_settings, settings_class, argv, {"device": resolve_device}, choose)
    load()  # counts the values
    names = [name for name, count in counts.items() if count > 1]
    for name in names:
        if name not in RUN_SETTINGS:
            raise UserError(f"{name} has several values, but must be the same for all runs")
    if not names:
        raise UserError(
            "there is nothing to compare: give a setting several values, in a flag as "
            "--learning_rate=1e-3,3e-4 or in a config file as learning_rate = [1e-3, 3e-4]"
        )
    runs = {}
    for combination in itertools.product(*(range(counts[name]) for name in names)):
        indices.update(zip(names, combination, strict=True))
        settings = load()
        values = [f"{name}={getattr(settings, name)}" for name in names]
        folder = quote(",".join(values), safe=",+=")  # n_layer=4,seed=1
        runs[Path(settings.sweep_dir, folder)] = settings
    return runs
