"""Average the parameters of several checkpoints (section 6.1)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from minitransformer.cli import positive
from minitransformer.commands import Command
from minitransformer.runs.checkpoint import save
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.settings.options import UsageError
from minitransformer.text.pairs import file_digest
from minitransformer.training.averaging import mean_of


def select_checkpoints(paths: Sequence[Path], last: int | None) -> list[Path]:
    """Return the `last` checkpoints (5) of one run directory, or the files themselves.

    Raises: UsageError if directories and files are mixed, if a file is named twice, or
    if there are files and `last`; ValueError if the run has too few checkpoints.
    """
    # Files
    if len(paths) > 1 or not paths[0].is_dir():
        if last is not None and all(path.exists() for path in paths):
            raise UsageError("--last does nothing with checkpoints that are named")
        if folders := [path for path in paths if path.is_dir()]:
            raise UsageError(f"expected one run or checkpoints, got {folders[0]} too")
        files = list(filter(Path.is_file, paths))
        if len({*map(file_digest, files)}) < len(files):
            raise UsageError("expected different checkpoints, got one twice")
        return list(paths)
    # A run directory
    checkpoints = RunDirectory(paths[0]).checkpoints()
    last = last or 5
    if len(checkpoints) < last:
        raise ValueError(
            f"{paths[0]}: expected at least {last} checkpoints (--last), it has "
            f"{len(checkpoints)}; --keep-last of train.py keeps more"
        )
    return checkpoints[-last:]


def average(args: argparse.Namespace) -> None:
    """Write the mean of checkpoints, and name them."""
    paths = select_checkpoints(args.inputs, args.last)
    save(args.output, mean_of(paths))
    print(f"wrote {args.output}: the mean of {', '.join(p.name for p in paths)}")


def main(arguments: Sequence[str]) -> int:
    parser = Command(
        "minitransformer average",
        "Average the last checkpoints of a run, or several files (section 6.1).",
        (
            "minitransformer average averaged.safetensors runs/NAME --last 20",
            "minitransformer average averaged.safetensors A.safetensors B.safetensors",
            "python translate.py --model averaged.safetensors --input new.en",
        ),
        "At the end of a run, train.py itself averages up to --average checkpoints:\n"
        "the number that validates best, or with --average-by number all of them.",
    )
    add = parser.add_argument
    add("output", type=Path, help="the checkpoint to write")
    add("inputs", type=Path, nargs="+", help="one run directory, or checkpoints")
    last = "how many checkpoints of a run directory to average (default 5)"
    add("--last", type=positive, metavar="N", help=last)
    return parser.run(arguments, average)
