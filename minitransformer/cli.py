"""The command line: parsers made from settings, exit codes, the standard streams."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import os
import shlex
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from minitransformer.settings import VERSION
from minitransformer.settings.config import ONLY_IN_FILES
from minitransformer.settings.options import (
    Config,
    UsageError,
    checked,
    flag_name,
    suggestion,
    value_type,
)
from minitransformer.settings.scripts import as_installed, raise_on_interrupt

METAVARS = {int: "N", float: "X", str: "NAME"}
NUMBERS = {int: "a whole number", float: "a number"}

# Flags of other toolkits, and the flags that do the same here.
ELSEWHERE = {
    **dict.fromkeys(map(flag_name, ONLY_IN_FILES), "--config"),
    "--batch-size": "--max-tokens --decode-tokens",
    "--checkpoint": "--model --resume",
    "--early-stopping": "--patience",
    "--epochs": "--steps",
    "--fp16": "--precision",
    "--from": "--model",
    "--gpu": "--device",
    "--length-penalty": "--alpha",
    "--lr": "--learning-rate",
    "--max-update": "--steps",
    "--to": "--model",
    "--tokenizer": "--vocabulary",
}


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and suggest a known flag."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        for kind in NUMBERS:
            self.register("type", kind, functools.partial(_number, kind))
        self.register("type", Path, _path)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self._refuse_unknown(*self.parse_known_args(args, namespace))

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments with the one list of words among them or after `--`."""
        args = list(sys.argv[1:] if args is None else args)
        end = args.index("--") if "--" in args else len(args)
        parsed, unknown = self.parse_known_intermixed_args(args[:end], namespace)
        self._refuse_unknown(parsed, unknown)
        # Add the words after `--`, which may look like flags.
        [action] = self._get_positional_actions()
        words = getattr(parsed, action.dest)
        setattr(parsed, action.dest, [*words, *args[end + 1 :]])
        return parsed

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        """Return the flags of a line of a file @FILE, as a shell would."""
        return shlex.split(arg_line, comments=True)

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and one line, without the list of all flags before it."""
        self.exit(2, f"{self.prog}: error: {printable(message)}\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(as_installed(message), file)

    def _refuse_unknown(self, namespace: Any, unknown: list[str]) -> Any:
        if unknown:
            # Suggest the flag that does the same here, or else one of a similar name.
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
    paragraph of `notes`. With `usual` flags, `--help` shows these alone, and
    `--help-all` shows every flag.
    """

    def __init__(
        self,
        prog: str,
        summary: str,
        examples: tuple[str, ...],
        notes: str = "",
        usual: tuple[str, ...] = (),
    ) -> None:
        lines = "\n".join(f"    {example}" for example in examples)
        super().__init__(
            prog=prog,
            description=summary,
            epilog=f"examples:\n{lines}" + (f"\n\n{notes}" if notes else ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._usual = usual
        if usual:
            self.add_argument(
                "--help-all",
                action=_HelpAll,
                nargs=0,
                default=argparse.SUPPRESS,
                help="show all flags, by topic, and exit",
            )
        self.add_argument(
            "--version",
            action="version",
            version=package_version(),
            help=argparse.SUPPRESS,  # each command has it, and none needs to say so
        )

    def format_help(self) -> str:
        """Return the help without the flags that are not usual."""
        shown = {"-h", "--help-all", *self._usual}
        for action in self._actions if self._usual else ():
            if action.option_strings and not shown & {*action.option_strings}:
                action.help = argparse.SUPPRESS
        return super().format_help()


class _HelpAll(argparse.Action):
    def __call__(self, parser: Any, *_: Any) -> None:
        parser._usual = ()
        parser.print_help()
        parser.exit()


def package_version() -> str:
    """Return the name and the version of the package."""
    return f"minitransformer {VERSION}"


def add_arguments(
    parser: argparse.ArgumentParser, cls: type[Config], without: tuple[str, ...] = ()
) -> None:
    """Add a flag for each field that `cls` declares, but for those in `without`.

    They are in a group with the title `cls.help_group`. A field of type bool becomes a
    flag that takes no value.
    """
    group = parser.add_argument_group(cls.help_group)
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        if f.name in cls.__annotations__ and f.name not in without:
            group.add_argument(flag_name(f.name), **_flag(f, hints[f.name]))


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say where to compute."""
    parser.add_argument(
        "--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)"
    )
    parser.add_argument(
        "--threads",
        type=positive,
        metavar="N",
        help="how many cores of a CPU are used (default all cores)",
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which model translates, and with which terms."""
    parser.add_argument(
        "--model",
        "-m",
        type=Path,
        action="append",
        metavar="PATH",
        help="run, checkpoint, en-de or de-en (default newest ended run, or en-de); "
        "repeat for an ensemble",
    )
    parser.add_argument(
        "--glossary",
        type=Path,
        metavar="FILE",
        help="file of terms and their translations, with a tab between them",
    )


def _flag(f: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a field's flag."""
    kind, optional = value_type(hint)
    settings = {"dest": f.name, "default": argparse.SUPPRESS, **f.metadata["flag"]}
    if kind is bool:
        names = "dest", "default", "help"
        return {name: settings[name] for name in names} | {"action": "store_true"}
    settings["type"] = functools.partial(_read_flag, f, kind)
    if not settings["choices"]:
        settings["metavar"] = settings["metavar"] or METAVARS.get(kind)
    if not optional:
        settings["help"] += f" (default {f.default})"
    return settings


def _read_flag(f: dataclasses.Field[Any], kind: type, text: str) -> Any:
    """Read and check the value of a field's flag, which an error names."""
    try:
        return checked(f, kind, _number(kind, text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _number(kind: type, text: str) -> Any:
    """Read an argument of type int or float."""
    try:
        return kind(text)
    except ValueError:
        message = f"expected {NUMBERS[kind]}, got {text[:40]!r}"
        raise argparse.ArgumentTypeError(message) from None


def _path(text: str) -> Path:
    """Read the name of a file or folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a name, got an empty one")
    return Path(text)


def positive(text: str) -> int:
    """Read a whole number of at least 1, as the `type` of an argument."""
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(
            "expected a whole number of at least 1 and at most nine digits, "
            f"got {text[:40]!r}"
        )
    return int(text)


def path_or_standard(text: str) -> Path | None:
    """Read a path, as the `type` of an argument; `-` is standard input or output."""
    return None if text == "-" else _path(text)


def exit_code(
    prog: str,
    work: Callable[[], int | None],
    advice: Mapping[Path, str] | None = None,
) -> int:
    """Do the work of a command, report an error in one line, return the exit code.

    The code is 0 (or what `work` returns) on success, 1 after a failure, 2 for wrong
    usage, 130 after Ctrl-C and 141 if nobody reads the output any more, as with
    `| head`. `advice` is put after the message if the file that cannot be written is in
    the folder of the advice.
    """
    # Do the work; without an error, its output is complete.
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may be no UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    message = ""
    code = 1
    try:
        raise_on_interrupt()
        result = work() or 0
        sys.stdout.flush()
        return result
    # Else find the message and the exit code of the error.
    except KeyboardInterrupt:
        message = "interrupted"
        code = 130
    except (ValueError, RuntimeError, OverflowError) as error:
        message = str(error)
        code = 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:
        code = 141
    except OSError as error:
        place = f"{error.filename}: " if error.strerror and error.filename else ""
        message = f"{place}{error.strerror or error}"
        for folder, hint in (advice or {}).items():
            path = Path(error.filename or "/").absolute()
            if place and path.is_relative_to(folder.absolute()):
                message += f"; {hint}"
    except MemoryError as error:
        hint = "try a lower --max-tokens to train, --decode-tokens to translate"
        message = f"out of memory, {hint}: {error}"
    # Write what has been printed so far, then the message.
    try:
        sys.stdout.flush()
    except OSError:  # when Python exits, it would try to write the rest again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if message:
        say(f"{prog}: error: {printable(message)}")
    return code


def _open_closed_streams() -> None:
    """Open the null device for each standard stream that is closed.

    Otherwise the next file to be opened would get its number, and libraries would print
    into that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def say(line: str) -> None:
    """Print a line for people, beside any output."""
    print(as_installed(line), file=sys.stderr)


def printable(text: str) -> str:
    """Escape line feeds and other characters that could confuse a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
