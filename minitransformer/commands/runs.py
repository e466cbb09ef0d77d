"""List training runs, and delete those that are named."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from minitransformer.commands import Command
from minitransformer.runs.models import RUNS, all_runs, described
from minitransformer.runs.outputs import may_lose
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.settings.options import UsageError, suggestion
from minitransformer.system.files import partial_name


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


def named_run(name: str, folder: Path) -> RunDirectory:
    """Return the run with a path, or with a name in a folder.

    A name with a separator, or of dots, is a path alone.

    Raises: UsageError if there is no such run, or one of each.
    """
    places = [Path(name)] if name else []
    if os.path.basename(name) == name and name.strip("."):
        places.insert(0, folder / name)
    # Both may be the same folder, which counts once.
    paths = {path.resolve(): path for path in places}
    runs = [run for path in paths.values() if (run := RunDirectory(path)).is_run()]
    if len(runs) != 1:
        names = " and ".join(str(run.path.absolute()) for run in runs) or "none"
        others = (run.path.name for run in all_runs(folder) if run.is_run())
        hint = suggestion(name, () if runs else others)
        raise UsageError(f"{name}: expected one run, found {names}{hint}")
    return runs[0]


def delete(runs: Sequence[RunDirectory]) -> None:
    """Delete the files that runs have written: of all runs, or of none."""
    with ExitStack() as stack:
        # Lock all runs, as a training does.
        for run in runs:
            stack.enter_context(run.lock(resumes=True))
        sizes = [size(run) for run in runs]

        # Move their files into folders that are deleted at the end, or all back if one
        # cannot be moved.
        with ExitStack() as back:
            for run in runs:
                folder = stack.enter_context(partial_name(run.config))
                folder.mkdir()
                for path in [x for x in run.path.iterdir() if may_lose(x, "run")]:
                    place = folder / path.name
                    path.rename(place)
                    back.callback(place.rename, path)
            back.pop_all()
    # Say what was deleted, and which files of others are left.
    for run, freed in zip(runs, sizes, strict=True):
        kept = ", ".join(sorted(path.name for path in run.path.glob("*")))
        print(f"deleted {run.path}, {freed}" + f", but not {kept}" * bool(kept))


def list_or_delete(args: argparse.Namespace) -> None:
    """List the runs in a folder, or delete those that are named."""
    if args.delete:
        named = [named_run(name, args.folder) for name in args.delete]
        delete([*{run.path.resolve(): run for run in named}.values()])
    else:
        none = f"no runs in {args.folder.absolute()}"
        print("\n".join(map(about, all_runs(args.folder))) or none)


def main(arguments: Sequence[str]) -> int:
    parser = Command(
        "minitransformer runs",
        "List training runs with their size, text, updates and BLEU, or delete some.",
        ("minitransformer runs", "minitransformer runs --delete tiny-20261122-011703"),
        "Deleting asks nothing. Of several runs, all are deleted or none.",
    )
    add = parser.add_argument
    add("folder", type=Path, nargs="?", default=RUNS, help="where they are (runs)")
    add("--delete", nargs="+", metavar="RUN", help="names or paths to delete")
    return parser.run(arguments, list_or_delete)
