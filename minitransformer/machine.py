"""The processor and its memory: cores, threads of matrix products, the allocator."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path

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


class _BlasLimit:
    """Limits products to one thread while any thread is in a `with` block of it."""

    def __init__(self) -> None:
        self._lock, self._blocks = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._blocks:
                self._limit = _blas().limit(limits=1)
            self._blocks += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                self._limit.restore_original_limits()


_BLAS_LIMIT = _BlasLimit()


def one_blas_thread() -> AbstractContextManager[None]:
    """Limit each matrix product of this process to one thread inside the block.

    The limit is for threads that each compute matrix products of their own.
    """
    return _BLAS_LIMIT


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
