"""What people wait for is said when it begins."""

from __future__ import annotations

import sys


def announce(what: str, is_long: bool) -> None:
    """Say what is about to be done, if it may take more than two seconds."""
    if is_long and sys.stderr is not None:
        from tqdm import tqdm  # here, since most commands are to start without delay

        tqdm.write(f"{what} ...", file=sys.stderr)  # above any progress bar
