"""Average the parameters of several checkpoints (section 6.1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from minitransformer.runs import checkpoint
from minitransformer.runs.checkpoint import Checkpoint, load
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.settings.options import Parser, UsageError, exit_code, positive


def average_checkpoints(paths: Sequence[Path]) -> Checkpoint:
    """Average the parameters of checkpoints of one run (section 6.1).

    The tokenizer and the state are the last one's.

    Raises: ValueError if there is none, or they differ in shape or tokenizer.
    """
    if not paths:
        raise ValueError("expected checkpoints to average, got none")
    result = load(paths[-1])
    total = result.parameters.data.astype(np.float64)
    for path in paths[:-1]:
        other = load(path)
        if other.model.config != result.model.config:
            raise ValueError(f"{path}: its configuration differs from {paths[-1]}")
        if other.tokenizer.model != result.tokenizer.model:
            raise ValueError(f"{path}: its tokenizer differs from that of {paths[-1]}")
        total += other.parameters.data
    result.parameters.data[...] = total / len(paths)
    return result


def chosen(paths: Sequence[Path], last: int) -> list[Path]:
    """The checkpoints themselves, or the last ones of one run.

    Raises: UsageError if runs and files are mixed, ValueError if there are too few.
    """
    if len(paths) > 1 or not paths[0].is_dir():
        if folders := [path for path in paths if path.is_dir()]:
            raise UsageError(f"expected one run or checkpoints, got {folders[0]} too")
        return list(paths)
    steps = RunDirectory(paths[0]).steps()
    if len(steps) < last:
        raise ValueError(
            f"{paths[0]}: expected at least {last} checkpoints (--last), it has "
            f"{len(steps)}; --keep-last of train.py says how many are kept"
        )
    return steps[-last:]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        "minitransformer average",
        "Average the last checkpoints of a run, or the checkpoints named (section 6.1).",
        (
            "minitransformer average averaged.safetensors runs/NAME --last 20",
            "minitransformer average averaged.safetensors A.safetensors B.safetensors",
            "python translate.py --model averaged.safetensors --input new.en",
        ),
        "train.py averages the last --average checkpoints of a run when it ends.",
    )
    add = parser.add_argument
    add("output", type=Path, help="the checkpoint to write")
    add("inputs", type=Path, nargs="+", help="a run directory, or checkpoints")
    add("--last", type=positive, default=5, metavar="N", help="of a run (default 5)")
    args = parser.parse_args(arguments)

    def work() -> None:
        paths = chosen(args.inputs, args.last)
        checkpoint.save(args.output, average_checkpoints(paths))
        print(f"wrote {args.output}: the mean of {', '.join(p.name for p in paths)}")

    return exit_code("average", work)
