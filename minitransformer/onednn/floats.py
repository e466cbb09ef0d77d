"""Operations that multiply floating-point matrices by oneDNN, with their gradients.

oneDNN adds the bias of a layer and takes the ReLU, or the exponentials of the loss,
where it multiplies: while the results are in registers. What it multiplies is called
rounded here. In float32 (`float32.py`) that is the array itself, in bfloat16
(`bfloat16.py`) an array of half the size.

Shapes: N rows, n inputs, m outputs, D d_model, V vocabulary.
"""

from __future__ import annotations

import numpy as np

from minitransformer.engine import ops
from minitransformer.engine.autograd import Vjp
from minitransformer.onednn.kernels import ROWS_STEP, Kernels, padded_rows
from minitransformer.onednn.library import EXP, RELU, OneDnn

# Smaller matrices are multiplied by NumPy.
MIN_SIZE = 64 * 64

# The loss computes the logits of at least this many rows at a time.
MIN_ROWS_PER_CHUNK = 128


class FloatKernels(Kernels[np.ndarray]):
    """The operations that multiply rounded rows by rounded parameters.

    The loss computes logits of `chunk_share` times fewer rows at a time than NumPy's.
    """

    chunk_share = 2

    def __init__(self, library: OneDnn) -> None:
        super().__init__(
            linear=self.linear,
            exponentials=self.exponentials,
            projected_cross_entropy=self.projected_cross_entropy,
        )
        self.product = library.product

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

        def vjp(g: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
            g = g.reshape(count, weight.shape[1])
            if low_out is not None:
                g = g * (low_out[:count].view(f"i{low_out.itemsize}") > 0)
            db = None if bias is None else np.ones(len(g), g.dtype) @ g
            low = self._rounded_rows(g)

            dx = self.product(low[:count], matrix.T).reshape(shape)
            return dx, self._sum_over_rows(rows, low), db

        return out, vjp

    def exponentials(
        self, rows: np.ndarray, table: np.ndarray
    ) -> tuple[np.ndarray, None]:
        """Return exp(rows table^T). Shapes: rows [N, D], table [V, D] -> [N, V]"""
        low = self._rounded_rows(padded_rows(rows))
        matrix = self._rounded_parameters(table)
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
        loss, drows, dweight = 0.0, np.empty_like(rows), np.empty_like(weight)
        # A number of rows to which `padded_rows` adds none, but for the last chunk.
        chunk = ops.rows_per_chunk(vocab_size) // self.chunk_share
        chunk = max(chunk, MIN_ROWS_PER_CHUNK) // ROWS_STEP * ROWS_STEP
        for start in range(0, len(rows), chunk):
            target = ids[start : start + chunk]
            count, row = len(target), np.arange(len(target))
            part = padded_rows(rows[start : start + chunk])
            found = self._softmax_terms(self._rounded_rows(part), low_weight.T, target)
            exponentials, totals, log_totals, target_logits = found
            loss += float((log_totals - confidence * target_logits).sum())
            exponentials[row, target] -= confidence * totals[:count]
            inverse_totals = (1 / totals)[:, None]
            low = self._rounded_rows(exponentials)  # [chunk, V]
            scaled = self._rounded_rows(part * inverse_totals)
            product = self.product(low, low_weight)[:count]
            place = drows[start : start + chunk]
            np.multiply(product, inverse_totals[:count], out=place)
            self.product(low.T, scaled, dweight, add=start > 0)
            del found, exponentials, low
        if not len(rows):
            dweight.fill(0)
        if smoothing > 0:
            weight_sum, row_sum = ones @ weight, np.ones(len(rows), x.dtype) @ rows
            loss -= smoothing * float(row_sum @ weight_sum)
            drows -= smoothing * weight_sum
            dweight -= smoothing * row_sum
        dx = np.zeros(x.shape, x.dtype)
        dx.reshape(-1, width)[used] = drows

        def vjp(g: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
            np.multiply(dx, g, out=dx)
            return dx, np.multiply(dweight, g, out=dweight), None

        return np.asarray(loss, dtype=x.dtype), vjp

    def _softmax_terms(
        self, rows: np.ndarray, matrix: np.ndarray, targets: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Return what the loss needs of the logits, which are a product.

        They are its exponentials, each row times a factor of its own, and the sums of
        the rows; log-sum-exp of each row that has a target, and the logits of targets.

        Shapes: rounded rows [N or more, D] and matrix [D, V], targets [N]
        -> [N or more, V], [N or more], [N], [N]
        """
        count, row = len(targets), np.arange(len(targets))
        ones = np.ones(matrix.shape[1], np.float32)
        exponentials = self.product(rows, matrix, function=EXP)
        with np.errstate(over="ignore"):  # `moderate` sees it
            totals = exponentials @ ones
        of_targets = exponentials[row, targets]
        if ops.moderate(totals) and of_targets.all():
            return exponentials, totals, np.log(totals[:count]), np.log(of_targets)
        logits = self.product(rows, matrix)
        target_logits, highest = logits[row, targets], logits.max(axis=-1)
        logits -= highest[:, None]
        exponentials = np.exp(logits, out=logits)
        totals = exponentials @ ones
        log_totals = np.log(totals[:count]) + highest[:count]
        return exponentials, totals, log_totals, target_logits

    def _is_faster(self, weight: np.ndarray) -> bool:
        return weight.size >= MIN_SIZE

    def _rounded_parameters(self, matrix: np.ndarray) -> np.ndarray:
        """Round a matrix of parameters."""
        raise NotImplementedError

    def _sum_over_rows(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Return A^T B of rounded rows.

        Shapes: a [N, n], b [N, m] -> [n, m]
        """
        raise NotImplementedError
