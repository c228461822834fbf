"""Settings of the scripts: typed dataclass fields, config files, flags and `--help`.

A script declares a dataclass of `setting(...)` fields and calls `load_settings` with its arguments:
Python config files and `--name=value` flags, applied left to right. If the dataclass has an
attribute OPERANDS, arguments without dashes are values of that field instead of config files, and
so are all that follow `--`. An attribute ARGUMENTS replaces the arguments in the usage line.
Standard library only, so that `--help` does not wait for torch.
"""

import dataclasses
import inspect
import io
import os
import runpy
import sys
import traceback
import types
from contextlib import redirect_stdout
from pathlib import Path

from folio.cli.errors import UserError, nearest
from folio.cli.fields import check_value, parse_value, type_name
from folio.cli.process import script_name

ROOT = Path(__file__).parents[2]  # of the repository
PRESETS = ROOT / "config"


def names_with_scope(settings_class, *scopes):
    """Returns the names of the settings with one of the scopes."""
    fields = dataclasses.fields(settings_class)
    return {field.name for field in fields if field.metadata["scope"] in scopes}


def changed_settings(settings):
    """Returns the settings that differ from their defaults, as a dict."""
    pairs = ((field, getattr(settings, field.name)) for field in dataclasses.fields(settings))
    return {field.name: value for field, value in pairs if value != field.default}


def load_settings(settings_class, argv=None, resolvers=None, choose=None, quiet=False):
    """Builds `settings_class` from config files and flags, applied left to right.

    A config file reads the values so far, and those of the flags to its right. Raises UserError for
    an invalid argument or value.

    Args:
        argv: the arguments. Default: those of the process.
        resolvers: {name: function} that resolves a value, such as "auto" to "cpu". Config files
            read the resolved value.
        choose: for sweeps, `choose(name, value)` returns the value to use for one that a config
            file assigns, or the text to use for the list of a flag's texts, separated by commas.
        quiet: suppresses what config files print.
    """
    fields = _fields(settings_class)
    values = {name: field.default for name, field in fields.items()}

    def resolved(values):
        found = {name: resolve(values[name]) for name, resolve in (resolvers or {}).items()}
        return values | found

    steps = parse_arguments(settings_class, argv, choose)
    for place, (name, value) in enumerate(steps):
        if name is not None:
            values[name] = value
            continue
        flags_to_the_right = {key: each for key, each in steps[place:] if key is not None}
        with redirect_stdout(io.StringIO() if quiet else sys.stdout):
            seen = resolved(values | flags_to_the_right)
            values |= _run_config_file(fields, seen, value, choose)
    return settings_class(**resolved(values))


def _fields(settings_class):
    return {field.name: field for field in dataclasses.fields(settings_class)}


# Arguments


def parse_arguments(settings_class, argv=None, choose=None):
    """Returns (name, value) for each flag and (None, path) for each config file, which is not run.

    Prints the help text and exits if it is requested. Raises UserError for invalid arguments.
    """
    argv = sys.argv[1:] if argv is None else argv
    operands = getattr(settings_class, "OPERANDS", None)
    fields, steps, rest, given = _fields(settings_class), [], list(argv), []
    if {"-h", "--help"} & set(argv):
        print(_help_text(settings_class))
        sys.exit(0)
    while rest:
        argument = rest.pop(0)
        if operands and argument == "--":
            given += rest
            break
        if not argument.startswith("--"):
            if operands:
                given.append(argument)
            else:
                steps.append((None, _find_config_file(argument)))
            continue
        name, equals, text = argument[2:].partition("=")
        if name not in fields:
            hint = nearest(name, fields, "; --help lists the settings")
            raise UserError(f"unknown setting --{name}{hint}")
        field = fields[name]
        if not equals:
            has_value = rest and not rest[0].startswith("--")
            if field.type is bool and not (has_value and rest[0].lower() in ("true", "false")):
                text = "True"  # --stream alone means --stream=True
            elif has_value:
                text = rest.pop(0)
            else:
                raise UserError(f"--{name} needs a value: --{name}=VALUE, {type_name(field)}")
        text = choose(name, text.split(",")) if choose else text
        steps.append((name, parse_value(field, text, f"--{name}")))
    return [*steps, (operands, tuple(given))] if given else steps


def _find_config_file(argument):
    for path in (Path(argument), ROOT / argument):  # presets are found from any folder
        if path.suffix == ".py" and os.path.isfile(path):  # Path.is_file raises for a long name
            return path
    if "=" in argument or argument.startswith("-"):
        raise UserError(f"write settings as --name=value, not {argument}")
    presets = [path.relative_to(ROOT).as_posix() for path in sorted(PRESETS.rglob("[!_]*.py"))]
    hint = nearest(argument, presets, f"; available: {', '.join(presets)}")
    raise UserError(f"there is no config file {argument}, with a name that ends in .py{hint}")


# Config files


def _run_config_file(fields, values, path, choose):
    """Runs a config file with `values` as its global names. Returns their new values, checked."""
    try:
        names = runpy.run_path(str(path), init_globals=values)
    except (KeyboardInterrupt, UserError):
        raise
    except BaseException as error:  # a config file can raise anything
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f" line {frame.lineno}" for frame in frames if frame.filename == str(path)]
        place = f"{path}{lines[-1] if lines else ''}"
        raise UserError(f"{place}: {type(error).__name__}: {error}") from error
    found = {}
    for name, value in names.items():
        if isinstance(value, types.ModuleType):
            continue
        if name in fields:
            value = choose(name, value) if choose else value
            found[name] = check_value(fields[name], value, f"{path}: {name}")
        elif not (name.startswith("_") or callable(value)):
            hint = f"{nearest(name, fields)}; names of helper variables start with _"
            raise UserError(f"{path}: unknown setting {name}{hint}")
    return found


# Help


def _help_text(settings_class):
    arguments = getattr(settings_class, "ARGUMENTS", "[CONFIG_FILE ...] [--name=value ...]")
    lines = [f"usage: {script_name()} {arguments}", "", inspect.getdoc(settings_class)]
    for name, field in _fields(settings_class).items():
        if name == getattr(settings_class, "OPERANDS", None):
            continue
        if field.metadata["group"]:
            lines += ["", field.metadata["group"]]
        bounds = f" in {field.metadata['bounds']}" if field.metadata["bounds"] else ""
        lines.append(f"  --{name}={field.default!r}")
        lines.append(f"      {field.metadata['explanation']} ({type_name(field)}{bounds})")
    return "\n".join(lines)
