"""The built-in corpus: English-German pairs from a hand-written bilingual grammar.

Its short scenes have gender, case, adjective agreement, verb-second order and
separable verbs. One English sentence has exactly one German translation, so a
translation is right or wrong by rule. Read `words`, `clauses`, then `corpus`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

VERSION = 2
FOLDER = f"built-in-{VERSION}"


def are_built_in(files: Iterable[str | Path]) -> bool:
    """Whether all files are the corpus's own, of any version."""
    return all(re.fullmatch(r"built-in-\d+", Path(x).parent.name) for x in files)
