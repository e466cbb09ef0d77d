"""Names that a model respelled, copied from the source (beyond the paper).

A model respells names that it has seldom seen: "Kathmandu" becomes "Kathovannu". It is
unsure of such a word, and sure of names that its languages write in different ways.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

from minitransformer.text.tokenizer import Tokenizer
from minitransformer.translation.beam_search import Words

_WORD = re.compile(r"[^\W\d_]{3,}")

# A rare name is a word with a capital and small letters that the vocabulary cuts into
# at least so many pieces, also without the capital.
LEAST_PIECES = 3

# A word is a name respelled if their `SequenceMatcher.ratio` is at least SIMILAR, and
# the mean log-probability of the word's pieces is below UNSURE.
SIMILAR, UNSURE = 0.6, -0.3


def rare_names(tokenizer: Tokenizer, texts: Iterable[str]) -> set[str]:
    """Return what may be names in texts: their rare words with a capital."""
    words = list({word for text in texts for word in _capitalised(text)})
    pieces, small = (
        map(len, tokenizer.encode(forms))
        for forms in (words, [word.lower() for word in words])
    )
    each = zip(words, map(min, pieces, small), strict=True)
    return {word for word, count in each if count >= LEAST_PIECES}


def near_misses(names: set[str], source: str, translation: str) -> dict[str, str]:
    """Return words of a translation and, for each, a name that it may stand for.

    The source has the name and the translation has not. The word is the one of the
    translation that is most similar to it.
    """
    lacking = [x for x in _capitalised(source) if x in names and x not in translation]
    words = [word for word in _capitalised(translation) if word not in source]
    found = dict[str, str]()
    for name in lacking if words else ():
        similarity, word = max((_similarity(name, word), word) for word in words)
        if similarity >= SIMILAR:
            found.setdefault(word, name)
    return found


def copy_names(translation: str, names: dict[str, str], words: Words) -> str:
    """Return a translation with names in place of words of which the model is unsure.

    `names` are those of `near_misses`, `words` are those of the hypothesis.
    """
    for text, log_prob in words:
        for word in _WORD.findall(text):
            if word in names and log_prob is not None and log_prob < UNSURE:
                whole = rf"(?<![^\W\d_]){word}(?![^\W\d_])"
                translation = re.sub(whole, names[word], translation)
    return translation


def _capitalised(text: str) -> list[str]:
    return [x for x in _WORD.findall(text) if x[0].isupper() and not x.isupper()]


def _similarity(a: str, b: str) -> float:
    return SequenceMatcher(None, a.lower(), b.lower()).ratio()
