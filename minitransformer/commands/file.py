"""Translate a file of another kind than plain text, such as subtitles.

Layout, timing, placeholders and order stay: text is translated where it stands, and all
else is written as it was. The Translate Toolkit reads .po, .xliff and .tmx.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from minitransformer.api import load
from minitransformer.cli import Parser, add_arguments, add_device, exit_code, say
from minitransformer.runs.models import described, find_checkpoint, language_codes
from minitransformer.runs.outputs import check_output
from minitransformer.settings.decoding_config import DecodingConfig, TranslationConfig
from minitransformer.settings.options import UsageError, flags_of
from minitransformer.system.files import write_bytes
from minitransformer.text.bilingual import (
    STORES,
    Pair,
    divider,
    open_store,
    read_rows,
)
from minitransformer.text.markup import html_lines

# Where text stands in a file: the second group, behind the first, or in its place.
CUES = re.compile(r"(?m)(^(?:[^-\n]|-(?!->))*-->.*\n)(.*\S.*(?:\n.*\S.*)*)")
DIALOGUE = re.compile(r"(?m)(^Dialogue:(?:[^,\n]*,){9})(.+)")
STRINGS = re.compile(r'(?<!\\)(?:("(?:[^"\\]|\\.)*"\s*:)|("(?:[^"\\]|\\.)*"))')
PROPERTIES = re.compile(
    r"(?m)(^[ \t]*(?![#!])(?:[^\s:=\\]|\\.)+(?:[ \t]*[:=][ \t]*|[ \t]+))"
    r"((?:[^\\\n]|\\(?:.|\n))+)"
)
LINES = re.compile("()(.+)")

# A line of a subtitle ends so, and begins so if it belongs to another speaker.
BREAK = re.compile(r"\n|\\[Nn]")
SPEAKER = "-", "\u2013", "\u2014", "\u266a"
# The tags of subtitles, and words, which may have tags with spaces.
TAG = re.compile(r"<[^<>]*>|\{[^{}]*\}")
WORD = re.compile(rf"(?:{TAG.pattern}|\S)+")
# What a backslash begins in a property.
ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|\n\s*|.)")
NAMED = {"n": "\n", "t": "\t", "r": "", "f": ""}
# The parts of an OpenDocument with text, and the most that is unpacked, in bytes.
PARTS = "content.xml", "styles.xml"
MAX_UNPACKED = 1 << 26


class Document(NamedTuple):
    """The texts of a file, of which each may have several lines.

    `write` takes their translations, and returns the file.
    """

    texts: list[str]
    write: Callable[[Iterator[str]], Any]

    @property
    def lines(self) -> list[str]:
        """The lines to translate."""
        return "\n".join(self.texts).split("\n")

    def translated(self, lines: Sequence[str]) -> bytes:
        """Return the file with a translation of each line."""
        rest = iter(lines)
        return self.write(
            "\n".join(next(rest) for _ in text.split("\n")) for text in self.texts
        )


def read_document(data: bytes, name: str, languages: Pair) -> Document:
    """Read a file of the kind that its name says.

    `languages` are the codes of the source and the target.

    Raises: ValueError if the kind is not known, or the file is not of it or has no
    text; RuntimeError if the Translate Toolkit is needed and not installed.
    """
    kind = Path(name).suffix.lower()
    if kind not in KINDS:
        expected = f"expected {', '.join(KINDS)}, got {kind or 'no ending'}"
        raise ValueError(f"{name}: {expected}; an office program saves .docx as .odt")
    try:
        if kind in STORES:
            document = _of_store(data, Path(name), languages)
        elif kind in TEXTS:
            document = _of_text(data, TEXTS[kind])
        else:
            document = _of_archive(data)
    except (UnicodeDecodeError, json.JSONDecodeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{name}: expected {kind}, in UTF-8: {error}") from error
    if not any(map(str.strip, document.texts)):
        raise ValueError(f"{name}: expected text to translate, found none")
    return document


# Kinds of text


def _of_text(data: bytes, divide: Callable[[str], Document]) -> Document:
    """Divide a file by a function of its text; byte-order mark and line ends stay."""
    text = data.decode()
    mark = text[: text.startswith("\ufeff")]
    end = "\r\n" if "\r\n" in text else "\n"
    texts, write = divide(text.removeprefix(mark).replace("\r\n", "\n"))
    return Document(texts, lambda new: (mark + write(new).replace("\n", end)).encode())


def _found(
    pattern: re.Pattern[str],
    read: Callable[[str], str],
    write: Callable[[str, str], str],
    text: str,
) -> Document:
    """Take the texts that a pattern finds, as the second of its groups.

    `read` returns what such a group says, and `write` a translation in its notation.
    """

    def write_all(new: Iterator[str]) -> str:
        return pattern.sub(
            lambda x: (x[1] or "") + (write(next(new), x[2]) if x[2] else ""), text
        )

    return Document([read(x[2]) for x in pattern.finditer(text) if x[2]], write_all)


def _joined(cue: str) -> str:
    """Return the lines of a subtitle as one, unless they have several speakers."""
    lines = BREAK.split(cue)
    speakers = [TAG.sub("", line).lstrip().startswith(SPEAKER) for line in lines]
    return ("\n" if any(speakers) else " ").join(lines)


def _wrapped(end: str, translation: str, cue: str) -> str:
    """Divide a translation into as many lines as a subtitle has, of similar length."""
    lines: list[list[str]] = [[] for _ in BREAK.split(cue)]
    place = 0
    for word in WORD.findall(translation):
        lines[place * len(lines) // len(translation)].append(word)
        place += len(word) + 1
    wrapped = [" ".join(words) for words in lines if words]
    return end.join(translation.split("\n") if "\n" in translation else wrapped)


def _of_json(text: str) -> Document:
    json.loads(text)
    write = partial(json.dumps, ensure_ascii=False)
    return _found(STRINGS, json.loads, lambda new, _: write(new), text)


def _unescaped(value: str) -> str:
    """Return what the value of a property says."""

    def character(escape: re.Match[str]) -> str:
        code = escape[1]
        is_number = len(code) == 5 and code[0] == "u"
        return chr(int(code[1:], 16)) if is_number else NAMED.get(code, code.strip())

    text = ESCAPE.sub(character, value)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _escaped(text: str, value: str) -> str:
    """Return text as the value of a property, in ASCII."""
    return json.dumps(text)[1:-1].replace('\\"', '"')


def _of_html(text: str) -> Document:
    lines = html_lines(text)
    return Document(
        [line.text for line in lines],
        lambda new: "".join(line.with_text(next(new)) for line in lines),
    )


def _of_table(is_csv: bool, text: str) -> Document:
    """Take the cells of each column that has a cell of several words.

    Other columns have keys or numbers. A first row without such a cell is a heading.
    """
    lines = text.split("\n")
    rows = read_rows(lines, is_csv)
    prose = {n for row in rows for n, cell in enumerate(row) if " " in cell.strip()}
    is_heading = not any(" " in cell.strip() for cell in rows[0])
    places = [(row, n) for row in rows[is_heading:] for n in prose if n < len(row)]

    def write(new: Iterator[str]) -> str:
        for row, n in places:
            row[n] = next(new)
        if not is_csv:
            return "\n".join(map("\t".join, rows))
        out = io.StringIO()
        writer = csv.writer(out, delimiter=divider(lines), lineterminator="\n")
        writer.writerows(rows)
        return out.getvalue().removesuffix("\n")

    return Document([row[n] for row, n in places], write)


# Kinds that a library opens


def _of_store(data: bytes, path: Path, languages: Pair) -> Document:
    """Take what has no translation yet, which is marked for review."""
    if languages == ("source", "target"):  # not known
        languages = "", ""
    store = open_store(data, path, languages)
    store.settargetlanguage(store.targetlanguage or languages[1])
    parts = [
        _of_unit(unit)
        for unit in store.units
        if unit.istranslatable() and unit.source and not unit.target
    ]

    def write(new: Iterator[str]) -> bytes:
        for part in parts:
            part.write(new)
        return bytes(store)

    return Document([text for part in parts for text in part.texts], write)


def _of_unit(unit: Any) -> Document:
    """Take the text of a unit, with any elements in it, or its plural forms."""
    source = _segment(getattr(unit, "source_dom", None))
    if source is None or not len(source):
        forms = getattr(unit.source, "strings", [unit.source])

        def write(new: Iterator[str]) -> None:
            translations = [next(new) for _ in forms]
            unit.target = translations if len(forms) > 1 else translations[0]
            unit.markreviewneeded()

        return Document([*map(str, forms)], write)

    etree = import_module("lxml.etree")
    xml = etree.tostring(source, encoding="unicode", with_tail=False)
    texts, write_xml = _of_html(xml)

    def write_elements(new: Iterator[str]) -> None:
        translated = etree.fromstring(write_xml(new))
        unit.target = xml  # makes the element, which then is filled
        target = _segment(unit.target_dom)
        target.text = translated.text
        target[:] = translated
        unit.markreviewneeded()

    return Document(texts, write_elements)


def _segment(dom: Any) -> Any:
    """Return the element of a unit that has the text of a language."""
    return None if dom is None else next(dom.iter("{*}seg"), dom)


def _of_archive(data: bytes) -> Document:
    """Take the text of an OpenDocument, its headers and its footers."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    infos = archive.infolist()
    if sum(info.file_size for info in infos) > MAX_UNPACKED:
        raise ValueError(f"expected at most {MAX_UNPACKED:,} bytes unpacked, got more")
    contents = {info: archive.read(info) for info in infos}
    parts = {x: _of_html(contents[x].decode()) for x in infos if x.filename in PARTS}

    def write(new: Iterator[str]) -> bytes:
        out = io.BytesIO()
        contents.update({info: part.write(new) for info, part in parts.items()})
        with zipfile.ZipFile(out, "w") as copy:
            for info, content in contents.items():
                copy.writestr(info, content)
        return out.getvalue()

    return Document([text for part in parts.values() for text in part.texts], write)


TEXTS: dict[str, Callable[[str], Document]] = {
    ".srt": partial(_found, CUES, _joined, partial(_wrapped, "\n")),
    ".vtt": partial(_found, CUES, _joined, partial(_wrapped, "\n")),
    ".ass": partial(_found, DIALOGUE, _joined, partial(_wrapped, r"\N")),
    ".html": _of_html,
    ".htm": _of_html,
    ".csv": partial(_of_table, True),
    ".tsv": partial(_of_table, False),
    ".json": _of_json,
    ".properties": partial(_found, PROPERTIES, _unescaped, _escaped),
    ".txt": partial(_found, LINES, str, lambda new, _: new),
}
KINDS = (*TEXTS, *STORES, ".odt")


def translate_file(args: argparse.Namespace) -> None:
    """Translate a file, and say how many lines lack something."""
    check_output(args.output, args, kind="text")
    if args.output.suffix.lower() != args.input.suffix.lower():
        raise UsageError(f"{args.output}: expected the ending of {args.input.name}")
    # Read the file before the model, which takes longer.
    paths = args.model or [find_checkpoint(None)]
    languages = language_codes(find_checkpoint(paths[0]))
    document = read_document(args.input.read_bytes(), args.input.name, languages)
    say(f"minitransformer file: using {described(find_checkpoint(paths[0]))}")
    translator = load(
        *paths, device=args.device, threads=args.threads, glossary=args.glossary
    )
    flags = flags_of(args, DecodingConfig)
    config = TranslationConfig.changed(translator.decoding, flags)
    ranked = translator.hypotheses(document.lines, config)
    new = document.translated([best.text for best, *_ in ranked])
    write_bytes(args.output, new, replace=True)
    if lacking := sum(bool(best.missing) for best, *_ in ranked):
        what = "a number, a term or text to copy"
        say(f"minitransformer file: {lacking} of {len(ranked)} lines lack {what}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        "minitransformer file",
        "Translate a file, whose layout, timing, placeholders and order stay.",
        (
            "minitransformer file film.en.srt film.de.srt",
            "minitransformer file --model de-en seite.html page.html",
        ),
        f"Kinds: {' '.join(KINDS)}.\n"
        "Translations that .po, .xliff and .tmx have stay as they are. In tables, the\n"
        "columns with several words in a cell are translated. .docx: save it as .odt.",
        usual=("--model", "--glossary", "--device", "--threads", "--beam"),
    )
    add = parser.add_argument
    add("input", type=Path, help="the file to translate")
    add("output", type=Path, help="the file to write, of the same kind")
    model = "run, checkpoint, en-de or de-en (default newest ended run, or en-de)"
    add("--model", "-m", type=Path, action="append", metavar="PATH", help=model)
    terms = "file of terms and their translations, with a tab between them"
    add("--glossary", type=Path, metavar="FILE", help=terms)
    add_device(parser)
    add_arguments(parser, DecodingConfig)
    args = parser.parse_args(arguments)

    return exit_code(parser.prog, lambda: translate_file(args))
