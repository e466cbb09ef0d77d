"""What people wait for is said when it begins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def waiting(what: str, is_long: bool = True) -> Iterator[None]:
    """Say what is waited for, if that may take more than two seconds.

    A terminal shows it for as long as it lasts; elsewhere it is a line.
    """
    if not is_long or sys.stderr is None:
        yield
    elif not sys.stderr.isatty():
        print(f"{what} ...", file=sys.stderr)
        yield
    else:
        from tqdm import tqdm  # here, since most commands are to start without delay

        with tqdm(desc=what, bar_format="{desc} ...", leave=False):
            yield
