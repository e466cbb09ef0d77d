"""List training runs, and delete those that are named."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from minitransformer.cli import Parser, exit_code
from minitransformer.runs.checkpoint import recorded_state
from minitransformer.runs.models import RUNS, all_runs, corpus_name
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.settings.options import UsageError, suggestion


def size_of(run: RunDirectory) -> str:
    files = (path for path in run.path.rglob("*") if path.is_file())
    return f"{sum(path.lstat().st_size for path in files) / 1e6:,.1f} MB"


def about(run: RunDirectory) -> tuple[str, str, str, str, str]:
    """Return a row of the list: name, size, updates, validation BLEU, text."""
    updates, bleu = "0", ""
    try:
        text = corpus_name(run.read_config())
        if run.has_checkpoint():
            state = recorded_state(
                (run.checkpoints() or [run.preferred_checkpoint()])[-1]
            )
            updates = f"{state.step:,}"
            bleu = f"{state.best_bleu:.2f}" if state.best_bleu >= 0 else ""
        text += "" if run.has_ended() else " (not ended)"
    except ValueError as error:
        text = str(error)
    return run.path.name, size_of(run), updates, bleu, text


def listing(runs: list[RunDirectory]) -> str:
    """Return a line for each run under a line of titles."""
    rows = [("run", "size", "updates", "BLEU", "text"), *map(about, runs)]
    name, size, updates, bleu = (max(len(row[i]) for row in rows) for i in range(4))
    return "\n".join(
        f"{a:<{name}}  {b:>{size}}  {c:>{updates}}  {d:>{bleu}}  {e}"
        for a, b, c, d, e in rows
    )


def named_run(name: str, folder: Path) -> RunDirectory:
    """Return the run that is meant: a path, or the name of one in a folder.

    Raises: UsageError if that is no run, or might be one of two.
    """
    places = {path.resolve(): path for path in (folder / name, Path(name))}
    found = [run for path in places.values() if (run := RunDirectory(path)).is_run()]
    if len(found) > 1:
        one, other = (run.path.absolute() for run in found)
        raise UsageError(f"{name}: expected one run, got {one} and {other}")
    if not found:
        hint = suggestion(name, (run.path.name for run in all_runs(folder)))
        raise UsageError(f"{name}: expected a run, found none of this name{hint}")
    return found[0]


def delete(runs: list[RunDirectory]) -> None:
    """Delete the files of runs, unless one is trained; other files stay."""
    with ExitStack() as locks:
        for run in runs:
            locks.enter_context(run.lock([os.getpid()]))
        sizes = [size_of(run) for run in runs]
        for run in runs:
            for path in reversed([*run.own_files(), run.log]):
                path.unlink(missing_ok=True)  # config.json comes last
    for run, size in zip(runs, sizes, strict=True):
        kept = sorted(path.name for path in run.path.glob("*"))
        rest = f", but {', '.join(kept)}, not of the run" if kept else ""
        print(f"deleted {run.path}, {size}{rest}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        "minitransformer runs",
        "List training runs: size, updates, validation BLEU and text; or delete some.",
        ("minitransformer runs", "minitransformer runs --delete tiny-20261122-011703"),
        "Nothing is asked before files are deleted. Of two runs, both are deleted or "
        "none.",
    )
    add = parser.add_argument
    add("folder", type=Path, nargs="?", default=RUNS, help="where they are (runs)")
    add("--delete", nargs="+", metavar="RUN", help="runs to delete, by name or path")
    args = parser.parse_args(arguments)

    def work() -> None:
        if args.delete:
            named = (named_run(name, args.folder) for name in args.delete)
            delete(list({run.path.resolve(): run for run in named}.values()))
        elif found := all_runs(args.folder):
            print(listing(found))
        else:
            print(f"no runs in {args.folder.absolute()}")

    return exit_code(parser.prog, work)
