"""The one rule for output: no file of the user or of a run is lost."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from minitransformer.runs.run_directory import NAMES, RunDirectory
from minitransformer.settings.options import UsageError


def check_output(
    output: Path | None, args: argparse.Namespace, replace: bool = False
) -> None:
    """Check a file, a folder or standard output (None) before anything is computed.

    It must not be a file that the arguments name, standard input, or a file of a run,
    even by another name. A folder must be new or empty. With `replace`, text may take
    the place of text; otherwise `atomic_write` refuses to replace other content.

    Raises: UsageError
    """
    name = "standard output" if output is None else str(output)

    # The inputs: standard input (0), and all other paths among the arguments.
    lists = (x if isinstance(x, list) else [x] for x in vars(args).values())
    paths = (x for values in lists for x in values if isinstance(x, Path))
    read: list[int | Path] = [0, *(path for path in paths if path is not output)]
    written = 1 if output is None else output
    if any(_same_file(written, x) for x in read):
        raise UsageError(f"{name}: expected a file to write, got one that is read")
    if output is None:
        return
    if output.is_dir() and any(output.iterdir()):
        kinds = "a file, or a new or an empty folder"
        raise UsageError(f"{name}: expected {kinds}, got a folder with files")

    # A file of a run, and a file that is not text, are not replaced.
    real = Path(os.path.realpath(output))
    is_own = re.fullmatch(NAMES, real.name, re.IGNORECASE)
    if is_own and RunDirectory(real.parent).config.is_file():
        raise UsageError(f"{name}: expected a file to write, got one of a run")
    if replace and real.suffix not in (".gz", ".png") and real.is_file():
        with open(real, "rb") as file:
            if b"\0" in file.read(4096):
                raise UsageError(f"{name} is not text: it is not replaced")


def _same_file(one: int | Path, other: int | Path) -> bool:
    """Whether both are one file, not a device or a pipe. 0 and 1 are open."""
    are_files = os.path.isfile(one) and os.path.isfile(other)
    return are_files and os.path.samefile(one, other)
