"""The processor and its memory: cores, and the allocator."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from pathlib import Path


def tune_allocator() -> None:
    """Make glibc keep freed memory for reuse, because new pages are slow to obtain.

    All threads then share one heap, because glibc returns the memory of further heaps
    to the system.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library
        return
    m_trim_threshold = -1
    m_mmap_threshold = -3
    m_arena_max = -8
    # Older versions take at most 32 MiB. If glibc took neither, a trim threshold would
    # make it map every array above 128 KiB anew.
    if mallopt(m_mmap_threshold, 1 << 30) or mallopt(m_mmap_threshold, 1 << 25):
        mallopt(m_trim_threshold, (1 << 31) - 1)
        mallopt(m_arena_max, 1)


def cores() -> set[int]:
    """Return the numbers of the processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def multiplies_bf16_fast(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor has AMX, or AVX-512 BF16 by AMD (docs/flags.md)."""
    try:
        known = cpuinfo.read_text("ascii", "ignore")
    except OSError:  # another system than Linux
        return False
    return "amx_bf16" in known or ("AuthenticAMD" in known and "avx512_bf16" in known)


def num_cores() -> int:
    """Return how many cores this process may use; a container may limit their time."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
        return min(len(cores()), math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no such file; or "max", which is no limit
        return len(cores())
