"""The one rule for output: no file of the user or of a run is lost."""

from __future__ import annotations

import argparse
import codecs
import os
import re
from pathlib import Path

from minitransformer.runs.run_directory import HIDDEN, NAMES, RunDirectory
from minitransformer.settings.options import UsageError
from minitransformer.text.lines import open_text

# How much of a file tells its kind, in bytes.
START = 1 << 20


def may_lose(path: Path, kind: str) -> bool:
    """Whether a command for this kind of file may delete or replace one.

    Of a "run", it is a regular file with a name of training, and not hidden. Otherwise
    it is empty or of the kind: UTF-8, which a .gz holds compressed, or a ".png".

    Raises: OSError if the file cannot be read.
    """
    if kind == "run":
        is_own = re.fullmatch(NAMES, path.name) and path.name not in HIDDEN
        return bool(is_own) and path.is_file() and not path.is_symlink()
    try:
        with open_text(path) as file:
            start = file.read(START)
        if kind == ".png":
            return start.startswith(b"\x89PNG\r\n") or not start
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except ValueError:  # neither UTF-8 nor gzip
        return False
    return b"\0" not in start and not start.startswith(b"%PDF-")


def check_output(output: Path | None, args: argparse.Namespace, kind: str = "") -> None:
    """Check a file, a folder or standard output (None) before anything is computed.

    It must not be a file that the arguments name, standard input, or a file of a run,
    even by another name. A folder must be new or empty. With a `kind`, "text" or ".png"
    may take the place of such a file; otherwise `atomic_write` refuses to replace other
    content.

    Raises: UsageError, OSError
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

    # A file of a run, and a file of another kind, are not replaced.
    real = Path(os.path.realpath(output))
    is_own = re.fullmatch(NAMES, real.name, re.IGNORECASE)
    if is_own and RunDirectory(real.parent).config.is_file():
        raise UsageError(f"{name}: expected a file to write, got one of a run")
    if kind and real.is_file() and not may_lose(real, kind):
        what = "a PNG" if kind == ".png" else "text"
        raise UsageError(f"{name} is not {what}: it is not replaced")


def _same_file(one: int | Path, other: int | Path) -> bool:
    """Whether both are one file, not a device or a pipe. 0 and 1 are open."""
    are_files = os.path.isfile(one) and os.path.isfile(other)
    return are_files and os.path.samefile(one, other)
