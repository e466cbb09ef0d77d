"""Files that commands write line by line, and a bar for those who wait."""

from __future__ import annotations

import gzip
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from minitransformer.settings.options import UsageError
from minitransformer.system.files import atomic_write
from minitransformer.text.lines import read_lines


@contextmanager
def open_output(path: Path | None) -> Iterator[TextIO]:
    """Open standard output, or a file that appears once it is complete.

    It is compressed if its name ends in .gz, always to the same bytes.

    Raises: ValueError if standard output is closed, OSError naming what cannot be
    written.
    """
    if path is not None:
        if path.is_dir():
            raise ValueError(f"expected a file to write, got the folder {path}")
        with ExitStack() as stack:
            file = stack.enter_context(atomic_write(path))
            if path.suffix == ".gz":
                packed = gzip.GzipFile("", "wb", fileobj=file, mtime=0)
                file = cast(BinaryIO, stack.enter_context(packed))
            text = io.TextIOWrapper(file, encoding="utf-8", newline="\n")
            yield text
            text.detach()
        return
    if sys.stdout is None:
        raise ValueError("standard output: expected an open file, it is closed")
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
    yield sys.stdout
    sys.stdout.flush()


@contextmanager
def progress_bar(
    source: Path | None, output: Path | None
) -> Iterator[Callable[[int], object]]:
    """Yield a function that shows how many more lines of a file are done.

    The bar is for people who wait: there is none unless standard error is a terminal,
    nor where the output appears on the terminal or the source is no file.
    """
    waits = sys.stderr is not None and sys.stderr.isatty()
    if output is None and sys.stdout is not None and sys.stdout.isatty():
        waits = False
    if not waits or source is None or not source.is_file():
        yield lambda lines: None
        return
    from tqdm import tqdm  # here, since most commands are to start without delay

    with tqdm(total=sum(1 for _ in read_lines(source)), unit=" lines") as bar:
        yield bar.update


def refuse_overwriting_inputs(
    name: str, output: Path | None, *read: Path | None
) -> None:
    """Raises: UsageError if an output is a file that is read, by whatever name.

    `name` is what the command calls its output.
    """
    if output is not None and os.path.isfile(output):  # a terminal may be both
        sources = {os.path.realpath(path) for path in read if path}
        if os.path.realpath(output) in sources:
            raise UsageError(f"{name}: expected no file that is read, got {output}")
