"""A setting: a dataclass field with an explanation, a type, bounds and a scope."""

import dataclasses
import reprlib
import types
import typing
from contextlib import suppress
from typing import Literal

from folio.cli.errors import UserError

Scope = Literal["run", "files", "machine", "display"]


def setting(default, explanation, bounds=None, *, group=None, scope: Scope = "run"):
    """Declares a dataclass field, with the line that `--help` prints for it.

    Args:
        bounds: an interval such as "[0, 1)".
        group: starts a new heading in `--help`.
        scope: what the setting is for. "run": the results depend on it. "files": which files are
            read and written, and when a process stops. "machine": where and how to compute.
            "display": what is reported and saved, and how often.
    """
    metadata = {"explanation": explanation, "bounds": bounds, "group": group, "scope": scope}
    return dataclasses.field(default=default, metadata=metadata)


def parse_value(field, text, label):
    """Returns the value that a flag's text represents. Raises UserError like `check_value`."""
    literal = text.title() if text in ("true", "false") else text
    value = text
    for option in _options(field.type):
        if option in (int, float):
            with suppress(ValueError):
                value = option(text)
        elif not isinstance(option, type) and literal == str(option):
            value = option
    return check_value(field, value, label)


def check_value(field, value, label):
    """Returns `value` as the field's type; an int becomes a float where the type is float.

    Raises UserError if it has another type or is out of bounds. `label` names it in the message.
    """
    options, kind = _options(field.type), type(value)
    becomes_float = kind is int and float in options
    literals = [option for option in options if not isinstance(option, type)]
    is_literal = any(kind is type(each) and value == each for each in literals)
    if not (kind in options or becomes_float or is_literal):
        raise UserError(f"{label} must be {type_name(field)}, not {reprlib.repr(value)}")
    if kind is int and not -(2**63) <= value < 2**63:
        raise UserError(f"{label} must be a 64-bit integer, not {reprlib.repr(value)}")
    if becomes_float:
        value = float(value)
    bounds = field.metadata["bounds"]
    if bounds and value is not None and not _inside(value, bounds):
        raise UserError(f"{label} must be in {bounds}, not {value}")
    return value


def _inside(value, bounds):
    low, high = (float(end) for end in bounds[1:-1].split(","))
    above = low < value or (bounds[0] == "[" and value == low)
    return above and (value < high or (bounds[-1] == "]" and value == high))


def type_name(field):
    """Returns the field's type as `--help` prints it: 'auto, True or False', 'int or None'."""
    options = _options(field.type)
    names = [each.__name__ if isinstance(each, type) else str(each) for each in options]
    return " or ".join(", ".join(names).rsplit(", ", 1))


def _options(annotation):
    """Returns the types and values that a type annotation allows: [int, None] for int | None."""
    if annotation is bool:
        return [True, False]
    if annotation is types.NoneType:
        return [None]
    parts = typing.get_args(annotation)  # of a union or a Literal
    return [option for part in parts for option in _options(part)] if parts else [annotation]
