"""What all benchmarks share: sides in processes of their own, medians and ratios."""

from __future__ import annotations

import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy  # noqa: F401  (loads the library that `blas_in_use` describes)
import threadpoolctl

from minitransformer.backends.devices import open_kernels

Result = dict[str, Any]  # what a side prints as JSON


def peak_memory_mb() -> float:
    """Return the peak resident memory of this process.

    On Linux `ru_maxrss` includes the parent's peak, so the kernel's own count is read.
    """
    if (status := Path("/proc/self/status")).exists():
        peak = next(x for x in status.read_text().split("\n") if x.startswith("VmHWM"))
        return int(peak.split()[1]) / 1024
    resource = importlib.import_module("resource")  # which Windows has not
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / (1024 * 1024 if sys.platform == "darwin" else 1024)


@contextmanager
def watched_memory() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the peak memory inside the block so far, in MB.

    It is the peak of this process, or the highest sum of this process and those that it
    has forked, if that is higher. Shared memory counts once. A look may take tens of
    milliseconds, because the kernel visits every page. Therefore there are at most ten
    a second, and they take 1% of the time.
    """
    # Another thread looks at the memory until the block ends.
    highest = 0.0
    ended = threading.Event()

    def watch() -> None:
        nonlocal highest
        pause = 0.1
        while not ended.wait(pause):
            started = time.perf_counter()
            if children := forked_processes():
                sizes = map(proportional_memory_mb, [os.getpid(), *children])
                highest = max(highest, sum(sizes))
            pause = max(0.1, 100 * (time.perf_counter() - started))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield lambda: max(highest, peak_memory_mb())
    finally:
        ended.set()
        watcher.join()


def forked_processes() -> list[int]:
    """Return the ids of this process's children, on Linux."""
    lists = Path("/proc/self/task").glob("*/children")
    return [int(word) for path in lists for word in path.read_text("ascii").split()]


def proportional_memory_mb(process: int) -> float:
    """Return the memory of a process, with its share of the memory of several."""
    try:
        rollup = Path(f"/proc/{process}/smaps_rollup").read_text("ascii")
    except OSError:  # it has ended
        return 0.0
    size = next(x for x in rollup.splitlines() if x.startswith("Pss:"))
    return int(size.split()[1]) / 1024


def run_side(script: str, arguments: Sequence[str]) -> Result:
    """Run `script` with `arguments`, and read the JSON of its last line."""
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed with code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def alternate(
    script: str, sides: Sequence[str], arguments: Sequence[str], rounds: int
) -> dict[str, list[Result]]:
    """Run each side `rounds` times with `--side`, in alternating order."""
    results: dict[str, list[Result]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides:
            print(f"round {number + 1}/{rounds}: {side}", file=sys.stderr)
            results[side].append(run_side(script, [*arguments, "--side", side]))
    return results


def medians(results: Sequence[Result]) -> Result:
    return {
        key: round(statistics.median(result[key] for result in results), 4)
        for key in results[0]
    }


def ratio(
    ours: Sequence[Result], theirs: Sequence[Result], key: str
) -> dict[str, float]:
    """Return the median, least and greatest of the ratios within a round."""
    ratios = [a[key] / b[key] for a, b in zip(ours, theirs, strict=True)]
    return {
        "median": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "greatest": round(max(ratios), 3),
    }


def processor() -> str:
    """Return the processor's name and its instructions for fast matrix products."""
    if not (cpuinfo := Path("/proc/cpuinfo")).exists():
        return platform.processor() or platform.machine()
    # The fields of the last processor; all are alike.
    lines = (line.partition(":") for line in cpuinfo.read_text().split("\n"))
    fields = {name.strip(): value.strip() for name, _, value in lines}
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    flags = set(fields.get("flags", "").split())
    instructions = ", ".join(name for name in wanted if name in flags)
    return f"{fields.get('model name', platform.machine())} ({instructions})"


def can_compute_in(precision: str) -> bool:
    """Whether this engine has oneDNN's products of a precision on this processor."""
    try:
        open_kernels(precision)
    except RuntimeError:
        return False
    return True


def blas_in_use() -> str:
    """Return the library of NumPy's matrix products, and the kernels that it chose.

    OpenBLAS chooses kernels by the processor, or by OPENBLAS_CORETYPE. A processor with
    AVX-512 is half as fast with kernels that do not use it.
    """
    # SciPy and others may load further libraries: only NumPy's counts.
    used = threadpoolctl.ThreadpoolController().select(user_api="blas").info()
    return ", ".join(
        f"{blas['internal_api']} {blas['version']} {blas.get('architecture', '')}"
        for blas in used
        if "numpy" in blas["filepath"]
    )


def report(benchmark: str, **values: object) -> None:
    """Print the result as JSON, with the machine it comes from."""
    machine = (
        f"{platform.machine()} {platform.system()} Python {platform.python_version()}"
    )
    described = {
        "benchmark": benchmark,
        "machine": machine,
        "processor": processor(),
        "numpy_products": blas_in_use(),
    }
    print(json.dumps({**described, **values}, indent=2))
