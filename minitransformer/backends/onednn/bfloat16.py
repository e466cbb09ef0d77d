"""Matrix products in bfloat16, on processors that have instructions for them.

A bfloat16 is the upper half of a float32: its range, with 7 bits of mantissa instead of
23. `linear` and the loss round both factors of their products to bfloat16 and sum in
float32. Everything else stays float32, also activations and attention, which have 16
bits with `--precision bf16` on a GPU.

oneDNN multiplies. Parameters are rounded once after each change, and activations once
for the products of the forward and the backward pass. Arrays of type uint16 hold the
bits of bfloat16 numbers.

Shapes: N rows, n inputs, m outputs, D d_model, V vocabulary.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from minitransformer.backends.onednn.kernels import (
    CacheByOwner,
    is_parameter,
    with_more_rows,
)
from minitransformer.backends.onednn.library import EXP, RELU, OneDnn
from minitransformer.engine.backend import Backend
from minitransformer.system.workers import shared_zeros

# Smaller matrices are multiplied by NumPy.
MIN_SIZE = 64 * 64


class Bfloat16Kernels:
    """Products of rounded rows with parameters, which are rounded after each change.

    The operations of `engine/ops.py` call `round_for` to round the factor of a matrix
    of parameters, and `matmul` to multiply both. A rounding is a view of an array that
    is padded with rows of zeros. `_roundings` caches roundings of vectors of parameters
    and of matrices in them.
    """

    def __init__(self, library: OneDnn) -> None:
        self.round = library.round
        self.multiply = library.product
        self._roundings = CacheByOwner()
        self._thread = threading.local()

    def backend(self) -> Backend:
        """Return the backend that computes with these kernels."""
        return Backend(
            precision="bf16",
            find_kernel=self.find,
            parameters_changed=self.parameters_changed,
        )

    def find(self, name: str, arrays: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Return the kernel of an operation, if it should compute with these arrays.

        Rows are rounded for products with a matrix of parameters that is large enough.
        Rounded rows are multiplied here.
        """
        if name == "matmul":
            return self.matmul if _is_rounded(arrays[0]) else None
        kernels = {"round_for": self.round_for, "exponentials": self.exponentials}
        if name in kernels and _is_faster(arrays[1]):
            return kernels[name]
        return None

    def round_for(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Round a matrix, and cache the result as long as its memory's owner lives.

        Queries, keys and values are projected from one array, and those of all decoder
        layers from the encoder's output. Therefore nothing may change such an array in
        place.

        Shapes: x [N, n]
        """
        owner = x if x.base is None else x.base
        if (inputs := getattr(self._thread, "inputs", None)) is None:
            inputs = self._thread.inputs = CacheByOwner()
        rounded: np.ndarray = inputs.get(owner, self._rounded_rows, x)
        return rounded

    def matmul(
        self,
        a: np.ndarray,
        b: np.ndarray,
        bias: np.ndarray | None = None,
        relu: bool = False,
    ) -> np.ndarray:
        """`ops.matmul` of a rounding and parameters, or of two roundings."""
        count = len(a)
        a = _with_zeros(a)
        b = _with_zeros(b) if _is_rounded(b) else self._rounded_parameters(b)
        function = RELU if relu else None
        return self.multiply(a, b, bias=bias, function=function)[:count]

    def exponentials(self, rows: np.ndarray, table: np.ndarray) -> np.ndarray:
        """Return exp(rows table^T). Shapes: rows [N, D], table [V, D] -> [N, V]"""
        low = _with_zeros(self.round_for(rows, table))
        matrix = self._rounded_parameters(table.T)
        return self.multiply(low, matrix, function=EXP)[: len(rows)]

    def parameters_changed(self, vector: np.ndarray) -> None:
        """Round a vector of new or changed parameters.

        Processes that were forked since its first rounding share the rounded copy.
        """
        self.round(vector, self._roundings.get(vector, self._rounded_vector, vector))

    def _rounded_vector(self, vector: np.ndarray) -> np.ndarray:
        low = shared_zeros(vector.shape, np.uint16)
        self.round(vector, low)
        return low

    def _rounded_rows(self, x: np.ndarray) -> np.ndarray:
        low = with_more_rows(x, np.uint16)
        self.round(x, low[: len(x)])
        return low[: len(x)]

    def _rounded_parameters(self, matrix: np.ndarray) -> np.ndarray:
        """Return a rounded matrix of parameters, a view of the rounded vector.

        One rounded copy of the vector serves all its matrices.
        """
        low: np.ndarray = self._roundings.get(matrix.base, self._view, matrix)
        return low

    def _view(self, matrix: np.ndarray) -> np.ndarray:
        vector = matrix.base
        assert vector is not None
        low = self._roundings.get(vector, self._rounded_vector, vector)
        # The same place, shape and order in the copy, whose numbers are half as long.
        first = (matrix.ctypes.data - vector.ctypes.data) // vector.itemsize
        strides = [x // vector.itemsize * low.itemsize for x in matrix.strides]
        return np.ndarray(matrix.shape, low.dtype, low, first * low.itemsize, strides)


def _is_rounded(a: np.ndarray) -> bool:
    """Whether an array comes from `round_for`."""
    return a.dtype == np.uint16


def _is_faster(weight: np.ndarray) -> bool:
    """Whether a matrix is one of parameters with which products are faster here."""
    # A single row or column is no matrix: its transposition looks the same.
    large = weight.size >= MIN_SIZE and min(weight.shape) > 1
    return large and is_parameter(weight)


def _with_zeros(a: np.ndarray) -> np.ndarray:
    """Return a rounding, also a transposed one, with its padding of zeros."""
    assert a.base is not None
    return a.base if a.strides == a.base.strides else a.base.T


@functools.cache
def open_kernels() -> Bfloat16Kernels:
    """Return the kernels of this processor. Raises: RuntimeError as `OneDnn`."""
    return Bfloat16Kernels(OneDnn())
