"""The built-in corpus: English-German pairs from a hand-written bilingual grammar.

Numbers, dates, clock times, prices and short scenes with gender, case, adjective
agreement, verb-second order and separable verbs. One English sentence has exactly one
German translation, so a translation is right or wrong by rule. Read `numbers`, `words`,
`clauses`, then `corpus`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

VERSION = 1
FOLDER = f"built-in-{VERSION}"


def are_built_in(files: Iterable[str | Path]) -> bool:
    """Whether all files are the corpus's own, which takes no grammar to know."""
    return {Path(file).parent.name for file in files} == {FOLDER}
