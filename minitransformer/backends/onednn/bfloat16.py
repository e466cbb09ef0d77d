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

import numpy as np

from minitransformer.backends.onednn.kernels import Kernels, with_more_rows
from minitransformer.backends.onednn.library import EXP, RELU, OneDnn
from minitransformer.system.workers import shared_zeros

# Smaller matrices are multiplied by NumPy.
MIN_SIZE = 64 * 64


class Bfloat16Kernels(Kernels[np.ndarray]):
    """Products of rounded rows with parameters, which are rounded after each change.

    A rounding is a view of an array that is padded with rows of zeros.
    """

    def __init__(self, library: OneDnn) -> None:
        super().__init__()
        self.round = library.round
        self.multiply = library.product

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
        b = _with_zeros(b) if self._is_rounded(b) else self._rounded_parameters(b)
        function = RELU if relu else None
        return self.multiply(a, b, bias=bias, function=function)[:count]

    def exponentials(
        self, rows: np.ndarray, table: np.ndarray
    ) -> tuple[np.ndarray, None]:
        """Return exp(rows table^T). Shapes: rows [N, D], table [V, D] -> [N, V]"""
        low = _with_zeros(self.round_for(rows, table))
        matrix = self._rounded_parameters(table.T)
        return self.multiply(low, matrix, function=EXP)[: len(rows)], None

    def parameters_changed(self, vector: np.ndarray) -> None:
        """Round a vector of new or changed parameters.

        Processes that were forked since its first rounding share the rounded copy.
        """
        self.round(vector, self._roundings.get(vector, vector, self._rounded_vector))

    def _rounded_vector(self, vector: np.ndarray) -> np.ndarray:
        low = shared_zeros(vector.shape, np.uint16)
        self.round(vector, low)
        return low

    def _is_rounded(self, a: np.ndarray) -> bool:
        return a.dtype == np.uint16

    def _is_faster(self, weight: np.ndarray) -> bool:
        # A single row or column is no matrix: its transposition looks the same.
        return weight.size >= MIN_SIZE and min(weight.shape) > 1

    def _rounded_rows(self, x: np.ndarray) -> np.ndarray:
        low = with_more_rows(x, np.uint16)
        self.round(x, low[: len(x)])
        return low[: len(x)]

    def _rounded_parameters(self, matrix: np.ndarray) -> np.ndarray:
        """Return a rounded matrix of parameters, a view of the rounded vector.

        One rounded copy of the vector serves all its matrices.
        """
        low: np.ndarray = self._roundings.get(matrix.base, matrix, self._view)
        return low

    def _view(self, matrix: np.ndarray) -> np.ndarray:
        vector = matrix.base
        assert vector is not None
        low = self._roundings.get(vector, vector, self._rounded_vector)
        # The same place, shape and order in the copy, whose numbers are half as long.
        first = (matrix.ctypes.data - vector.ctypes.data) // vector.itemsize
        strides = [x // vector.itemsize * low.itemsize for x in matrix.strides]
        return np.ndarray(matrix.shape, low.dtype, low, first * low.itemsize, strides)


def _with_zeros(a: np.ndarray) -> np.ndarray:
    """Return a rounding, also a transposed one, with its padding of zeros."""
    assert a.base is not None
    return a.base if a.strides == a.base.strides else a.base.T


@functools.cache
def open_kernels() -> Bfloat16Kernels:
    """Return the kernels of this processor. Raises: RuntimeError as `OneDnn`."""
    return Bfloat16Kernels(OneDnn())
