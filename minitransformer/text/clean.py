"""One form of text, for all that follows (beyond the paper).

Text that looks the same can be written in many ways. `clean` returns one of them: in
Unicode's composed form (NFC), with a space for each white space of any kind, without
controls and characters that only help to format it. Nothing is lost that a reader
would miss: joiners (Persian, Indic scripts, emoji), direction marks (Hebrew, Arabic),
variation selectors and the space without width of Khmer and Thai stay, as do ligatures,
superscripts, fractions and full-width letters.
"""

from __future__ import annotations

import re
import unicodedata

_SPACES = "\t-\r\x1c-\x1f\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_DROPPED = (
    "\0-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad"  # controls, the soft hyphen
    "\u2060-\u2064\u206a-\u206f\ufeff"  # the word joiner, invisible operators, BOM
    "\ufff9-\ufffb\U000e0001"  # the frames of annotations, a language tag
)
# Kept characters that show nothing by themselves: fillers, marks, joiners, selectors.
_SILENT = (
    " \u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2065-\u2069\u2800\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
# SentencePiece reads this block as its mark for a space; a low line looks like it.
_MARK = "\u2581"
_LOW_LINE = "_"

_SPACE = re.compile(f"[{_SPACES}]")
_DROP = re.compile(f"[{_DROPPED}]")
_SHOWN = re.compile(f"[^{_SPACES}{_DROPPED}{_SILENT}]")

# Composition takes time that is quadratic in a run of accents. In lines longer than
# this, a mark of no effect cuts such runs, as in Unicode's stream-safe format (UAX 15).
_LONG = 4096
_MOST_MARKS = 30
_CUT = "\u034f"


def clean(text: str) -> str:
    """Return this form of a line of text. It is empty if the line shows nothing."""
    # Most lines are plain ASCII, and stay as they are.
    if text.isascii() and text.isprintable():
        return "" if text.isspace() else text
    if not _SHOWN.search(text):
        return ""
    text = _DROP.sub("", _SPACE.sub(" ", text)).replace(_MARK, _LOW_LINE)
    if len(text) > _LONG:
        import regex  # here, since most commands are to start without delay

        mark = rf"[^\P{{M}}{_CUT}]"
        run = rf"({mark}{{{_MOST_MARKS}}})(?={mark})"
        text = regex.sub(run, rf"\1{_CUT}", text)
    return unicodedata.normalize("NFC", text)
