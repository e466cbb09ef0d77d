"""Repairs of translations without the model, and what is missing after them.

A model changes a digit of a number at times: "It costs 1,350 euros." becomes "Es kostet
1.530 Euro." `with_numbers` puts the digits of the source into the number, which keeps
its marks.

A model also respells names of people and places that it has seldom seen: "Kathmandu"
becomes "Kathovannu". It is unsure of such a word, and sure of names that its languages
write in different ways. `near_misses` finds them, `copy_names` puts the names in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

from minitransformer.text.tokenizer import Tokenizer

NUMBER = re.compile(r"(?<![⟦\d])\d+(?:[.,:]\d+)*(?![⟧\d])")
# Numbers that may be spelled in a translation: up to twelve, without a sign.
SPELLED = re.compile(r"(?<![-+\u2212$€£/\d.,:])(?:\d|1[0-2])(?![.,:]?\d|[%°$€£/-])")
# The time after noon: 3 p.m. is 15:00.
AFTER_NOON = re.compile(r"(\d\d?)(?:[.:](\d\d))? ?p\.? ?m\b", re.I)

# A rare name is a word with a capital and small letters that the vocabulary cuts into
# at least so many pieces, with its capital and without.
LEAST_PIECES = 3

# A word is a name respelled if their `SequenceMatcher.ratio` is at least SIMILAR, and
# the mean log-probability of the word's pieces is below UNSURE_LOG_PROB.
SIMILAR = 0.6
UNSURE_LOG_PROB = -0.3
LETTERS = re.compile(r"[^\W\d_]{3,}")


def missing_numbers(source: str, translation: str) -> list[str]:
    """Return the numbers of the source that the translation has less often.

    8.760 may stand for 8,760, and 15 for 3 p.m. Numbers up to twelve may be spelled, if
    no other number stands in the translation.
    """
    missing, spelled, others = _compared(source, translation)
    return missing + spelled if others else missing


def with_numbers(source: str, translation: str) -> str:
    """Put digits of the source into numbers that the source lacks.

    Of "We need 947 chairs." and "Wir brauchen 974 Stühle." it makes "Wir brauchen 947
    Stühle."
    """
    missing, spelled, others = _compared(source, translation)
    missing = missing or spelled
    if len(missing) != len(others):
        return translation
    # A number that is one digit longer or shorter is written as in the source.
    right = dict[str, str]()
    for number, written in zip(missing, others, strict=True):
        more = len(_digits(written)) - len(_digits(number))
        if not more:
            right[written] = _with_digits(written, _digits(number))
        elif abs(more) == 1:
            right[written] = number
    return NUMBER.sub(lambda x: right.pop(x[0], x[0]), translation)


def _compared(source: str, translation: str) -> tuple[list[str], list[str], list[str]]:
    """Return the source's numbers that a translation lacks, and its other numbers.

    Of those that it lacks, the second list has those that may be spelled.
    """
    others = NUMBER.findall(translation)
    digits = [*map(_digits, others)]
    missing = list[str]()
    spelled = list[str]()
    for match in NUMBER.finditer(source):
        ways = [_digits(match[0])]
        if time := AFTER_NOON.match(source, match.start()):
            ways.append(f"{int(time[1]) + 12}{time[2] or ''}")
        if way := next((x for x in ways if x in digits), None):
            del others[digits.index(way)]
            digits.remove(way)
        else:
            may_be_spelled = SPELLED.match(source, match.start())
            (spelled if may_be_spelled else missing).append(match[0])
    return missing, spelled, others


def _with_digits(number: str, digits: str) -> str:
    """Return a number with other digits and its own marks."""
    rest = iter(digits)
    return "".join(next(rest) if x.isdigit() else x for x in number)


def _digits(number: str) -> str:
    return re.sub(r"\D", "", number)


def rare_names(tokenizer: Tokenizer, texts: Iterable[str]) -> set[str]:
    """Return words of texts that may be names: rare ones with a capital."""
    words = list({word for text in texts for word in _capitalised(text)})
    pieces, small = (
        map(len, tokenizer.encode(forms))
        for forms in (words, [word.lower() for word in words])
    )
    each = zip(words, map(min, pieces, small), strict=True)
    return {word for word, count in each if count >= LEAST_PIECES}


def near_misses(names: set[str], source: str, translation: str) -> dict[str, str]:
    """Return words of a translation and, for each, a name that it may stand for.

    The source has the name, and the translation lacks it. The word is the most similar
    one of the translation.
    """
    lacking = [x for x in _capitalised(source) if x in names and x not in translation]
    words = [word for word in _capitalised(translation) if word not in source]
    respelled = dict[str, str]()
    for name in lacking if words else ():
        similarity, word = max((_similarity(name, word), word) for word in words)
        if similarity >= SIMILAR:
            respelled.setdefault(word, name)
    return respelled


def copy_names(
    translation: str, names: dict[str, str], words: Iterable[tuple[str, float | None]]
) -> str:
    """Put names in place of words of which the model is unsure.

    `names` come from `near_misses`; `words` has the log-probability of each word.
    """
    unsure = {
        word: names[word]
        for text, log_prob in words
        if log_prob is not None and log_prob < UNSURE_LOG_PROB
        for word in names.keys() & LETTERS.findall(text)
    }
    return LETTERS.sub(lambda word: unsure.get(word[0], word[0]), translation)


def _capitalised(text: str) -> list[str]:
    return [x for x in LETTERS.findall(text) if x[0].isupper() and not x.isupper()]


def _similarity(a: str, b: str) -> float:
    return SequenceMatcher(None, a.lower(), b.lower()).ratio()
