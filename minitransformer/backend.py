"""Arrays and the machine under them: libraries, devices, random bytes, memory.

Everything above this file calls the array library that its arrays belong to, which
`array_module` tells. Only this file, `cuda/` and NCCL know that CuPy exists.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
import os
import sys
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from threadpoolctl import ThreadpoolController

# A NumPy or a CuPy array. CuPy has no type stubs, so both are Any to the type checker.
Array: TypeAlias = Any


def array_module(array: Array) -> ModuleType:
    """Return the library (NumPy or CuPy) that `array` belongs to."""
    if isinstance(array, np.ndarray | np.generic):
        return np
    return importlib.import_module("cupy")


def device_module(device: str) -> ModuleType:
    """Return the array library of `cpu`, `cuda` or `cuda:N`, selecting GPU N.

    Raises: ValueError if the name is unknown, RuntimeError if there is no such GPU.
    """
    kind, _, index = device.partition(":")
    if device == "cpu":
        return np
    if kind != "cuda" or (index and not index.isdigit()):
        raise ValueError(f"expected a device cpu, cuda or cuda:N, got {device!r}")
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise RuntimeError(
            "device cuda needs CuPy: pip install 'minitransformer[cuda13]' "
            "(or [cuda12] for a CUDA 12 driver)"
        ) from error
    if not cupy.cuda.is_available():
        raise RuntimeError(
            "device cuda: no CUDA driver or no GPU was found (nvidia-smi lists both)"
        )
    count = cupy.cuda.runtime.getDeviceCount()
    if int(index or 0) >= count:
        raise RuntimeError(f"device {device}: expected cuda:0 to cuda:{count - 1}")
    cupy.cuda.Device(int(index or 0)).use()
    return cupy


def to_host(array: Array) -> np.ndarray:
    """Return `array` as a NumPy array, copied only if it lives on a GPU."""
    return array if isinstance(array, np.ndarray) else array.get()


def widened(array: Array) -> Array:
    """`array` in float32, if its numbers have 16 bits."""
    return array.astype(np.float32) if array.dtype.itemsize == 2 else array


def override(name: str, arrays: tuple[Array, ...]) -> Any:
    """Return the fused CUDA version of operation `name` for `arrays`, or None.

    There is none for NumPy arrays, nor where `cuda/ops.py` refuses these arrays.
    """
    if any(isinstance(array, np.ndarray) for array in arrays):
        return None
    return _fused().find(name, arrays)


@functools.cache
def _fused() -> ModuleType:
    return importlib.import_module("minitransformer.cuda.ops")


def philox(xp: ModuleType, seed: Array, first: int, count: int) -> Array:
    """Philox 4x32-10 (Salmon et al., 2011): 16 random bytes for each counter.

    Shapes: seed [1] uint64, counters first to first + count - 1 -> [count, 16] uint8
    """
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    counter = xp.arange(first, first + count, dtype=np.uint64)
    a, b = counter & low, counter >> half
    c, d = xp.zeros_like(a), xp.zeros_like(a)
    key_0, key_1 = seed & low, seed >> half
    for _ in range(10):
        p, q = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (q >> half) ^ b ^ key_0, q & low, (p >> half) ^ d ^ key_1, p & low
        key_0 = (key_0 + np.uint64(0x9E3779B9)) & low
        key_1 = (key_1 + np.uint64(0xBB67AE85)) & low
    return xp.stack([a, b, c, d], axis=1).astype(np.uint32).view(np.uint8)


def dropout_threshold(rate: float) -> int:
    """Below which random byte an element is dropped: `rate` in units of 1/256."""
    return min(round(rate * 256), 255)


class RandomStream:
    """Random bytes on the library's device, a function of the integers in `key`.

    Keys such as (seed, step, shard) make each training step's noise independent of what
    was drawn before, so that resuming needs no generator state. On a GPU the bytes are
    Philox's of `seed`, an array there, and of counters that `take` hands out: kernels
    compute them again wherever they need them, and a replayed graph meets a new seed.
    """

    def __init__(
        self, key: tuple[int, ...], xp: ModuleType = np, counters: bool | None = None
    ) -> None:
        self._xp = xp
        self._generator: Any = None
        if counters or (counters is None and xp is not np):
            self.seed = xp.empty(1, dtype=np.uint64)
            self.reseed(key)
        else:
            sequence = np.random.SeedSequence(key)
            self._generator = np.random.Generator(np.random.SFC64(sequence))

    def reseed(self, key: tuple[int, ...]) -> None:
        """Begin the stream of another key, in the same `seed` array."""
        state = np.random.SeedSequence(key).generate_state(1, np.uint64)
        self.seed[...] = self._xp.asarray(state)
        self._taken = 0

    def take(self, shape: tuple[int, ...]) -> int:
        """Reserve bytes for an array: the first counter of its mask.

        Every row of the last axis starts with a counter of its own.
        """
        first = self._taken
        self._taken += math.prod(shape[:-1]) * counters_per_row(shape[-1])
        return first

    def keep_mask(self, shape: tuple[int, ...], rate: float) -> tuple[Array, float]:
        """Draw a dropout mask: True where kept, and the factor for what is kept.

        One random byte decides an element, so `rate` is rounded to a multiple of
        1/256; the factor is the inverse of the keep probability that results.
        """
        threshold = dropout_threshold(rate)
        size = math.prod(shape)
        if self._generator is None:
            first = self.take(shape)
            drawn = philox(self._xp, self.seed, first, self._taken - first)
            rows = drawn.reshape(-1, 16 * counters_per_row(shape[-1]))
            random_bytes = rows[:, : shape[-1]]
        else:
            words = self._generator.integers(
                0, 2**64 - 1, size=(size + 7) // 8, dtype=np.uint64, endpoint=True
            )
            random_bytes = words.view(np.uint8)[:size]
        kept = random_bytes.reshape(shape) >= threshold
        return kept, 256 / (256 - threshold)


def counters_per_row(width: int) -> int:
    """How many counters of 16 bytes a row of `width` elements takes."""
    return (width + 15) // 16


def tune_allocator() -> bool:
    """Let glibc keep freed memory, so that large arrays do not fault in fresh pages.

    Returns whether it was done; elsewhere than on glibc nothing happens. All threads
    share one heap, because a thread's own heap would be returned to the system.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    m_trim_threshold, m_mmap_threshold, m_arena_max = -1, -3, -8
    settings = {
        m_mmap_threshold: 1 << 30,
        m_trim_threshold: (1 << 31) - 1,
        m_arena_max: 1,
    }
    accepted = [mallopt(name, value) for name, value in settings.items()]
    return all(accepted)


@functools.cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


def one_blas_thread() -> AbstractContextManager[Any]:
    """Keep matrix products to one thread each, where this engine's threads share work.

    Undone when the context ends; for all threads of the process.
    """
    return _blas().limit(limits=1)


def num_cores() -> int:
    """Return how many processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
