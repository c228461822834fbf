"""Settings of the scripts: typed dataclass fields, flags, config files and `--help`.

A script declares a dataclass of `setting(...)` fields and calls `load_settings` with its arguments:
Python config files and `--name=value` flags, applied left to right. If the dataclass has a field of
type tuple, arguments without dashes and all after `--` are its values instead of config files.
"""

import builtins
import dataclasses
import inspect
import os
import reprlib
import shlex
import sys
import traceback
import typing
from contextlib import suppress
from pathlib import Path
from types import NoneType

from folio import __version__
from folio.cli.errors import UserError, script_name, suggest

ROOT = Path(__file__).parents[2]  # the repository's root folder
LITERALS = {bool: [True, False], NoneType: [None]}  # the values of these types
BOOL_TEXTS = ("True", "False", "true", "false")


def setting(default, explanation, bounds=None, *, group=None, affects="results"):
    """Declares a dataclass field, with the line that `--help` prints for it.

    Args:
        bounds: an interval such as "[0, 1)".
        group: starts a new heading in `--help`.
        affects: what depends on the setting. "results": those of the run. "files": which files are
            read and written, and when a process stops. "machine": where and how to compute.
            "display": what is reported and saved, and how often.
    """
    metadata = {"explanation": explanation, "bounds": bounds, "group": group, "affects": affects}
    return dataclasses.field(default=default, metadata=metadata)


def names_affecting(settings_class, *affected):
    """Returns the names of the settings that affect one of these, such as "results"."""
    fields = dataclasses.fields(settings_class)
    return {field.name for field in fields if field.metadata["affects"] in affected}


def changed_settings(settings):
    """Returns the settings that were given or differ from their defaults, as a dict."""
    given = getattr(settings, "given", ())  # a copy by dataclasses.replace has none
    pairs = ((field, getattr(settings, field.name)) for field in dataclasses.fields(settings))
    return {f.name: value for f, value in pairs if f.name in given or value != f.default}


def load_settings(settings_class, argv=None, resolvers=None):
    """Builds `settings_class` from config files and flags, applied left to right.

    A config file can read the current values, and those of the flags to its right. Raises UserError
    for an invalid argument or value, also for a ValueError of the class's `__post_init__`.

    Args:
        argv: the arguments. Default: those of the process.
        resolvers: {name: function} that resolves a value, also for config files: "auto" to "cpu".
    """
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse_arguments(settings_class, argv)
    fields = settings_class.__dataclass_fields__
    defaults, given = {name: field.default for name, field in fields.items()}, {}
    for position, (name, value) in enumerate(arguments):
        if name in fields:
            given[name] = value
            continue
        later_flags = {key: value for key, value in arguments[position:] if key in fields}
        readable = _resolve(defaults | given | later_flags, resolvers)
        given |= _run_config_file(name, fields, readable)
    try:
        settings = settings_class(**_resolve(defaults | given, resolvers))
    except ValueError as error:
        raise UserError(str(error)) from error
    vars(settings).update(given=set(given), command_line=shlex.join(argv))  # frozen otherwise
    return settings


def _resolve(values, resolvers):
    """Returns `values` with those that have a resolver replaced by its result."""
    resolvers = resolvers or {}
    return values | {name: resolve(values[name]) for name, resolve in resolvers.items()}


# Arguments


def parse_arguments(settings_class, argv):
    """Returns a list of pairs: (name, value) of a flag, or (Path, None) of a config file, not run.

    All positional arguments together are one pair, the last. Handles `--help` and `--version`.
    Raises UserError for invalid arguments.
    """
    remaining = list(argv)
    handle_help(settings_class, remaining)
    positional_name = _positional_name(settings_class)
    arguments, positional = [], []
    while remaining:
        argument = remaining.pop(0)
        if positional_name and argument == "--":
            positional += remaining
            break
        if argument.startswith("--"):
            arguments.append(_parse_flag(settings_class, argument, remaining))
        elif positional_name:
            positional.append(argument)
        else:
            arguments.append((_find_config_file(argument, settings_class), None))
    if positional:
        arguments.append((positional_name, tuple(positional)))
    return arguments


def _positional_name(settings_class):
    """Returns the name of the field for positional arguments, or None."""
    fields = dataclasses.fields(settings_class)
    return next((field.name for field in fields if field.type is tuple), None)


def _parse_flag(settings_class, argument, remaining):
    """Returns (name, value) of a flag. If its value is the next argument, removes that one."""
    fields = settings_class.__dataclass_fields__
    name, equals, text = argument[2:].partition("=")
    if name not in fields:
        hint = suggest(name, fields, "; --help lists the settings")
        if name == "config":
            hint = f"; config files are named without a flag: {script_name()} {text or 'FILE'}"
        raise UserError(f"unknown setting --{name}{hint}")
    field = fields[name]
    if not equals:
        following = remaining[0] if remaining else "--"
        if field.type is bool and following not in BOOL_TEXTS:
            text = "True"  # --stream alone means --stream=True
        elif not following.startswith("--"):
            text = remaining.pop(0)
        else:
            raise UserError(f"--{name} needs a value: --{name}=VALUE, {_type_name(field)}")
    if text.startswith("~/"):  # most shells keep it after "="
        text = os.path.expanduser(text)
    return name, parse_value(field, text, f"--{name}")


def _find_config_file(argument, settings_class):
    for path in (Path(argument), ROOT / argument):  # presets are found from any folder
        if path.suffix == ".py" and os.path.isfile(path):  # Path.is_file raises for a long name
            return path
    if "=" in argument or argument.startswith("-"):
        raise UserError(f"write settings as --name=value, not {argument}")
    name = "input" if hasattr(settings_class, "input") else "out_dir"
    if name == "input" or os.path.isdir(argument):
        hint = f"; did you mean --{name}={argument}?"
    else:
        paths = sorted((ROOT / "config").rglob("[!_]*.py"))
        known = [path.relative_to(ROOT).as_posix() for path in paths]
        known += map(str, Path(argument).parent.glob("*.py"))
        rule = "; ls config lists presets, which end with .py; values with spaces need quotes"
        hint = suggest(argument, known, rule)
    raise UserError(f"there is no config file {argument}{hint}")


# Values


def parse_value(field, text, label):
    """Returns the value that a flag's text represents. Raises UserError like `check_value`."""
    spelled = text.title() if text in BOOL_TEXTS else text
    value = text
    for option in _options(field.type):
        if option in (int, float):
            with suppress(ValueError):
                value = option(text)
        elif str(option) == spelled:
            value = option
    return check_value(field, value, label)


def check_value(field, value, label):
    """Returns `value` as the field's type; an int becomes a float where the type is float.

    Raises UserError if it has the wrong type or is out of bounds. `label` names it in the message.
    """
    options = _options(field.type)
    if type(value) is int and not -(2**63) <= value < 2**63:  # of torch and NumPy
        raise UserError(f"{label} must be less than 2**63")
    if type(value) is int and float in options:
        value = float(value)
    if not (type(value) in options or repr(value) in map(repr, options)):  # 1 == True
        raise UserError(f"{label} must be {_type_name(field)}, not {reprlib.repr(value)}")
    if any("\ud800" <= character <= "\udfff" for character in str(value)):  # bytes of a shell
        raise UserError(f"{label} is not UTF-8 text: set the encoding of the terminal to UTF-8")
    bounds = field.metadata["bounds"]
    if bounds and value is not None and not _is_within(value, bounds):
        raise UserError(f"{label} must be in {bounds}, not {value}")
    return value


def _is_within(value, bounds):
    low, high = (float(end) for end in bounds[1:-1].split(","))
    is_above = low < value or (bounds[0] == "[" and value == low)
    is_below = value < high or (bounds[-1] == "]" and value == high)
    return is_above and is_below


def _type_name(field):
    """Returns the field's type as `--help` prints it: 'auto, True or False', 'int or None'."""
    options = _options(field.type)
    names = [option.__name__ if isinstance(option, type) else str(option) for option in options]
    return " or ".join(", ".join(names).rsplit(", ", 1))


def _options(annotation):
    """Returns the types and values that a type annotation allows: [int, None] for int | None."""
    members = typing.get_args(annotation)  # of a union or a Literal
    if not members:
        return LITERALS.get(annotation, [annotation])
    return [option for member in members for option in _options(member)]


def _run_config_file(path, fields, readable):
    """Runs a config file, which can read `readable`. Returns the values it assigns, checked."""
    names = {"__name__": "config", "__file__": str(path)}
    names["__builtins__"] = vars(builtins) | readable
    try:
        exec(compile(path.read_bytes(), path, "exec"), names)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a config file can raise anything
        frames = traceback.extract_tb(error.__traceback__)
        places = [f"{path} line {frame.lineno}" for frame in frames if frame.filename == str(path)]
        cause = f"{type(error).__name__}: {error}"  # a SyntaxError names its line
        raise UserError(f"{[path, *places][-1]}: {cause}") from error
    for name in names.get("__annotations__", {}):
        if name not in names:
            raise UserError(f"{path}: '{name}: VALUE' assigns nothing; write {name} = VALUE")
    values = {}
    for name, value in names.items():
        if name in fields:
            values[name] = check_value(fields[name], value, f"{path}: {name}")
        elif not (name.startswith("_") or callable(value) or inspect.ismodule(value)):
            rule = "names of helper variables start with _" + suggest(name, fields, similarity=0.8)
            raise UserError(f"{path}: {name} is not a setting; {rule}")
    return values


# Help


def handle_help(settings_class, argv):
    """Prints the help text or the version, and exits, if `argv` requests it."""
    if {"-h", "--help"} & set(argv):
        print(_help_text(settings_class))
    elif "--version" in argv:
        print(f"folio {__version__}")
    else:
        return
    sys.exit(0)


def _help_text(settings_class):
    arguments = "[CONFIG_FILE ...] [--name=value ...]"
    positional_name = _positional_name(settings_class)
    if positional_name:
        arguments = f"[--name=value ...] [--] [{positional_name.upper()} ...]"
    usage = f"usage: {script_name()} [--version] {arguments}"
    lines = [usage, "", inspect.getdoc(settings_class) or ""]
    for name, field in settings_class.__dataclass_fields__.items():
        if name == positional_name:
            continue
        group, explanation, bounds = map(field.metadata.get, ("group", "explanation", "bounds"))
        if group:
            lines += ["", group]
        kind = _type_name(field) + (f" in {bounds}" if bounds else "")
        lines += [f"  --{name}={field.default!r}", f"      {explanation} ({kind})"]
    description = sys.modules[settings_class.__module__].__doc__ or ""
    commands = [line for line in description.splitlines() if line.startswith("    python")]
    return "\n".join([*lines, "", "Examples", *commands[:2]])
