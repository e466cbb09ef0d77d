"""How users call the two scripts, which depends on the way of installing."""

from __future__ import annotations

import re
from pathlib import Path

# The scripts of a source tree; from a wheel they are commands of `minitransformer`.
SCRIPTS = re.compile(r"(?<![\w/.-])(?:python )?(train|translate)\.py\b")
IN_TREE = Path(__file__).parents[2].joinpath("train.py").is_file()


def as_installed(text: str) -> str:
    """Return text for users with the scripts called as they are called here."""
    return text if IN_TREE else SCRIPTS.sub(r"minitransformer \1", text)
