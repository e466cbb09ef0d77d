"""Text files: lines of UTF-8, plain or .gz, that only a line feed ends."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import os
import select
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from minitransformer.settings.config import TextConfig


def open_text(path: Path) -> BinaryIO:
    """Open a plain or gzip file for reading bytes."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path))
    return open(path, "rb")


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, plain or .gz, without their ends.

    Only a line feed ends a line; a carriage return before it and a byte-order mark at
    the start of the file are dropped.

    Raises: ValueError naming the file and line of text that is not UTF-8.
    """
    with open_text(path) as file:
        try:
            for number, raw in enumerate(file, start=1):
                yield decoded_line(raw.removesuffix(b"\n"), number, str(path))
        except (gzip.BadGzipFile, EOFError) as error:
            raise ValueError(f"{path}: expected a gzip file, got {error}") from None


def decoded_line(raw: bytes, number: int, place: str) -> str:
    """Decode line `number` (from 1) of the text that `place` names."""
    if number == 1:
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        return raw.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place}, line {number}: expected UTF-8, got byte "
            f"{raw[error.start]:#04x} at position {error.start}"
        ) from None


def lines_as_they_come(descriptor: int, limit: int) -> Iterator[list[str]]:
    """Yield lists of at most `limit` lines from an open file, terminal or pipe.

    A list ends when no more is waiting to be read, so that somebody who types or a
    program at the other end gets an answer to each line.

    Raises: ValueError as `read_lines`.
    """
    waiting: list[str] = []
    rest, number, at_end = b"", 0, False
    while not at_end or waiting:
        ready = not waiting or bool(select.select([descriptor], [], [], 0)[0])
        if at_end or not ready or len(waiting) >= limit:
            yield waiting[:limit]
            waiting = waiting[limit:]
            continue
        block = os.read(descriptor, 1 << 16)
        *complete, rest = (rest + block).split(b"\n")
        at_end = not block
        if at_end and rest:
            complete.append(rest)
        for raw in complete:
            number += 1
            waiting.append(decoded_line(raw, number, "standard input"))


@dataclass(frozen=True)
class TextPair:
    """Two files whose lines are translations of each other."""

    source: Path
    target: Path

    def digest(self) -> str:
        """A digest of the content of both files, whatever their names."""
        total = hashlib.blake2b(digest_size=16)
        for path in (self.source, self.target):
            part = hashlib.blake2b(digest_size=16)
            with open_text(path) as file:
                while block := file.read(1 << 20):
                    part.update(block)
            total.update(part.digest())
        return total.hexdigest()

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield the pairs of lines. Raises: ValueError if one file is longer."""
        source, target = read_lines(self.source), read_lines(self.target)
        for number, (s, t) in enumerate(itertools.zip_longest(source, target)):
            if s is None or t is None:
                shorter, longer = self.source, self.target
                if s is not None:
                    shorter, longer = longer, shorter
                rest = 1 + sum(1 for _ in (target if s is None else source))
                raise ValueError(
                    f"expected as many lines in {shorter} as in {longer}, got {number} "
                    f"and {number + rest}"
                )
            yield s, t

    def first(self, limit: int | None = None) -> list[tuple[str, str]]:
        """Return the first `limit` pairs of lines, or all of them."""
        return list(itertools.islice(self.lines(), limit))


def text_pairs(files: Mapping[str, Sequence[str]]) -> dict[str, TextPair]:
    """Pair up the (source, target) files of each split.

    Raises: ValueError if one is not there.
    """
    for path in (path for pair in files.values() for path in pair):
        if not Path(path).is_file():
            raise ValueError(f"expected a text file, found none at {path}")
    return {split: TextPair(*map(Path, pair)) for split, pair in files.items()}


def find_text(config: TextConfig) -> dict[str, TextPair]:
    """Find the splits train, val and test among named files or in a folder.

    Raises: ValueError if there is no training text or a side of a split is missing.
    """
    if config.files:
        return text_pairs(config.files)
    folder, source, target = Path(config.data or ""), config.source, config.target
    if not folder.is_dir():
        raise ValueError(f"--data: expected a folder, found none at {folder}")
    found = {
        split: find_pair(folder, split, str(source), str(target))
        for split in ("train", "val", "test")
    }
    if found["train"] is None:
        raise ValueError(
            f"expected train.{source} and train.{target}, plain or .gz, found none in "
            f"{folder}"
        )
    return {split: pair for split, pair in found.items() if pair}


def find_pair(folder: Path, stem: str, source: str, target: str) -> TextPair | None:
    """Find `stem*.source` and `stem*.target` in a folder, plain or .gz.

    Raises: ValueError if only one side is there.
    """
    sides: list[dict[str, Path]] = []
    for language in (source, target):
        found: dict[str, Path] = {}
        for suffix in (f".{language}", f".{language}.gz"):
            for path in sorted(folder.glob(f"{stem}*{suffix}")):
                found.setdefault(path.name.removesuffix(suffix), path)
        sides.append(found)
    both = sorted(set(sides[0]) & set(sides[1]))
    if both:
        return TextPair(sides[0][both[0]], sides[1][both[0]])
    if sides[0] or sides[1]:
        there = next(iter([*sides[0].values(), *sides[1].values()]))
        missing = target if sides[0] else source
        raise ValueError(f"expected {stem}*.{missing} beside {there}, found none")
    return None
