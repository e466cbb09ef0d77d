"""How users call the two scripts, and how Ctrl-C ends them while they start."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

# The scripts of a source tree; from a wheel they are commands of `minitransformer`.
SCRIPTS = re.compile(r"(?<![\w/.-])(?:python )?(train|translate)\.py\b")
IN_TREE = Path(__file__).parents[2].joinpath("train.py").is_file()


def as_installed(text: str) -> str:
    """Return text for users with the scripts called as they are called here."""
    return text if IN_TREE else SCRIPTS.sub(r"minitransformer \1", text)


def end_on_interrupt() -> None:
    """Let Ctrl-C end a script at once, with one line, while it loads its modules."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, now that there is work to put away."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: object) -> None:
    os.write(2, f"{os.path.basename(sys.argv[0])}: error: interrupted\n".encode())
    os._exit(130)
