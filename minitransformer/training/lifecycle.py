"""What keeps a run safe: signals that stop it, and its log."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from tqdm import tqdm

from minitransformer.runs.run_directory import RunDirectory

# The signals that ask a training to save and stop; SIGHUP says that a terminal closed.
# Windows has SIGBREAK (Ctrl-Break), which alone reaches a process in another group.
HANGUP = getattr(signal, "SIGHUP", None)
BREAK = getattr(signal, "SIGBREAK", None)
STOP_SIGNALS = tuple(s for s in (HANGUP, BREAK, signal.SIGINT, signal.SIGTERM) if s)


@contextmanager
def stop_signals_handled(handle: Callable[[int], None]) -> Iterator[None]:
    """Call `handle(number)` for each of the stop signals that arrives.

    A SIGHUP that is ignored, as under nohup, stays so.
    """

    def handler(number: int, frame: FrameType | None) -> None:
        handle(number)

    heeded = [
        number
        for number in STOP_SIGNALS
        if number != HANGUP or signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def end_at_second_signal() -> None:
    """Let SIGINT and SIGTERM end this process at once, and ignore SIGHUP.

    A terminal that closes may send SIGHUP twice.
    """
    for number in STOP_SIGNALS:
        ignored = number == HANGUP
        signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)


def logger(run: RunDirectory, is_first: bool) -> Callable[[str], None]:
    """Return a function that prints a line and appends it to the run's log.

    Rank 0, which `is_first`, alone writes; the line appears above the progress bar.
    """

    def log(line: str) -> None:
        if is_first:
            if sys.stdout is not None:  # None if it was closed
                tqdm.write(line, file=sys.stdout)
                sys.stdout.flush()
            run.append(run.path / "train.log", line)

    return log
