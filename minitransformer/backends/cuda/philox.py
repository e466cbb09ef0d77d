"""Dropout masks on a GPU, which are never stored, and the generator of their numbers.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011)
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import NamedTuple

import numpy as np

from minitransformer.backends.cuda import device
from minitransformer.engine.backend import Array, array_module

# Random 16-bit numbers that Philox computes from one value of its counter.
NUMBERS_PER_COUNTER = 8


class PhiloxStream:
    """A `RandomStream` of Philox's counter-based generator, for arrays on a GPU.

    A random 16-bit number decides each element, so rates are multiples of 1/65,536.
    `seed` is an array on the device and `take` hands out counters. A kernel computes
    the same numbers again wherever it needs them, and a replayed CUDA graph draws new
    noise once the seed has changed.
    """

    def __init__(self, key: tuple[int, ...], xp: ModuleType) -> None:
        self._xp = xp
        self.seed = xp.empty(1, dtype=np.uint64)
        self.reseed(key)

    def reseed(self, key: tuple[int, ...]) -> None:
        """Start the stream of another key, in the same `seed` array."""
        state = np.random.SeedSequence(key).generate_state(1, np.uint64)
        self.seed[...] = self._xp.asarray(state)
        self._taken = 0

    def take(self, shape: tuple[int, ...]) -> int:
        """Reserve the counters of a mask and return the first of them.

        Every row of the last axis starts with a counter of its own.
        """
        first = self._taken
        self._taken += math.prod(shape[:-1]) * counters_per_row(shape[-1])
        return first

    def keep_mask(self, shape: tuple[int, ...], rate: float) -> tuple[Array, float]:
        mask = draw_mask(shape, rate, self)
        kept = drop(self._xp.ones(shape, np.float32), mask)
        return kept > 0, 65_536 / (65_536 - mask.threshold)


class DropoutMask(NamedTuple):
    """A dropout mask as kernels take it; each computes the random numbers again.

    `seed` is an array on the GPU, and `first` the first counter of Philox. Threshold 0
    means no dropout.
    """

    seed: Array
    first: np.uint64
    threshold: int


def draw_mask(
    shape: tuple[int, ...], rate: float, rng: PhiloxStream | None
) -> DropoutMask:
    """Reserve the counters of a mask for rows of the last axis."""
    if rng is None or rate <= 0:
        return DropoutMask(None, np.uint64(0), 0)
    return DropoutMask(rng.seed, np.uint64(rng.take(shape)), dropout_threshold(rate))


def dropout_threshold(rate: float) -> int:
    """Return the 16-bit number below which an element is dropped: 65,536 x `rate`."""
    return min(round(rate * 65_536), 65_535)


def counters_per_row(width: int) -> int:
    """Return how many counters a row of `width` elements takes."""
    return -(-width // NUMBERS_PER_COUNTER)


def drop(x: Array, mask: DropoutMask) -> Array:
    """Return a contiguous array: x, or a copy with the dropped elements set to 0."""
    rows = device.rows_of(x)
    if mask.threshold:
        rows, dropped_from = array_module(x).empty_like(rows), rows
        device.current().launch(
            "dropout",
            x.dtype,
            device.warp_blocks(len(rows)),
            rows,
            dropped_from,
            *device.size_of(rows),
            *mask,
        )
    return rows.reshape(x.shape)
