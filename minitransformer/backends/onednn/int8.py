"""Matrix products of 8-bit integers, for translating on processors that have them.

Each column of a matrix of parameters has a scale, and so has each row of activations.
Divided by its scale, the largest number is 127, and all numbers are rounded to
integers. The products of the integers are exact. Times both scales, they are near to
the products in float32. Everything else stays float32, as with `--precision bf16`.
There are no gradients.

The processors multiply unsigned integers by signed ones. Therefore 128 is added to the
integers of activations, and its share of the products is subtracted again:

    x W ~ scale_x ((q_x + 128) q_W - 128 (sums of the columns of q_W)) scale_W

oneDNN does all of this in the same pass as the product, also the next operations: it
adds the bias, and applies the ReLU or the exponential.

Shapes: N rows, n inputs, m outputs, D d_model, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from minitransformer.backends.onednn.few_rows import (
    LARGEST,
    MAX_FEW,
    SMALLEST,
    FewRows,
    FewRowsProducts,
    few_rows,
    find_numkong,
)
from minitransformer.backends.onednn.kernels import Kernels, more_rows, with_more_rows
from minitransformer.backends.onednn.library import EXP, RELU, OneDnn, ScaledMatrix

SMALLEST_BITS = SMALLEST.view(np.int32)

# To round or load a number takes about as long as so many multiplications.
MIN_PRODUCTS = 112

# The logits of so many rows are computed at a time: with a vocabulary of 10,000, they
# stay in a processor's cache.
LOGITS_ROWS = 64


class Rows(NamedTuple):
    """Activations: integers plus 128, and the scale of each row.

    Shapes: integers [more_rows(num_rows), n], scales [more_rows(num_rows), 1]
    """

    integers: np.ndarray
    scales: np.ndarray
    num_rows: int


class Int8Kernels(Kernels[Rows | FewRows]):
    """Products of integers, with a cache of the parameters as integers."""

    def __init__(self, library: OneDnn) -> None:
        super().__init__()
        self.quantize = library.quantize
        self.multiply = library.scaled_product
        numkong = find_numkong()
        self.few = FewRowsProducts(numkong) if numkong else None

    def parameters_changed(self, vector: np.ndarray) -> None:
        """Forget the integers of parameters that have changed."""
        self._roundings.forget(vector)

    def matmul(
        self,
        a: Rows | FewRows,
        b: np.ndarray,
        bias: np.ndarray | None = None,
        relu: bool = False,
    ) -> np.ndarray:
        """`ops.matmul` of rows and parameters."""
        if isinstance(a, FewRows):
            assert self.few is not None
            return self.few.multiply(a, self._scaled_matrix(b), bias, relu)
        out = self.multiply(
            a.integers,
            a.scales,
            self._scaled_matrix(b),
            bias=bias,
            function=RELU if relu else None,
        )
        return out[: a.num_rows]

    def exponentials(
        self, rows: np.ndarray, table: np.ndarray
    ) -> tuple[np.ndarray, Iterator[slice]]:
        """Return exp(rows table^T), and an iterator that computes it slice by slice.

        Shapes: rows [N, D], table [V, D] -> [N, V]
        """
        values = np.empty((more_rows(len(rows)), len(table)), np.float32)
        matrix = self._scaled_matrix(table.T)

        def fill() -> Iterator[slice]:
            for first in range(0, len(rows), LOGITS_ROWS):
                part = slice(first, min(first + LOGITS_ROWS, len(rows)))
                low = self._many_rows(rows[part])
                out = values[first : first + len(low.integers)]
                self.multiply(low.integers, low.scales, matrix, function=EXP, out=out)
                yield part

        return values[: len(rows)], fill()

    def _is_rounded(self, a: Any) -> bool:
        return isinstance(a, Rows | FewRows)

    def _is_faster(self, weight: np.ndarray) -> bool:
        return weight.size >= MIN_PRODUCTS * sum(weight.shape)

    def _rounded_rows(self, x: np.ndarray) -> Rows | FewRows:
        if self.few is not None and len(x) <= MAX_FEW:
            return few_rows(x)
        return self._many_rows(x)

    def _many_rows(self, x: np.ndarray) -> Rows:
        # The largest magnitude of each row. Compared as integers, magnitudes have the
        # same order in less time, and NaN is the greatest: a broken model is noticed.
        x = np.ascontiguousarray(x)
        magnitudes = x.view(np.int32) & np.int32(0x7FFFFFFF)
        integers = with_more_rows(x, np.uint8)
        scales = np.zeros(len(integers), np.float32)
        peaks = scales[: len(x)]
        out = peaks.view(np.int32)
        np.maximum.reduce(magnitudes, axis=1, out=out, initial=SMALLEST_BITS)
        # Quantize the rows; their scales turn the integers back into numbers.
        self.quantize(x, LARGEST / peaks, integers[: len(x)])
        peaks *= np.float32(1 / LARGEST)
        return Rows(integers, scales[:, None], len(x))

    def _scaled_matrix(self, matrix: np.ndarray) -> ScaledMatrix:
        """Return a matrix of parameters as integers, made at its first use."""
        scaled: ScaledMatrix = self._roundings.get(matrix.base, matrix, scaled_matrix)
        return scaled


def scaled_matrix(matrix: np.ndarray) -> ScaledMatrix:
    """Return a matrix of float32 parameters as integers. Shapes: matrix [n, m]"""
    peaks = np.maximum(np.abs(matrix).max(axis=0), SMALLEST)
    integers = np.rint(matrix * (LARGEST / peaks)).astype(np.int8)
    return ScaledMatrix(integers, peaks / np.float32(LARGEST))


@functools.cache
def open_kernels() -> Int8Kernels:
    """Return the kernels of this processor. Raises: RuntimeError as `OneDnn`."""
    return Int8Kernels(OneDnn("int8"))
