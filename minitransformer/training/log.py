"""The log of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tqdm import tqdm

from minitransformer.runs.run_directory import RunDirectory


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
