"""Philox and its dropout masks in NumPy, to compare the kernels with."""

import numpy as np

from minitransformer.backends.cuda.philox import (
    NUMBERS_PER_COUNTER,
    PhiloxStream,
    counters_per_row,
    dropout_threshold,
)

LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


class HostPhilox(PhiloxStream):
    """The stream of a key, for NumPy."""

    def __init__(self, key):
        super().__init__(key, np)

    def keep_mask(self, shape, rate):
        first = self.take(shape)
        drawn = philox(self.seed, first, self._taken - first)
        rows = drawn.reshape(-1, NUMBERS_PER_COUNTER * counters_per_row(shape[-1]))
        threshold = dropout_threshold(rate)
        keep = rows[:, : shape[-1]].reshape(shape) >= threshold
        return keep, 65_536 / (65_536 - threshold)


def philox(seed, first, count):
    """Compute Philox 4x32-10: 8 random numbers for each counter.

    Shapes: seed [1] uint64, counters first to first + count - 1 -> [count, 8] uint16
    """
    counter = np.arange(first, first + count, dtype=np.uint64)
    zeros = np.zeros_like(counter)
    words = philox_4x32_10(
        (counter & LOW, counter >> HALF, zeros, zeros), (seed & LOW, seed >> HALF)
    )
    return np.stack(words, axis=1).astype(np.uint32).view(np.uint16)


def philox_4x32_10(counter, key):
    """Salmon et al. (2011), with 32-bit words in uint64: 10 rounds, 2 keys."""
    (a, b, c, d), (k, h) = counter, key
    for _ in range(10):
        p, q = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (q >> HALF) ^ b ^ k, q & LOW, (p >> HALF) ^ d ^ h, p & LOW
        k, h = (k + np.uint64(0x9E3779B9)) & LOW, (h + np.uint64(0xBB67AE85)) & LOW
    return a, b, c, d
