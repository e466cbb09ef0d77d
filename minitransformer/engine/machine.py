"""The processor and its memory: cores, threads of matrix products, the allocator."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from contextlib import AbstractContextManager
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


def one_blas_thread() -> AbstractContextManager[Any]:
    """Limit each matrix product to one thread until the returned context ends.

    The limit is for a process whose threads each compute matrix products of their own.
    """
    return _blas().limit(limits=1)


def num_cores() -> int:
    """Return how many processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
