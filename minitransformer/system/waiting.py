"""What people wait for is said when it begins."""

from __future__ import annotations

import sys
from contextlib import suppress


def announce(what: str, is_long: bool) -> None:
    """Say what is about to be done, if it may take more than two seconds."""
    if is_long:
        from tqdm import tqdm  # here, since most commands are to start without delay

        with suppress(OSError):  # the terminal may be gone
            tqdm.write(f"{what} ...", file=sys.stderr)  # above any progress bar
