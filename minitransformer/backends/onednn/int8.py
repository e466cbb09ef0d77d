"""Matrix products of 8-bit integers, for translating: `--precision int8`.

Each column of a matrix of parameters has a scale, and so has each row of activations.
Divided by its scale, the largest magnitude is 127, and all numbers are rounded to
integers. The products of the integers are exact. Times both scales, they are near to
the products in float32:

    x W ~ (q_x q_W) scale_W scale_x

Everything else stays float32, as with `--precision bf16`, and so does whatever is
recorded for a gradient.

NumKong rounds and multiplies on any processor. It is the fastest for few rows, such as
the beams of one sentence: oneDNN's products have at least 16 rows. oneDNN multiplies
many, if it and the processor's instructions are there. Both turn integers into numbers
in the same order: a row has the same bits among few rows as among many.

Shapes: N rows, n inputs, m outputs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minitransformer.backends.onednn.kernels import is_parameter, with_more_rows
from minitransformer.backends.onednn.library import RELU, OneDnn, ScaledMatrix
from minitransformer.engine.autograd import is_recording
from minitransformer.engine.backend import Backend
from minitransformer.engine.ops import relu_in_place
from minitransformer.settings.extras import import_extra

# The most rows for which NumKong takes less time than oneDNN.
MAX_FEW = 24

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
        # By the ids of arrays of parameters: references to these, and their integers.
        self._matrices: dict[tuple[int, ...], tuple[Any, Int8Matrix]] = {}

    @property
    def is_fast(self) -> bool:
        """Whether this processor multiplies integers faster than float32."""
        return self._library is not None

    def backend(self) -> Backend:
        """Return the backend that computes with these kernels."""
        return Backend(
            precision="int8",
            find_kernel=self.find,
            parameters_changed=lambda vector: self._matrices.clear(),
        )

    def find(self, name: str, arrays: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Return the kernel of an operation if it is faster than NumPy's products.

        It is chosen, and the integers are made, at the first use of parameters.
        """
        if name not in ("linear", "projections") or is_recording():
            return None
        weights = arrays[1:2] if name == "linear" else arrays[1:]
        key = tuple(map(id, weights))
        if (known := self._matrices.get(key)) is None:
            if not _is_faster(weights[0]):
                return None
            # The integers are forgotten together with the parameters.
            refs = [
                weakref.ref(weight, lambda _: self._matrices.pop(key, None))
                for weight in weights
            ]
            known = refs, Int8Matrix(weights, self._numkong, self._library)
            self._matrices[key] = known
        matrix = known[1]
        return matrix.linear if name == "linear" else matrix.projections


def _is_faster(weight: np.ndarray) -> bool:
    """Whether a matrix is one of parameters with which products are faster here."""
    large = weight.size >= MIN_PRODUCTS * sum(weight.shape)
    return large and is_parameter(weight)


class Int8Matrix:
    """Matrices of parameters side by side, as integers, and the products with them."""

    def __init__(
        self, weights: Sequence[np.ndarray], numkong: Any, library: OneDnn | None
    ) -> None:
        self._round, self._multiply = numkong.astype, numkong.dots_packed
        self._library = library
        self._widths = [weight.shape[1] for weight in weights]
        # Each column has a scale: its largest magnitude becomes 127.
        peaks = [np.abs(weight).max(axis=0, initial=SMALLEST) for weight in weights]
        rounded = [
            np.rint(weight * (LARGEST / peak)).astype(np.int8)
            for weight, peak in zip(weights, peaks, strict=True)
        ]
        joined = rounded[0] if len(rounded) == 1 else np.concatenate(rounded, axis=1)
        # The scales of rows are their largest magnitudes: divide by both 127.
        self._scales = np.concatenate(peaks) / (LARGEST * LARGEST)
        self._packed = numkong.dots_pack(np.ascontiguousarray(joined.T), "int8")
        self._scaled = ScaledMatrix(joined, self._scales) if library else None

    def linear(
        self,
        x: np.ndarray,
        weight: np.ndarray,
        bias: np.ndarray | None = None,
        *,
        relu: bool = False,
    ) -> tuple[np.ndarray, None]:
        """As `ops.linear`, without its gradient.

        Shapes: x [..., n], weight [n, m], bias [m] -> [..., m]
        """
        rows = x.reshape(-1, x.shape[-1])
        if self._library is not None and len(rows) > MAX_FEW:
            out = self._many_rows(rows, bias, relu)
        else:
            # Turn the sums of integers into numbers in oneDNN's order.
            integers, peaks = self._rounded(rows)
            out = np.asarray(self._multiply(integers, self._packed)).astype(np.float32)
            out *= self._scales
            out *= peaks
            if bias is not None:
                out += bias
            if relu:
                relu_in_place(out)
        return out.reshape(*x.shape[:-1], len(self._scales)), None

    def projections(self, x: np.ndarray, *weights: np.ndarray) -> list[np.ndarray]:
        """As `ops.projections`: one product with the matrices side by side."""
        out, _ = self.linear(x, weights[0])
        results = []
        end = 0
        for width in self._widths:
            first, end = end, end + width
            results.append(out[..., first:end])
        return results

    def _many_rows(
        self, rows: np.ndarray, bias: np.ndarray | None, relu: bool
    ) -> np.ndarray:
        """Multiply by oneDNN, with rows of zeros at the end. Shapes: rows [N, n]"""
        assert self._library is not None
        assert self._scaled is not None
        padded = with_more_rows(rows, np.float32)
        padded[: len(rows)] = rows
        integers, peaks = self._rounded(padded)
        function = RELU if relu else None
        out = self._library.scaled_product(
            np.asarray(integers), peaks, self._scaled, bias=bias, function=function
        )
        return out[: len(rows)]

    def _rounded(self, x: np.ndarray) -> tuple[Any, np.ndarray]:
        """Return x as integers, and the largest magnitude of each row.

        The largest magnitude becomes 127. NaN becomes 0, but makes its row's NaN.

        Shapes: x [N, n]
        """
        peaks = np.maximum.reduce(
            np.abs(x), axis=1, keepdims=True, initial=SMALLEST
        )  # [N, 1]
        return self._round(x * (LARGEST / peaks), "int8"), peaks


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
