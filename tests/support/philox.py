"""Philox and its dropout masks in NumPy, to compare the kernels with."""

import numpy as np

from minitransformer.backends.cuda.philox import (
    NUMBERS_PER_COUNTER,
    PhiloxStream,
    counters_per_row,
    dropout_threshold,
)


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
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    counter = np.arange(first, first + count, dtype=np.uint64)
    a, b = counter & low, counter >> half
    c, d = np.zeros_like(a), np.zeros_like(a)
    key_0, key_1 = seed & low, seed >> half
    for _ in range(10):
        p, q = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (q >> half) ^ b ^ key_0, q & low, (p >> half) ^ d ^ key_1, p & low
        key_0 = (key_0 + np.uint64(0x9E3779B9)) & low
        key_1 = (key_1 + np.uint64(0xBB67AE85)) & low
    return np.stack([a, b, c, d], axis=1).astype(np.uint32).view(np.uint16)
