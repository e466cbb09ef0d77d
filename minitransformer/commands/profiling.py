"""Profiling: where the time of a training step goes, by operation."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from threading import Lock
from typing import Any

from minitransformer.engine.autograd import Vjp, wrap_primitives
from minitransformer.engine.backend import Array
from minitransformer.training.optimizer import Optimizer
from minitransformer.training.parallel import ParallelModel


class Profile:
    """Times every primitive, forward and backward, and whatever `timed` wraps.

    `wait` is called before the clock is read, so that a GPU completes what is queued.
    Units: seconds, summed over threads
    """

    def __init__(self, wait: Callable[[], None] = lambda: None) -> None:
        self._wait = wait
        self._lock = Lock()
        self.calls = Counter[str]()
        self.seconds = defaultdict[str, float](float)

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wrap a function so that each call is counted under a name."""

        def wrapped(*args: Any, **options: Any) -> Any:
            self._wait()
            started = time.perf_counter()
            result = function(*args, **options)
            self._wait()
            seconds = time.perf_counter() - started
            with self._lock:
                self.calls[name] += 1
                self.seconds[name] += seconds
            return result

        return wrapped

    def wrap_primitive(
        self, name: str, body: Callable[..., tuple[Array, Vjp]]
    ) -> Callable[..., tuple[Array, Vjp]]:
        """Wrap a primitive's body and the vjp that it returns."""

        def wrapped(*arrays: Array, **options: Any) -> tuple[Array, Vjp]:
            out, vjp = self.timed(body, f"{name} forward")(*arrays, **options)
            return out, self.timed(vjp, f"{name} backward")

        return wrapped

    def table(self, steps: int, seconds: float) -> str:
        """Return a line for each operation, the longest time first.

        A line has calls and milliseconds a step and the share of a step. `seconds` is
        the wall time of all steps. The last lines are the part that no operation takes,
        and a whole step.
        """
        lines = [f"{'operation':<34}{'calls':>7}{'ms':>10}{'share':>9}"]
        longest = sorted(self.seconds.items(), key=lambda item: -item[1])
        rest = max(seconds - sum(self.seconds.values()), 0.0)
        for name, total in [*longest, ("everything else", rest)]:
            calls = f"{self.calls[name] / steps:.5}" if name in self.calls else ""
            ms, share = 1e3 * total / steps, total / seconds
            lines.append(f"{name:<34}{calls:>7}{ms:>10.2f}{share:>9.1%}")
        return "\n".join([*lines, f"{'a step':<41}{1e3 * seconds / steps:>10.2f}"])


def profile_updates(
    update: Callable[[], object], adam: Optimizer, parallel: ParallelModel, steps: int
) -> str:
    """Time `steps` updates, after a few to warm up, and return the table."""
    for _ in range(3):
        update()
    profile = Profile(parallel.synchronize)
    adam.step = profile.timed(adam.step, "adam")  # type: ignore[method-assign]
    with wrap_primitives(profile.wrap_primitive):
        started = time.perf_counter()
        for _ in range(steps):
            update()
        parallel.synchronize()
        seconds = time.perf_counter() - started
    return profile.table(steps, seconds)
