"""What a model reads of a line: its prose (beyond the paper).

Prose is words, plain numbers, spaces and the ordinary marks of a language, in letters
that the vocabulary has. Whatever else stands in a line is a slot: an address, a path, a
variable of any notation, a mixture of letters and digits, a sign, a tag, an emoji. The
model reads a symbol in its place, or nothing, and the translation has it unchanged.
Nothing has to be listed to be safe.

`Mask.slots` finds the slots by the shape of a line, in which `a` stands for each letter
and `9` for each digit: the shape of "Is $x 5.2 m?" is "Aa $a 9.9 a?". Patterns say
which chunks between spaces are prose.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from minitransformer.text.tokenizer import Tokenizer

# Symbols that stand for slots.
SYMBOLS = tuple(f"⟦{n}⟧" for n in range(1, 10))

# Letters of scripts that write no spaces: Thai, Lao, Burmese, Khmer, Chinese, Japanese.
NO_SPACES = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3001-\u303f\u3041-\u30ff\u3400-\u4dbf"
    "\u4e00-\u9fff\uf900-\ufaff\uff01-\uff65\U00020000-\U0003ffff]"
)
# HTML's elements come as characters for private use: tags, and what has a place in a
# sentence.
TAGS = range(0xF0000, 0xFFFFE)
ELEMENTS = range(0x100000, 0x10FFFE)

# The shapes of other characters than ASCII's.
OF_CATEGORY = {"Nd": "9", "Sc": "$", "Pi": '"', "Pf": '"', "Pd": "-", "Po": ","}
OF_CHARACTER = dict(zip("\u2018\u2019„…\u2212\u200c\u200d•", "''\".-mms", strict=True))

# Other unknown characters that have a place in a sentence: numbers, mathematics, money.
PLACED = "Nl", "No", "Sm", "Sc"

# Marks behind a word.
CLOSERS = ".,:;!?…)]}\"'»”"
# Quotes and apostrophes, and ASCII's.
USUAL = dict(zip("\u2018\u2019“”«»", "''" + '"' * 4, strict=True))

# What stands before a word only with a space between.
BEFORE_WORD = re.compile(rf"[^\W_]|[{re.escape(CLOSERS)}]")

# Tags, code between backticks, and braces within braces may have white space inside.
BRACED = r"\{[^{}]*\}"
for _ in range(3):
    BRACED = rf"\{{(?:[^{{}}]|{BRACED})*\}}"
SPACED = re.compile(
    rf"<[a-zA-Z/!?%][^<>]*>|(?<!`)(`+)[^`]+\1(?!`)|\$\([^()]*\)|{BRACED}"
)
# 3rd, the 1990s: digits that are read as a word is.
ORDINAL = re.compile(r"(?<![\w.,])\d{1,4}(?:st|nd|rd|th|s|er)(?!\w)")
# What makes a word of a number beside it: digits, one sign.
BESIDE_NUMBER = re.compile(r"\d|^(?:#|[^\w\s*#|>-]{1,3}|&\w+;)$", re.A)
# Decimals behind these are versions or sections: they have a point in any language.
PARTS = re.compile(r"(?:^|version|section|chapter|abschnitt|kapitel)\W*$", re.I)

# Prose: words, numbers, and both joined by hyphens, slashes or marks.
NUMBER = (
    r"(?:9{1,3}(?:,999)+(?:\.9+)?|9{1,3}(?:\.999){1,2}(?:,9+)?|9{1,3}[.,]99?|99?:99?|"
    r"99?[/-]99?|999-999|9999-9999|9{1,4})(?![.,:]?9)"
)
WORD = r"(?:[aA]{1,2}(?:\.[aA])+(?![aA])|[aA]{1,60}(?:'[aA]{1,60})*)"
# What joins two words. The letters of the path a/b/c.d are none.
JOINT = r"(?:-{1,3}|[,;!?/]|\.(?=A[aA])|\.\.+)[\"']*(?![aA]\.[aA])"
WORDS = rf"(?:{NUMBER}{JOINT})?{WORD}(?:{JOINT}{WORD})*(?:{JOINT}{NUMBER}%?)?"
# The member of a class, such as Console.WriteLine, is no prose; "end.The" is.
MEMBER = r"(?=[aA]+\.A)[aA.]*(?:aA|AAa)"
PROSE = rf"(?!{MEMBER})(?:-(?=[aA]{{2}}))?{WORDS}(?:(?<=[aA]{{2}})-)?"
# Most lines are words and marks between spaces.
PLAIN = re.compile(
    r"(?:[\"'(]*[aA]{2,60}(?:['-][aA]{1,60})*[.,!?;:\"')]{0,3}(?: |$)|[aA] )*"
)

LETTER = re.compile("[aAw]")
TWO_LETTERS = re.compile("[aA]{2}|w")

# What stands for itself also beside letters, and what may stand around a word.
TAG = r"<[aA/!?%][^<>]*>"
MARKUP = (
    rf"(?:{TAG}|<[^<>\s]+>|&\#?[aA9]{{1,30}};|\\[aA](?!a|AA|\\)|"
    r"[$\#%@]?\{[^{}]*\}|\[[^\[\]aAx\s]*\])"
)
CLOSING = r"[.,!?;:\"')]{0,9}"
END = rf"(?={CLOSING}(?:[*~\]|&st]{{1,9}}{CLOSING})?(?=\s|$|w|{MARKUP}))"
PARTS_OF_LINE = re.compile(
    rf"""
    # Markup, and scripts without spaces, stand for themselves also beside letters.
      (?P<word1><[?%][^<>]*>|<<[^<>\s]+>>|<[^\s=<>]*(?:@|://)[^\s<>]*>|[$\#%@]?\{{[^{{}}]*\}})
    | (?P<loose1>{MARKUP})
    | w+
    # Marks that stand alone; a dash, but not the item of a list; a face such as :-)
    | (?<!\S)(?:[,;:!?.]?["']*|["'()]+[,;:!?.]*|[/%$]|-{{2,3}}|\.{{2,3}})(?=\s|$)
    | (?<!\S)-(?=\s)(?<=\S\s-)
    | (?<!\S)(?P<loose2>[:;=][^aA9x\s]+)(?=\s|$)
    # Prose, with marks before and behind it.
    | ["'(]+(?=\S)
    | [,;!?]+(?=(?:["'(]*(?:{PROSE}|[-+$]*{NUMBER}[%$]?))?{END})
    | (?:[-+]?\$)?(?P<number>[-+]?{NUMBER})[%$]?(?![aA9]){END}
    | {PROSE}{END}
    | (?<=\S)[.,!?;:"')]+
    # Signs alone: some have a place in the sentence. Signs around words: **very**
    | (?<!\S)(?P<word2>(?=[^aA9xw\s&+<=^%@/\\]*[&+<=^%@/\\])[^aA9xw\s]+?){END}
    | (?P<loose3>[^aA9xw\s]+?){END}
    | (?P<word3>\[+[^\[\]\s]+\]+){END}
    | (?P<loose4>[*~\[|&s]{{1,9}})(?=["'(]*(?=[aA9'-]{{2}}){PROSE}{END})
    | (?P<loose5>t+)(?=["'(]*{PROSE}{END})
    # All else: members, and names with unknown letters, up to their endings; then any
    # characters.
    | (?P<word5>(?=[aA]*x)[aAx]+|(?={MEMBER})[aA.]+)(?=['-][aA])
    | (?P<word4>(?::[^\s:]+:|\([^()\s]*\)|(?!{MARKUP})[^\sw])+?){END}
    """,
    re.X,
)


class Slot(NamedTuple):
    """A part of a line that the model does not read, and its `output`.

    A "word" has a place in the sentence; the sentence is whole without a "loose" slot.
    A "number" is read, and becomes a word if the model changes it. A "term" of a
    glossary is read, and replaced by its translation. The model reads the `name` of a
    word, if it has one.
    """

    start: int
    end: int
    output: str
    kind: str
    name: str = ""


class Shapes(dict[int, str]):
    """The shape of each character, for `str.translate`.

    Of a letter it is "a" or "A", "w" in a script without spaces, or "x" if none of the
    vocabulary's `pieces` has it; of a digit "9", of a mark that of ASCII, of another
    sign "s".
    """

    def __init__(self, tokenizer: Tokenizer | None, pieces: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self.known = {*"".join(pieces)}
        # Symbols of the user, such as <2de>, are read as words are.
        self._symbols = {
            x
            for x in pieces
            if len(x) > 2 and not re.match(r"\w|▁", x) and x not in SYMBOLS
        }

    def __missing__(self, code: int) -> str:
        character = chr(code)
        category = unicodedata.category(character)
        is_letter = category[0] == "L" or category in ("Mn", "Mc")
        is_known = not self._tokenizer or (
            {*self._tokenizer.normalise(character)} <= self.known
        )
        if character.isascii() and not character.isalnum():
            shape = character
        elif code in TAGS:
            shape = "t"
        elif code in ELEMENTS or (not is_known and (is_letter or category in PLACED)):
            shape = "x"
        elif not is_known or 0xFE00 <= code < 0xFE10:
            shape = "s"
        elif character in OF_CHARACTER:
            shape = OF_CHARACTER[character]
        elif NO_SPACES.match(character):
            shape = "w"
        elif is_letter:
            shape = "m" if category[0] == "M" else "aA"[character.isupper()]
        else:
            shape = OF_CATEGORY.get(category, "s")
        self[code] = shape
        return shape

    def of(self, line: str, terms: Iterable[Slot]) -> str:
        """Return the shape of a line. Terms look like words, whatever is in them."""
        shape = unbroken(line).translate(self)
        # Marks and joiners belong to the letter or sign before them.
        shape = re.sub(r"s[sm]+", lambda x: "s" * len(x[0]), shape).replace("m", "a")
        chunks = re.finditer(r"\S+", line) if self._symbols else ()
        as_words = (x.span() for x in chunks if x[0] in self._symbols)
        ordinals = (x.span() for x in ORDINAL.finditer(line))
        characters = [*shape]
        for start, end in (*as_words, *ordinals, *(x[:2] for x in terms)):
            characters[start:end] = re.sub(r"\S", "a", line[start:end])
        return "".join(characters)


class Mask:
    """Finds what a model does not read, by the characters of its vocabulary.

    `find_terms` finds the terms of a glossary (`Glossary.find`).
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        find_terms: Callable[[str], Iterable[Slot]] | None = None,
    ) -> None:
        pieces = tokenizer.written() if tokenizer else []
        self._shapes = Shapes(tokenizer, pieces)
        self._find_terms = find_terms
        # Letters that are parts of words, but no words.
        words = {*pieces}
        self._no_words = {x for x in self._shapes.known if "▁" + x not in words}
        has_symbols = tokenizer and all(map(tokenizer.keeps_whole, SYMBOLS))
        self.symbols = SYMBOLS if has_symbols else ()
        # Marks that the vocabulary has seen less often than those of ASCII.
        self._rare = {
            ord(mark): usual
            for mark, usual in USUAL.items()
            if {mark, usual} <= words and pieces.index(mark) > pieces.index(usual)
        }

    def slots(self, line: str) -> list[Slot]:
        """Return the slots of a cleaned line. A line without other words is one.

        "**Ask** me@a.de at 9" has a loose slot on both sides of "Ask", a word and a
        number.
        """
        terms = [*self._find_terms(line)] if self._find_terms else []
        shape = self._shapes.of(line, terms)
        if not terms and PLAIN.fullmatch(shape):
            return []
        slots = _parts(shape, line)
        # Without a word, nothing is to translate, nor with single letters beside slots,
        # nor with one that is no word.
        read = hide(shape, [x for x in slots if x.kind != "number"])
        text = line.strip()
        is_letter = not terms and text in self._no_words
        if text and not (TWO_LETTERS if slots or is_letter else LETTER).search(read):
            return [Slot(0, len(line), line, "loose")]
        # No term is part of a slot.
        within = {i for x in slots for i in range(x.start, x.end)}
        terms = [x for x in terms if within.isdisjoint(range(x.start, x.end))]
        return sorted([*slots, *terms])

    def as_read(self, text: str) -> str:
        """Return text with usual marks, such as ", in place of rare ones, such as »."""
        rare = self._rare
        if "„" in text:  # which “ closes
            rare = {**rare, ord("“"): "“"}
        return text.translate(rare)


def named(line: str, slots: Iterable[Slot], symbols: Sequence[str]) -> list[Slot]:
    """Give words symbols as names, as far as there are any that the line lacks."""
    free = iter([x for x in symbols if x not in line])
    return [
        x._replace(name=next(free, "")) if x.kind == "word" else x
        for x in slots
        if x.kind != "number"
    ]


def hide(line: str, slots: Iterable[Slot]) -> str:
    """Return a line as the model reads it."""
    return "".join(itertools.chain.from_iterable(read_parts(line, slots)))


def read_parts(line: str, slots: Iterable[Slot]) -> Iterator[tuple[str, str]]:
    """Yield what the model reads before each slot and in its place, and then the rest.

    It reads terms, numbers and the names of words; nothing of other slots.
    """
    end = 0
    for slot in slots:
        text = line[end : slot.start]
        read = line[slot.start : slot.end]
        end = slot.end
        before = line[max(slot.start - 1, 0) : slot.start]
        before_letter = line[end : end + 1].isalnum()
        if slot.name:  # letters that touch the slot do not touch its name
            read = " " * before.isalnum() + slot.name + " " * before_letter
        elif slot.kind in ("word", "loose"):
            read = " " * bool(before_letter and BEFORE_WORD.match(before))
            text = text if before_letter else text.rstrip()  # one space is enough
        yield text, read
    yield line[end:], ""


def unbroken(line: str) -> str:
    """Return a line with low lines for white space within tags, code and brackets."""
    return SPACED.sub(lambda x: re.sub(r"\s", "_", x[0]), line)


def _parts(shape: str, line: str) -> list[Slot]:
    """Return the parts of a line that are no prose, and its numbers.

    Those with only white space between them are one, as are numbers with such beside.
    """
    slots = list[Slot]()
    for part in PARTS_OF_LINE.finditer(shape):
        if not part.lastgroup:
            continue
        start, end = part.span(part.lastgroup)
        kind = part.lastgroup.rstrip("12345")
        if "." in part[0] and PARTS.search(line[max(start - 12, 0) : start]):
            kind = kind.replace("number", "word")
        # Join it with the slots before it.
        while slots and not line[slots[-1].end : start].strip():
            last = slots[-1]
            kinds = {last.kind, kind}
            if "number" in kinds:
                other = line[start:end] if last.kind == "number" else last.output
                touches = last.end == start
                if len(kinds) == 1 or not (touches or BESIDE_NUMBER.search(other[-9:])):
                    break
            kind = "loose" if kinds == {"loose"} else "word"
            start = slots.pop().start
        slots.append(Slot(start, end, line[start:end], kind))
    return slots
