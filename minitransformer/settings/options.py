"""Dataclasses whose fields are checked and become flags, and what commands share."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import importlib
import io
import json
import operator
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TextIO, TypeVar, cast

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

C = TypeVar("C")

METAVARS = {int: "N", float: "X", str: "NAME"}
NUMBERS = {int: "a whole number", float: "a number"}

# How values are compared with the limits of `option`
COMPARISONS = {
    "at_least": operator.ge,
    "at_most": operator.le,
    "above": operator.gt,
    "below": operator.lt,
}

# What numbers stay below, so that they fit into arrays and counters.
TOO_LARGE = 2**63


class UsageError(ValueError):
    """Wrong arguments, or arguments that do not go together: exit code 2."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: which known name may have been meant."""
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


# Flags of other toolkits, and those that do here what they do there.
ELSEWHERE = {
    "--arch": "--config",
    "--batch-size": "--max-tokens --decode-tokens",
    "--checkpoint": "--model --resume",
    "--early-stopping": "--patience",
    "--epochs": "--steps",
    "--finetune-from-model": "--from",
    "--fp16": "--precision",
    "--gpu": "--device",
    "--max-epoch": "--steps",
    "--mini-batch": "--max-tokens --decode-tokens",
    "--normalize": "--alpha",
    "--path": "--model",
    "--restore-file": "--resume",
    "--restrict-lexicon": "--shortlist",
    "--score-reference": "--score",
    "--train-steps": "--steps",
    "--valid-sets": "--val-source",
}


def printable(text: str) -> str:
    """Escape line feeds, and what else could confuse a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and suggest a known flag."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        for kind in NUMBERS:
            self.register("type", kind, functools.partial(_number, kind))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self._refuse_unknown(*self.parse_known_args(args, namespace))

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments with the one list of words among them or after `--`."""
        args, words = list(sys.argv[1:] if args is None else args), []
        if "--" in args:
            place = args.index("--")
            args, words = args[:place], args[place + 1 :]
        found = self._refuse_unknown(*self.parse_known_intermixed_args(args, namespace))
        [action] = self._get_positional_actions()
        setattr(found, action.dest, [*getattr(found, action.dest), *words])
        return found

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and one line, without the list of all flags before it."""
        self.exit(2, f"{self.prog}: error: {printable(message)}\n")

    def _refuse_unknown(self, namespace: Any, unknown: list[str]) -> Any:
        if unknown:
            flag = next((x for x in unknown if x.startswith("-")), unknown[0])
            flag = flag.partition("=")[0]
            own = self._option_string_actions
            same = [x for x in ELSEWHERE.get(flag, "").split() if x in own]
            hint = f"; did you mean {same[0]}?" if same else suggestion(flag, own)
            self.error(f"unrecognized argument {flag}{hint}")
        return namespace


class Parser(CommandParser):
    """The parser of a whole command.

    The help begins with `summary` and ends with `examples`, which are commands, and a
    paragraph of `notes`.
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
        )
        hidden = argparse.SUPPRESS  # each command has it, and none needs to say so
        shown = package_version()
        self.add_argument("--version", action="version", version=shown, help=hidden)


def package_version() -> str:
    """Return the name and the version of the package."""
    # By name, because it is an entry point, which this room may not import.
    package = importlib.import_module("minitransformer")
    return f"minitransformer {package.__version__}"


def _number(kind: type, text: str) -> Any:
    """Read an argument of type int or float."""
    try:
        return kind(text)
    except ValueError:
        message = f"expected {NUMBERS[kind]}, got {text[:40]!r}"
        raise argparse.ArgumentTypeError(message) from None


def exit_code(
    prog: str, work: Callable[[], int | None], who: str = "", lasting_error: int = 1
) -> int:
    """Do the work of a command, report an error in one line, return the exit code.

    That is 0 (or what `work` returns) on success, 1 after a failure, 2 for wrong usage,
    130 after Ctrl-C and 141 if nobody reads the output any more, as with `| head`.
    `who`, such as a rank, is put before the message. An error that would come again,
    such as damaged data, may have another code than 1.
    """
    code = 1
    open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may be no UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    stdout = sys.stdout
    try:
        sys.stdout = cast(TextIO, stdout and NamedOutput(stdout))
        result = work() or 0
        if sys.stdout is not None:
            sys.stdout.flush()
        return result
    except KeyboardInterrupt:
        message, code = "interrupted", 130
    except (ValueError, RuntimeError, OverflowError) as error:
        message = str(error)
        if isinstance(error, ValueError):
            code = 2 if isinstance(error, UsageError) else lasting_error
    except OSError as error:
        if isinstance(error, BrokenPipeError) and error.filename:  # no socket
            return 141
        place = f"{error.filename}: " if error.strerror and error.filename else ""
        message = f"{place}{error.strerror or error}"
    except MemoryError as error:
        advice = "try a lower --max-tokens to train, --decode-tokens to translate"
        message = f"out of memory, {advice}: {error}"
    finally:
        sys.stdout = stdout
    print(f"{prog}: error: {who}{printable(message)}", file=sys.stderr)
    return code


class NamedOutput:
    """Standard output, which is named in the errors of writing, and then given up."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._named():
            return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._named():
            self._stream.flush()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # at exit, Python would fail to write the rest again
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            error.filename = "standard output"
            raise


def open_standard_streams() -> None:
    """Open the null device for each standard stream that is closed.

    Otherwise the next file to be opened would get its number, and what libraries print;
    and `print` would write to standard output what is meant for standard error.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, this one
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)


def option(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
    alias: str | None = None,
) -> Any:
    """Return a dataclass field that becomes a flag; `alias` is another name of it."""
    limits = {"at_least": at_least, "at_most": at_most, "below": below, "above": above}
    flag = {"help": help, "choices": choices, "metavar": metavar}
    metadata = {"limits": limits, "alias": alias, "flag": flag}
    return field(default=default, metadata=metadata)


class Config:
    """A dataclass that checks its fields: their types, and the limits in `option`.

    A field of a tuple type takes any number of values, or one alone. `help_group` is
    the title of its flags in a program's help.
    """

    help_group: ClassVar[str]

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            kind, optional, several = _value_type(hints[f.name])
            if value is None and optional:
                continue
            try:
                if several:
                    values = value if isinstance(value, list | tuple) else (value,)
                    checked = tuple(_checked(f, kind, x) for x in values)
                else:
                    checked = _checked(f, kind, value)
            except ValueError as error:
                raise ValueError(f"{f.name}: {error}") from None
            object.__setattr__(self, f.name, checked)


def _checked(f: dataclasses.Field[Any], kind: type, value: Any) -> Any:
    """Return a value of a field as the type `kind`. Raises: ValueError"""
    choices = f.metadata["flag"]["choices"]
    if type(value) is not kind and (kind, type(value)) != (float, int):
        raise ValueError(f"expected {kind.__name__}, got {value!r:.40}")
    if kind is not str and not abs(value) < TOO_LARGE:  # not a number, either
        raise ValueError(f"expected a number below 2^63, got {value!s:.40}")
    for name, limit in f.metadata["limits"].items():
        if limit is not None and not COMPARISONS[name](value, limit):
            expected = f"{name.replace('_', ' ')} {limit}"
            raise ValueError(f"expected {expected}, got {value}")
    if choices is not None and value not in choices:
        raise ValueError(f"expected one of {', '.join(choices)}, got {value}")
    return kind(value)


def _read_flag(f: dataclasses.Field[Any], kind: type, text: str) -> Any:
    """Read and check a value of a field's flag, so that an error names the flag."""
    try:
        return _checked(f, kind, _number(kind, text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def build(cls: type[C], preset: dict[str, Any], values: dict[str, Any]) -> C:
    """Make a config of class `cls` from a preset and from `values`, which override it.

    Values of other classes are ignored. Raises: UsageError if one is out of range.
    """
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    settings = overridden(preset, values)
    try:
        return cls(**{k: v for k, v in settings.items() if k in names})
    except ValueError as error:
        raise UsageError(str(error)) from error


def overridden(preset: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a preset with those of `values` in their place.

    A number of updates between checkpoints replaces a number of minutes, too.
    """
    if "save_every" in values:
        preset = {k: v for k, v in preset.items() if k != "checkpoint_minutes"}
    return {**preset, **values}


def read_settings(path: Path) -> dict[str, Any]:
    """Read the values in a JSON or TOML file by field name, also those in tables.

    Raises: UsageError if it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        values: Any
        if path.suffix == ".toml":
            values = tomllib.loads(text)
        else:
            values = json.loads(text, object_pairs_hook=_without_repetition)
        if not isinstance(values, dict):
            raise ValueError("expected an object of settings")
        tables = [v if isinstance(v, dict) else {k: v} for k, v in values.items()]
        return _without_repetition([pair for t in tables for pair in t.items()])
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: {reason}") from error


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return pairs as a dict. Raises: ValueError if a name comes more than once."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"expected each setting once, got {twice} more than once")
    return values


def from_dict(cls: type[C], values: dict[str, Any]) -> C:
    """Make a config from a JSON object that has its fields and no others.

    Fields whose default is None may be missing, as some are in older files.

    Raises: ValueError naming the fields that are unknown or missing.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    needed = {f.name for f in fields if f.default is not None}
    unknown = values.keys() - {f.name for f in fields}
    if wrong := sorted(unknown | (needed - values.keys())):
        raise ValueError(f"{cls.__name__}: unknown or missing {', '.join(wrong)}")
    return cls(**values)


def add_arguments(
    parser: argparse.ArgumentParser, cls: type[Config], without: tuple[str, ...] = ()
) -> None:
    """Add a flag for each field of `cls`, but for those in `without`.

    They are in a group with the title `cls.help_group`; the fields that `cls` inherits
    are in the group of the class that has declared them. A field of type bool becomes a
    flag that takes no value.
    """
    seen = set(without)
    for part in reversed(cls.__mro__):
        if not (issubclass(part, Config) and dataclasses.is_dataclass(part)):
            continue
        group = parser.add_argument_group(part.help_group)
        hints = typing.get_type_hints(part)
        for f in dataclasses.fields(part):
            if f.name in seen:
                continue
            seen.add(f.name)
            kind, optional, several = _value_type(hints[f.name])
            settings = dict(f.metadata["flag"])
            if not settings["choices"]:
                settings["metavar"] = settings["metavar"] or METAVARS.get(kind)
            if several:
                settings |= {"nargs": "+", "action": "extend"}
            elif not optional and kind is not bool:
                settings["help"] += f" (default {f.default})"
            names = filter(None, (flag_name(f.name), f.metadata["alias"]))
            read = functools.partial(_read_flag, f, kind)
            settings |= {"dest": f.name, "type": read, "default": argparse.SUPPRESS}
            if kind is bool:
                settings = {k: settings[k] for k in ("dest", "help", "default")}
                settings["action"] = "store_true"
            group.add_argument(*names, **settings)


def flag_name(field_name: str) -> str:
    """Return the flag of a field: d_model has --d-model."""
    return "--" + field_name.replace("_", "-")


def path_or_standard(text: str) -> Path | None:
    """Read a path, as the `type` of an argument; `-` is standard input or output."""
    return None if text == "-" else Path(text)


def positive(text: str) -> int:
    """Read a whole number of at least 1, as the `type` of an argument."""
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(
            "expected a whole number of at least 1 and at most nine digits, "
            f"got {text[:40]!r}"
        )
    return int(text)


def given(namespace: argparse.Namespace, cls: type) -> dict[str, Any]:
    """Return the fields of `cls` whose flags are on the command line."""
    return {
        f.name: getattr(namespace, f.name)
        for f in dataclasses.fields(cls)
        if hasattr(namespace, f.name)
    }


def _value_type(hint: Any) -> tuple[type, bool, bool]:
    """Return a field's type (int, float, str), if it may be None, if it has several."""
    if isinstance(hint, types.UnionType):
        kinds = [kind for kind in hint.__args__ if kind is not type(None)]
        return kinds[0], True, False
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], False, True
    return hint, False, False
