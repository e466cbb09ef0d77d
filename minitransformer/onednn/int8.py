"""Matrix products of 8-bit integers, for translating on processors that have them.

Each column of a matrix of parameters has a scale, and so has each row of activations:
the scale makes the largest of its numbers 127, and all are rounded to integers. Their
products, which are exact, times both scales are near to those in float32. Everything
else stays float32, as with `--precision bf16`. There are no gradients.

The processors multiply unsigned integers by signed ones. So 128 is added to those of
activations, and what that adds to the products is subtracted again, with the biases:

    x W ~ scale_x ((q_x + 128) q_W - 128 (sums of the columns of q_W)) scale_W

Shapes: N rows, n inputs, m outputs, D d_model, V vocabulary.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

import numpy as np

from minitransformer.engine.autograd import Vjp
from minitransformer.machine import exp2_is_fast
from minitransformer.onednn.kernels import Kernels, with_more_rows
from minitransformer.onednn.library import OneDnn

LARGEST = 127

# Stands for what is largest where all numbers are zero or about as small.
SMALLEST = np.float32(1e-30)

# A number that is rounded or scaled takes about as long as so many that are multiplied.
MIN_PRODUCTS = 112

# The logits of so many rows are computed at a time: for 10,000 tokens, they stay in a
# processor's cache.
LOGITS_ROWS = 64


class Rows(NamedTuple):
    """Activations: integers, and what the largest of each row stood for.

    Shapes: integers [N or more, n], peaks [N, 1]
    """

    integers: np.ndarray
    peaks: np.ndarray


class Columns(NamedTuple):
    """Parameters: integers, and the scale of each column over 127.

    `offsets` are what 128 in all rows of the other factor adds, negated.

    Shapes: integers [n, m], scales, offsets [m]
    """

    integers: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray


class Int8Kernels(Kernels[Rows]):
    """The operations that multiply integers, and the parameters as integers."""

    def __init__(self, library: OneDnn) -> None:
        super().__init__(linear=self.linear, exponentials=self.exponentials)
        self.quantized, self.product = library.quantized, library.product
        # By the id of a vector of parameters, and the place of a matrix in it.
        self._kept: dict[int, dict[tuple[int, ...], Columns]] = {}

    def parameters_changed(self, vector: np.ndarray) -> None:
        """Forget the integers of parameters that have changed."""
        if (matrices := self._kept.get(id(vector))) is not None:
            matrices.clear()

    def linear(
        self,
        x: np.ndarray,
        weight: np.ndarray,
        bias: np.ndarray | None = None,
        *,
        relu: bool = False,
    ) -> tuple[np.ndarray, Vjp]:
        """`ops.linear`. Shapes: x [..., n], weight [n, m], bias [m] -> [..., m]"""
        out, peaks = self._product(self._rounded_input(x), weight)
        out *= peaks
        if bias is not None:
            out += bias
        if relu:
            np.maximum(out, 0, out=out)
        return out.reshape(*x.shape[:-1], weight.shape[1]), _no_gradient

    def exponentials(
        self, rows: np.ndarray, table: np.ndarray
    ) -> tuple[np.ndarray, Iterator[slice]]:
        """Return exp(rows table^T), and yield slices of its rows once they are there.

        Shapes: rows [N, D], table [V, D] -> [N, V]
        """
        values = np.empty((len(rows), len(table)), np.float32)
        return values, self._fill(values, rows, table)

    def _fill(
        self, values: np.ndarray, rows: np.ndarray, table: np.ndarray
    ) -> Iterator[slice]:
        is_fast = exp2_is_fast(values.dtype.name)  # exp(x) = 2^(x log2(e))
        exp = np.exp2 if is_fast else np.exp
        factor = np.float32(math.log2(math.e) if is_fast else 1)
        for first in range(0, len(rows), LOGITS_ROWS):
            part = slice(first, first + LOGITS_ROWS)
            logits, peaks = self._product(self._rounded_rows(rows[part]), table.T)
            logits *= peaks * factor
            exp(logits, out=values[part])
            yield part

    def _product(self, rows: Rows, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what the product is when its rows are multiplied by the peaks."""
        integers, scales, offsets = self._columns(weight)
        out = self.product(rows.integers, integers, scales=scales, bias=offsets)
        return out[: len(rows.peaks)], rows.peaks

    def _is_faster(self, weight: np.ndarray) -> bool:
        return weight.size >= MIN_PRODUCTS * sum(weight.shape)

    def _rounded_rows(self, x: np.ndarray) -> Rows:
        # As integers, magnitudes have the same order, are faster to compare, and NaN is
        # the greatest, so that a broken model is noticed.
        x = np.ascontiguousarray(x)
        magnitudes = x.view(np.int32) & np.int32(0x7FFFFFFF)
        peaks = magnitudes.max(axis=1).view(np.float32)
        integers = with_more_rows(x, np.uint8)
        factors = LARGEST / np.maximum(peaks, SMALLEST)
        self.quantized(x, factors, integers[: len(x)])
        return Rows(integers, peaks[:, None])

    def _columns(self, matrix: np.ndarray) -> Columns:
        """Return a matrix of parameters as integers, made at its first use."""
        vector = matrix.base
        assert vector is not None
        if id(vector) not in self._kept:
            weakref.finalize(vector, self._kept.pop, id(vector), None)
        kept = self._kept.setdefault(id(vector), {})
        place = matrix.__array_interface__["data"][0], *matrix.shape, *matrix.strides
        if place not in kept:
            kept[place] = columns(matrix)
        return kept[place]


def columns(matrix: np.ndarray) -> Columns:
    """Return a matrix of float32 parameters as integers. Shapes: [n, m]"""
    peaks = np.maximum(np.abs(matrix).max(axis=0), SMALLEST)
    integers = np.rint(matrix * (LARGEST / peaks)).astype(np.int8)
    scales = peaks / np.float32(LARGEST * LARGEST)
    offsets = -128 * integers.sum(axis=0) * scales
    return Columns(integers, scales, offsets.astype(np.float32))


def _no_gradient(g: np.ndarray) -> NoReturn:
    raise RuntimeError("int8 is for translating: expected no gradient to be asked for")


@functools.cache
def open_kernels() -> Int8Kernels:
    """Return the kernels of this processor. Raises: RuntimeError as `OneDnn`."""
    return Int8Kernels(OneDnn("int8"))
