"""What the kernels of all precisions share: whose products they compute.

Shapes: N rows, n inputs.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from minitransformer.machine import limit_threads

R = TypeVar("R")

# Numbers of rows are rounded up, from 512 on to a multiple of this one, so that few
# products have to be compiled.
ROWS_STEP = 64

# The matrices that `Kernels.are_slow` multiplies have so many rows and columns.
TRIAL_SIZE = 256


class Kernels(Generic[R]):
    """Operations that multiply by parameters, and take rounded rows of the type R."""

    def __init__(self, **kernels: Callable[..., Any]) -> None:
        self._kernels = kernels
        self._thread = threading.local()

    def find(
        self, name: str, arrays: tuple[np.ndarray, ...]
    ) -> Callable[..., Any] | None:
        """Return the kernel of an operation whose second array is a parameter.

        NumPy multiplies other matrices, and those for which it is faster.
        """
        if name == "parameters_changed":
            return self.parameters_changed
        kernel = self._kernels.get(name)
        if kernel and _is_parameter(arrays[1]) and self._is_faster(arrays[1]):
            return kernel
        return None

    def are_slow(self) -> bool:
        """Whether a product takes longer than NumPy's, as some do without AMX.

        It must take a tenth longer: times that differ by less may be noise.
        """
        vector = np.ones(TRIAL_SIZE**2, np.float32)
        weight = vector.reshape(TRIAL_SIZE, TRIAL_SIZE)
        x = weight.copy()
        self._kernels["linear"](x, weight)  # rounds both
        with limit_threads(1):
            plain = _least_seconds(lambda: x @ weight)
            own = _least_seconds(lambda: self._kernels["linear"](x, weight))
        return own > 1.1 * plain

    def parameters_changed(self, vector: np.ndarray) -> None:
        """Renew or forget what was made of a vector of parameters."""
        raise NotImplementedError

    def _is_faster(self, weight: np.ndarray) -> bool:
        """Whether products with a matrix are faster here than NumPy's."""
        raise NotImplementedError

    def _rounded_rows(self, x: np.ndarray) -> R:
        """Round a matrix [N, n], of at least as many rows as it has."""
        raise NotImplementedError

    def _rounded_input(self, x: np.ndarray) -> R:
        """Round the rows of activations [..., n], once while the array lives.

        Queries, keys and values are projected from one array, and those of all decoder
        layers from the encoder's output. So nothing may change an input in place.
        """
        inputs = self._thread.__dict__.setdefault("inputs", {})
        if id(x) not in inputs:
            low, key = self._rounded_rows(x.reshape(-1, x.shape[-1])), id(x)
            inputs[key] = weakref.ref(x, lambda _: inputs.pop(key)), low
        rounded: R = inputs[id(x)][1]
        return rounded


def more_rows(count: int) -> int:
    """Return a number of rows rounded up, to a multiple of 16, 32 or 64.

    Products of ever new numbers of rows would be compiled again and again.
    """
    step = min(max(16, 1 << count.bit_length() >> 4), ROWS_STEP)
    return -(-count // step) * step


def with_more_rows(x: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Return an array with room for a matrix, and rows of zeros that follow.

    Shapes: x [N, n] -> [more_rows(N), n]
    """
    out: np.ndarray = np.empty((more_rows(len(x)), x.shape[1]), dtype)
    out[len(x) :] = 0
    return out


def padded_rows(x: np.ndarray) -> np.ndarray:
    """Return a matrix and rows of zeros that follow, or the matrix if it needs none.

    Shapes: x [N, n] -> [more_rows(N), n]
    """
    if len(x) == more_rows(len(x)):
        return x
    out = with_more_rows(x, x.dtype)
    out[: len(x)] = x
    return out


def _least_seconds(function: Callable[[], object]) -> float:
    """Return the least time of several calls."""

    def seconds() -> float:
        started = time.perf_counter()
        function()
        return time.perf_counter() - started

    return min(seconds() for _ in range(5))


def _is_parameter(weight: np.ndarray) -> bool:
    """Whether a matrix is one in a flat vector of float32 parameters."""
    in_vector = weight.base is not None and weight.base.ndim == 1
    return in_vector and weight.dtype == np.float32
