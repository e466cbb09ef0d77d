"""Text in capitals only, written as a vocabulary knows it (beyond the paper)."""

from __future__ import annotations

import re
from collections.abc import Callable

WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)*")


def without_capitals(
    text: str, encode: Callable[[list[str]], list[list[int]]]
) -> str | None:
    """Return text in capitals as it is usually written.

    Of each word in small letters, with a capital and in capitals, that is taken which
    has fewest word pieces, or the more frequent ones, which have lower ids. So names
    keep a capital. None stands for text that is not in capitals, that a model of
    capitals has, or that has no word of one piece, such as an abbreviation.
    """
    if not all(letter.isupper() for letter in text if letter.isalpha()):
        return None
    known, start = False, WORD.search(text)

    def usual(found: re.Match[str]) -> str:
        nonlocal known
        forms = [found[0].lower(), found[0].capitalize(), found[0]]
        ids = dict(zip(forms, encode(forms), strict=True))
        word = min(forms, key=lambda form: (len(ids[form]), ids[form]))
        known |= len(ids[word]) == 1 < len(word) and word != found[0]
        is_first = start and found.start() == start.start()
        return word[0].upper() + word[1:] if is_first else word

    small = WORD.sub(usual, text)
    return small if known else None
