"""Where the time of a training step goes, by operation."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

from minitransformer.engine.autograd import Vjp, observed
from minitransformer.engine.backend import Array
from minitransformer.training.optimizer import Optimizer
from minitransformer.training.parallel import ParallelModel


@dataclass
class Entry:
    """Calls of an operation in one direction, their seconds and operations."""

    calls: int = 0
    seconds: float = 0.0
    flops: float = 0.0


class Profile:
    """Times every primitive, forward and backward, and whatever `timed` wraps.

    Threads add up: divide by their number for the share of a step. `wait` is called
    before the clock is read: on a GPU it waits for what is in work.
    """

    def __init__(self, wait: Callable[[], None] = lambda: None) -> None:
        self._wait = wait
        self.entries: defaultdict[tuple[str, str], Entry] = defaultdict(Entry)
        self._lock = Lock()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its calls are counted under `name`."""

        def wrapped(*args: Any, **options: Any) -> Any:
            return self._time((name, ""), 0.0, function, *args, **options)

        return wrapped

    def observe(
        self, name: str, body: Callable[..., tuple[Array, Vjp]]
    ) -> Callable[..., tuple[Array, Vjp]]:
        """Wrap a primitive's body and the vjp that it returns."""

        def wrapped(*arrays: Array, **options: Any) -> tuple[Array, Vjp]:
            forward, backward = operations(name, arrays, options)
            out, vjp = self._time((name, "forward"), forward, body, *arrays, **options)

            def timed_vjp(g: Array) -> tuple[Array | None, ...]:
                return self._time((name, "backward"), backward, vjp, g)

            return out, timed_vjp

        return wrapped

    def _time(
        self,
        key: tuple[str, str],
        flops: float,
        function: Callable[..., Any],
        *args: Any,
        **options: Any,
    ) -> Any:
        self._wait()
        started = time.perf_counter()
        result = function(*args, **options)
        self._wait()
        seconds = time.perf_counter() - started
        with self._lock:
            entry = self.entries[key]
            entry.calls += 1
            entry.seconds += seconds
            entry.flops += flops
        return result

    def table(self, steps: int, seconds: float, num_threads: int) -> str:
        """Lines by time: calls and milliseconds a step, share, GFLOP/s of a thread.

        `seconds` is the wall time of the steps; what no line explains comes last.
        Calls run by several threads at once count as one by the share that each takes.
        """
        rows, explained = [], 0.0
        for (name, phase), entry in self.entries.items():
            wall = entry.seconds / (num_threads if phase else 1)
            explained += wall
            speed = entry.flops / entry.seconds / 1e9 if entry.flops else None
            rows.append((f"{name} {phase}".strip(), entry.calls / steps, wall, speed))
        rows.sort(key=lambda row: -row[2])
        rows.append(("everything else", 0, max(seconds - explained, 0.0), None))
        lines = [
            f"{'operation':<34}{'calls':>7}{'ms':>10}{'share':>9}{'GFLOP/s':>10}",
            *(
                f"{name:<34}{calls or '':>7.5}{1e3 * wall / steps:>10.2f}"
                f"{wall / seconds:>9.1%}{(speed and f'{speed:.1f}') or '':>10}"
                for name, calls, wall, speed in rows
            ),
            f"{'a step':<41}{1e3 * seconds / steps:>10.2f}",
        ]
        return "\n".join(lines)


def operations(
    name: str, arrays: tuple[Array, ...], options: dict[str, Any]
) -> tuple[float, float]:
    """Floating-point operations of a primitive's matrix products, there and back."""
    if name == "linear":
        x, weight = arrays[:2]
        flops = 2.0 * x.size * weight.shape[1]
        return flops, 2 * flops
    if name == "attention":
        q, k, v = arrays[:3]
        flops = 2.0 * q.shape[1] * (k.size + v.size)
        return flops, 2 * flops
    if name == "restricted_attention":
        q, k, v = arrays[:3]
        seen = min(k.shape[1], options["before"] + 1 + options["after"])
        flops = 2.0 * seen * (k.size + v.size)
        return flops, 2 * flops
    if name == "projected_cross_entropy":
        x, weight, targets = arrays[:3]
        used = int((targets != options["padding_id"]).sum())
        return 3 * 2.0 * used * weight.size, 0.0  # the gradient comes with the loss
    return 0.0, 0.0


def profile_updates(
    update: Callable[[], None], adam: Optimizer, parallel: ParallelModel, steps: int
) -> str:
    """Run an update `steps` times, after a few to warm up, and return the table."""
    for _ in range(3):
        update()
    profile = Profile(parallel.synchronize)
    adam.step = profile.timed("adam", adam.step)  # type: ignore[method-assign]
    with observed(profile.observe):
        started = time.perf_counter()
        for _ in range(steps):
            update()
        parallel.synchronize()
        seconds = time.perf_counter() - started
    return profile.table(steps, seconds, parallel.num_threads)
