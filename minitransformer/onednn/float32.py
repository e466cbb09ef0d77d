"""Matrix products in float32 by oneDNN, for processors where it is faster than NumPy.

Its products are float32 products as NumPy's are, but for the order in which numbers are
added, and so for last bits. On some processors they are faster by a tenth, and oneDNN
saves passes over their results (`floats.py`).
"""

from __future__ import annotations

import functools

import numpy as np

from minitransformer.onednn.floats import FloatKernels
from minitransformer.onednn.library import OneDnn


class Float32Kernels(FloatKernels):
    """The operations, with arrays as they are."""

    def parameters_changed(self, vector: np.ndarray) -> None:
        """Nothing was made of them."""

    def _rounded_rows(self, x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x)

    def _rounded_input(self, x: np.ndarray) -> np.ndarray:
        return self._rounded_rows(x.reshape(-1, x.shape[-1]))

    def _rounded_parameters(self, matrix: np.ndarray) -> np.ndarray:
        return matrix

    def _sum_over_rows(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        # NumPy multiplies: oneDNN would compile a product for each number of rows.
        total: np.ndarray = a.T @ b
        return total


@functools.cache
def open_kernels() -> Float32Kernels:
    """Return the kernels of this processor. Raises: RuntimeError as `OneDnn`."""
    return Float32Kernels(OneDnn("fp32-onednn"))
