"""Profiling: where the time of a training step goes, by operation."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

from minitransformer.engine.autograd import Vjp, wrap_primitives
from minitransformer.engine.backend import Array
from minitransformer.training.optimizer import Optimizer
from minitransformer.training.parallel import ParallelModel


@dataclass
class Entry:
    """The calls of one operation in one direction, with their time and work.

    `flops` counts floating-point operations; `seconds` are summed over threads.
    """

    calls: int = 0
    seconds: float = 0.0
    flops: float = 0.0


class Profile:
    """Times every primitive, forward and backward, and whatever `timed` wraps.

    `wait` is called before the clock is read, so that a GPU completes what is queued.
    `entries` are by name and direction, which is empty for what is no primitive.
    """

    def __init__(self, wait: Callable[[], None] = lambda: None) -> None:
        self._wait = wait
        self.entries: defaultdict[tuple[str, str], Entry] = defaultdict(Entry)
        self._lock = Lock()

    def timed(
        self,
        function: Callable[..., Any],
        name: str,
        direction: str = "",
        flops: float = 0.0,
    ) -> Callable[..., Any]:
        """Wrap a function so that each call is counted under a name and direction."""

        def wrapped(*args: Any, **options: Any) -> Any:
            self._wait()
            started = time.perf_counter()
            result = function(*args, **options)
            self._wait()
            seconds = time.perf_counter() - started
            with self._lock:
                entry = self.entries[name, direction]
                entry.calls += 1
                entry.seconds += seconds
                entry.flops += flops
            return result

        return wrapped

    def wrap_primitive(
        self, name: str, body: Callable[..., tuple[Array, Vjp]]
    ) -> Callable[..., tuple[Array, Vjp]]:
        """Wrap a primitive's body and the vjp that it returns."""

        def wrapped(*arrays: Array, **options: Any) -> tuple[Array, Vjp]:
            forward, backward = operations(name, arrays, options)
            timed_body = self.timed(body, name, "forward", forward)
            out, vjp = timed_body(*arrays, **options)
            return out, self.timed(vjp, name, "backward", backward)

        return wrapped

    def table(self, steps: int, seconds: float) -> str:
        """Return a line for each operation, the longest time first.

        A line has calls and milliseconds a step, the share of a step, and GFLOP/s.
        `seconds` is the wall time of all steps. The last lines are the part that no
        operation takes, and a whole step.
        """
        rows, explained = [], 0.0
        for (name, phase), entry in self.entries.items():
            wall = entry.seconds
            explained += wall
            speed = entry.flops / wall / 1e9 if entry.flops else None
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
    """Count a primitive's floating-point operations in matrix products.

    Returns: those of the forward and of the backward pass
    """
    if name == "linear":
        x, weight = arrays[:2]
        flops = 2.0 * x.size * weight.shape[1]
    elif name == "attention":
        q, k, v = arrays[:3]
        flops = 2.0 * q.shape[1] * (k.size + v.size)
    elif name == "restricted_attention":
        q, k, v = arrays[:3]
        keys = min(k.shape[1], options["before"] + 1 + options["after"])
        flops = 2.0 * keys * (k.size + v.size)
    elif name == "projected_cross_entropy":
        x, weight, targets = arrays[:3]
        used = int((targets != options["padding_id"]).sum())
        return 3 * 2.0 * used * weight.size, 0.0  # its forward computes the gradient
    else:
        flops = 0.0
    return flops, 2 * flops


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
