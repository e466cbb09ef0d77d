"""Average checkpoints of one run (section 6.1): its last ones, or those named.

    python -m minitransformer.average averaged.safetensors runs/NAME --last 20
    python -m minitransformer.average averaged.safetensors first.safetensors ...
    python translate.py --model averaged.safetensors --input new.en

train.py averages the last --average of a run when it ends.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from minitransformer import checkpoint
from minitransformer.checkpoint import RunDirectory
from minitransformer.options import Parser, UsageError, exit_code, positive


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
    parser = Parser("python -m minitransformer.average", __doc__ or "")
    add = parser.add_argument
    add("output", type=Path, help="the checkpoint to write")
    add("inputs", type=Path, nargs="+", help="a run directory, or checkpoints")
    add("--last", type=positive, default=5, metavar="N", help="of a run (default 5)")
    args = parser.parse_args(arguments)

    def work() -> None:
        paths = chosen(args.inputs, args.last)
        checkpoint.save(args.output, checkpoint.average(paths))
        print(f"wrote {args.output}: the mean of {', '.join(p.name for p in paths)}")

    return exit_code("average", work)


if __name__ == "__main__":
    sys.exit(main())
