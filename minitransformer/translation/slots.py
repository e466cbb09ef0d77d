"""Slots put into translations: where their names stand, or where the alignment says.

"Ich sehe ⟦1⟧." and the slot "a.txt" become "Ich sehe a.txt."
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from minitransformer.text.masking import CLOSERS, Slot, hide

NAME = re.compile(r"⟦\d+⟧")
MARKS = CLOSERS + "([{«„“"


def place(
    line: str,
    slots: Sequence[Slot],
    translation: str,
    links: Sequence[tuple[int, int]],
    *,
    heeds_names: bool,
) -> str:
    """Put the names of slots into a translation that lacks them.

    A copy follows the word that was made from the word before it. If it touches only
    the next word, it stands before the word that was made from that one. A term
    replaces the words that were made from it. `links` are pairs of a word that the
    model read and a word of the translation. Names that the model did not read are no
    slots, nor are any unless `heeds_names`.
    """
    read = {slot.name for slot in slots if slot.is_named and heeds_names}
    if len(read) == len(slots) and heeds_names:
        return translation
    words = [
        NAME.sub(lambda name: name[0] if name[0] in read else "", word)
        for word in translation.split() or [""]
    ]
    source = hide(line, slots)
    last = -1  # the word of the translation that has the slot before
    shift = 0  # from a place in the line to that in the source that the model read
    for slot in slots:
        before = source[: slot.start + shift]
        after = source[slot.start + shift :]
        shift += len(slot.read) - (slot.end - slot.start)
        if slot.name in read:
            last = next((n for n, x in enumerate(words) if slot.name in x), last)
        elif slot.kind == "term":
            _place_term(slot, before, words, links)
        else:
            last = _place_copy(
                slot, words, links, before=before, after=after, last=last
            )
    return " ".join(filter(None, words))


def _place_term(
    slot: Slot, before: str, words: list[str], links: Sequence[tuple[int, int]]
) -> None:
    """Put the name of a term in place of the words that were made from it."""
    first = len(before.split()) - bool(before[-1:].strip())
    made = {j for i, j in links if first <= i < first + len(slot.read.split())}
    own = _words_of_term(slot.output, words, made)
    if replaced := words[own]:
        text = " ".join(replaced)
        # Names of copies that stand there stay.
        others = NAME.findall(text)
        made_text = NAME.sub("", text).strip(MARKS + " ")
        whole = "".join(others) + slot.name
        if made_text and made_text in text:
            whole = text.replace(made_text, slot.name, 1)
        words[own] = [whole, *[""] * (len(replaced) - 1)]


def _words_of_term(output: str, words: list[str], made: set[int]) -> slice:
    """Return the places of a term's words: its own if they occur, else `made`."""
    size = len(output.split())
    for n in range(len(words)):
        if " ".join(words[n : n + size]).strip(MARKS) == output:
            return slice(n, n + size)
    first = min(made, default=0)
    return slice(first, next(n for n in itertools.count(first) if n not in made))


def _place_copy(
    slot: Slot,
    words: list[str],
    links: Sequence[tuple[int, int]],
    *,
    before: str,
    after: str,
    last: int,
) -> int:
    """Put the name of a copy into the words, not before the word `last`.

    Return the number of the word that has it.
    """
    number = len(before.split())  # of the next word that was read
    opens = slot.touches[1] and not slot.touches[0]
    inside = before[-1:].isalnum()  # a mark that follows the word follows the slot
    if not re.search(r"\w", before):
        n = 0
        opens = True
    elif not re.search(r"\w", after):
        n = max((i for i, word in enumerate(words) if word), default=0)
        opens = False
        inside = bool(after.strip())
    else:
        i = max((i for i, _ in links if i < number + opens), default=-1)
        opens = opens and i == number
        n = (min if opens else max)((j for k, j in links if k == i), default=0)
    # Slots keep their order.
    opens = opens and n > last
    n = max(n, last)
    # The name stands before the word, or behind it: there, perhaps before its marks.
    text = "" if opens else words[n].rstrip(CLOSERS if inside else "")
    rest = words[n][len(text) :]
    name = slot.name
    if text and not slot.touches[0]:
        name = " " + name
    if opens and rest and not slot.touches[1]:
        name += " "
    words[n] = text + name + rest
    return n


def are_in_order(slots: Sequence[Slot], translation: str) -> bool:
    """Whether each name stands in a translation once, those of copies in order."""
    copies = [x.name for x in slots if x.kind != "term"]
    written = NAME.findall(translation)
    return len(written) == len(slots) and copies == [x for x in written if x in copies]


def restore(slots: Sequence[Slot], translation: str) -> str:
    """Put the slots in place of their names."""
    # Letters that touch a slot in the line touch it in the translation.
    of_name = {x.name: x for x in slots}
    parts = re.split(rf"({NAME.pattern})", translation)
    for i in range(1, len(parts), 2):
        slot = of_name[parts[i]]
        parts[i] = slot.output
        if slot.is_named and slot.read[0] == " ":
            parts[i - 1] = parts[i - 1].removesuffix(" ")
        if slot.kind != "term" and slot.touches[1]:
            parts[i + 1] = parts[i + 1].removeprefix(" ")
    return "".join(parts)
