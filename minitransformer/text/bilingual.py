"""Sentence pairs in one file: a translation memory, a catalogue or a table.

The Translate Toolkit reads .tmx, .po and .xliff (beyond the paper).
"""

from __future__ import annotations

import csv
import importlib
import importlib.metadata
import itertools
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from minitransformer.settings.extras import import_extra
from minitransformer.text.clean import clean
from minitransformer.text.lines import open_text, read_lines

# A sentence and its translation, or the languages or the files of both.
Pair: TypeAlias = tuple[str, str]
# Sentence pairs, and the codes of their languages, or "" if a file has none.
Bilingual: TypeAlias = tuple[list[Pair], Pair]

STORES = ".po", ".tmx", ".xlf", ".xliff"
LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"
LETTER = re.compile(r"[^\W\d_]")
# A cell as spreadsheets write it into text if it has quotes.
QUOTED = re.compile('"(?:[^"]|"")*"')


def read_bilingual(path: Path, languages: Pair = ("", "")) -> Bilingual:
    """Read the sentence pairs of a file, plain or .gz; a side may be blank.

    It is a .tmx, .po, .xliff or .csv, or has lines of source TAB target. `languages`
    are the codes of the source and the target, by default those of the file. In a table
    they are two columns, if the first line has names of columns, or else the first two.

    Raises: ValueError naming a line or a pair that is wrong.
    """
    name = path.with_suffix("") if path.suffix == ".gz" else path
    read = _read_store if name.suffix in STORES else _read_table
    try:
        pairs, own = read(path, name, languages)
    except csv.Error as error:
        raise ValueError(f"{path}: expected the quotes of a .csv: {error}") from error
    if all(own) and all(languages) and own != languages:
        expected, got = map(" to ".join, (languages, own))
        raise ValueError(f"{path}: expected {expected}, got {got}")
    # Most pairs must have letters, and not the same on both sides.
    whole = [pair for pair in pairs if all(map(clean, pair))]
    if not whole:
        of = " and ".join(filter(None, languages)) or "two languages"
        raise ValueError(f"{path}: expected sentences in {of}, found none")
    odd = [x for x in whole if x[0] == x[1] or not all(map(LETTER.search, x))]
    if 2 * len(odd) > len(whole):
        raise ValueError(
            f"{path}, pair {pairs.index(odd[0]) + 1}: expected a sentence in two "
            f"languages, got {' and '.join(odd[0])[:80]!r}; the first line of a table "
            "can name its columns, such as en and de"
        )
    # Text of several lines becomes one.
    return [(" ".join(s.split("\n")), " ".join(t.split("\n"))) for s, t in pairs], own


# Translation memories and catalogues


def _read_store(path: Path, name: Path, languages: Pair) -> Bilingual:
    with open_text(path) as file:
        store = open_store(file.read(), name, languages)
    pairs = [
        (str(unit.source or ""), str(unit.target or ""))
        for unit in store.units
        # The .xliff of a translation that nobody has approved is called fuzzy, too.
        if unit.istranslatable() and not (name.suffix == ".po" and unit.isfuzzy())
    ]
    return pairs, (_code(store.sourcelanguage), _code(store.targetlanguage))


def open_store(data: bytes, name: Path, languages: Pair) -> Any:
    """Return the Translate Toolkit's store of a file.

    Raises: ValueError if it is none, RuntimeError if the toolkit is not installed.
    """
    factory = import_toolkit("storage.factory", name.suffix)
    try:
        store = factory.getclass(name.name).parsestring(data)
    except Exception as error:  # each format has its own
        reason = " ".join(str(error).split())
        raise ValueError(f"{name}: expected {name.suffix}: {reason}") from error
    if languages == ("source", "target"):  # a model that does not know them
        languages = "", ""
    source, target = languages
    if name.suffix != ".tmx":
        store.settargetlanguage(store.targetlanguage or target)
        return store
    # A memory may have several languages with regions: those asked for, or its first.
    nodes = [node for unit in store.units for node in unit.getlanguageNodes()]
    codes = dict.fromkeys(node.get(LANGUAGE) or "" for node in nodes)
    if not all(languages):
        first = _code(store.sourcelanguage)
        own = sorted(dict.fromkeys(map(_code, codes)), key=lambda code: code != first)
        source, target = [*own, "", ""][:2]
    store.setsourcelanguage(_variant(codes, source))
    store.settargetlanguage(_variant(codes, target))
    return store


def import_toolkit(module: str, what: str) -> Any:
    """Import a module of the Translate Toolkit. Raises: RuntimeError saying for what"""
    # The toolkit's package has the name of the script translate.py.
    with suppress(ImportError):
        found = importlib.metadata.distribution("translate-toolkit")
        package = importlib.import_module("translate")
        package.__path__ = [str(found.locate_file("translate"))]
    need = f"{what} needs the Translate Toolkit, and Python 3.11"
    return import_extra(f"translate.{module}", "files", need)


def _code(language: str | None) -> str:
    """Return the code of a language without its region: en of en-US."""
    return re.split("[-_]", language or "")[0].lower()


def _variant(codes: Iterable[str], language: str) -> str:
    """Return the first of some codes that is one of a language, or its own."""
    return next((x for x in codes if _code(x) == language), language)


# Tables


def _read_table(path: Path, name: Path, languages: Pair) -> Bilingual:
    rows = read_rows(read_lines(path), name.suffix == ".csv")
    # A first row of names says which columns are meant.
    source = 0
    target = 1
    pairs = list[Pair]()
    for number, row in enumerate(rows, start=1):
        if number == 1 and (columns := _named_columns(row, languages)):
            source, target = columns
            if len(row[source]) == 2:
                languages = row[source], row[target]
        elif max(source, target) < len(row):
            pairs.append((row[source], row[target]))
        elif any(map(clean, row)):
            got = f"got {' '.join(row)[:60]!r}"
            raise ValueError(
                f"{path}, line {number}: expected source TAB target, {got}"
            )
        else:
            pairs.append(("", ""))
    # Spreadsheets double a quote within a cell, and put the cell into quotes.
    cells = filter(QUOTED.fullmatch, itertools.chain.from_iterable(pairs))
    if any('""' in cell[1:-1] for cell in cells):
        pairs = [(_unquoted(s), _unquoted(t)) for s, t in pairs]
    return pairs, languages


def _named_columns(row: Sequence[str], languages: Pair) -> tuple[int, int] | None:
    """Return the columns of the source and the target if a row has their names.

    These are the languages, "source" and "target", or two codes alone, such as en, de.
    """
    names = [name.strip().lower() for name in row]
    for source, target in (languages, ("source", "target")):
        if source and source in names and target in names:
            return names.index(source), names.index(target)
    are_codes = all(len(x) == 2 and x.isalpha() and x.islower() for x in row)
    return (0, 1) if are_codes and len(row) == 2 else None


def _unquoted(cell: str) -> str:
    return cell[1:-1].replace('""', '"') if QUOTED.fullmatch(cell) else cell


def read_rows(lines: Iterable[str], is_csv: bool) -> list[list[str]]:
    """Return the cells of each line, or of each row of a .csv. Raises: csv.Error"""
    if not is_csv:
        return [line.split("\t") for line in lines]
    lines = [f"{line}\n" for line in lines]
    return list(csv.reader(lines, strict=True, delimiter=divider(lines)))


def divider(lines: Sequence[str]) -> str:
    """Return what divides the cells of a .csv, so that most rows have as many."""

    def regular_rows(delimiter: str) -> int:
        rows = csv.reader(lines, strict=True, delimiter=delimiter)
        with suppress(csv.Error):
            widths = [len(row) for row in rows if len(row) > 1]
            return max(map(widths.count, {*widths}), default=0)
        return 0

    return max(",;\t", key=regular_rows)
