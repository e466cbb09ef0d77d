"""The processor and its memory: cores, threads of matrix products, the allocator."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from threadpoolctl import ThreadpoolController


def tune_allocator() -> bool:
    """Make glibc keep freed memory for reuse, because new pages are slow to obtain.

    All threads then share one heap, because glibc returns the memory of further heaps
    to the system.

    Returns: whether the settings were accepted; without glibc nothing changes
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    m_trim_threshold, m_mmap_threshold, m_arena_max = -1, -3, -8
    # Older versions take at most 32 MiB. If glibc took neither, a trim threshold would
    # make it map every array above 128 KiB anew.
    mmap = mallopt(m_mmap_threshold, 1 << 30) or mallopt(m_mmap_threshold, 1 << 25)
    trim = mmap and mallopt(m_trim_threshold, (1 << 31) - 1)
    return bool(trim and mallopt(m_arena_max, 1))


@functools.cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


class _ThreadLimits:
    """The limits that are in force, of which the least counts."""

    def __init__(self) -> None:
        self._lock, self._limits = threading.Lock(), list[int]()
        self._blas_limit: Any = None

    @contextmanager
    def at_most(self, count: int) -> Iterator[None]:
        self._change(self._limits.append, count)
        try:
            yield
        finally:
            self._change(self._limits.remove, count)

    def _change(self, change: Callable[[int], None], count: int) -> None:
        with self._lock:
            change(count)
            if self._blas_limit is not None:
                self._blas_limit.restore_original_limits()
            least = min(self._limits, default=None)
            self._blas_limit = None if least is None else _blas().limit(limits=least)

    def least(self) -> int | None:
        return min(self._limits, default=None)


_THREAD_LIMITS = _ThreadLimits()


def limit_threads(count: int) -> AbstractContextManager[None]:
    """Limit each matrix product of this process to `count` threads inside the block.

    The limit of 1 is for processes that share the cores with others.
    """
    return _THREAD_LIMITS.at_most(count)


def product_threads() -> int:
    """Return how many threads a product by oneDNN has: as many as were asked for."""
    return _THREAD_LIMITS.least() or 1


def cores() -> set[int]:
    """Return the numbers of the processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def num_cores() -> int:
    """Return how many cores this process may use; a container may limit their time."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
        return min(len(cores()), math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no such file; or "max", which is no limit
        return len(cores())
