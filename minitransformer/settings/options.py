"""Settings as dataclasses: fields that are checked, and become flags in `cli.py`."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import json
import math
import operator
import types
import typing
from collections.abc import Iterable
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar

C = TypeVar("C")

# Values of settings, by the names of their fields.
Settings: TypeAlias = dict[str, Any]

# How values are compared with the limits of `option`
COMPARISONS = {
    "at_least": operator.ge,
    "at_most": operator.le,
    "above": operator.gt,
    "below": operator.lt,
}

# Numbers must be smaller than this to fit into arrays and counters.
TOO_LARGE = 2**63


# The types of a dataclass's fields, which are evaluated once.
type_hints = functools.cache(typing.get_type_hints)


class UsageError(ValueError):
    """Wrong arguments, or arguments that do not go together: exit code 2."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: which known name may have been meant."""
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
    **limits: float,
) -> Any:
    """Return a dataclass field that becomes a flag.

    The names of `limits` are those of COMPARISONS.
    """
    flag = {"help": help, "choices": choices, "metavar": metavar}
    metadata = {"limits": limits, "flag": flag}
    return field(default=default, metadata=metadata)


class Config:
    """A dataclass that checks its fields: their types, and the limits in `option`.

    `help_group` is the title of its flags in a program's help.
    """

    help_group: ClassVar[str]

    def __post_init__(self) -> None:
        hints = type_hints(type(self))  # type: ignore[arg-type]
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            kind, optional = value_type(hints[f.name])
            if value is None and optional:
                continue
            try:
                value = checked(f, kind, value)
            except ValueError as error:
                raise ValueError(f"{f.name}: {error}") from None
            object.__setattr__(self, f.name, value)


def checked(f: dataclasses.Field[Any], kind: type, value: Any) -> Any:
    """Return a value of a field as the type `kind`. Raises: ValueError"""
    choices = f.metadata["flag"]["choices"]
    if value == "":
        raise ValueError("expected a name, got an empty one")
    if type(value) is not kind and (kind, type(value)) != (float, int):
        raise ValueError(f"expected {kind.__name__}, got {value!r:.40}")
    if kind is not str and (abs(value) >= TOO_LARGE or math.isnan(value)):
        raise ValueError(f"expected a number below 2^63, got {value!s:.40}")
    for name, limit in f.metadata["limits"].items():
        if not COMPARISONS[name](value, limit):
            expected = f"{name.replace('_', ' ')} {limit}"
            raise ValueError(f"expected {expected}, got {value}")
    if choices is not None and value not in choices:
        raise ValueError(f"expected one of {', '.join(choices)}, got {value}")
    return kind(value)


def make_config(cls: type[C], preset: Settings, values: Settings) -> C:
    """Make a config of class `cls` from a preset and from `values`, which override it.

    Values of other classes are ignored. Raises: UsageError if one is out of range.
    """
    try:
        return from_dict(cls, merged(preset, values))
    except ValueError as error:
        raise UsageError(str(error)) from error


def merged(preset: Settings, values: Settings) -> Settings:
    """Return the settings of a preset, overridden by `values`.

    A number of updates between checkpoints also replaces a number of minutes.
    """
    if "save_every" in values:
        preset = {k: v for k, v in preset.items() if k != "checkpoint_minutes"}
    return {**preset, **values}


def read_settings(path: Path) -> Settings:
    """Read the settings in a JSON file by field name, nested objects included.

    Raises: UsageError if it cannot be read.
    """
    try:
        if path.is_fifo():
            raise ValueError("expected a file, got a pipe")
        values = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(values, dict):
            raise ValueError("expected an object of settings")
        parts = [v if isinstance(v, dict) else {k: v} for k, v in values.items()]
        return {name: value for part in parts for name, value in part.items()}
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: {reason}") from error


def from_dict(cls: type[C], values: Settings) -> C:
    """Make a config of a JSON object. Missing fields have their defaults.

    Unknown fields, such as those of another version, are left out.
    """
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in values.items() if name in names})


def flag_name(field_name: str) -> str:
    """Return the flag of a field: d_model has --d-model."""
    return "--" + field_name.replace("_", "-")


def flags_of(namespace: argparse.Namespace, cls: type) -> Settings:
    """Return the fields of `cls` whose flags are on the command line."""
    return {
        f.name: getattr(namespace, f.name)
        for f in dataclasses.fields(cls)
        if hasattr(namespace, f.name)
    }


def value_type(hint: Any) -> tuple[type, bool]:
    """Return a field's type (bool, int, float or str), and if it may be None."""
    if isinstance(hint, types.UnionType):
        [kind] = [kind for kind in hint.__args__ if kind is not type(None)]
        return kind, True
    return hint, False
