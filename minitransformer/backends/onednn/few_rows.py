"""Products of 8-bit integers with few rows, by NumKong and NumPy.

oneDNN's products have at least 16 rows, and one of 16 takes as long for one. Decoding a
single sentence needs one row for each beam. NumKong multiplies these in a fraction of
the time. Both multiply integers exactly, and the steps from integers to numbers are
those of oneDNN, in its order: a row has the same bits among few rows as among many.

Shapes: N rows, n inputs, m outputs
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from minitransformer.backends.onednn.library import ScaledMatrix

# The most rows for which NumKong takes less time than oneDNN.
MAX_FEW = 8

# The largest integer, and the least value that the largest magnitude of a row or column
# counts as.
LARGEST = 127
SMALLEST = np.float32(1e-30)


class FewRows(NamedTuple):
    """Activations: integers, and the scale of each row.

    Shapes: integers [N, n] int8, scales [N, 1]
    """

    integers: np.ndarray
    scales: np.ndarray


def find_numkong() -> ModuleType | None:
    """Return the library NumKong if it is installed."""
    try:
        return importlib.import_module("numkong")
    except ImportError:
        return None


class FewRowsProducts:
    """Products of few rows with matrices of integers that NumKong has packed."""

    def __init__(self, numkong: Any) -> None:
        self._pack, self._multiply = numkong.dots_pack, numkong.dots_packed

    def multiply(
        self,
        rows: FewRows,
        matrix: ScaledMatrix,
        bias: np.ndarray | None = None,
        relu: bool = False,
    ) -> np.ndarray:
        """As `OneDnn.scaled_product`, whose integers of rows are 128 larger.

        Shapes: bias [m] -> [N, m]
        """
        # Pack the matrix at its first use, and sum its columns times 128.
        if matrix.packed is None:
            integers = np.ascontiguousarray(matrix.integers.T)
            sums = 128 * integers.sum(axis=1, dtype=np.int32)
            matrix.packed = self._pack(integers, "int8"), sums
        packed, sums = matrix.packed

        # Multiply integers, and turn the sums into numbers as oneDNN does.
        products = np.asarray(self._multiply(rows.integers, packed))
        out = (products + sums).astype(np.float32)
        out *= matrix.scales
        out += matrix.offsets
        out *= rows.scales
        if bias is not None:
            out += bias
        return np.maximum(out, 0, out=out) if relu else out


def few_rows(x: np.ndarray) -> FewRows:
    """Round each row to 127ths of its largest magnitude. Shapes: x [N, n]"""
    peaks = np.maximum(np.abs(x).max(axis=1, keepdims=True), SMALLEST)
    # oneDNN adds 128 before it rounds, which decides some ties.
    above = np.rint(x * (LARGEST / peaks) + np.float32(128))
    integers = (above - np.float32(128)).astype(np.int8)
    return FewRows(integers, peaks * np.float32(1 / LARGEST))
