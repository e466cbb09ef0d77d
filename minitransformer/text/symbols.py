"""Symbols that stand for what is copied, learned from pairs (beyond the paper).

Text that both sides of a training pair hold, such as an address, becomes a symbol on
both. So a model learns to copy symbols.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from zlib import crc32

from minitransformer.text.bilingual import Pair
from minitransformer.text.masking import SYMBOLS, Mask, hide, named

# A vocabulary gets symbols if so many training pairs have something to copy.
LEAST_PAIRS = 1000


def hide_pair(mask: Mask, source: str, target: str) -> Pair:
    """Put symbols in place of slots that both sides of a pair have in order."""
    # Begin with any symbol, so that all are learned alike.
    first = crc32(source.encode()) % len(SYMBOLS)
    symbols = SYMBOLS[first:] + SYMBOLS[:first]
    slots = [named(side, mask.slots(side), symbols) for side in (source, target)]
    same = [x.output for x in slots[0]] == [x.output for x in slots[1]]
    if same and all(x.name for x in slots[0] if x.kind == "word"):
        hidden = hide(source, slots[0])
        if hidden.strip():
            return hidden, hide(target, slots[1])
    return source, target


def symbols_for(pairs: Iterable[Pair]) -> tuple[str, ...]:
    """Return the symbols, or none if too few of the first million pairs need them."""
    mask = Mask()
    first = itertools.islice(pairs, 10**6)
    need_them = (x for x in first if hide_pair(mask, *x) != x)
    count = sum(1 for _ in itertools.islice(need_them, LEAST_PAIRS))
    return SYMBOLS if count == LEAST_PAIRS else ()
