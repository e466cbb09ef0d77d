"""Matrix products of 8-bit integers, for translating: `--precision int8`.

Each column of a matrix of parameters has a scale, and so has each row of activations.
Divided by its scale, the largest magnitude is 127, and all numbers are rounded to
integers. The products of the integers are exact. Times both scales, they are near to
the products in float32:

    x W ~ (q_x q_W) scale_W scale_x

Everything else stays float32, as with `--precision bf16`. There are no gradients.

NumKong rounds and multiplies on any processor. It is the fastest for few rows, such as
the beams of one sentence: oneDNN's products have at least 16 rows. oneDNN multiplies
many, if it and the processor's instructions are there. Both turn integers into numbers
in the same order: a row has the same bits among few rows as among many.

Shapes: N rows, n inputs, m outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from minitransformer.backends.onednn.kernels import (
    CacheByOwner,
    is_parameter,
    with_more_rows,
)
from minitransformer.backends.onednn.library import RELU, OneDnn, ScaledMatrix
from minitransformer.engine.backend import Backend
from minitransformer.settings.extras import import_extra

# The most rows for which NumKong takes less time than oneDNN.
MAX_FEW = 8

# The largest integer, and the least value that the largest magnitude of a row or column
# counts as.
LARGEST = np.float32(127)
SMALLEST = np.float32(1e-30)

# To round or load a number takes about as long as so many multiplications.
MIN_PRODUCTS = 112


class Int8Kernels:
    """Products of integers, with a cache of the parameters as integers."""

    def __init__(self, numkong: Any, library: OneDnn | None) -> None:
        self._numkong = numkong
        self._library = library
        self._kernels: dict[str, Callable[..., Any]] = {
            "linear": self.linear,
            "projections": self.projections,
        }
        self._matrices = CacheByOwner()

    def backend(self) -> Backend:
        """Return the backend that computes with these kernels."""
        return Backend(find_kernel=self.find, parameters_changed=self._matrices.forget)

    def find(self, name: str, arrays: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Return the kernel of an operation if it is faster than NumPy's products."""
        kernel = self._kernels.get(name)
        if kernel is None or not is_parameter(weight := arrays[1]):
            return None
        return kernel if weight.size >= MIN_PRODUCTS * sum(weight.shape) else None

    def linear(
        self,
        x: np.ndarray,
        weight: np.ndarray,
        bias: np.ndarray | None = None,
        *,
        relu: bool = False,
    ) -> tuple[np.ndarray, None]:
        """As `ops.linear`, without its gradient."""
        out = self._product(x, (weight,), bias, relu)
        return out.reshape(*x.shape[:-1], weight.shape[1]), None

    def projections(self, x: np.ndarray, *weights: np.ndarray) -> list[np.ndarray]:
        """As `ops.projections`: one product with the matrices side by side."""
        out = self._product(x, weights)
        results = []
        end = 0
        for weight in weights:
            first, end = end, end + weight.shape[1]
            results.append(out[:, first:end].reshape(*x.shape[:-1], end - first))
        return results

    def _product(
        self,
        x: np.ndarray,
        weights: tuple[np.ndarray, ...],
        bias: np.ndarray | None = None,
        relu: bool = False,
    ) -> np.ndarray:
        """Multiply by matrices side by side, and add the bias. Shapes: -> [N, m]"""
        matrix: ScaledMatrix = self._matrices.get(
            weights[0].base, self._scaled_matrix, *weights
        )
        rows = x.reshape(-1, x.shape[-1])
        count = len(rows)
        # oneDNN multiplies many, with rows of zeros at their end.
        if self._library is not None and count > MAX_FEW:
            padded = with_more_rows(rows, np.float32)
            padded[:count] = rows
            integers, scales = self._rounded(padded)
            function = RELU if relu else None
            out = self._library.scaled_product(
                np.asarray(integers), scales, matrix, bias=bias, function=function
            )
            return out[:count]
        # NumKong multiplies few, and the sums become numbers in the same order.
        integers, scales = self._rounded(rows)
        products = self._numkong.dots_packed(integers, matrix.packed)
        out = np.asarray(products).astype(np.float32)
        out *= matrix.scales
        out *= scales
        if bias is not None:
            out += bias
        return np.maximum(out, 0, out=out) if relu else out

    def _rounded(self, x: np.ndarray) -> tuple[Any, np.ndarray]:
        """Round each row to 127ths of its largest magnitude; NaN makes its scale NaN.

        Returns: the integers [N, n] int8, and the scale of each row [N, 1]
        """
        peaks = np.maximum(np.abs(x).max(axis=1, keepdims=True), SMALLEST)
        integers = self._numkong.astype(x * (LARGEST / peaks), "int8")
        return integers, peaks / LARGEST

    def _scaled_matrix(self, *matrices: np.ndarray) -> ScaledMatrix:
        """Return matrices of parameters side by side, as integers, also packed."""
        integers, scales = [], []
        for matrix in matrices:
            peaks = np.maximum(np.abs(matrix).max(axis=0), SMALLEST)
            integers.append(np.rint(matrix * (LARGEST / peaks)).astype(np.int8))
            scales.append(peaks / LARGEST)
        joined = integers[0] if len(integers) == 1 else np.concatenate(integers, axis=1)
        packed = self._numkong.dots_pack(np.ascontiguousarray(joined.T), "int8")
        return ScaledMatrix(joined, np.concatenate(scales), packed)


@functools.cache
def open_kernels() -> Int8Kernels:
    """Return the kernels of this processor.

    Raises: RuntimeError if NumKong is not installed.
    """
    numkong = import_extra("numkong", "onednn", "--precision int8 needs NumKong")
    try:
        return Int8Kernels(numkong, OneDnn("int8"))
    except RuntimeError:
        return Int8Kernels(numkong, None)
