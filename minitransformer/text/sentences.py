"""Lines divided into their sentences, by rules, and text in capitals only.

A stop before white space ends a sentence, unless a word in lower case follows, or what
comes before it is an abbreviation, an initial, or the number of a date or a list. The
full stops of Chinese and Japanese need no white space.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

# Stops with the quotes and brackets that close after them.
WIDE_CLOSERS = r"[」』）》〉】〕”’\"')]"
WIDE = rf"[。！？｡]+{WIDE_CLOSERS}*"
STOP = re.compile(
    r"(?P<stop>(?<![.!?‽…])[.!?‽…]+|[؟۔।॥։።။។]|(?<=[\u0370-\u03ff]);)"
    r"(?:[\"'’”“‘»«›‹)\]}]|\s»|\[\d+\])*(?=\s)"
    rf"|(?<![。！？｡]){WIDE}(?![。！？｡]|{WIDE_CLOSERS}|と|って)"
)
ENDS_WIDE = re.compile(rf"{WIDE}$")

# What follows: white space, what opens a sentence, and its first word or character.
NEXT = re.compile(
    r"(?P<space>\s*)[\"'“”„‚‘’«»‹›(\[{「『（《〈【¿¡–—•*#\s-]*"
    r"(?P<word>https?:|www\.|[^\W\d_]+(?:['’][^\W\d_]+)?\.?|.)"
)

ADDRESSES = "http:", "https:", "www."

# What comes before a full stop: a word with its dots, and initials before it.
LAST = re.compile(r"(?:\b[^\W\d_]\.[\s-]?)*[\w’'§.-]*$")

# Words of languages, which the file explains.
LISTS = Path(__file__).with_name("abbreviations.txt").read_text(encoding="utf-8")
NEVER, BEFORE_NUMBER, SELDOM, BEGINNINGS, BEFORE_ORDINAL = (
    frozenset(found.partition("]")[2].split()) for found in LISTS.split("[")[1:]
)

# Initials and some numbers are as the words that seldom end a sentence.
INITIAL = re.compile(r"(?:\w\.)*[^\W\d_]|[IVXLC]+|\w+str")
DAY = re.compile(r"\d{1,3}")

# The number of an item, at the start or after a colon.
ITEM = re.compile(r"(?:^|:)\W*(?:\d{1,3}|[^\W\d_]|[ivxIVX]+)$")

# A word whose capitals are put aside.
WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)*")

# How many characters before a stop are looked at, and around the middle of a long text.
CONTEXT, REACH = 40, 1000

# Where a sentence is best divided: after punctuation, which in ASCII ends a word.
CLOSING = r"[\"'\p{Pe}\p{Pf}]*"
PUNCTUATION = (
    rf"(?V1)(?<=[.!?,;:]{CLOSING})\s+|"
    rf"(?<=[\p{{Terminal_Punctuation}}--[!-~]]{CLOSING})\s*"
)


def split_sentences(text: str) -> list[str]:
    """Return white space and sentences by turns, which together are the text.

    The first and the last are white space, if only the empty string.
    """
    lead, core, tail = as_one_sentence(text)
    split, start, end = [lead], len(lead), len(lead) + len(core)
    is_lower = core.islower()
    for stop in STOP.finditer(text, start, end):
        following = NEXT.match(text, stop.end(), end)
        before = text[max(start, stop.start() - CONTEXT) : stop.start()]
        if following and _ends(before, stop["stop"], following["word"], is_lower):
            split += [text[start : stop.end()], following["space"]]
            start = following.end("space")
    return [*split, text[start:end], tail]


def as_one_sentence(text: str) -> list[str]:
    """Return the white space before a text, the text, and the white space after it."""
    core = text.strip()
    lead, _, tail = text.partition(core) if core else (text, "", "")
    return [lead, core, tail]


def usual_sentences(lines: Iterable[str]) -> int:
    """Return how many sentences half of the lines have at most."""
    counts = sorted(len(split_sentences(line)) // 2 for line in lines)
    return counts[(len(counts) - 1) // 2]


def halved(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Return white space between parts that fit: halves of the text, or these halved.

    A text is divided near its middle: after punctuation if there is any between the
    quarters, else between words, else between characters. The parts come first, third,
    and so on.
    """
    if len(text) < 2 or fits(text):
        return [text]
    import regex  # here, since most commands are to start without delay

    first = end = middle = len(text) // 2
    kinds = (PUNCTUATION, middle // 2), (r"\s+", middle), (r"\X\K", middle)
    for pattern, reach in kinds:
        begin = middle - min(reach, REACH)
        stop = len(text) - begin
        found = regex.finditer(pattern, text, pos=begin, endpos=stop)
        inside = [x.span() for x in found if begin < x.start() and x.end() < stop]
        if inside:
            first, end = min(inside, key=lambda span: abs(span[0] - middle))
            break
    return [*halved(text[:first], fits), text[first:end], *halved(text[end:], fits)]


def space_after(translation: str, space: str) -> str:
    """Return what stands between the translation of a sentence and the next one.

    That is the white space of the source; but between one space and none, the script of
    the translation decides.
    """
    if space.strip(" ") or len(space) > 1:
        return space
    return "" if ENDS_WIDE.search(translation[-CONTEXT:]) else " "


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


def _ends(before: str, stops: str | None, word: str, is_lower: bool) -> bool:
    """Whether stops end the sentence whose last characters are given.

    `word` follows. The text may be in lower case.
    """
    if stops is None:  # wide ones, which stand nowhere else
        return True
    first = word[0]
    if first.islower() and not is_lower and word not in ADDRESSES:
        return False
    if not (first.isalnum() or first > "\u2fff"):  # letters, digits, CJK, emoji
        return False
    if stops == "…" or stops.startswith(".."):
        return len(before.split()) > 1 and not re.fullmatch("I(['’].*)?", word)
    if stops != ".":
        return True
    if ITEM.search(before):
        return False
    last = re.sub(r"[\s-]", "", LAST.findall(before)[0])
    tail = last.rpartition(".")[2]
    names = {last, last.lower(), tail, tail.lower()}
    if names & NEVER or (names & BEFORE_NUMBER and first.isdigit()):
        return False
    previous = "".join(before.split()[-2:-1]).lower()
    around = previous in BEFORE_ORDINAL or previous[-1:] == ","
    if (around and DAY.fullmatch(last)) or names & SELDOM or INITIAL.fullmatch(last):
        return (word.capitalize() if len(word) > 1 else word) in BEGINNINGS
    return True
