"""The log of a run, and standard output that may fail without ending a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

from tqdm import tqdm

from minitransformer.runs.run_directory import RunDirectory


class LossyStream:
    """A text stream that drops what cannot be written.

    A closed pipe or terminal, or a full disk, then costs lines and not the run.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


def drop_failed_output() -> None:
    """Let no print to standard output or standard error fail from now on."""
    if sys.stdout is None:  # it was closed
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stdout, sys.stderr = LossyStream(sys.stdout), LossyStream(sys.stderr)


def logger(run: RunDirectory, is_first: bool) -> Callable[[str], None]:
    """Return a function that prints a line and appends it to the run's log.

    Rank 0, which `is_first`, alone writes; the line appears above the progress bar.
    """

    def log(line: str) -> None:
        if is_first:
            if sys.stdout is not None:  # None if it was closed
                tqdm.write(line, file=sys.stdout)
                sys.stdout.flush()
            run.append(run.path / "train.log", line)

    return log
