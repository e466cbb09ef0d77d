"""Dropout masks on a GPU, which are never stored."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from minitransformer.backends.cuda.philox import PhiloxStream, dropout_threshold
from minitransformer.engine.backend import Array


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
