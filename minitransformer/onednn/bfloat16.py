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

from minitransformer.engine import ops
from minitransformer.engine.autograd import Gradient, Vjp
from minitransformer.onednn.kernels import ROWS_STEP, Kernels, with_more_rows
from minitransformer.onednn.library import EXP, RELU, OneDnn
from minitransformer.workers import shared_zeros

# Smaller matrices are multiplied in float32.
MIN_SIZE = 64 * 64

# The loss computes the logits of at least this many rows at a time.
MIN_ROWS_PER_CHUNK = 128


class Bfloat16Kernels(Kernels[np.ndarray]):
    """The operations that multiply in bfloat16, and the parameters, rounded."""

    def __init__(self, library: OneDnn) -> None:
        super().__init__(
            linear=self.linear,
            exponentials=self.exponentials,
            projected_cross_entropy=self.projected_cross_entropy,
        )
        self.rounded, self.product = library.rounded, library.product
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

    def linear(
        self,
        x: np.ndarray,
        weight: np.ndarray,
        bias: np.ndarray | None = None,
        *,
        relu: bool = False,
    ) -> tuple[np.ndarray, Vjp]:
        """`ops.linear`. Shapes: x [..., n], weight [n, m], bias [m] -> [..., m]"""
        shape, count = x.shape, x.size // len(weight)
        rows = self._rounded_input(x)  # [N or more, n]
        matrix = self._rounded_parameters(weight)
        function = RELU if relu else None
        out = self.product(rows, matrix, bias=bias, function=function)[:count]
        out = out.reshape(*shape[:-1], weight.shape[1])
        # What the next operation multiplies also tells where the ReLU was positive.
        low_out = self._rounded_input(out) if relu else None

        def vjp(g: np.ndarray) -> tuple[np.ndarray, Gradient, np.ndarray | None]:
            g = g.reshape(count, weight.shape[1])
            if low_out is not None:
                g = g * (low_out[:count].view(np.int16) > 0)
            db = None if bias is None else np.ones(len(g), g.dtype) @ g
            low = self._rounded_rows(g)
            dx = self.product(low, self._rounded_parameters(weight).T)[:count]

            def add_dweight(total: np.ndarray | None) -> np.ndarray:
                return self.product(rows.T, low, total)

            return dx.reshape(shape), add_dweight, db

        return out, vjp

    def exponentials(
        self, rows: np.ndarray, table: np.ndarray
    ) -> tuple[np.ndarray, None]:
        """Return exp(rows table^T). Shapes: rows [N, D], table [V, D] -> [N, V]"""
        low, matrix = self._rounded_rows(rows), self._rounded_parameters(table)
        return self.product(low, matrix.T, function=EXP)[: len(rows)], None

    def projected_cross_entropy(
        self,
        x: np.ndarray,
        weight: np.ndarray,
        targets: np.ndarray,
        *,
        label_smoothing: float,
        padding_id: int,
    ) -> tuple[np.ndarray, Vjp]:
        """`ops.projected_cross_entropy`, whose comments explain the steps.

        Shapes: x [..., D], weight [V, D], targets [...] -> scalar
        """
        vocab_size, width = weight.shape
        flat_targets = targets.reshape(-1)
        used = np.flatnonzero(flat_targets != padding_id)
        rows, ids = x.reshape(-1, width)[used], flat_targets[used]
        smoothing, confidence = label_smoothing / vocab_size, 1 - label_smoothing
        ones = np.ones(vocab_size, np.float32)
        low_weight = self._rounded_parameters(weight)
        loss, drows, dweight = 0.0, np.empty_like(rows), np.zeros_like(weight)
        # Fewer rows than in float32, since there is a rounded copy of the logits, and a
        # number to which `_rounded_rows` adds no rows of zeros.
        chunk = max(ops.rows_per_chunk(vocab_size) // 3, MIN_ROWS_PER_CHUNK)
        chunk = chunk // ROWS_STEP * ROWS_STEP
        for start in range(0, len(rows), chunk):
            part, target = rows[start : start + chunk], ids[start : start + chunk]
            found = self._softmax_terms(self._rounded_rows(part), low_weight.T, target)
            exponentials, totals, log_totals, target_logits = found
            loss += float((log_totals - confidence * target_logits).sum())
            exponentials[np.arange(len(part)), target] -= confidence * totals
            inverse_totals = (1 / totals)[:, None]
            low = self._rounded_rows(exponentials)  # [chunk, V]
            scaled = self._rounded_rows(part * inverse_totals)
            product = self.product(low, low_weight)[: len(part)]
            np.multiply(product, inverse_totals, out=drows[start : start + chunk])
            self.product(low.T, scaled, dweight)
            del found, exponentials, low
        if smoothing > 0:
            weight_sum, row_sum = ones @ weight, np.ones(len(rows), x.dtype) @ rows
            loss -= smoothing * float(row_sum @ weight_sum)
            drows -= smoothing * weight_sum
            dweight -= smoothing * row_sum
        dx = np.zeros(x.shape, x.dtype)
        dx.reshape(-1, width)[used] = drows

        def vjp(g: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
            return (
                np.multiply(dx, g, out=dx),
                np.multiply(dweight, g, out=dweight),
                None,
            )

        return np.asarray(loss, dtype=x.dtype), vjp

    def _softmax_terms(
        self, rows: np.ndarray, matrix: np.ndarray, targets: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Return what the loss needs of the logits, which are a product.

        They are its exponentials, each row times a factor of its own, and the sums of
        the rows; log-sum-exp of each row, and the logits of its target.

        Shapes: rounded rows [N or more, D] and matrix [D, V], targets [N] -> [N, V],
        and three times [N]
        """
        count, row = len(targets), np.arange(len(targets))
        ones = np.ones(matrix.shape[1], np.float32)
        exponentials = self.product(rows, matrix, function=EXP)[:count]
        with np.errstate(over="ignore"):  # `moderate` sees it
            totals = exponentials @ ones
        of_targets = exponentials[row, targets]
        if ops.moderate(totals) and of_targets.all():
            return exponentials, totals, np.log(totals), np.log(of_targets)
        logits = self.product(rows, matrix)[:count]
        target_logits, highest = logits[row, targets], logits.max(axis=-1)
        logits -= highest[:, None]
        exponentials = np.exp(logits, out=logits)
        totals = exponentials @ ones
        return exponentials, totals, np.log(totals) + highest, target_logits

    def _is_faster(self, weight: np.ndarray) -> bool:
        return weight.size >= MIN_SIZE

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
