"""The kernels of a training step on this GPU, and what each takes.

    python benchmarks/profile_step.py
    python benchmarks/profile_step.py --shape big-25000 --kernels 60

PyTorch's profiler (CUPTI) records steps that CUDA graphs launch: it sees the kernels of
the whole process, also those of CuPy and cuBLAS, and each kernel of a graph.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import gpu as speed

from minitransformer.cli import exit_code

STEPS = 5


def kernel_table(events: Iterable[Any], steps: int, most: int) -> list[str]:
    """Return a line for each kernel that the profiler saw, the longest first."""
    times: dict[str, list[float]] = defaultdict(list)
    first, last = float("inf"), 0.0
    for event in events:
        if "cuda" in str(event.device_type).lower():
            span = event.time_range
            times[event.name].append(span.elapsed_us())
            first, last = min(first, span.start), max(last, span.end)
    lines = [f"{'kernel':<72}{'calls':>7}{'ms':>9}{'us each':>9}"]
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:most]:
        line = (
            f"{name[:71]:<72}{len(each) / steps:>7.0f}{sum(each) / 1e3 / steps:>9.3f}"
        )
        lines.append(f"{line}{sum(each) / len(each):>9.1f}")
    busy = sum(map(sum, times.values())) / 1e3 / steps
    whole = (last - first) / 1e3 / steps if times else 0.0
    return [*lines, f"a step {whole:.2f} ms, of which kernels take {busy:.2f} ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--shape", choices=speed.SHAPES, default="base-25000")
    add("--kernels", type=int, default=45, help="the most that are shown")
    args = parser.parse_args()
    from torch.profiler import ProfilerActivity, profile

    asked = argparse.Namespace(shape=args.shape, side="ours", device="cuda")
    step, wait = speed.ours(asked)
    for number in range(4):  # kernels are compiled, graphs recorded and replayed
        step(number)
    wait()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for number in range(4, 4 + STEPS):
            step(number)
        wait()
    print("\n".join(kernel_table(found.events(), STEPS, args.kernels)))


if __name__ == "__main__":
    sys.exit(exit_code("profile_step.py", main))
