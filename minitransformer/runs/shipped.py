"""The trained models that come with the package, each with a card that describes it."""

from __future__ import annotations

import os
from pathlib import Path

from minitransformer.runs.checkpoint import SUFFIX

# A folder for each model, by its name: the checkpoint and its card, README.md, whose
# title is the name, a colon, and what the model does.
FOLDER = Path(__file__).parents[1] / "models"

# The model that is used where there is no run.
DEFAULT = "en-de"


def shipped_model(name: str) -> Path | None:
    """Return the checkpoint of the model of this name, or None if there is none."""
    path = FOLDER / name / f"model{SUFFIX}"
    return path if path.parent.parent == FOLDER and os.path.isfile(path) else None


def card_title(checkpoint: Path) -> str:
    """Return the title of a shipped model's card, or "" for another checkpoint."""
    if checkpoint.parent.parent != FOLDER:
        return ""
    card = checkpoint.with_name("README.md").read_text(encoding="utf-8")
    return card.partition("\n")[0].removeprefix("# ")
