"""HTML as lines of text, whose tags come back byte for byte (beyond the paper).

A page is read by Python's parser. Its text becomes lines, with a character for private
use in place of each tag within a line: "I am <b>very</b> hungry" has two. `Mask` never
shows them to a model. Elements that nobody translates are one such character. What
stands between lines, such as a paragraph's tags, is kept beside them.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any, NamedTuple

from minitransformer.text.masking import ELEMENTS, TAGS

# Elements within a sentence: phrasing content of the standard and what it had before,
# those of translation memories, and those of OpenDocument.
INLINE = frozenset(
    "a abbr acronym b bdi bdo big br cite code data del dfn em font i img input ins "
    "kbd label map mark meter nobr output q rp rt ruby s samp slot small span strike "
    "strong sub sup time tt u var wbr "
    "bpt bx ept ex g hi it mrk ph x text:a text:bookmark text:bookmark-end "
    "text:bookmark-ref text:bookmark-start text:date text:page-count text:page-number "
    "text:s text:soft-page-break text:span text:time".split()
)
KEPT = frozenset(
    "code kbd math pre samp script style svg textarea var bpt ept it ph "
    "text:bookmark-ref text:date text:page-count text:page-number text:time".split()
)
VOID = frozenset(
    "area base br col embed hr img input link meta param source track wbr".split()
)
# These belong to the word before them, and are kept with what they hold.
RAISED = frozenset(["sub", "sup"])
# More would take longer than they are worth; further ones divide lines.
MOST_TAGS = 4096
SPACES = " \t\r\n\f"
WHITE = re.compile(f"[{SPACES}]+")
COMMENT = re.compile("<!--")
UNCLOSED = re.compile("<[A-Za-z/!?]")
PRIVATE = re.compile("[\U000f0000-\U0010ffff]")


class PlainLine(NamedTuple):
    """A line of text, and the end of line behind it."""

    text: str
    behind: str

    def with_text(self, translation: str) -> str:
        """Return a translation with the end of this line."""
        return translation + self.behind


class HtmlLine(NamedTuple):
    """A line of a page, as `text` with characters for its tags, and as it stands there.

    `tags` has the source of each such character, and `behind` what follows the line.
    """

    text: str
    source: str
    tags: dict[str, str]
    behind: str

    def with_text(self, translation: str) -> str:
        """Return the source of a translation, or the line's own if a tag is lost."""
        if translation == self.text or PRIVATE.findall(translation) != [*self.tags]:
            return self.source + self.behind
        escaped = html.escape(translation, quote=False)
        return PRIVATE.sub(lambda x: self.tags[x[0]], escaped) + self.behind


def html_lines(page: str) -> list[HtmlLine]:
    """Divide a page into lines. A line may be empty; together they are the page."""
    lines = list[HtmlLine]()
    text = source = behind = ""
    tags = dict[str, str]()
    for kind, raw, data in _Reader(page).parts:
        # White space at the beginning of a line stands before it.
        if kind == "text" and (behind or not source):
            words = raw.lstrip(SPACES)
            behind += raw[: len(raw) - len(words)]
            raw, data = words, data.lstrip(SPACES)
        is_full = kind != "text" and len(tags) == MOST_TAGS
        if kind == "between" or is_full or not raw:
            behind += raw
            continue
        if behind:
            lines.append(_line(text, source, tags, behind))
            text = source = behind = ""
            tags = {}
        if kind != "text":
            codes = ELEMENTS if kind == "element" else TAGS
            character = chr(codes[len(tags)])
            tags[character] = raw
            data = character + " " * (kind == "break")
        text += WHITE.sub(" ", data)
        source += raw
    return [*lines, _line(text, source, tags, behind)]


def _line(text: str, source: str, tags: dict[str, str], behind: str) -> HtmlLine:
    """Return a line without white space at its end, which stands behind it."""
    words = source.rstrip(SPACES)
    behind = source[len(words) :] + behind
    return HtmlLine(text.rstrip(SPACES), words, tags, behind)


class _Reader(HTMLParser):
    """Reads the `parts` of a page: their kind, source, and text without entities."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self._starts = [0, *(x.end() for x in re.finditer("\n", page))]
        self._events = [(0, "between", "")]  # the place, kind and text of each
        self._kept: list[str] = []  # the element that is kept, and those of its name
        # A comment or a tag without an end goes on to the end of the page. To look for
        # the end of each one again would take a time that is quadratic.
        comment = COMMENT.search(page, page.rfind("-->") + 1)
        tag = UNCLOSED.search(page, page.rfind(">") + 1)
        end = min([x.start() for x in (comment, tag) if x] + [len(page)])
        self.feed(page[:end])
        self.close()
        self.parts = [*self._joined(page[:end]), ("between", page[end:], "")]

    def _add(self, kind: str, data: str = "") -> None:
        if not self._kept:
            line, column = self.getpos()
            self._events.append((self._starts[line - 1] + column, kind, data))

    def _add_tag(self, tag: str) -> None:
        self._add("break" if tag == "br" else "tag" if tag in INLINE else "between")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        classes = (given.get("class") or "").split()
        is_kept = tag in KEPT | RAISED or given.get("translate") == "no"
        if self._kept:
            if tag == self._kept[0]:
                self._kept.append(tag)
        elif (is_kept or "notranslate" in classes) and tag not in VOID:
            kind = "tag" if tag in RAISED else "element"
            self._add(kind if tag in INLINE else "between")
            self._kept.append(tag)
        else:
            self._add_tag(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self._add_tag(tag)

    def handle_endtag(self, tag: str) -> None:
        self._add_tag(tag)
        if self._kept and tag == self._kept[0]:
            self._kept.pop()

    def handle_data(self, data: str) -> None:
        self._add("text", data)

    def handle_comment(self, data: str) -> None:
        self._add("tag")

    def handle_decl(self, decl: str) -> None:
        self._add("between")

    def unknown_decl(self, data: str) -> None:
        self._add("between")

    handle_pi = handle_comment

    def _joined(self, page: str) -> Iterator[tuple[str, str, str]]:
        """Yield the parts: each goes on to the next event."""
        events = self._events
        ends = [*(place for place, *_ in events[1:]), len(page)]
        for (place, kind, data), end in zip(events, ends, strict=True):
            raw = page[place:end]
            # What the parser did not read to its end, and characters of ours, are kept.
            is_whole = raw.endswith(">")
            if kind == "text":
                is_whole = html.unescape(raw) == data and not PRIVATE.search(raw)
            yield kind if is_whole else "between", raw, data
