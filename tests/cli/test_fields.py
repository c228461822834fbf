"""Settings as dataclass fields: parsing and checking their values."""

import reprlib
from dataclasses import dataclass, fields
from typing import Literal

import pytest

from folio.cli.errors import UserError
from folio.cli.fields import check_value, parse_value, setting


@dataclass(frozen=True)
class Settings:
    """One setting of each type."""

    device: str = setting("auto", "where to compute", group="Machine", scope="machine")
    compile: Literal["auto"] | bool = setting("auto", "whether to compile", scope="machine")
    steps: int = setting(100, "updates to make", "[0, inf)", group="Run")
    warmup: int | None = setting(None, "updates until the full rate")
    rate: float = setting(0.5, "learning rate", "(0, 1]")
    shift: float = setting(0.0, "added to the loss", "(-inf, inf)")
    bias: bool = setting(False, "whether layers have one")
    norm: Literal["layernorm", "rmsnorm"] = setting("layernorm", "kind of norm")
    name: str | None = setting(None, "of the run", scope="display")


FIELDS = {field.name: field for field in fields(Settings)}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("steps", "7", 7),
        ("warmup", "-3", -3),
        ("warmup", "None", None),
        ("rate", "1", 1.0),
        ("shift", "-1.5e-3", -1.5e-3),
        ("bias", "true", True),
        ("compile", "False", False),
        ("compile", "auto", "auto"),
        ("norm", "rmsnorm", "rmsnorm"),
        ("name", "", ""),
    ],
)
def test_text_is_parsed_to_the_type_of_the_field(name, text, value):
    found = parse_value(FIELDS[name], text, "HERE")
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("steps", "1.5", "must be int, not '1.5'"),
        ("steps", "9223372036854775808", "must be a 64-bit integer, not 9223372036854775808"),
        ("rate", "fast", "must be float, not 'fast'"),
        ("rate", "nan", "must be in (0, 1], not nan"),
        ("shift", "1e400", "must be in (-inf, inf), not inf"),
        ("steps", 1.0, "must be int, not 1.0"),
        ("steps", True, "must be int, not True"),
        ("steps", -1, "must be in [0, inf), not -1"),
        ("warmup", [1, 2], "must be int or None, not [1, 2]"),
        ("rate", 0, "must be in (0, 1], not 0.0"),
        ("bias", 1, "must be True or False, not 1"),
        ("compile", 1, "must be auto, True or False, not 1"),
        ("norm", "batchnorm", "must be layernorm or rmsnorm, not 'batchnorm'"),
        ("name", [1] * 10**6, "must be str or None, not [1, 1, 1, 1, 1, 1, ...]"),
    ],
    ids=reprlib.repr,
)
def test_a_value_of_the_wrong_type_or_out_of_bounds_is_an_error(name, value, reason):
    function = parse_value if isinstance(value, str) else check_value
    with pytest.raises(UserError) as caught:
        function(FIELDS[name], value, "HERE")
    assert str(caught.value) == f"HERE {reason}"
