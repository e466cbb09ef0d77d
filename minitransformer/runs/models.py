"""Which run or model is meant, and what it has learned from."""

from __future__ import annotations

import os
from pathlib import Path

from minitransformer.runs.checkpoint import SUFFIX, recorded_state
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.runs.shipped import DEFAULT, card_title, shipped_model
from minitransformer.settings.config import RunConfig
from minitransformer.text.grammar.corpus import FOLDER

RUNS = Path("runs")


def all_runs(runs: Path = RUNS) -> list[RunDirectory]:
    """Return the run directories in `runs`; that which was written to last is first."""
    found = [RunDirectory(path.parent) for path in runs.glob("*/config.json")]
    return sorted(found, key=RunDirectory.last_written, reverse=True)


def newest_run(runs: Path = RUNS) -> RunDirectory:
    """Return the run directory in `runs` that was written to last.

    Raises: FileNotFoundError if there is none.
    """
    if not (found := all_runs(runs)):
        expected = f"expected a training run in {runs.absolute()}, found none"
        raise FileNotFoundError(f"{expected}: run train.py first or name one")
    return found[0]


def find_checkpoint(path: Path | None, runs: Path = RUNS) -> Path:
    """Return the checkpoint that `path` names.

    It may be a checkpoint file, a run directory (its preferred checkpoint) or, if
    neither has that name, a shipped model. None is the newest run in `runs` that has
    ended and learned from text of the user, or else the default shipped model.

    Raises: FileNotFoundError if there is no checkpoint.
    """
    if path is None:
        ended = (run for run in all_runs(runs) if run.has_ended())
        own = (run for run in ended if not learned_built_in_text(run.read_config()))
        found = next((run.preferred_checkpoint() for run in own), None)
        if (found := found or shipped_model(DEFAULT)) is None:
            expected = f"expected a run in {runs.absolute()} that has ended, found none"
            raise FileNotFoundError(f"{expected}: run train.py first or name a model")
        return found
    if not (path.is_file() or RunDirectory(path).has_checkpoint()):
        path = shipped_model(str(path)) or path
    if not path.exists():
        expected = f"a run, a checkpoint or a shipped model ({DEFAULT})"
        raise FileNotFoundError(f"{path}: expected {expected}, found nothing")
    return RunDirectory(path).preferred_checkpoint() if path.is_dir() else path


def is_model(text: str) -> bool:
    """Return whether an argument names a run, a checkpoint or a shipped model.

    A missing path inside an existing folder counts too: the user meant a model.
    """
    # os.path.isfile is False for what is no name or cannot be read; Path raises.
    is_checkpoint = text.endswith(SUFFIX) and os.path.isfile(text)
    is_shipped = shipped_model(text) is not None
    is_run = os.path.isfile(Path(text, "config.json"))
    folder = os.path.dirname(text) if len(text.split()) == 1 else ""
    is_wrong = os.path.isdir(folder) and not os.path.exists(text)
    return is_shipped or is_checkpoint or is_run or is_wrong


def learned_built_in_text(settings: RunConfig) -> bool:
    return {Path(path).parent.name for path in settings.text["train"]} == {FOLDER}


def corpus_name(settings: RunConfig) -> str:
    """Return what a run learned from, in a few words."""
    if learned_built_in_text(settings):
        return "the built-in corpus"
    source, target = (Path(path.removesuffix(".gz")) for path in settings.text["train"])
    if source.with_suffix("") == target.with_suffix(""):
        languages = f"{source.suffix[1:]} to {target.suffix[1:]}"
        return f"{source.parent.name}/{source.stem}, {languages}"
    return f"{source.name} to {target.name}"


def described(checkpoint: Path) -> str:
    """Return what a checkpoint is: its text, updates and validation BLEU, or its card.

    Raises: ValueError if it cannot be read.
    """
    if title := card_title(checkpoint):
        return f"the shipped model {title}"
    state, about = recorded_state(checkpoint), list[str]()
    if (run := RunDirectory(checkpoint.parent)).config.is_file():
        about.append(corpus_name(run.read_config()))
    about.append(f"{state.step:,} updates")
    if state.best_bleu >= 0:
        about.append(f"validation BLEU {state.best_bleu:.2f}")
    return f"{checkpoint} ({', '.join(about)})"
