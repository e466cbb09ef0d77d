"""Lines divided into their sentences, by rules, and joined again.

A stop before white space ends a sentence, unless a word in lower case follows, or what
comes before it is an abbreviation, an initial, or the number of a date or a list. The
full stops of Chinese and Japanese need no white space.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

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

# Words that end no sentence; those with a capital, if they are written so.
NEVER = frozenset(
    "mr mrs ms mx dr prof hr fr frl st ste mme mlle mm Gen Col Capt Lt Sgt Adm Rev Hon "
    "Sen Rep Gov Pres Dipl Ing Mt Ft M Mgr Sig Sra Sr Dra vs e.g i.e eg ie cf viz "
    "approx ca z.b zb d.h dh u.a o.ä u.ä v.a z.t i.a i.d.r u.u m.e s.o s.u v.chr n.chr "
    "bzw resp vgl bspw sog ggf evtl inkl exkl einschl zzgl geb gest tel p.ex av".split()
)

# Words that end none before a number.
BEFORE_NUMBER = frozenset(
    "no nos nr num art ch chap fig figs sec vol p pp kap abb abs bd ziff tab eq".split()
)

# Words that end one if the next is of BEGINNINGS; initials and some numbers, too.
SELDOM = frozenset(
    "etc usw usf al inc ltd co corp bros jr sr ph.d dept univ assn mio mrd str jh chr "
    "jan feb mar mär apr jun jul aug sep sept oct okt nov dec dez janv févr avr juil "
    "min std sek tsd oz lb lbs tbsp tsp ave blvd rd ff".split()
)
INITIAL = re.compile(r"(?:\w\.[\s-]?)*[^\W\d_]|[IVXLC]+|\w+str")
BEGINNINGS = frozenset(
    "The A An He She It I We They You This That These Those There Here My Your His Her "
    "Our Their But And So Or If When While What Where Who Why How In On At For From "
    "With After Before Then Now Not No Yes Please However Do Does Did Is Are Was Were "
    "Have Has Can Could Would Let Some Many All Every Each "
    "Der Die Das Den Dem Ein Eine Einen Er Sie Es Ich Wir Ihr Du Dies Diese Dieser "
    "Mein Meine Sein Seine Unser Unsere Aber Und Oder Wenn Als Wann Was Wo Wer Warum "
    "Wie Im Am Auf Für Bei Mit Nach Von Vor Zu Dann Danach Doch Dort Da Hier Heute "
    "Jetzt Nicht Kein Keine Alle Viele Bitte Ja Nein Ist Sind War Hat Kann "
    "Le La Les Un Une Des Il Elle Ils Elles On Nous Vous Je Tu Ce Cette Ces C'est Mais "
    "Et Ou Si Quand Que Qui Où Dans Sur Pour Avec Mon Ma Son Sa Notre Non Oui".split()
)

# Numbers before a full stop that are ordinals, as in "am 3. Mai": by the word before
# them, or by the month after them.
ORDINAL = re.compile(
    r"(?:\b(?:am|der|die|das|den|dem|des|im|vom|zum|zur|bis|ab|seit|und|jede[rnms]?|"
    r"[msd]?ein(?:e[rnms]?)?|ihr(?:e[rnms]?)?|unser(?:e[rnms]?)?)|,)\s+\d{1,3}$",
    re.I,
)
MONTHS = frozenset(
    "Januar Februar März April Mai Juni Juli August September Oktober November "
    "Dezember Jahrhundert Jahrhunderts".split()
)

# The number of an item, at the start or after a colon. A line that is a list, which
# begins with one, may have more of them anywhere.
ITEM = r"(?:\d{1,3}|[^\W\d_]|[ivxIVX]+)"
LIST = re.compile(rf"\W*{ITEM}[.)]")
FIRST, LATER = re.compile(rf"(?:^|:)\W*{ITEM}$"), re.compile(rf"(?<!\w){ITEM}$")


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
    kind = core.islower(), LIST.match(core) is not None
    for stop in STOP.finditer(text, start, end):
        following = NEXT.match(text, stop.end(), end)
        before = text[max(start, stop.start() - CONTEXT) : stop.start()]
        if following and _ends(before, stop["stop"], following["word"], *kind):
            split += [text[start : stop.end()], following["space"]]
            start = following.end("space")
    return [*split, text[start:end], tail]


def as_one_sentence(text: str) -> list[str]:
    """Return the white space before a text, the text, and the white space after it."""
    core = text.strip()
    lead, _, tail = text.partition(core) if core else (text, "", "")
    return [lead, core, tail]


def usual_sentences(lines: Iterable[str]) -> int:
    """Return how many sentences at most nine in ten lines have."""
    counts = sorted(len(split_sentences(line)) // 2 for line in lines)
    return counts[(9 * len(counts) - 1) // 10]


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


def _ends(
    before: str, stops: str | None, word: str, is_lower: bool, is_list: bool
) -> bool:
    """Whether stops end the sentence whose last characters are given.

    `word` follows. The text may be in lower case, or be a list.
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
    if (LATER if is_list else FIRST).search(before):
        return False
    last = re.sub(r"[\s-]", "", LAST.findall(before)[0])
    tail = last.rpartition(".")[2]
    names = {last, last.lower(), tail, tail.lower()}
    if names & NEVER or (names & BEFORE_NUMBER and first.isdigit()):
        return False
    is_ordinal = ORDINAL.search(before) or (last.isdigit() and word in MONTHS)
    if is_ordinal or names & SELDOM or INITIAL.fullmatch(last):
        return (word.capitalize() if len(word) > 1 else word) in BEGINNINGS
    return True
