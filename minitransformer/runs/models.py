"""Find runs and models by their names, and the text that a model has learned from.

Trained models come with the package, each with a card that describes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from minitransformer.runs.checkpoint import SUFFIX, Checkpoint, recorded_state
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.settings.options import suggestion
from minitransformer.text.bilingual import Pair
from minitransformer.text.grammar import are_built_in
from minitransformer.text.pairs import TextPair

RUNS = Path("runs")

# A folder for each shipped model, by its name: the checkpoint and its card, README.md,
# whose title is the name, a colon, and what the model does.
SHIPPED = Path(__file__).parents[1] / "models"

# The model that is used where there is no run.
DEFAULT = "en-de"


def all_runs(folder: Path = RUNS) -> list[RunDirectory]:
    """Return the run directories in `folder`, the one that was trained last first."""
    runs = [RunDirectory(path.parent) for path in folder.glob("*/config.json")]
    return sorted(runs, key=RunDirectory.last_written, reverse=True)


def newest_run() -> RunDirectory:
    """Return the run directory in ./runs that was trained last.

    Raises: FileNotFoundError if there is none.
    """
    for run in all_runs():
        return run
    expected = f"expected a training run in {RUNS.absolute()}, found none"
    raise FileNotFoundError(f"{expected}: run train.py first or name one")


def find_checkpoint(path: Path | None) -> Path:
    """Return the checkpoint that `path` names.

    It may be a checkpoint file, a run directory (its preferred checkpoint) or, if
    neither has that name, a shipped model. None stands for the newest run in ./runs
    that has ended and learned from text of the user, or else the default shipped model.

    Raises: FileNotFoundError if there is no checkpoint.
    """
    # The default.
    if path is None:
        for run in all_runs():
            if run.has_ended() and not are_built_in(run.read_config().text["train"]):
                return run.preferred_checkpoint()
        path = Path(DEFAULT)

    # A file or a run of this name comes before a shipped model.
    if not (path.is_file() or RunDirectory(path).has_checkpoint()):
        path = shipped_model(str(path)) or path
    if not path.exists():
        shipped = sorted(x.parent.name for x in shipped_models())
        expected = f"a run, a checkpoint or a shipped model ({', '.join(shipped)})"
        hint = suggestion(str(path), shipped)
        raise FileNotFoundError(f"{path}: expected {expected}, found nothing{hint}")
    return RunDirectory(path).preferred_checkpoint() if path.is_dir() else path


def shipped_model(name: str) -> Path | None:
    """Return the checkpoint of the model of this name, or None if there is none."""
    path = SHIPPED / name / f"model{SUFFIX}"
    return path if path.parent.parent == SHIPPED and os.path.isfile(path) else None


def shipped_models() -> list[Path]:
    """Return the checkpoints of the shipped models, the default one first."""
    paths = SHIPPED.glob(f"*/model{SUFFIX}")
    return sorted(paths, key=lambda path: (path.parent.name != DEFAULT, path))


def card_title(checkpoint: Path) -> str:
    """Return the title of a shipped model's card, or "" for another checkpoint."""
    if checkpoint.parent.parent != SHIPPED:
        return ""
    card = checkpoint.with_name("README.md").read_text(encoding="utf-8")
    return card.partition("\n")[0].removeprefix("# ")


def language_codes(checkpoint: Path) -> Pair:
    """Return the codes of the languages that a model translates from and to.

    The name of a shipped model has them, such as en-de. Otherwise they are the suffixes
    of the training text, such as train.en.gz, as the checkpoint or its run says.
    Suffixes that are no codes give "source" and "target".
    """
    names: Sequence[str] = ()
    run = RunDirectory(checkpoint.parent)
    if card_title(checkpoint):
        names = checkpoint.parent.name.split("-")
    elif languages := recorded_state(checkpoint).languages:
        names = languages
    elif run.is_run():
        names = TextPair(*map(Path, run.read_config().text["train"])).languages
    are_codes = len({*names}) == 2 and all(x.isalpha() and len(x) < 4 for x in names)
    return (names[0], names[1]) if are_codes else ("source", "target")


def models_by_direction(paths: Iterable[Path]) -> list[list[Path]]:
    """Return the models of each pair of languages, in the order of the first ones."""
    groups: dict[Pair, list[Path]] = {}
    for path in paths:
        groups.setdefault(language_codes(find_checkpoint(path)), []).append(path)
    return list(groups.values())


def figures(checkpoint: Path) -> str:
    """Return the updates of a model and its BLEU, where it is known."""
    if title := card_title(checkpoint):
        return title.partition("(")[2].rstrip(")")
    state = recorded_state(checkpoint)
    updates = f"{state.step:,} updates"
    if state.best_bleu < 0:
        return updates
    return f"{updates}, validation BLEU {state.best_bleu:.2f}"


def fingerprint(path: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a path, and what checkpoints that belong together share, or None.

    Only codes of two letters say a direction: other endings may stand for anything.
    """
    codes = language_codes(path)
    return {
        "path": path,
        "configuration": checkpoint.model.config,
        "tokenizer": checkpoint.tokenizer.model,
        "direction": codes if {*map(len, codes)} == {2} else None,
        "training text": checkpoint.state.text.get("train"),
        "beginning (--seed or --from)": checkpoint.state.origin or None,
    }


def require_alike(
    own: dict[str, Any], other: dict[str, Any], names: Sequence[str] = ()
) -> None:
    """Compare these names of two fingerprints, or all, where both are known.

    Raises: ValueError that says which differs.
    """
    for name in names or list(own)[1:]:
        if None not in (own[name], other[name]) and own[name] != other[name]:
            differs = f"its {name} differs from that of {other['path']}"
            raise ValueError(f"{own['path']}: {differs}")


def described(checkpoint: Path) -> str:
    """Describe a checkpoint: its text, updates and validation BLEU, or its card.

    Raises: ValueError if it cannot be read.
    """
    if title := card_title(checkpoint):
        return f"the shipped model {title}"
    about = [figures(checkpoint)]
    run = RunDirectory(checkpoint.parent)
    if run.config.is_file():
        files = run.read_config().text["train"]
        text = " to ".join("/".join(Path(x).parts[-2:]) for x in files)
        about = ["the built-in corpus" if are_built_in(files) else text, *about]
    return f"{checkpoint} ({', '.join(about)})"
