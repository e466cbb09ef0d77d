"""Matrix products in bfloat16, on processors that have instructions for them.

A bfloat16 is the upper half of a float32: its range, with 7 bits of mantissa instead of
23. `linear` and the loss round the matrices that they multiply to bfloat16 and sum in
float32. Everything else stays float32, also activations and attention, which have 16
bits with `--precision bf16` on a GPU.

oneDNN multiplies. What is used again is rounded once: the parameters once after each
change, activations once for the products of the forward and the backward pass.
Arrays of type uint16 hold the bits of bfloat16 numbers.

Shapes: N rows, n inputs, m outputs, D d_model, V vocabulary.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

import numpy as np

from minitransformer.onednn.floats import FloatKernels
from minitransformer.onednn.kernels import with_more_rows
from minitransformer.onednn.library import OneDnn
from minitransformer.workers import shared_zeros


class Bfloat16Kernels(FloatKernels):
    """The operations with rounded rows, and the parameters, rounded."""

    chunk_share = 3  # since there is a rounded copy of the logits

    def __init__(self, library: OneDnn) -> None:
        super().__init__(library)
        self.rounded = library.rounded
        self._lock = threading.Lock()
        self._kept: dict[int, np.ndarray] = {}  # by the id of the vector
        self._views: dict[int, tuple[Any, np.ndarray]] = {}  # by the id of the matrix

    def parameters_changed(self, vector: np.ndarray) -> None:
        """Round a vector of parameters that are new or have changed.

        Processes that were forked since its first rounding share the rounded copy.
        """
        if id(vector) not in self._kept:
            weakref.finalize(vector, self._kept.pop, id(vector), None)
            self._kept[id(vector)] = shared_zeros(vector.shape, np.uint16)
        self.rounded(vector, self._kept[id(vector)])

    def _rounded_rows(self, x: np.ndarray) -> np.ndarray:
        low = with_more_rows(x, np.uint16)
        self.rounded(x, low[: len(x)])
        return low

    def _rounded_parameters(self, matrix: np.ndarray) -> np.ndarray:
        """Return a matrix of parameters, rounded: a view of its vector's rounded copy.

        So one copy serves all matrices. A view is kept as long as its matrix lives.
        """
        key, views = id(matrix), self._views
        if key not in views:
            views[key] = (
                weakref.ref(matrix, lambda _: views.pop(key)),
                self._view(matrix),
            )
        return views[key][1]

    def _sum_over_rows(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return self.product(a.T, b)

    def _view(self, matrix: np.ndarray) -> np.ndarray:
        vector = matrix.base
        assert vector is not None
        with self._lock:
            if id(vector) not in self._kept:
                self.parameters_changed(vector)
        low = self._kept[id(vector)]
        start = (matrix.ctypes.data - vector.ctypes.data) // vector.itemsize
        strides = (x // vector.itemsize * low.itemsize for x in matrix.strides)
        place = start * low.itemsize
        return np.ndarray(matrix.shape, low.dtype, low, place, tuple(strides))


@functools.cache
def open_kernels() -> Bfloat16Kernels:
    """Return the kernels of this processor. Raises: RuntimeError as `OneDnn`."""
    return Bfloat16Kernels(OneDnn())
