"""Lines of UTF-8: read from files, plain or .gz, pipes and terminals, and written."""

from __future__ import annotations

import gzip
import io
import itertools
import os
import re
import select
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from minitransformer.system.files import atomic_write, name_errors

# The longest line that is read, in bytes. Cutting it into word pieces takes 60 to 120
# times as much memory.
MAX_LINE = 1 << 22


def require_file(path: Path) -> None:
    """Raises: FileNotFoundError if nothing is there, ValueError if it is no file."""
    if not path.exists():
        raise FileNotFoundError(f"expected a file, found none at {path}")
    if not path.is_file():
        kind = "folder" if path.is_dir() else "pipe, which can be read only once"
        raise ValueError(f"{path}: expected a file, got a {kind}")


@contextmanager
def open_text(path: Path) -> Iterator[BinaryIO]:
    """Open a file of bytes. If its name ends in .gz, they are decompressed."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            yield cast(BinaryIO, file)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: expected a gzip file, got {error}") from None
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, plain or .gz, without their ends.

    Only a line feed ends a line. A carriage return before it and a byte-order mark at
    the start of the file are dropped.

    Raises: ValueError naming the file, and the line if one is not UTF-8 or has more
    than MAX_LINE bytes.
    """
    with open_text(path) as file:
        lines = iter(lambda: file.readline(MAX_LINE + 1), b"")
        for number, raw in enumerate(lines, start=1):
            yield decode_line(raw.removesuffix(b"\n"), number, str(path))


def decode_line(raw: bytes, number: int, place: str) -> str:
    """Decode line `number` (from 1) of the text that `place` names."""
    if len(raw) > MAX_LINE:
        raise ValueError(
            f"{place}, line {number}: expected at most {MAX_LINE:,} bytes before a "
            "line feed, got more"
        )
    # A byte-order mark is no text, nor is the carriage return of a line end.
    if number == 1:
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        return raw.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place}, line {number}: expected UTF-8, got byte "
            f"{raw[error.start]:#04x} at position {error.start}"
        ) from None


def source_lines(
    sentences: Iterable[str], path: Path | None, limit: int
) -> Iterator[list[str]]:
    """Yield the lines of a file, or sentences, or standard input, in lists of `limit`.

    A list ends earlier after MAX_LINE characters, and when a terminal or a pipe has no
    more lines for now.
    """
    # Where a line is None, there are no more for now.
    lines: Iterable[str | None] = (
        sentence.replace("\n", " ") for sentence in sentences
    )
    if not sentences:
        lines = read_lines(path) if path else read_open_file(sys.stdin.fileno())
    # Collect lines until a list is full.
    taken = list[str]()
    size = 0
    for line in lines:
        if line is not None:
            taken.append(line)
            size += len(line)
        if taken and (line is None or len(taken) == limit or size > MAX_LINE):
            yield taken
            taken = []
            size = 0
    if taken:
        yield taken


def read_open_file(descriptor: int) -> Iterator[str | None]:
    """Yield the lines of an open file, and None whenever it has no more for now.

    So a person who types, or a program at the other end of a pipe, gets an answer to
    each line. Raises: ValueError as `read_lines`.
    """
    place = "standard input"
    numbers = itertools.count(1)
    rest = b""  # a line whose end has not been read yet
    with name_errors(Path(place)):
        while (block := os.read(descriptor, 1 << 16)) and len(rest) <= MAX_LINE:
            *complete, rest = (rest + block).split(b"\n")
            for raw in complete:
                yield decode_line(raw, next(numbers), place)
            if not select.select([descriptor], [], [], 0)[0]:
                yield None
    if rest:
        yield decode_line(rest, next(numbers), place)


# The mark of an item or a heading.
ITEM = re.compile(r"(?:[-*+•#|]|\d{1,3}[.)]|[a-z]\))\s")

# No text is broken to fit fewer characters.
NARROW = 40

# A word divided at the end of a line; "Vor- und Nachteile" has none.
HYPHEN = re.compile(r"(?<=[^\W\d_])-\n(?=(?!(?:and|or|und|oder|bis)\b)[a-zß-ÿ])")


def join_paragraphs(lines: Sequence[str]) -> list[str]:
    """Join the lines of each paragraph, where text was broken to fit a page.

    A blank line, a deeper indent, the item of a list or another depth of quotation
    begins a paragraph. A line ends it that is shorter than two thirds of the longest
    around, or short for any text: an address is none.

        We live near the vil-
        lage, which has a church,    We live near the village, which has a church,
        - a house with               - a house with trees
          trees                      - a bank
        - a bank
    """
    paragraphs = list[list[str]]()
    for _, group in itertools.groupby(lines, lambda line: not line.strip("> \t")):
        block = list(group)
        long = max(NARROW, *map(len, block)) * 2 / 3
        margin = text = ""
        for line in block:
            # The margin has the indent and any signs of quotation.
            last_margin, last = margin, text
            text = line.strip().lstrip("> \t")
            margin = line[: line.index(text)]
            # Does it go on with the last line, or hang below an item?
            deeper = len(margin) > len(last_margin)
            hangs = deeper and ITEM.match(last)
            divides = HYPHEN.search(f"{last}\n{text}")
            begins = deeper or len(last) < long or ITEM.match(text)
            alike = last and margin.count(">") == last_margin.count(">")
            if alike and (hangs or divides or not begins):
                paragraphs[-1].append(text)
            else:
                paragraphs.append([line.rstrip()])
    return [HYPHEN.sub("", "\n".join(x)).replace("\n", " ") for x in paragraphs]


def zip_lines(
    parts: Iterable[list[str]], path: Path | None
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield lists of lines, each with as many lines of the file at `path`.

    Without a file, these are blank. Raises: ValueError if it has more lines or fewer.
    """
    expected = f"{path}: expected a line for each source line"
    others = read_lines(path) if path else itertools.repeat("")
    count = 0
    for lines in parts:
        # Take as many lines of the file as there are in the list.
        beside = list(itertools.islice(others, len(lines)))
        if len(beside) < len(lines):
            raise ValueError(f"{expected}, got {count + len(beside)}")
        count += len(lines)
        yield lines, beside
    if path and next(others, None) is not None:
        raise ValueError(f"{expected}, got more than {count}")


# Writing


@contextmanager
def open_output(path: Path | None) -> Iterator[TextIO]:
    """Open standard output, or a file that appears once it is complete.

    A file whose name ends in .gz is compressed, always to the same bytes.

    Raises: OSError naming a file that cannot be written.
    """
    if path is not None:
        with ExitStack() as stack:
            file = stack.enter_context(atomic_write(path, replace=True))
            if path.suffix == ".gz":
                packed = gzip.GzipFile("", "wb", fileobj=file, mtime=0)
                file = cast(BinaryIO, stack.enter_context(packed))
            text = io.TextIOWrapper(file, encoding="utf-8", newline="\n")
            yield text
            text.detach()
        return
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
    yield sys.stdout
    sys.stdout.flush()


@contextmanager
def progress_bar(
    source: Path | None, unseen: Path | bool | None
) -> Iterator[Callable[[int], object]]:
    """Yield a function that adds to a bar how many more lines of a file are done.

    There is no bar unless standard error is a terminal and the source a file, nor if
    the output is seen on the terminal.
    """
    waits = sys.stderr.isatty() and (unseen or not sys.stdout.isatty())
    if not waits or source is None or not source.is_file():
        yield lambda lines: None
        return
    from tqdm import tqdm  # here, since most commands are to start without delay

    with tqdm(total=sum(1 for _ in read_lines(source)), unit=" lines") as bar:
        yield bar.update


def as_list_of_str(
    name: str, given: Iterable[str], count: int | None = None
) -> list[str]:
    """Return strings as a list.

    Raises: ValueError if they are none, or not one for each of `count` lines.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ValueError(f"expected a list of {name}, got {given!r}")
    strings = list(given)
    if others := [x for x in strings if not isinstance(x, str)]:
        raise ValueError(f"expected a list of {name}, got {others[0]!r} in it")
    if count is not None and len(strings) != count:
        raise ValueError(f"expected {name} for {count} lines, got {len(strings)}")
    return strings
