"""List training runs, and delete those that are named."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from minitransformer.cli import Parser, exit_code
from minitransformer.runs.models import RUNS, all_runs, described
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.settings.options import UsageError, suggestion


def size(run: RunDirectory) -> str:
    files = (path for path in run.path.rglob("*") if path.is_file())
    return f"{sum(path.lstat().st_size for path in files) / 1e6:,.1f} MB"


def about(run: RunDirectory) -> str:
    """Return a line about a run: its size, and the model that it translates with."""
    try:
        model = described(run.preferred_checkpoint())
    except (OSError, ValueError) as error:
        model = str(error)
    return f"{size(run):>12}  {model}{'' if run.has_ended() else ', not ended'}"


def named_run(name: Path, folder: Path) -> RunDirectory:
    """Return the run with a path, or with a name in a folder.

    Raises: UsageError if there is no such run, or one of each.
    """
    # Both may be the same folder, which counts once.
    paths = {path.resolve(): path for path in (folder / name, name)}
    runs = [run for path in paths.values() if (run := RunDirectory(path)).is_run()]
    if len(runs) != 1:
        names = " and ".join(str(run.path.absolute()) for run in runs) or "none"
        hint = suggestion(str(name), () if runs else os.listdir(folder))
        raise UsageError(f"{name}: expected one run, found {names}{hint}")
    return runs[0]


def delete(runs: Sequence[RunDirectory]) -> None:
    """Delete the files that runs have written, or nothing if one is being trained."""
    # Lock all runs first, as a training does.
    with ExitStack() as locks:
        for run in runs:
            locks.enter_context(run.lock([os.getpid()], resumes=True))
        sizes = [size(run) for run in runs]
        for run in runs:
            for path in run.own_files():
                run.remove(path)
    # Say what was deleted, and which files of others are left.
    for run, freed in zip(runs, sizes, strict=True):
        kept = ", ".join(sorted(path.name for path in run.path.glob("*")))
        print(f"deleted {run.path}, {freed}" + f", but not {kept}" * bool(kept))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        "minitransformer runs",
        "List training runs with their size, text, updates and BLEU, or delete some.",
        ("minitransformer runs", "minitransformer runs --delete tiny-20261122-011703"),
        "Deleting asks nothing. Of several runs, all are deleted or none.",
    )
    add = parser.add_argument
    add("folder", type=Path, nargs="?", default=RUNS, help="where they are (runs)")
    add(
        "--delete", type=Path, nargs="+", metavar="RUN", help="names or paths to delete"
    )
    args = parser.parse_args(arguments)

    def work() -> None:
        if args.delete:
            named = [named_run(name, args.folder) for name in args.delete]
            delete([*{run.path.resolve(): run for run in named}.values()])
        else:
            none = f"no runs in {args.folder.absolute()}"
            print("\n".join(map(about, all_runs(args.folder))) or none)

    return exit_code(parser.prog, work)
