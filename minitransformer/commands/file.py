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
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from minitransformer.api import load
from minitransformer.cli import add_arguments, add_device, add_model, say
from minitransformer.commands import Command
from minitransformer.runs.models import described, find_checkpoint, language_codes
from minitransformer.settings.decoding_config import DecodingConfig, TranslationConfig
from minitransformer.settings.options import UsageError, flags_of
from minitransformer.system.files import write_bytes
from minitransformer.text.bilingual import (
    STORES,
    Pair,
    divider,
    import_toolkit,
    open_store,
    read_rows,
)
from minitransformer.text.markup import html_lines
from minitransformer.translation.confidence import LACKED

# Where text stands in a file: the second group, behind the first, or in its place.
CUES = re.compile(r"(?m)(^(?:[^-\n]|-(?!->))*-->.*\n)(.*\S.*(?:\n.*\S.*)*)")
# A dialogue may be a drawing.
DIALOGUE = re.compile(r"(?m)(^Dialogue:(?:[^,\n]*,){9})(?!.*\\p[1-9])(.+)")
STRINGS = re.compile(r'(?<!\\)(?:("(?:[^"\\]|\\.)*"\s*:)|("(?:[^"\\]|\\.)*"))')
PROPERTIES = re.compile(
    r"(?m)(^[ \t]*(?![#!])(?:[^\s:=\\]|\\.)+(?:[ \t]*[:=][ \t]*|[ \t]+))"
    r"((?:[^\\\n]|\\(?:.|\n))+)"
)

# A line of a subtitle ends so, and begins so if it belongs to another speaker.
BREAK = re.compile(r"\n|\\[Nn]")
SPEAKER = "-", "\u2013", "\u2014", "\u266a"
# The tags of subtitles, and words, which may have tags with spaces.
TAG = re.compile(r"<[^<>]*>|\{[^{}]*\}")
WORD = re.compile(rf"(?:{TAG.pattern}|\S)+")
# What does not belong to a value that goes on in the next line.
INDENTED = re.compile(r"(?<=\n)[ \t]+")
# The parts of an OpenDocument with text, and the most that is unpacked, in bytes.
PARTS = "content.xml", "styles.xml"
MAX_UNPACKED = 1 << 26

# What the libraries say of a file that is damaged, or of another kind.
DAMAGED = (
    EOFError,
    NotImplementedError,
    UnicodeDecodeError,
    csv.Error,
    json.JSONDecodeError,
    zipfile.BadZipFile,
    zlib.error,
)
Translate: TypeAlias = Callable[[str], str]


def file_lines(data: bytes, name: str, languages: Pair) -> list[str]:
    """Return the lines of a file to translate.

    Raises: as `rewritten`; ValueError if there are none.
    """
    lines = list[str]()

    def take(text: str) -> str:
        lines.extend(text.split("\n"))
        return text

    rewritten(data, name, languages, take)
    if not any(map(str.strip, lines)):
        raise ValueError(f"{name}: expected text to translate, found none")
    return lines


def with_lines(
    data: bytes, name: str, languages: Pair, translations: Sequence[str]
) -> bytes:
    """Return a file with a translation of each of its `file_lines`."""
    rest = iter(translations)
    return rewritten(
        data, name, languages, lambda x: "\n".join(next(rest) for _ in x.split("\n"))
    )


def rewritten(data: bytes, name: str, languages: Pair, translate: Translate) -> bytes:
    """Return a file of the kind that its name says, with each text translated.

    `languages` are the codes of the source and the target. A text may have several
    lines.

    Raises: ValueError if the kind is not known, or the file is not of it; RuntimeError
    if the Translate Toolkit is needed and not installed.
    """
    kind = Path(name).suffix.lower()
    if kind not in KINDS:
        expected = f"expected {', '.join(KINDS)}, got {kind or 'no ending'}"
        raise ValueError(f"{name}: {expected}; an office program saves .docx as .odt")
    try:
        if kind in STORES:
            return _store(
                open_store(data, Path(name).with_suffix(kind), languages), translate
            )
        if kind == ".odt":
            return _archive(data, translate)
        # The byte-order mark and the ends of lines stay.
        text = data.decode()
        mark = text[: text.startswith("\ufeff")]
        end = "\r\n" if "\r\n" in text else "\n"
        plain = text.removeprefix(mark).replace("\r\n", "\n")
        return (mark + TEXTS[kind](plain, translate).replace("\n", end)).encode()
    except DAMAGED as error:
        raise ValueError(f"{name}: expected {kind}, in UTF-8: {error}") from error


# Kinds of text


def _subtitles(
    pattern: re.Pattern[str], end: str, text: str, translate: Translate
) -> str:
    """Translate the cues that a pattern finds, whose lines end in `end`."""
    return pattern.sub(lambda x: x[1] + _cue(x[2], end, translate), text)


def _cue(cue: str, end: str, translate: Translate) -> str:
    """Translate the lines of a subtitle as one, unless they have several speakers.

    The translation gets as many lines, of similar length.
    """
    lines = BREAK.split(cue)
    if any(TAG.sub("", line).lstrip().startswith(SPEAKER) for line in lines):
        return end.join(translate("\n".join(lines)).split("\n"))
    translation = translate(" ".join(lines))
    divided: list[list[str]] = [[] for _ in lines]
    place = 0
    for word in WORD.findall(translation):
        divided[place * len(lines) // len(translation)].append(word)
        place += len(word) + 1
    return end.join(" ".join(words) for words in divided if words)


def _json(text: str, translate: Translate) -> str:
    json.loads(text)

    def value(string: str) -> str:
        return json.dumps(translate(json.loads(string)), ensure_ascii=False)

    return STRINGS.sub(lambda x: x[1] or value(x[2]), text)


def _properties(text: str, translate: Translate) -> str:
    """Translate the values, which then are ASCII."""
    quote = import_toolkit("misc.quote", ".properties")

    def value(escaped: str) -> str:
        plain = quote.propertiesdecode(INDENTED.sub("", escaped))
        # Two escapes may be one character.
        plain = plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return json.dumps(translate(plain))[1:-1].replace(r"\"", '"')

    return PROPERTIES.sub(lambda x: x[1] + value(x[2]), text)


def _html(text: str, translate: Translate) -> str:
    return "".join(line.with_text(translate(line.text)) for line in html_lines(text))


def _table(is_csv: bool, text: str, translate: Translate) -> str:
    """Translate each column that has a cell of several words.

    Other columns have keys or numbers. A first row without such a cell is a heading.
    """
    lines = text.split("\n")
    rows = read_rows(lines, is_csv)
    prose = {n for row in rows for n, cell in enumerate(row) if " " in cell.strip()}
    is_heading = not any(" " in cell.strip() for cell in rows[0])
    rows[is_heading:] = [
        [translate(cell) if n in prose else cell for n, cell in enumerate(row)]
        for row in rows[is_heading:]
    ]
    if not is_csv:
        return "\n".join(map("\t".join, rows))
    out = io.StringIO()
    csv.writer(out, delimiter=divider(lines), lineterminator="\n").writerows(rows)
    return out.getvalue().removesuffix("\n")


TEXTS: dict[str, Callable[[str, Translate], str]] = {
    ".srt": partial(_subtitles, CUES, "\n"),
    ".vtt": partial(_subtitles, CUES, "\n"),
    ".ass": partial(_subtitles, DIALOGUE, r"\N"),
    ".html": _html,
    ".htm": _html,
    ".csv": partial(_table, True),
    ".tsv": partial(_table, False),
    ".json": _json,
    ".properties": _properties,
    ".txt": lambda text, translate: translate(text),
}
KINDS = (*TEXTS, *STORES, ".odt")


# Kinds that a library opens


def _store(store: Any, translate: Translate) -> bytes:
    """Translate what has no translation yet, and mark it for review."""
    for unit in store.units:
        if not unit.istranslatable() or not unit.source or unit.target:
            continue
        source = _segment(getattr(unit, "source_dom", None))
        if source is None or not len(source):
            # Several forms, if there is a plural.
            forms = getattr(unit.source, "strings", [unit.source])
            translations = [translate(str(form)) for form in forms]
            unit.target = translations if len(forms) > 1 else translations[0]
        else:
            # The text has elements.
            etree = import_module("lxml.etree")
            xml = etree.tostring(source, encoding="unicode", with_tail=False)
            translated = etree.fromstring(_html(xml, translate))
            unit.target = xml  # makes the element, which then is filled
            target = _segment(unit.target_dom)
            target.text = translated.text
            target[:] = translated
        unit.markreviewneeded()
    return bytes(store)


def _segment(dom: Any) -> Any:
    """Return the element of a unit that has the text of a language."""
    return None if dom is None else next(dom.iter("{*}seg"), dom)


def _archive(data: bytes, translate: Translate) -> bytes:
    """Translate the text of an OpenDocument, its headers and its footers."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(out, "w") as new:
        if sum(info.file_size for info in archive.infolist()) > MAX_UNPACKED:
            raise ValueError(f"expected at most {MAX_UNPACKED:,} bytes, got more")
        for info in archive.infolist():
            content = archive.read(info)
            if info.filename in PARTS:
                content = _html(content.decode(), translate).encode()
            new.writestr(info, content)
    return out.getvalue()


def translate_file(args: argparse.Namespace) -> None:
    """Translate a file, and say how many lines lack something."""
    if args.output.suffix.lower() != args.input.suffix.lower():
        raise UsageError(f"{args.output}: expected the ending of {args.input.name}")
    paths = args.model or [find_checkpoint(None)]
    first = find_checkpoint(paths[0])
    # Read the file before the model, which takes longer.
    data = args.input.read_bytes()
    name = args.input.name
    languages = language_codes(first)
    lines = file_lines(data, name, languages)
    say(f"minitransformer file: using {described(first)}")
    translator = load(
        *paths, device=args.device, threads=args.threads, glossary=args.glossary
    )
    flags = flags_of(args, DecodingConfig)
    config = TranslationConfig.changed(translator.decoding, flags)
    ranked = translator.hypotheses(lines, config)
    new = with_lines(data, name, languages, [best.text for best, *_ in ranked])
    write_bytes(args.output, new, replace=True)
    if lacking := sum(bool(best.missing) for best, *_ in ranked):
        say(f"minitransformer file: {lacking} of {len(ranked)} lines lack {LACKED}")


def main(arguments: Sequence[str]) -> int:
    parser = Command(
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
    add_model(parser)
    add_device(parser)
    add_arguments(parser, DecodingConfig)
    return parser.run(arguments, translate_file, kind="text")
