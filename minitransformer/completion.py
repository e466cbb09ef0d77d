"""Completion of commands and flags in the shell: bash, zsh, fish and others."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from minitransformer.__main__ import COMMANDS, main_of
from minitransformer.settings.extras import import_extra
from minitransformer.settings.options import Parser, exit_code
from minitransformer.settings.presets import PRESETS


class _Found(Exception):  # noqa: N818
    """Carries the parser of a command out of it, before it parses anything."""


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command, without running the command."""

    def stop(parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        raise _Found(parser)

    main = main_of(command)
    with mock.patch.multiple(Parser, parse_args=stop, parse_intermixed_args=stop):
        try:
            main([])
        except _Found as found:
            parser = found.args[0]
    return parser


def command_line(shtab: Any) -> argparse.ArgumentParser:
    """Return one parser of all commands, which says what a flag may be followed by."""
    root = argparse.ArgumentParser("minitransformer")
    commands = root.add_subparsers()
    parsers = {name: parser_of(name) for name in COMMANDS if name != "completion"}
    for name, parser in parsers.items():
        what = COMMANDS[name][1]
        commands.add_parser(name, help=what, parents=[parser], add_help=False)
        for action in parser._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            if action.dest == "config":
                action.choices = list(PRESETS)
            elif action.choices and not isinstance(action, argparse._SubParsersAction):
                action.choices = list(action.choices)  # shtab 1.13 fails on a dict
    shells = commands.add_parser("completion", help=COMMANDS["completion"][1])
    shells.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        "minitransformer completion",
        "Print a script that completes commands and flags in a shell.",
        (
            "minitransformer completion bash "
            "> ~/.local/share/bash-completion/completions/minitransformer",
            "minitransformer completion zsh > ~/.zfunc/_minitransformer",
            "minitransformer completion fish | source    # in config.fish",
        ),
        "For zsh, the folder has to be in fpath before compinit.",
    )
    parser.add_argument("shell", help="bash, zsh, fish, tcsh or powershell")
    args = parser.parse_args(arguments)

    def work() -> None:
        need = "shell completion needs shtab"
        shtab = import_extra("shtab", "completion", need)
        if args.shell not in shtab.SUPPORTED_SHELLS:
            known = ", ".join(shtab.SUPPORTED_SHELLS)
            parser.error(f"expected one of {known}, got {args.shell}")
        print(shtab.complete(command_line(shtab), args.shell))

    return exit_code(parser.prog, work)
