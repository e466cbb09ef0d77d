"""Slots put into translations: where their names stand, or where the alignment says.

"Ich sehe ⟦1⟧." and the slot "a.txt" become "Ich sehe a.txt."
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from minitransformer.text.masking import CLOSERS, Slot, hide, read_parts
from minitransformer.translation.beam_search import Links

NAME = re.compile(r"⟦\d+⟧")
# A word up to its first letter.
BEGINNING = re.compile(r"(?<!\S)[^\w\s]*\S")
OPENERS = "([{«„“\"'"


class Place(NamedTuple):
    """The characters of a translation, perhaps none, in whose place a slot stands."""

    start: int
    end: int
    slot: Slot


def put_slots(
    line: str, slots: Sequence[Slot], translation: str, links: Links
) -> str | None:
    """Put slots into a translation; a term that has no place in it is left out.

    `links` are pairs of a word that the model read and a word of the translation. None
    if the names of slots do not stand in the translation once, in their order.
    """
    names = [x.name for x in slots if x.name]
    if NAME.findall(translation) != names:
        return None
    # Find the places: first of copies, in their order.
    aligned = Aligned(hide(line, slots), translation, links)
    spans = [x.span() for x in NAME.finditer(translation)] + [(len(translation), 0)]
    places = list[Place]()
    terms = list[Place]()
    last = place = 0
    for slot, (text, read) in zip(slots, read_parts(line, slots), strict=False):
        place += len(text)
        if slot.kind == "term":
            span = aligned.words(place, len(read.split()))
            terms.append(Place(*span, slot))
        elif slot.name:
            start, last = spans.pop(0)
            places.append(Place(start, last, slot))
        else:
            touches = line[max(slot.start - 1, 0) : slot.start].strip()
            opens = not touches and line[slot.end : slot.end + 1].isalnum()
            last = min(max(aligned.gap(place, opens), last), spans[0][0])
            places.append(Place(last, last, slot))
        place += len(read)
    # A term replaces words in which nothing else stands.
    for term in terms:
        if term.end and all(x.end <= term.start or term.end <= x.start for x in places):
            places.append(term)
    return _written(line, translation, sorted(places, key=lambda x: x[:2]))


class Aligned:
    """A text that a model read, and the links of its words to a translation's."""

    def __init__(self, read: str, translation: str, links: Links) -> None:
        beginnings = [x.span() for x in BEGINNING.finditer(read)]
        self._starts = [start for start, _ in beginnings]
        self._letters = [end - 1 for _, end in beginnings]
        self._read = read
        self._translation = translation
        self._words = [x.span() for x in re.finditer(r"\S+", translation)] or [(0, 0)]
        self._links = links

    def words(self, place: int, count: int) -> tuple[int, int]:
        """Return what was made from words, without marks; 0, 0 if it is not together.

        `count` words were read, the first of them at a place.
        """
        first = bisect_right(self._starts, place) - 1
        made = {j for i, j in self._links if first <= i < first + count}
        if not made or max(made) - min(made) >= len(made):
            return 0, 0
        start = self._words[min(made)][0]
        text = self._translation[start : self._words[max(made)][1]]
        inner = text.strip(OPENERS + CLOSERS)
        start += text.index(inner)
        return start, start + len(inner)

    def gap(self, place: int, opens: bool) -> int:
        """Return where a copy stands that was at a place of the text.

        It follows the word that was made from the word before it. If it opens the next
        word, it stands before the word that was made from that.
        """
        number = bisect_left(self._letters, place)  # of the next word
        if number == 0:
            return 0
        before = [x for x in self._links if x[0] < number + opens]
        i, word = max(before, default=(-1, 0))
        if opens and i == number:
            return self._words[min(j for k, j in before if k == i)][0]
        if number == len(self._letters):
            word = -1
        # A mark may follow both the word and the copy.
        start, end = self._words[word]
        marks = CLOSERS if self._read[place - 1].isalnum() else ""
        return start + len(self._translation[start:end].rstrip(marks))


def _written(line: str, translation: str, places: Sequence[Place]) -> str:
    """Return a translation with slots in their places."""
    text = ""
    end = 0
    for start, stop, slot in places:
        text += translation[end:start]
        end = stop
        # White space and letters touch a copy as they do in the line.
        before = line[max(slot.start - 1, 0) : slot.start]
        behind = line[slot.end : slot.end + 1]
        following = translation[end : end + 1]
        if slot.kind == "term":
            before = behind = ""
        elif before.strip():
            text = text.rstrip()
        elif text and not slot.name:
            text = text.rstrip() + " "
        text += slot.output
        if behind.isalnum():
            end += following == " "
        elif start == stop and following.strip():
            is_mark = start > 0 and following in CLOSERS
            text += " " * (following.isalnum() or (behind.isspace() and not is_mark))
    return text + translation[end:]
