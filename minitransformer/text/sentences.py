"""Lines divided into their sentences, by rules, and text in capitals only.

A stop before white space ends a sentence, unless a word in lower case follows, or an
abbreviation, an initial or the number of a date or a list comes before it. The full
stops of Chinese and Japanese need no white space.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from minitransformer.text.masking import unbroken

# Stops with the quotes and brackets that close after them.
WIDE_CLOSERS = r"[」』）》〉】〕”’\"')]"
WIDE = rf"[。！？｡]+{WIDE_CLOSERS}*"
STOP = re.compile(
    r"(?P<stop>(?<![.!?‽…])[.!?‽…]+|[؟۔।॥։።။។]|(?<=[\u0370-\u03ff]);)"
    r"(?:[\"'’”“‘»«›‹)\]}\U000f0000-\U000ffffd]|\s»|\[\d+\])*(?=\s)"
    rf"|(?<![。！？｡]){WIDE}(?![。！？｡]|{WIDE_CLOSERS}|と|って)"
)
ENDS_WIDE = re.compile(rf"{WIDE}$")

# The text after a stop: white space, opening marks, and the first word or character.
NEXT = re.compile(
    r"(?P<space>\s*)[\"'“”„‚‘’«»‹›(\[{「『（《〈【¿¡–—•*#\s\U000f0000-\U000ffffd-]*"
    r"(?P<word>https?:|www\.|[^\W\d_]+(?:['’][^\W\d_]+)?\.?|(?s:.))"
)

ADDRESSES = "http:", "https:", "www."

# Money, names of people and things, variables and tags begin sentences, too.
SIGNS = "$€£@#{%`<"

# The end of the text before a full stop: a word with its dots, and initials before it.
LAST = re.compile(r"(?:\b[^\W\d_]\.[\s-]?)*[\w’'§.-]*$")

# Lists of words in several languages; the file explains them.
LISTS = Path(__file__).with_name("abbreviations.txt").read_text(encoding="utf-8")
NEVER, BEFORE_NUMBER, SELDOM, BEGINNINGS, BEFORE_ORDINAL = (
    frozenset(section.partition("]")[2].split()) for section in LISTS.split("[")[1:]
)

# Initials, Roman numbers and names of streets seldom end a sentence, as those words do.
INITIAL = re.compile(r"(?:\w\.)*[^\W\d_]|[IVXLC]+|\w+str")
DAY = re.compile(r"\d{1,3}")

# The number of an item, at the start or after a colon.
ITEM = re.compile(r"(?:^|:)\W*(?:\d{1,3}|[^\W\d_]|[ivxIVX]+)$")

# A word whose capitals are put aside.
WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)*")

LONGEST_ABBREVIATION = 3

# How many characters before a stop decide whether it ends a sentence.
CONTEXT = 40
# How far from the middle of a long sentence it is divided, in characters.
REACH = 1000

# Where a sentence is best divided: after punctuation, in ASCII only before white space.
# So many quotes and brackets may close after it; to look back further takes long.
CLOSING = r"[\"'\p{Pe}\p{Pf}]{0,9}"
PUNCTUATION = (
    rf"(?V1)(?<=[.!?,;:]{CLOSING})\s+|"
    rf"(?<=[\p{{Terminal_Punctuation}}--[!-~]]{CLOSING})\s*"
)


class Sentence(NamedTuple):
    """A sentence, or half of a long one, and the white space before it."""

    space: str
    text: str


def split_sentences(line: str) -> list[Sentence]:
    """Divide a line into its sentences; a blank line has an empty one.

    Together they are the line, up to the white space at its end.
    """
    # A sentence begins after the last one and the white space that follows it.
    space, text = as_one_sentence(line)
    start = len(space)
    end = start + len(text)
    is_lower = text.islower()
    whole = unbroken(line)  # a tag or code is not divided
    sentences = list[Sentence]()
    for stop in STOP.finditer(whole, start, end):
        following = NEXT.match(whole, stop.end(), end)
        before = whole[max(start, stop.start() - CONTEXT) : stop.start()]
        if not following:
            break
        sign = whole[following.end("space")]
        word = sign if sign in SIGNS else following["word"]
        if _ends(before, stop["stop"], word, is_lower):
            sentences.append(Sentence(space, line[start : stop.end()]))
            space = following["space"]
            start = following.end("space")
    return [*sentences, Sentence(space, line[start:end])]


def divide(line: str, most: float, fits: Callable[[str], bool]) -> list[Sentence]:
    """Divide a line into its sentences if there are more than `most`, else into cells.

    Sentences in capitals are read by themselves. If a line does not fit, a sentence is
    halved until its parts do. A tab divides cells.
    """
    line = line.rstrip()
    ends = [x.start() for x in re.finditer(r"(?<=\S)\s*\t", unbroken(line))]
    spans = zip([0, *ends], [*ends, len(line)], strict=True)
    cells = [line[start:end] for start, end in spans]
    sentences = [x for cell in cells for x in split_sentences(cell)]
    if not fits(line):
        return [part for x in sentences for part in halved(x, fits)]
    # Capitals are read as small letters: they are not mixed with other text.
    mixed = len({x.text.isupper() for x in sentences}) == 2
    if (math.inf if mixed else len(sentences)) <= most:
        return [as_one_sentence(cell) for cell in cells]
    return sentences


def as_one_sentence(line: str) -> Sentence:
    """Return a line as one sentence, without the white space at its end."""
    line = line.rstrip()
    text = line.lstrip()
    return Sentence(line.removesuffix(text), text)


def median_sentences(lines: Iterable[str]) -> int:
    """Return the median of the number of sentences in a line, the lower one of two."""
    counts = sorted(len(split_sentences(line)) for line in lines)
    return counts[(len(counts) - 1) // 2]


def halved(sentence: Sentence, fits: Callable[[str], bool]) -> list[Sentence]:
    """Divide a sentence into halves, and these again, until each text fits.

    A sentence is divided near its middle: after punctuation if there is any between the
    quarters, else between words, else between characters.
    """
    space, text = sentence
    if len(text) < 2 or fits(text):
        return [sentence]
    import regex  # here, since most commands are to start without delay

    # Of the best kind of place that there is, take the one nearest to the middle.
    left_end = right_start = middle = len(text) // 2
    kinds = (PUNCTUATION, middle // 2), (r"\s+", middle), (r"\X\K", middle)
    for pattern, reach in kinds:
        begin = middle - min(reach, REACH)
        stop = len(text) - begin
        matches = regex.finditer(pattern, unbroken(text), pos=begin, endpos=stop)
        inside = [x.span() for x in matches if begin < x.start() and x.end() < stop]
        if inside:
            left_end, right_start = min(inside, key=lambda span: abs(span[0] - middle))
            break
    left = Sentence(space, text[:left_end])
    right = Sentence(text[left_end:right_start], text[right_start:])
    return [*halved(left, fits), *halved(right, fits)]


def space_after(translation: str, space: str) -> str:
    """Return the white space between the translation of a sentence and the next one.

    It is that of the source, unless this is one space or none: then the script of the
    translation decides.
    """
    if space.strip(" ") or len(space) > 1:
        return space
    return "" if ENDS_WIDE.search(translation[-CONTEXT:]) else " "


def in_usual_case(text: str, encode: Callable[[list[str]], list[list[int]]]) -> str:
    """Return text with its words in capitals, or those of a title, as usually written.

    "IT IS VERY Old" becomes "It is very Old". The form of a word with the fewest word
    pieces is taken: in small letters, with a capital or as it is; of two, the one with
    the lower ids, which is more frequent. So names keep their capital. An abbreviation
    has no form of one piece, and stays; outside of titles, so do words of two letters.
    """
    words = WORD.findall(text)
    # A title has capitals where no sentence has any; a name, such as The Who, has not.
    is_title = not BEGINNINGS.isdisjoint(words[1:])
    whole = text.isupper() or (is_title and all(x[0].isupper() for x in words))
    usual = dict[str, str]()
    shouted = {x for x in words if x.isupper() and len(x) > 2}
    for word in {*words} if whole else shouted:
        forms = [word.lower(), word.capitalize(), word]
        costs = [(len(ids), ids) for ids in encode(forms)]
        (count, _), form = min(zip(costs, forms, strict=True))
        if count == 1 or (whole and len(word) > LONGEST_ABBREVIATION):
            usual[word] = form
    text = WORD.sub(lambda word: usual.get(word[0], word[0]), text)
    # It still begins with a capital.
    return re.sub(r"[^\W\d_]", lambda x: x[0].upper(), text, count=1) if usual else text


def _ends(before: str, stops: str | None, word: str, is_lower: bool) -> bool:
    """Whether `stops` between the characters `before` and a `word` end a sentence.

    `is_lower` says that the whole line is in lower case.
    """
    if stops is None:  # wide ones stand nowhere else
        return True
    # What follows must be able to begin a sentence.
    first = word[0]
    if first.islower() and not is_lower and word not in ADDRESSES:
        return False
    if not (first.isalnum() or first in SIGNS or first > "\u2fff"):  # CJK, emoji
        return False
    # An ellipsis after one word, or before "I", is a pause; other signs always end.
    if stops == "…" or stops.startswith(".."):
        return len(before.split()) > 1 and not re.fullmatch("I(['’].*)?", word)
    last = re.sub(r"[\s-]", "", LAST.findall(before)[0])
    if stops != ".":
        return f"{last}{stops}" not in NEVER  # Yahoo!
    # A full stop may belong to the number of an item or to an abbreviation.
    if ITEM.search(before):
        return False
    tail = last.rpartition(".")[2]
    names = {last, last.lower(), tail, tail.lower()}
    if names & NEVER or (names & BEFORE_NUMBER and first.isdigit()):
        return False
    # After an ordinal or an initial, only some words begin a sentence.
    previous = "".join(before.split()[-2:-1]).lower()
    around = previous in BEFORE_ORDINAL or re.fullmatch(r".*,|\d{1,2}\.", previous)
    if (around and DAY.fullmatch(last)) or names & SELDOM or INITIAL.fullmatch(last):
        return (word.capitalize() if len(word) > 1 else word) in BEGINNINGS
    return True
