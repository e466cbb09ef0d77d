"""Text in capitals only, written as a vocabulary knows it (beyond the paper)."""

from __future__ import annotations

import re
from collections.abc import Callable

WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)*")


def without_capitals(
    text: str, encode: Callable[[list[str]], list[list[int]]]
) -> str | None:
    """Return text in capitals as it usually is, None if it is not in capitals.

    Of each word in small letters, with a capital and in capitals, that is taken which
    has fewest word pieces, or the more frequent ones, which have lower ids. So names
    keep a capital, and text stays that has no word of one piece, as abbreviations do.
    """
    if not all(letter.isupper() for letter in text if letter.isalpha()):
        return None
    usual = []
    for word in WORD.findall(text):
        forms = [word.lower(), word.capitalize(), word]
        sizes = [(len(ids), ids) for ids in encode(forms)]
        usual.append(min(zip(sizes, forms, strict=True)))
    if not any(n == 1 < len(word) and not word.isupper() for (n, _), word in usual):
        return None
    words = (word for _, word in usual)
    small = WORD.sub(lambda found: next(words), text)
    return re.sub(r"[^\W\d_]", lambda first: first[0].upper(), small, count=1)
