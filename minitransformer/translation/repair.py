"""Repairs of translations without the model, and what is missing after them.

A model changes a digit of a number at times: "It costs 1,350 euros." becomes "Es kostet
1.530 Euro." `repair_numbers` puts the digits of the source into the number, which keeps
its marks.

A model also respells names of people and places that it has seldom seen: "Kathmandu"
becomes "Kathovannu". It is unsure of such a word, and sure of names that its languages
write in different ways. `respelled_names` finds them, `copy_names` puts the names in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

from minitransformer.text.tokenizer import Tokenizer

NUMBER = re.compile(r"(?<![⟦\d])\d+(?:[.,:]\d+)*(?![⟧\d])")
# Numbers that may be spelled in a translation: up to twelve, without a sign.
SPELLED = re.compile(r"(?<![-+\u2212$€£/\d.,:])(?:\d|1[0-2])(?![.,:]?\d|[%°$€£/-])")
# The time after noon: 3 p.m. is 15:00.
AFTER_NOON = re.compile(r"(\d\d?)(?:[.:](\d\d))? ?p\.? ?m\b", re.I)

# A rare name is a word with a capital and small letters that the vocabulary cuts into
# at least so many pieces, with its capital and without.
LEAST_PIECES = 3

# A word is a name respelled if their ratio (`difflib.SequenceMatcher`) is at least
# SIMILAR, and its log-probability in nats is below UNSURE_LOG_PROB.
SIMILAR = 0.6
UNSURE_LOG_PROB = -1.2
LETTERS = re.compile(r"[^\W\d_]{3,}")


def repair_numbers(source: str, translation: str) -> tuple[str, list[str], list[str]]:
    """Put digits of the source into numbers that it lacks.

    Return also which numbers are missing then, and which the model invented. Of "We
    need 947 chairs." and "Wir brauchen 974 Stühle." it makes "Wir brauchen 947 Stühle."
    8.760 may stand for 8,760, and 15 for 3 p.m. Numbers up to twelve may be spelled, if
    the model invented none.
    """
    # The numbers of each side that the other one lacks.
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
    # A number that is one digit longer or shorter is written as in the source.
    repaired = dict[str, str]()
    lacking = missing or spelled
    pairs = [*zip(lacking, others, strict=False)] if len(lacking) == len(others) else []
    for number, written in pairs:
        more = len(_digits(written)) - len(_digits(number))
        if abs(more) < 2 and written not in repaired:
            repaired[written] = number if more else _with_digits(written, number)
            lacking.remove(number)
            others.remove(written)
    text = NUMBER.sub(lambda x: repaired.pop(x[0], x[0]), translation)
    return text, missing + (spelled if others else []), others


def _with_digits(number: str, other: str) -> str:
    """Return a number with the digits of another one and its own marks."""
    digits = iter(_digits(other))
    return re.sub(r"\d", lambda _: next(digits), number)


def _digits(number: str) -> str:
    return re.sub(r"\D", "", number)


def respelled_names(
    tokenizer: Tokenizer, source: str, translation: str
) -> dict[str, str]:
    """Return words of a translation and, for each, a rare name that it may stand for.

    The source has the name, and the translation lacks it. The word is the most similar
    one of the translation.
    """
    # Names that a side alone has.
    words = [x for x in _capitalised(translation) if x not in source]
    names = [x for x in _capitalised(source) if x not in translation]
    if not words or not names:
        return {}
    # Rare ones, and the words that are like them.
    cuts = tokenizer.encode([*names, *map(str.lower, names)])
    pieces = [*map(len, cuts)]
    respelled = dict[str, str]()
    for name, *counts in zip(names, pieces, pieces[len(names) :], strict=False):
        if min(counts) >= LEAST_PIECES:
            for word in get_close_matches(name, words, n=1, cutoff=SIMILAR):
                respelled.setdefault(word, name)
    return respelled


def copy_names(
    translation: str, names: dict[str, str], words: Iterable[tuple[str, float | None]]
) -> str:
    """Put names in place of words of which the model is unsure.

    `names` come from `respelled_names`; `words` has the log-probability of each word.
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
