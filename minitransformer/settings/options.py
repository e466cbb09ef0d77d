"""Settings as frozen dataclasses: range checks, and flags made from the fields."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import sys
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

C = TypeVar("C")

METAVARS = {int: "N", float: "X", str: "NAME"}


class UsageError(ValueError):
    """Arguments that are wrong in themselves or together: exit code 2."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """What `name` may have been meant to be, as the end of an error's line."""
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


class Parser(argparse.ArgumentParser):
    """An argument parser that suggests a known flag in place of an unknown one.

    `summary` is the first line of the help, `examples` its commands, one a line, and
    `notes` a paragraph below them.
    """

    def __init__(
        self, prog: str, summary: str, examples: tuple[str, ...], notes: str = ""
    ) -> None:
        lines = "\n".join(f"    {example}" for example in examples)
        super().__init__(
            prog=prog,
            description=summary,
            epilog=f"examples:\n{lines}" + (f"\n\n{notes}" if notes else ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self._complete(*self.parse_known_args(args, namespace))

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self._complete(*self.parse_known_intermixed_args(args, namespace))

    def _complete(self, found: argparse.Namespace, unknown: list[str]) -> Any:
        if unknown:
            flag = next((x for x in unknown if x.startswith("-")), unknown[0])
            flag = flag.partition("=")[0]
            hint = suggestion(flag, self._option_string_actions)
            self.error(f"unrecognized argument {flag}{hint}")
        return found


def exit_code(prog: str, work: Callable[[], int | None], who: str = "") -> int:
    """Do the work of a command; say in one line what went wrong, if anything did.

    0 (or what `work` returns) where all went well, 1 for failures, 2 for usage, 130
    for Ctrl-C. `who` is put before what went wrong.
    """
    try:
        return work() or 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, RuntimeError) as error:
        print(f"{prog}: error: {who}{error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except OSError as error:
        place = f"{error.filename}: " if error.strerror and error.filename else ""
        reason = error.strerror or error
        print(f"{prog}: error: {who}{place}{reason}", file=sys.stderr)
        return 1
    except MemoryError as error:
        advice = "try a lower --max-tokens to train, --decode-tokens to translate"
        print(f"{prog}: error: {who}out of memory, {advice}: {error}", file=sys.stderr)
        return 1


def option(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    below: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] | None = None,
    aliases: tuple[str, ...] = (),
) -> Any:
    """A dataclass field with a help text, its range, and other names of its flag."""
    metadata = {
        "help": help,
        "at_least": at_least,
        "below": below,
        "above": above,
        "choices": choices,
        "aliases": aliases,
    }
    return field(default=default, metadata=metadata)


class Checked:
    """A dataclass whose fields are checked against the ranges that `option` gives.

    `help_group` is the title and the description of its flags in a program's help.
    """

    help_group: ClassVar[tuple[str, str]]

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value, rule = getattr(self, f.name), f.metadata
            kind, optional = _value_type(hints[f.name])
            if value is None and optional:
                continue
            if kind is float and type(value) is int:
                object.__setattr__(self, f.name, float(value))
            elif type(value) is not kind:
                raise ValueError(f"{f.name}: expected {kind.__name__}, got {value!r}")
            if kind is float and value != value:
                raise ValueError(f"{f.name}: expected a number, got {value}")
            if rule["at_least"] is not None and value < rule["at_least"]:
                raise ValueError(
                    f"{f.name}: expected at least {rule['at_least']}, got {value}"
                )
            if rule["above"] is not None and value <= rule["above"]:
                raise ValueError(
                    f"{f.name}: expected above {rule['above']}, got {value}"
                )
            if rule["below"] is not None and value >= rule["below"]:
                raise ValueError(
                    f"{f.name}: expected below {rule['below']}, got {value}"
                )
            if rule["choices"] is not None and value not in rule["choices"]:
                raise ValueError(
                    f"{f.name}: expected one of {', '.join(rule['choices'])}, "
                    f"got {value}"
                )


def build(cls: type[C], preset: dict[str, Any], values: dict[str, Any]) -> C:
    """Make a config of class `cls` from a preset's values and those given.

    Values of other classes are passed over. Raises: UsageError if one is out of range.
    """
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    merged = {**preset, **values}
    try:
        return cls(**{k: v for k, v in merged.items() if k in names})
    except ValueError as error:
        raise UsageError(str(error)) from error


def read_settings(path: Path) -> dict[str, Any]:
    """Read a JSON or TOML file of settings by field name; tables in it are flattened.

    Raises: UsageError if it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        read = tomllib.loads if path.suffix == ".toml" else json.loads
        values: Any = read(text)
        if not isinstance(values, dict):
            raise ValueError("expected an object of settings")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from error
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat.update(value if isinstance(value, dict) else {name: value})
    return flat


def from_dict(cls: type[C], values: dict[str, Any]) -> C:
    """Make a config from a JSON object that must hold exactly its fields.

    Those that are None by default may be missing: older files do without.

    Raises: ValueError naming the fields that are unknown or missing.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    needed = {f.name for f in fields if f.default is not None}
    unknown = values.keys() - {f.name for f in fields}
    if wrong := sorted(unknown | (needed - values.keys())):
        raise ValueError(f"{cls.__name__}: unknown or missing {', '.join(wrong)}")
    return cls(**values)


def add_arguments(
    parser: argparse.ArgumentParser, cls: type[Checked], without: tuple[str, ...] = ()
) -> None:
    """Add a flag for every field of the config class `cls`, in a group of its own.

    Fields that would do nothing in this program are left out by `without`.
    """
    group = parser.add_argument_group(*cls.help_group)
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        if f.name in without:
            continue
        kind, optional = _value_type(hints[f.name])
        default = "" if optional else f" (default {f.default})"
        group.add_argument(
            "--" + f.name.replace("_", "-"),
            *f.metadata["aliases"],
            dest=f.name,
            type=kind,
            default=argparse.SUPPRESS,
            choices=f.metadata["choices"],
            metavar=None if f.metadata["choices"] else METAVARS[kind],
            help=f.metadata["help"] + default,
        )


def positive(text: str) -> int:
    """Read a flag's whole number of at least 1, as argparse's `type`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"expected a whole number of at least 1, got {text!r}"
        )
    return int(text)


def given(namespace: argparse.Namespace, cls: type) -> dict[str, Any]:
    """Return the fields of `cls` whose flags were given on the command line."""
    return {
        f.name: getattr(namespace, f.name)
        for f in dataclasses.fields(cls)
        if hasattr(namespace, f.name)
    }


def _value_type(hint: Any) -> tuple[type, bool]:
    """Return (int, float or str; whether None is allowed) of a field's annotation."""
    if isinstance(hint, types.UnionType):
        kinds = [kind for kind in hint.__args__ if kind is not type(None)]
        return kinds[0], True
    return hint, False
