"""The error type for mistakes that a user can correct, and helpers that format such errors."""

import difflib
import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

OTHER_NAMES = {  # {setting: its usual names in other programs, if they are not similar to it}
    "learning_rate": "lr",
    "max_iters": "epochs steps",
    "eval_interval": "eval_every eval_steps",
    "device": "gpu cuda cpu",
    "init_from": "model checkpoint resume",
    "start": "prompt",
    "max_new_tokens": "length max_length",
    "block_size": "context length max_length",
    "n_embd": "dim hidden_size",
    "temperature": "temp",
    "max_tokens": "limit",
    "val_fraction": "val_split",
    "val_input": "val",
    "text_key": "text_column column",
}


class UserError(Exception):
    """A user's mistake or a system error, reported in one line with exit status 2."""


class RankError(UserError):
    """An error of one process of a distributed run. That process prints it, whatever its rank."""


def suggest(name, known, otherwise="", similarity=0.6):
    """Returns '; did you mean NAME?' with the most similar name in `known`, or else `otherwise`.

    The setting that other programs call `name` comes before similar names.
    """
    for setting, other_names in OTHER_NAMES.items():
        if setting in known and name.replace("-", "_") in other_names.split():
            return f"; did you mean {setting}?"
    matches = difflib.get_close_matches(name, list(known), 1, similarity)
    return f"; did you mean {matches[0]}?" if matches else otherwise


def cause_of(error):
    """Returns the first line of an exception's message, at most 200 characters."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def is_out_of_memory(error):
    """Whether an exception reports a lack of memory, for which torch has no single class."""
    phrases = ("can't allocate memory", "not enough memory", "out of memory", "overflowed")
    is_torchs = isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)
    return is_torchs or isinstance(error, MemoryError)


def import_optional(package, user, others=""):
    """Returns an optional package. Raises UserError, with the command, if it is not installed.

    `user` is what needs it, together with the packages `others`.
    """
    try:
        return import_module(package)
    except ImportError as error:
        command = f"python -m pip install {package} {others}".rstrip()
        raise UserError(f"{user} needs: {command}") from error


def script_name():
    """Returns the name of the running script, such as train.py or tools.plot."""
    spec = sys.modules["__main__"].__spec__  # of a module that python -m runs
    if spec and spec.name.startswith("tools."):
        return spec.name.removesuffix(".__main__")
    return Path(sys.argv[0]).name


@contextmanager
def os_errors(verb, path):
    """A context that turns an OSError into a UserError: 'cannot read out/last.pt: REASON'."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot {verb} {path}: {error.strerror or error}") from error


@contextmanager
def as_user_error(message, *types):
    """A context that turns errors of these types into UserErrors: 'MESSAGE (CAUSE)'."""
    try:
        yield
    except types as error:
        raise UserError(f"{message} ({cause_of(error)})") from error


def check_types(data, types, description):
    """Raises UserError unless plain data is a dict with values of these types, {key: type}.

    A missing value is None. Other keys are allowed. `description` begins the message.
    """
    for key, kind in types.items():
        if not isinstance(data, dict) or not isinstance(data.get(key), kind):
            raise UserError(f"{description}: {key} is missing or has the wrong type")
