"""Say what is about to take long."""

from __future__ import annotations

import sys
from contextlib import suppress


def announce(task: str, is_long: bool) -> None:
    """Say which task begins, if it may take more than two seconds."""
    if is_long:
        from tqdm import tqdm  # here, since most commands are to start without delay

        with suppress(OSError):  # the terminal may be gone
            tqdm.write(f"{task} ...", file=sys.stderr)  # above any progress bar
