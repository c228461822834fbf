"""The settings of the scripts, and the error that a person can mend.

A script declares a dataclass of `setting(...)` fields and calls `load` on its arguments: Python
config files and `--key=value` flags, applied left to right. Presets live beside this file. Where
the dataclass names one of its fields by OPERANDS, that takes what would be config files.
Standard library only, so that `--help` need not wait for torch.
"""

import dataclasses
import difflib
import io
import math
import os
import reprlib
import runpy
import sys
import time
import traceback
import types
import typing
from contextlib import redirect_stdout, suppress
from pathlib import Path

STARTED = time.monotonic()  # when the script began: this is the first module that each imports


class UserError(Exception):
    """A mistake a person can mend, or the machine's refusal, told in one line (exit status 2)."""


def setting(default, explanation, *, bounds=None, group=None):
    """A dataclass field with the line that `--help` prints for it.

    `bounds` is an interval such as "[0, 1)"; `group` opens a new heading in `--help`.
    """
    metadata = {"explanation": explanation, "bounds": bounds, "group": group}
    return dataclasses.field(default=default, metadata=metadata)


def load(settings_class, argv, resolvers=None, choose=None, quiet=False):
    """Build `settings_class` from config files and flags, applied left to right.

    `resolvers` maps a setting to a function that turns its value into a concrete one ("auto" into
    "cpu", say). A config file reads such a setting already resolved; where a flag further right
    sets it, the file reads that flag's value. With `choose`, a setting may be given several
    values, in a file as a list, by a flag with commas between; choose(name, values) is the one
    taken. With `quiet`, what files print is dropped. Raises UserError for every mistake.
    """
    fields, resolvers = _fields(settings_class), resolvers or {}
    values = {name: field.default for name, field in fields.items()}
    origins = {}
    steps = _parse_arguments(settings_class, argv, choose)
    for place, (key, value) in enumerate(steps):
        if key is None:
            ahead = {name: value for name, value in steps[place:] if name in resolvers}
            labels = origins | {name: f"--{name}" for name in ahead}
            seen = _resolved(values | ahead, resolvers, labels)
            with redirect_stdout(io.StringIO() if quiet else sys.stdout):
                taken, origin = _run_config_file(fields, seen, value, choose), value
        else:
            taken, origin = {key: value}, f"--{key}"
        values.update(taken)
        origins.update(dict.fromkeys(taken, origin))
    return settings_class(**_resolved(values, resolvers, origins))


def load_each(settings_class, argv, resolvers=None, sample=None):
    """All combinations of settings that were given several values: (their names, [settings]).

    sample(settings, count) is the numbers of the combinations wanted, in order, of `count`, where
    `settings` is the first; None is all. Raises UserError like `load`.
    """
    lengths = {}

    def note(name, values):
        lengths[name] = len(values)
        return values[0]

    def at(places):
        """The settings with some values that are not the first."""

        def choose(name, values):
            if len(values) != lengths.get(name):
                raise UserError(f"how many values {name} has depends on another that has several")
            return values[places.get(name, 0)]

        return load(settings_class, argv, resolvers, choose, quiet=True)

    first = load(settings_class, argv, resolvers, note)
    # A range that something to its right replaced makes no difference.
    names = [
        name
        for name, length in lengths.items()
        if any(getattr(at({name: n}), name) != getattr(first, name) for n in range(1, length))
    ]
    count, found = math.prod(lengths[name] for name in names), []
    for number in sample(first, count) if sample else range(count):
        places = {}
        for name in reversed(names):
            number, places[name] = divmod(number, lengths[name])
        found.append(at(places))
    return names, list(dict.fromkeys(found))


def _resolved(values, resolvers, origins):
    """`values` with the concrete ones of `resolvers`; an error names where the value is from."""
    concrete = dict(values)
    for name, resolve in resolvers.items():
        try:
            concrete[name] = resolve(values[name])
        except UserError as error:
            raise UserError(f"{origins.get(name, name)}: {error}") from error
    return concrete


def answer_early(settings_class):
    """Answer `--help` and misspelt flags, before a script imports anything slow."""
    _parse_arguments(settings_class, sys.argv[1:])


def changed(settings):
    """The settings that differ from their defaults, as a dict."""
    pairs = ((field, getattr(settings, field.name)) for field in dataclasses.fields(settings))
    return {field.name: value for field, value in pairs if value != field.default}


def nearest(name, known, otherwise=""):
    """'; did you mean NAME?' for the closest of `known`, or `otherwise`."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else otherwise


def _fields(settings_class):
    return {field.name: field for field in dataclasses.fields(settings_class)}


def _parse_arguments(settings_class, argv, choose=None):
    """Arguments as a list of (setting, value) for flags and (None, path) for config files."""
    fields, steps, rest = _fields(settings_class), [], list(argv)
    operands = getattr(settings_class, "OPERANDS", None)
    if {"-h", "--help"} & set(argv):
        print(_help_text(settings_class))
        sys.exit(0)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            if operands:
                steps.append((operands, (*dict(steps).get(operands, ()), argument)))
            else:
                steps.append((None, _config_file(argument)))
            continue
        key, equals, text = argument[2:].partition("=")
        if key not in fields or key == operands:
            hint = nearest(key, fields.keys() - {operands}, "; --help lists the settings")
            raise UserError(f"unknown setting --{key}{hint}")
        is_switch = fields[key].type is bool  # --stream alone is --stream=True
        if not equals and is_switch and not (rest and rest[0].lower() in ("true", "false")):
            text = "True"
        elif not equals:
            if not rest or rest[0].startswith("--"):
                kind = _type_name(fields[key])
                raise UserError(f"--{key} needs a value: --{key}=VALUE, {kind}")
            text = rest.pop(0)
        label, texts = f"--{key}", text.split(",") if choose else [text]
        several = [_check(fields[key], _parse(fields[key], each, label), label) for each in texts]
        steps.append((key, choose(key, several) if len(several) > 1 else several[0]))
    return steps


def _config_file(argument):
    path, preset = Path(argument), Path(__file__).parent.parent / argument
    if not os.path.isfile(path) and os.path.isfile(preset):
        path = preset  # from whatever folder the script is called
    if os.path.isfile(path):  # Path.is_file would raise where a name is too long
        if path.suffix != ".py":
            raise UserError(f"{path} is not a config file: those are Python files, *.py")
        return path
    if "=" in argument or argument.startswith("-"):
        raise UserError(f"settings are written --key=value, not {argument}")
    here = Path(__file__).parent
    presets = [path.relative_to(here.parent).as_posix() for path in sorted(here.rglob("[!_]*.py"))]
    hint = nearest(argument, presets, f"; at hand: {', '.join(presets)}")
    raise UserError(f"there is no config file {argument}{hint}")


def _run_config_file(fields, values, path, choose):
    """Run a Python config file with the current values as names; return the settings it changed."""
    try:
        names = runpy.run_path(str(path), init_globals=values)
    except (Exception, SystemExit) as error:
        message = error.msg if isinstance(error, SyntaxError) else error
        raise UserError(f"{_place(error, path)}: {type(error).__name__}: {message}") from error
    taken = {}
    for name, value in names.items():
        if name in fields:
            if value is not values[name]:  # the very object where the file did not set it
                label, several = f"{path}: {name}", isinstance(value, list | tuple | range)
                if several and choose and value:
                    value = choose(name, [_check(fields[name], each, label) for each in value])
                taken[name] = _check(fields[name], value, label)
        elif not (name.startswith("_") or isinstance(value, types.ModuleType) or callable(value)):
            hint = nearest(name, fields, "; --help lists them, and a helper's name starts with _")
            raise UserError(f"{path}: unknown setting {name}{hint}")
    return taken


def _place(error, path):
    """'file line N' of the last line of `path` that an exception passed through."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path} line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return f"{path} line {lines[-1]}" if lines else str(path)


def _check(field, value, label):
    """`value` as the field's type (an int becomes a float), inside the field's bounds."""
    options, bounds = _options(field.type), field.metadata["bounds"]
    if not any(_fits(value, option) for option in options):
        hint = "; several values are for tools.sweep" if isinstance(value, list | tuple) else ""
        raise UserError(f"{label} must be {_type_name(field)}, not {_shortened(value)}{hint}")
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise UserError(f"{label} must be a number of 64 bits, not {_shortened(value)}")
    if float in options and type(value) is int:
        value = float(value)
    if type(value) is str and "\0" in value:
        raise UserError(f"{label} must have no null byte, unlike {_shortened(value)}")
    if bounds and isinstance(value, int | float) and not _inside(value, bounds):
        raise UserError(f"{label} must lie in {bounds}, not {_shortened(value)}")
    return value


def _shortened(value):
    try:
        return reprlib.repr(value)
    except ValueError:  # Python spells no integer of thousands of digits
        return f"so long a value ({type(value).__name__})"


def _parse(field, text, label):
    """The value of the field's type that a flag's text spells."""
    options = _options(field.type)
    if text == "None" and types.NoneType in options:
        return None
    for option in options:
        if option in (int, float):
            with suppress(ValueError):
                return option(text)
        elif option is str:
            return text
        elif option is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        else:
            for choice in _choices(option):
                if text == str(choice):
                    return choice
    raise UserError(f"{label} must be {_type_name(field)}, not {_shortened(text)}")


def _options(kind):
    """The members of a union type, or the type alone."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if is_union else (kind,)


def _choices(option):
    """The values that a Literal or None stands for; none for the other types."""
    return (None,) if option is types.NoneType else typing.get_args(option)


def _fits(value, option):
    if option is float:
        return type(value) in (int, float)
    if option in (bool, int, str):
        return type(value) is option
    return any(type(value) is type(choice) and value == choice for choice in _choices(option))


def _inside(value, bounds):
    low, high = (float(end) for end in bounds[1:-1].split(","))
    above = low < value or (bounds[0] == "[" and value == low)
    return above and (value < high or (bounds[-1] == "]" and value == high))


def _type_name(field):
    """How `--help` and errors call the field's type, as 'auto, True or False' or 'int or None'."""
    names = []
    for option in _options(field.type):
        choices = (True, False) if option is bool else _choices(option)
        names += [str(choice) for choice in choices] or [option.__name__]
    return " or ".join(", ".join(names).rsplit(", ", 1))


def _help_text(settings_class):
    module = getattr(sys.modules["__main__"], "__spec__", None)  # set by python -m
    script = f"-m {module.name}" if module else Path(sys.argv[0]).name
    summary = (settings_class.__doc__ or "").strip()
    arguments = getattr(settings_class, "ARGUMENTS", "[config/NAME.py ...] [--key=value ...]")
    lines = [f"python {script} {arguments}", "", summary]
    for field in dataclasses.fields(settings_class):
        if field.name == getattr(settings_class, "OPERANDS", None):
            continue
        if field.metadata["group"]:
            lines += ["", field.metadata["group"]]
        kind, bounds = _type_name(field), field.metadata["bounds"]
        about = f"{kind} in {bounds}" if bounds else kind
        lines.append(f"  --{field.name}={field.default!r}")
        lines.append(f"      {field.metadata['explanation']} ({about})")
    return "\n".join(lines)
