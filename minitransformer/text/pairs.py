"""Parallel text: two files whose lines are translations of each other, or one file."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from minitransformer.system.announce import announce
from minitransformer.text.bilingual import Bilingual, Pair, read_bilingual
from minitransformer.text.lines import open_output, open_text, read_lines, require_file

# Making a vocabulary or batches of a text of this size, in bytes, takes some seconds.
LARGE = 500_000


@dataclass(frozen=True)
class TextPair:
    """Parallel text: two files whose lines are translations of each other.

    A file that has both sides, such as .tmx, is the source and the target.
    """

    source: Path
    target: Path

    def __str__(self) -> str:
        return f"{self.source}, {self.target}"

    @property
    def paths(self) -> Pair:
        """The absolute paths of the source and of the target."""
        return str(self.source.absolute()), str(self.target.absolute())

    @property
    def languages(self) -> Pair:
        """The endings of both names, such as en and de, or what a file says itself."""
        if self.source == self.target:
            return _bilingual(self.source, file_digest(self.source))[1]
        source, target = (Path(x.removesuffix(".gz")).suffix[1:] for x in self.paths)
        return source, target

    @property
    def is_large(self) -> bool:
        """Whether there is so much text that people wait for its vocabulary or ids."""
        sizes = (os.path.getsize(path) for path in (self.source, self.target))
        return sum(sizes) > LARGE

    def digest(self) -> str:
        """Return a digest of the content, independent of the names of the files."""
        total = hashlib.blake2b(digest_size=16)
        for path in (self.source, self.target):
            total.update(file_digest(path))
        return total.hexdigest()

    def lines(self) -> Iterator[Pair]:
        """Yield the pairs of lines. Raises: ValueError if one file has more lines."""
        if self.source == self.target:
            yield from _bilingual(self.source, file_digest(self.source))[0]
            return
        source = read_lines(self.source)
        target = read_lines(self.target)
        for number, (s, t) in enumerate(itertools.zip_longest(source, target)):
            if s is None or t is None:
                total = number + 1 + sum(1 for _ in itertools.chain(source, target))
                files = (self.source, self.target)
                shorter, longer = files if s is None else reversed(files)
                raise ValueError(
                    f"expected as many lines in {shorter} as in {longer}, got {number} "
                    f"and {total}"
                )
            yield s, t


def file_digest(path: Path) -> bytes:
    """Return a digest of a file, read again only if its size or time has changed."""
    state = os.stat(path)
    return _digest(path, (state.st_ino, state.st_size, state.st_mtime_ns))


@functools.lru_cache(maxsize=64)
def _digest(path: Path, version: tuple[int, ...]) -> bytes:
    """Return the digest of a file. It is cached for each version of the file."""
    digest = hashlib.blake2b(digest_size=16)
    announce(f"reading {path}", version[1] > 100 * LARGE)
    with open_text(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.digest()


@functools.lru_cache(maxsize=4)
def _bilingual(path: Path, version: bytes) -> Bilingual:
    """Read a file of both sides. It is cached for each version of the file."""
    return read_bilingual(path)


def text_pairs(files: Mapping[str, Sequence[str]]) -> dict[str, TextPair]:
    """Return the pair of files of each split, from their (source, target) names.

    Raises: as `require_file`; ValueError if the target is the source by another name.
    """
    for source, target in files.values():
        for path in (source, target):
            require_file(Path(path))
        if source != target and os.path.samefile(source, target):
            raise ValueError(f"{target}: expected a target, got the source {source}")
    return {split: TextPair(Path(s), Path(t)) for split, (s, t) in files.items()}


def write_pairs(pairs: Iterable[Pair], source: Path, target: Path) -> int:
    """Write the lines of two files, plain or .gz; return the number of pairs."""
    count = 0
    with open_output(source) as sources, open_output(target) as targets:
        for one, other in pairs:
            sources.write(f"{one}\n")
            targets.write(f"{other}\n")
            count += 1
    return count


def check_files(output: Path | None, source: Path | None, *others: Path | None) -> None:
    """Check that all files are text and have as many lines as the source.

    Pipes are left alone. A source with no file beside it is read if there is an output
    file: an error in the last line would come after all the work.

    Raises: ValueError if a file has more lines or is not text; OSError if it cannot be
    read.
    """
    # What is read from a pipe is gone, so pipes are not compared.
    pipes = [x for x in (source, *others) if x and (x.is_fifo() or x.is_char_device())]
    compared = [path for path in others if path and path not in (source, *pipes)]
    if source in pipes:
        source = None
    if source and output and not compared:
        deque(read_lines(source), maxlen=0)
    for path in compared:
        lines = TextPair(source, path).lines() if source else read_lines(path)
        deque(lines, maxlen=0)
