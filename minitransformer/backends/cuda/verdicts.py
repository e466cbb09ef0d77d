"""Whether a faster path gives on this GPU what the plain one gives.

What no test has run on a device does not decide a result there by itself. At its first
use in a process both paths compute the same small inputs, and the faster one is used
only if they agree.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from minitransformer.backends.cuda import device
from minitransformer.engine.backend import Array, to_host

# The largest difference of two paths, relative to the largest number, in units of the
# last place of the activations' type. In 16 bits and tf32 the roundings of inputs and
# results prevail. In float32 two orders of summation do: of 264 terms, they differ by
# up to 5 units.
MAX_DIFFERENCE = {"float32": 16, "tf32": 8, "float16": 8, "bfloat16": 8}
MANTISSA_BITS = {"float32": 23, "tf32": 10, "float16": 10, "bfloat16": 7}


def matches_reference(
    gpu: device.Device,
    path: str,
    dtype: np.dtype[Any],
    results: Callable[[], Iterator[tuple[Array, Array]]],
    fallback: str,
) -> bool:
    """Return whether `path` may be used on this GPU, found out once.

    `results` yields arrays of the plain path and of the other, or raises what is wrong
    with the other. If the path may not be used, a warning says why, and what happens
    instead (`fallback`).
    """
    precision = "tf32" if gpu.tf32 and dtype == np.float32 else dtype.name
    name = f"{path} in {precision}"
    if name in gpu.verdicts:
        return gpu.verdicts[name]
    problem = "it gives other results"
    limit = MAX_DIFFERENCE[precision] * 2.0 ** -MANTISSA_BITS[precision]
    try:
        agree = all(_are_close(*pair, limit) for pair in results())
    except Exception as error:  # of a compiler, a library or the driver: many kinds
        agree, problem = False, str(error).partition("\n")[0]
    if not agree:
        warnings.warn(f"{fallback} in {precision}: {problem}", stacklevel=2)
    gpu.verdicts[name] = agree
    return agree


def _are_close(plain: Array, other: Array, limit: float) -> bool:
    a, b = (to_host(x).astype(np.float64) for x in (plain, other))
    return bool(np.abs(a - b).max() <= limit * np.abs(a).max())
