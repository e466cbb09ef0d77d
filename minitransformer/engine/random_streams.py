"""Random streams for dropout, each of which is identified by a key of integers.

Keys such as (seed, step, part) make the noise of each training step independent of
everything drawn before, so that resuming a run needs no generator state.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from minitransformer.engine.backend import Array


class RandomStream(Protocol):
    """A source of dropout masks."""

    def keep_mask(self, shape: tuple[int, ...], rate: float) -> tuple[Array, float]:
        """Draw a dropout mask, which is True for kept elements, and their factor.

        Elements are dropped independently of each other with probability `rate`. The
        factor is the inverse of the probability that an element is kept.
        """
        ...


class HostStream:
    """A stream of NumPy's SFC64 generator, for arrays on the processor.

    One random byte for each element drops a share of t/256, the largest such share that
    is not above the rate. A Poisson process then drops what is missing: if the number
    of hits has mean m x size, and every hit is at a random element, each element is
    spared with probability exp(-m), independently of the others.
    """

    def __init__(self, key: tuple[int, ...]) -> None:
        self._generator = np.random.Generator(np.random.SFC64(key))

    def keep_mask(self, shape: tuple[int, ...], rate: float) -> tuple[Array, float]:
        size = math.prod(shape)
        words = self._generator.integers(2**64, size=(size + 7) // 8, dtype=np.uint64)
        threshold = int(256 * rate)
        keep = words.view(np.uint8)[:size] >= threshold
        mean = size * math.log((1 - threshold / 256) / (1 - rate))
        hits = self._generator.random(self._generator.poisson(mean))
        keep[(size * hits).astype(np.intp)] = False
        return keep.reshape(shape), 1 / (1 - rate)
