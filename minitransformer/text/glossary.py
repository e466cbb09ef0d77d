"""Terms and their translations (beyond the paper)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from minitransformer.settings.options import UsageError
from minitransformer.text.clean import clean
from minitransformer.text.lines import read_lines
from minitransformer.text.masking import Slot


def read_glossary(path: Path) -> dict[str, str]:
    """Read lines of a term, a tab and its translation.

    Raises: UsageError naming the first line that is something else.
    """
    glossary = dict[str, str]()
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        term, _, output = line.partition("\t")
        if not is_pair(term, output) or "\t" in output.strip() or term in glossary:
            expected = "expected a new term, a tab and its translation"
            raise UsageError(f"{path}, line {number}: {expected}, got {line!r:.60}")
        glossary[term] = output
    return glossary


def is_pair(*pair: object) -> bool:
    """Whether a term and its translation are both some text of one line."""
    return all(
        isinstance(x, str) and clean(x).strip() and len(x.splitlines()) == 1
        for x in pair
    )


class Glossary:
    """Finds terms in lines: whole words, as they are written, with a capital or in
    capitals.

    Raises: UsageError naming a term, or a translation, that is no text of one line.
    """

    def __init__(self, terms: Mapping[str, str]) -> None:
        if not isinstance(terms, Mapping):
            raise UsageError(f"glossary: expected a dictionary, got {terms!r:.40}")
        self._outputs = dict[str, str]()
        for term, output in terms.items():
            if not is_pair(term, output):
                raise UsageError(
                    "glossary: expected a term and its translation, got "
                    f"{term!r:.40} and {output!r:.40}"
                )
            term = _folded(term)
            for form in (term.upper(), term[0].upper() + term[1:], term):
                self._outputs[form] = clean(output).strip()
        longest = sorted(map(re.escape, self._outputs), key=len, reverse=True)
        any_term = "|".join(longest).replace(r"\ ", " +")
        self._pattern = re.compile(rf"(?<![\w-])(?:{any_term})(?![\w-])")

    def find(self, line: str) -> Iterator[Slot]:
        """Yield the terms of a cleaned line, the longest at each place."""
        for match in self._pattern.finditer(line.replace("\u2019", "'")):
            output = self._outputs[_folded(match[0])]
            yield Slot(*match.span(), output, "term")


def _folded(term: str) -> str:
    """Return a term with straight apostrophes and single spaces."""
    return " ".join(clean(term).replace("\u2019", "'").split())
