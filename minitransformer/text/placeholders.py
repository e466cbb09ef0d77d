"""Text that a translation copies, and placeholders for it (beyond the paper).

Addresses, markup, code, emoji and long numbers belong into a translation as they are,
and a glossary has translations of terms. `Finder` finds such items in a line. The model
reads a name for each: a symbol of the vocabulary that it has learned to copy, or a
small number, since models copy these anyway. Terms are read as they are. Markup and
emoji are left out: a sentence is whole without them. `place` puts the names of both
where the word alignment says, and `restore` puts the items in place of their names.

A model also respells names of people and places that it has seldom seen: "Kathmandu"
becomes "Kathovannu". It is unsure of such a word, and sure of names that its languages
write in different ways. `near_misses` finds them, `copy_names` puts the names in.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import lru_cache
from pathlib import Path
from zlib import crc32

from minitransformer.settings.options import UsageError
from minitransformer.text.lines import read_lines
from minitransformer.text.tokenizer import Tokenizer

# The names of items: symbols of a vocabulary, or numbers where it has none.
SYMBOLS = tuple(f"⟦{n}⟧" for n in range(1, 10))
NUMBERS = tuple("47 58 36 29 61 83 74 92 17 35 68 53 24 76 19 85 42 63 38 97".split())
# A vocabulary gets the symbols if so many training pairs have something to copy.
LEAST_PAIRS = 1000
# Longer lines are translated as they are.
MOST_CHARACTERS = 5000
_NAME = re.compile(rf"⟦\d+⟧|(?<![\w.,])(?:{'|'.join(NUMBERS)})(?!\w|[.,]\d)")

_PICTURE = "\u2600-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff"
_LOOSE = rf"""  # a sentence is whole without these: comments, tags, escapes, emoji
    <!--.*?--> | </?[A-Za-z][^<>]*> | <\d+/?> | &(?:[A-Za-z]+|\#\w+); | \\[nrt]
  | (?:[0-9\#*]\ufe0f?\u20e3 | [{_PICTURE}] | \S\ufe0f)
    [\ufe0f\u200d\u20e3\U000e0020-\U000e007f{_PICTURE}]*
"""
# 12,345.6 or 12.345,6, but no network address such as 192.168.178.100
_GROUPED = r"""
    (?!(?:\d+\.){3}\d+(?!\d|[.,]\d))
    \d{1,3}(?:(?:,\d{3})+(?:\.\d+)?|(?:\.\d{3})+(?:,\d+)?)(?![\w/:-]|[.,]\d)
"""
_ENDINGS = (
    "txt|pdf|md|json|xml|html?|css|js|py|c|h|cpp|java|sh|exe|zip|gz|tar|csv|log|toml|"
    "ya?ml|ini|docx?|xlsx?|jpe?g|png|gif|svg|mp[34]|com|org|net|edu|gov|io|dev|de|uk|fr"
)
_WORD = rf"""  # these have a place in the sentence
    ``.+?``(?!`) | `[^`]+` | ⟦\d+⟧  # code, names
  | (?:[a-z]+://|mailto:|www\.)  # addresses
    [^\s<>"()]*(?:\([^\s<>"()]*\)[^\s<>"()]*)*(?<![.,:;!?'])
  | [\w.+%-]+@[\w-]+(?:\.[\w-]+)+
  | \{{\{{.*?\}}\}} | [$%]?\{{[^{{}}\s]*\}}  # variables
  | (?<!\d)%(?:\d+\$|\(\w+\))?[-+\#0]*\d*(?:\.\d+)?l{{0,2}}[sdifuxXcgeo@](?!\w)
  | (?<!\w)%\w+% | %%
  | (?<!\w)(?:[A-Za-z]:\\|~?/|\.{{1,2}}/)[\w.+/\\-]*\w  # paths
  | (?<!\w)[\w./-]*\w\.(?:{_ENDINGS})(?![\w-])
  | (?<!\w)(?:@\w+|\#\w+|\#\ \d+|\w+_\w+|0x[0-9a-fA-F]+) | (?<![\w-])--\w[\w-]*
  | (?<!\w)\+?(?!{_GROUPED})  # five digits or more
    (?=(?:[^\W\d_]*[-.,:/]?[^\W\d_]*\d\ ?){{5}})
    \w+(?:[-.,:/]\w+|(?<=\d)\ \d{{3,}})*
"""
_LOOSE_ONLY = re.compile(rf"(?:{_LOOSE}|\W)+", re.X)
_COUNT = rf"(?<![\w.,:])(?:\d{{1,4}}|{_GROUPED}|\d+[.,:]\d+)(?!\w|[.,:]\d)"
# All of the above have one of these signs, and most lines have none.
_SIGN = re.compile(r"[^\w\s,.!?;:'\"()-]|--|\d|_|\w\.\w")
_CLOSING = ".,:;!?…)]}\"'»”"
_MARKS = _CLOSING + "([{«„“"

# Numbers that may be spelled in a translation.
SPELLED = tuple(map(str, range(13)))

# A rare name is a word with a capital and small letters that the vocabulary cuts into
# at least so many pieces, with its capital and without.
LEAST_PIECES = 3

# A word is a name respelled if their `SequenceMatcher.ratio` is at least SIMILAR, and
# the mean log-probability of the word's pieces is below UNSURE_LOG_PROB.
SIMILAR = 0.6
UNSURE_LOG_PROB = -0.3
_LETTERS = re.compile(r"[^\W\d_]{3,}")


@dataclass(frozen=True)
class Item:
    """A part of a line, and the `output` that it becomes.

    Its kind is "word" or "loose": these are copied; "number", with at most four digits
    or its thousands set off: it is copied if the model changes a digit; or "term" of a
    glossary. The model reads `read` in its place, and `name` stands for it in the
    translation. It `touches` a character before it, and a letter behind.
    """

    start: int
    end: int
    output: str
    kind: str
    touches: tuple[bool, bool] = (False, False)
    read: str = ""
    name: str = ""


def read_glossary(path: Path) -> dict[str, str]:
    """Read lines of a term, a tab and its translation.

    Raises: UsageError naming the first line that is something else.
    """
    glossary = dict[str, str]()
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        term, _, output = map(str.strip, line.partition("\t"))
        if not (term and output) or "\t" in output or term in glossary:
            expected = "expected a new term, a tab and its translation"
            raise UsageError(f"{path}, line {number}: {expected}, got {line!r:.60}")
        glossary[term] = output
    return glossary


class Finder:
    """Finds the items of a line: copied text, and the terms of a glossary.

    A term also matches with a capital letter at its start. Characters that no piece of
    the vocabulary has are copied; letters among them, with their whole word.
    """

    def __init__(
        self, tokenizer: Tokenizer | None = None, glossary: Mapping[str, str] = {}
    ) -> None:
        self._normalise = lambda _: ""
        self._known = set[str]()
        self.has_symbols = False
        if tokenizer:
            self._normalise = tokenizer.normalise
            self._known = {*"".join(tokenizer.written())}
            self.has_symbols = all(map(tokenizer.keeps_whole, SYMBOLS))
        capital = {x[0].upper() + x[1:]: output for x, output in glossary.items()}
        self._outputs = capital | dict(glossary)
        self._pattern = lru_cache(256)(self._compile)

    def _compile(self, unknown: str) -> re.Pattern[str]:
        longest = sorted(map(re.escape, self._outputs), key=len, reverse=True)
        copied = f"{_LOOSE}|{_WORD}"
        for character in unknown:
            around = r"\w*" * (unicodedata.category(character)[0] in "LMN")
            copied += f"|{around}{re.escape(character)}{around}"
        term = rf"(?P<term>(?<![\w-])(?:{'|'.join(longest) or '(?!)'})(?![\w-]))"
        copied = rf"(?:{copied})(?:\s*(?:{copied}))*"
        return re.compile(rf"{term}|{copied}|(?P<number>{_COUNT})", re.X)

    def find(self, line: str) -> list[Item]:
        """Return the items of a line. A line without other words is one item.

        A line of more than MOST_CHARACTERS has none: to search it may take long.
        """
        # Most lines have nothing to look for.
        unknown = {*self._normalise(line)} - self._known
        if unknown:
            unknown = {x for x in line if {*self._normalise(x)} - self._known}
        may_have = unknown or self._outputs or _SIGN.search(line)
        if not may_have or len(line) > MOST_CHARACTERS:
            return []
        pattern = self._pattern("".join(sorted(unknown)))
        # Collect the items, and the rest of the line, which the model reads.
        items = list[Item]()
        rest = ""
        end = 0
        for match in pattern.finditer(line):
            start = match.start()
            output = match[0]
            kind = match.lastgroup or "word"
            read = ""
            rest += line[end:start]
            before = line[start - 1 : start]
            behind = line[match.end() :][:1]
            touches = before.strip() != "", behind.isalnum()
            if match.lastgroup:
                output = self._outputs.get(output, output)
                rest += output
            elif _LOOSE_ONLY.fullmatch(output):
                kind = "loose"
                if not touches[1]:  # one space is enough
                    start = max(end, len(line[:start].rstrip()))
                elif before.isalnum() or before in _CLOSING:
                    read = " " * bool(before)
            end = match.end()
            items.append(Item(start, end, output, kind, touches, read))
        if items and not re.search(r"\w", rest + line[end:]):
            return [Item(0, len(line), line, "loose")]
        return items

    def hide_pair(self, source: str, target: str) -> tuple[str, str]:
        """Put symbols in place of items that both sides of a pair have in order."""
        in_source = [x for x in self.find(source) if x.kind != "number"]
        if not in_source:
            return source, target
        in_target = [x for x in self.find(target) if x.kind != "number"]
        if [x.output for x in in_source] == [x.output for x in in_target]:
            # Begin with any symbol, so that all are learned alike.
            first = crc32(source.encode()) % len(SYMBOLS)
            names = SYMBOLS[first:] + SYMBOLS[:first]
            hidden = hide(source, named(source, in_source, names))
            if hidden.strip():
                return hidden, hide(target, named(target, in_target, names))
        return source, target


def symbols_for(pairs: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the symbols, or none if too few of the first million pairs need them."""
    hide_pair = Finder().hide_pair
    need_them = (x for x in itertools.islice(pairs, 10**6) if hide_pair(*x) != x)
    count = sum(1 for _ in itertools.islice(need_them, LEAST_PAIRS))
    return SYMBOLS if count == LEAST_PAIRS else ()


def named(line: str, items: Iterable[Item], names: Sequence[str]) -> list[Item]:
    """Give items their names; return none if there are too few names.

    The model reads names of words and numbers. It reads terms as they are. Without
    `names` it reads nothing in place of items that are copied.
    """
    free = iter([x for x in names if x not in line])
    result = list[Item]()
    kinds = ("word", "number") if names else ()
    for number, item in enumerate(items, start=100):
        name = next(free, "") if item.kind in kinds else f"⟦{number}⟧"
        if not name:
            return []
        read = item.read
        output = item.output
        if item.kind in kinds:  # letters that touch the item do not touch the name
            before = line[item.start - 1 : item.start].isalnum()
            behind = item.touches[1]
            read = " " * before + name + " " * behind
            output = "\b" * before + output + "\b" * behind
        elif item.kind == "term":
            read = line[item.start : item.end]
        result.append(replace(item, name=name, read=read, output=output))
    return result


def hide(line: str, items: Iterable[Item]) -> str:
    """Return a line as the model reads it."""
    read = ""
    end = 0
    for item in items:
        read += line[end : item.start] + item.read
        end = item.end
    return read + line[end:]


def place(
    line: str,
    items: Sequence[Item],
    translation: str,
    links: Sequence[tuple[int, int]],
) -> str:
    """Put the names of items that the model did not read into its translation.

    A copy follows the word that was made from the word before it. If it touches only
    the next word, it stands before the word that was made from that one. A term
    replaces the words that were made from it. `links` are pairs of a word that the
    model read and a word of the translation.
    """
    if all(item.read.strip() == item.name for item in items):
        return translation
    source = hide(line, items)
    words = translation.split() or [""]
    last = -1  # the word of the translation that has the item before
    shift = 0  # from a place in the line to that in the source that the model read
    for item in items:
        before = source[: item.start + shift]
        after = source[item.start + shift :]
        shift += len(item.read) - (item.end - item.start)
        if item.read.strip() == item.name:
            last = next((n for n, x in enumerate(words) if item.name in x), last)
            continue
        # A term replaces the words that were made from it.
        number = len(before.split())  # of the next word that was read
        if item.kind == "term":
            first = number - bool(before[-1:].strip())
            made = {j for i, j in links if first <= i < first + len(item.read.split())}
            if own := _words_of_term(item.output, words, made):
                text = " ".join(words[own[0] : own[-1] + 1])
                whole = text.replace(text.strip(_MARKS) or text, item.name, 1)
                words[own[0] : own[-1] + 1] = [whole, *[""] * (len(own) - 1)]
                continue
        # A copy opens the next word, or follows the word made from the one before it.
        opens = item.touches[1] and not item.touches[0]
        inside = before[-1:].isalnum()  # a mark that follows the word follows the item
        if not re.search(r"\w", before):
            n = 0
            opens = True
        elif not re.search(r"\w", after):
            n = len(words) - 1
            opens = False
            inside = bool(after.strip())
        else:
            i = max((i for i, _ in links if i < number + opens), default=-1)
            opens = opens and i == number
            n = (min if opens else max)((j for k, j in links if k == i), default=0)
        # Items keep their order.
        if opens and n > last:
            space = "" if item.touches[1] or not words[n] else " "
            words[n] = item.name + space + words[n]
        else:
            n = max(n, last)
            text = words[n].rstrip(_CLOSING) if inside else words[n]
            space = "" if item.touches[0] or not text else " "
            rest = words[n][len(text) :]
            words[n] = text + space + item.name + "\b" * item.touches[1] + rest
        last = n
    return _without_backspaces(" ".join(filter(None, words)))


def _without_backspaces(text: str) -> str:
    """Take out each backspace with the spaces around it."""
    return re.sub(" ?\x08 ?", "", text)


def _words_of_term(output: str, words: list[str], made: set[int]) -> Sequence[int]:
    """Return the places of a term's words: its own if they occur, else `made`."""
    size = len(output.split())
    for n in range(len(words)):
        if " ".join(words[n : n + size]).strip(_MARKS) == output:
            return range(n, n + size)
    first = min(made, default=0)
    return range(first, next(n for n in itertools.count(first) if n not in made))


def restore(items: Sequence[Item], translation: str) -> str | None:
    """Put the items in place of their names.

    None if a name was lost, doubled or invented, or if copies changed their order.
    """
    names = [x.name for x in items]
    terms = [x.name for x in items if x.kind == "term"]
    written = [x for x in _NAME.findall(translation) if x in names or x[0] == "⟦"]
    if sorted(written) != sorted(names):
        return None
    if [x for x in written if x not in terms] != [x for x in names if x not in terms]:
        return None
    outputs = {x.name: x.output for x in items}
    text = _NAME.sub(lambda x: outputs.get(x[0], x[0]), translation)
    return _without_backspaces(text)


def lacking(translation: str, items: Iterable[Item]) -> list[Item]:
    """Return the items that a translation lacks.

    8.760 may stand for 8,760. Numbers up to twelve may be spelled if the translation
    has none in digits.
    """
    # Compare digits, without the marks between them.
    plain = re.sub(r"(?<=\d)[.,:](?=\d)", "", translation)
    written = re.findall(r"\d+", plain)

    def is_lacking(item: Item) -> bool:
        if item.kind != "number":
            return item.output not in translation
        spelled = not written and item.output in SPELLED
        return not spelled and re.sub(r"\D", "", item.output) not in written

    return list(filter(is_lacking, items))


def hide_in_prefix(prefix: str, items: Iterable[Item]) -> str:
    """Return a translation's prefix as the model reads it."""
    for item in items:
        if item.kind != "term":
            prefix = prefix.replace(item.output.strip("\b"), item.read, 1)
    return prefix


def rare_names(tokenizer: Tokenizer, texts: Iterable[str]) -> set[str]:
    """Return words of texts that may be names: rare ones with a capital."""
    words = list({word for text in texts for word in _capitalised(text)})
    pieces, small = (
        map(len, tokenizer.encode(forms))
        for forms in (words, [word.lower() for word in words])
    )
    each = zip(words, map(min, pieces, small), strict=True)
    return {word for word, count in each if count >= LEAST_PIECES}


def near_misses(names: set[str], source: str, translation: str) -> dict[str, str]:
    """Return words of a translation and, for each, a name that it may stand for.

    The source has the name, and the translation lacks it. The word is the most similar
    one of the translation.
    """
    lacking = [x for x in _capitalised(source) if x in names and x not in translation]
    words = [word for word in _capitalised(translation) if word not in source]
    respelled = dict[str, str]()
    for name in lacking if words else ():
        similarity, word = max((_similarity(name, word), word) for word in words)
        if similarity >= SIMILAR:
            respelled.setdefault(word, name)
    return respelled


def copy_names(
    translation: str, names: dict[str, str], words: Iterable[tuple[str, float | None]]
) -> str:
    """Put names in place of words of which the model is unsure.

    `names` come from `near_misses`; `words` has the log-probability of each word.
    """
    unsure = {
        word: names[word]
        for text, log_prob in words
        if log_prob is not None and log_prob < UNSURE_LOG_PROB
        for word in names.keys() & _LETTERS.findall(text)
    }
    return _LETTERS.sub(lambda word: unsure.get(word[0], word[0]), translation)


def _capitalised(text: str) -> list[str]:
    return [x for x in _LETTERS.findall(text) if x[0].isupper() and not x.isupper()]


def _similarity(a: str, b: str) -> float:
    return SequenceMatcher(None, a.lower(), b.lower()).ratio()
