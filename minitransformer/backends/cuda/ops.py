"""Operations of the names and signatures of `engine/ops.py`, on kernels and cuBLAS.

Activations and matrices are of one type: float32, float16 or bfloat16. Vectors (biases,
gains) are float32, and so are statistics, losses and all gradients of parameters.
`find_kernel` leaves everything else to the reference bodies. No operation waits for
the GPU, so that a CUDA graph can hold it, and every sum has a fixed order, so that
equal inputs give equal bits. The formula of each kernel is above it in `kernels/`.

Shapes: as in `engine/ops.py`; N rows are the tokens of all sentences
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from minitransformer.backends.cuda import blaslt, device
from minitransformer.backends.cuda.attention import attention
from minitransformer.backends.cuda.beam_search import start_search
from minitransformer.backends.cuda.device import (
    WARP,
    WARPS,
    num_blocks,
    num_vectors,
    rows_of,
    size_of,
    warp_blocks,
)
from minitransformer.backends.cuda.philox import PhiloxStream, draw_mask, drop
from minitransformer.backends.cuda.precision import in_float32
from minitransformer.engine.autograd import PRIMITIVES, Gradient, Vjp
from minitransformer.engine.backend import Array, Backend, array_module
from minitransformer.engine.ops import LAYER_NORM_EPSILON
from minitransformer.model.parameters import ParameterBuffer

# The widest row that the LayerNorm kernels hold in registers: MAX_WIDTH in common.cu.
MAX_WIDTH = 1024

# The loss computes about this many logits at a time, in chunks of equal size: large
# enough that the product with the embedding, whose tiles have 128 rows, fills a GPU's
# multiprocessors.
LOGITS_PER_CHUNK = 5 << 26
ROWS_PER_TILE = 128

# Scoring given translations takes this many logits at a time, in float32.
LOGITS_TO_SCORE = 1 << 25

# The most threads of a block, and of one for a row of logits (cross_entropy.cu).
MAX_THREADS = 1024
LOSS_THREADS = 384

# The most partial sums of a matrix's rows that are computed before they are added up.
MAX_PARTIAL_SUMS = 256

# What a thread of LayerNorm's backward pass holds of a row (HELD vectors in
# layer_norm.cu), and how many of its blocks a multiprocessor runs at a time.
ELEMENTS_HELD = 16
BLOCKS_AT_ONCE = 2


def find_kernel(name: str, arrays: tuple[Array, ...]) -> Callable[..., Any] | None:
    """Return the fused body of operation `name`, or None if it does not take `arrays`.

    Refused are activations of another type than float32, float16 and bfloat16, matrices
    of another type than the activations, vectors that are not float32, and LayerNorm of
    rows wider than MAX_WIDTH. The last is computed in float32 if activations have 16
    bits, as CuPy lacks some operations on these.
    """
    floats = [a for a in arrays if a is not None and a.dtype.kind not in "biu"]
    if not floats or not device.is_activation_type(floats[0].dtype):
        return None
    real = floats[0].dtype
    wide = name == "add_layer_norm" and arrays[0].shape[-1] > MAX_WIDTH
    if wide and real.itemsize == 2:
        return functools.partial(in_float32, PRIMITIVES[name])
    if name not in KERNELS or wide:
        return None
    for array in floats[1:]:
        # Sinusoids are a float32 matrix, but no parameter.
        sinusoids = name == "embedding" and array.dtype == np.float32
        if array.dtype != (np.float32 if array.ndim == 1 else real) and not sinusoids:
            return None
    return KERNELS[name]


def dropout(x: Array, *, rate: float, rng: PhiloxStream) -> tuple[Array, Vjp]:
    mask = draw_mask(x.shape, rate, rng)

    def vjp(g: Array) -> tuple[Array]:
        return (drop(g, mask),)

    return drop(x, mask), vjp


@dataclass(frozen=True)
class ProductGradient:
    """The gradient g W^T of a linear layer's input, which is not multiplied yet.

    The sum with another gradient is then part of the product. `shape` is that of the
    input.

    Shapes: g [N, m], weight [n, m]
    """

    g: Array
    weight: Array
    shape: tuple[int, ...]

    def dense(self) -> Array:
        out = self._empty()
        device.current().matmul(self.g, self.weight.T, out)
        return out.reshape(self.shape)

    def plus(self, term: Array) -> Array | None:
        """Return the sum with an array, or None if cuBLASLt has no algorithm for it."""
        out = self._empty()
        done = blaslt.current().multiply(self.g, self.weight.T, out, term=rows_of(term))
        return out.reshape(self.shape) if done else None

    def _empty(self) -> Array:
        return array_module(self.g).empty((len(self.g), len(self.weight)), self.g.dtype)


def linear(
    x: Array, weight: Array, bias: Array | None = None, *, relu: bool = False
) -> tuple[Array, Vjp]:
    """As `engine.ops.linear`, with as much of it as possible within products.

    The gradients of parameters are added to what is there (`adding_to`). That of x is
    multiplied when it is needed (`ProductGradient`).
    """
    xp, gpu = array_module(x), device.current()
    rows = rows_of(x)  # [N, n]
    out = xp.empty((len(rows), weight.shape[1]), dtype=x.dtype)

    # cuBLASLt adds the bias and applies the ReLU. If it cannot, a kernel reads the
    # product again.
    if bias is None or not blaslt.current().multiply(
        rows, weight, out, bias=bias, relu=relu
    ):
        gpu.matmul(rows, weight, out)
        if relu or bias is not None:
            size, grid = size_of(out), warp_blocks(len(out))
            gpu.launch("bias_relu", out.dtype, grid, out, bias, *size, relu)
    activated = out if relu else None

    def vjp(g: Array) -> tuple[Gradient, Array | None, Array | None]:
        g, dbias, new_dbias = rows_of(g), None, None

        # db = the sum of g over all tokens. Where the ReLU's output is 0, so is g.
        if bias is not None:
            dbias, new_dbias = _gradient_of(bias)
        if activated is not None:
            g, unmasked = xp.empty_like(g), g
            _add_columns("relu_backward", unmasked, activated, g, total=dbias)
        elif dbias is not None:
            _add_columns("column_sums", g, total=dbias)

        # dW = x^T g.
        dweight, new_dweight = _gradient_of(weight)
        gpu.matmul(rows.T, g, dweight, beta=1.0)
        return ProductGradient(g, weight, x.shape), new_dweight, new_dbias

    return out.reshape(*x.shape[:-1], -1), vjp


def embedding(
    table: Array,
    ids: Array,
    positions: Array,
    *,
    scale: float = 1.0,
    rate: float = 0.0,
    rng: PhiloxStream | None = None,
) -> tuple[Array, Vjp]:
    """As `engine.ops.embedding`; an id's gradient adds its tokens in their order."""
    xp, gpu = array_module(table), device.current()
    length, width = ids.shape[-1], table.shape[1]
    dropout_mask = draw_mask((*ids.shape, width), rate, rng)
    out = xp.empty((*ids.shape, width), dtype=table.dtype)
    gpu.launch(
        "embedding",
        out.dtype,
        warp_blocks(ids.size),
        out,
        xp.ascontiguousarray(table),
        xp.ascontiguousarray(ids, dtype=np.int32),
        xp.ascontiguousarray(positions, dtype=np.float32),
        float(scale),
        ids.size,
        length,
        width,
        *dropout_mask,
    )

    def vjp(g: Array) -> tuple[Array | None, None, Array | None]:
        g = drop(g, dropout_mask)
        # The tokens of an id stand together in the order, and one block adds them up.
        order = gpu.sorted_tokens.get(device.address(ids))
        if order is None:
            order = sort_tokens(ids)
        dtable, new_dtable = _gradient_of(table)  # rows of other ids get nothing
        gpu.launch(
            "embedding_backward",
            g.dtype,
            ids.size,
            dtable,
            g,
            order,
            float(scale),
            ids.size,
            width,
        )
        # Positions add up over the sentences, if they are learned.
        if gpu.gradients and _place(positions) not in gpu.gradients:
            return new_dtable, None, None
        dpositions, new_dpositions = _gradient_of(positions)
        columns = dpositions[:length].reshape(-1)
        _add_columns("column_sums", g.reshape(-1, length * width), total=columns)
        return new_dtable, None, new_dpositions

    return out, vjp


def sort_tokens(ids: Array) -> Array:
    """Return the tokens by id, and in their order where ids are equal.

    The id is in the upper half of a number, and the token's place in the lower.

    Shapes: ids [...] -> [N] int64
    """
    xp = array_module(ids)
    flat = ids.reshape(-1).astype(np.int64)
    return xp.sort((flat << 32) + xp.arange(flat.size))


def add_layer_norm(
    x: Array,
    residual: Array,
    gain: Array,
    bias: Array,
    *,
    rate: float = 0.0,
    rng: PhiloxStream | None = None,
) -> tuple[Array, Vjp]:
    """As `engine.ops.add_layer_norm`, in one kernel each way.

    x + residual is rounded to the activations' type before it is normalised.
    """
    xp, gpu, shape = array_module(x), device.current(), x.shape
    rows, shortcut = rows_of(x), rows_of(residual)  # which the vjp does not keep
    gain, bias = xp.ascontiguousarray(gain), xp.ascontiguousarray(bias)
    # The vjp needs the sum h, and the means and inverse deviations of its rows.
    out, h = xp.empty_like(rows), xp.empty_like(rows)
    statistics = xp.empty((2, len(rows)), np.float32)
    dropout_mask = draw_mask(shape, rate, rng)
    gpu.launch(
        "add_layer_norm",
        x.dtype,
        warp_blocks(len(rows)),
        out,
        h,
        *statistics,
        rows,
        shortcut,
        gain,
        bias,
        LAYER_NORM_EPSILON,
        *size_of(rows),
        *dropout_mask,
    )

    def vjp(g: Array) -> tuple[Array, Array, Array | None, Array | None]:
        g = rows_of(g)
        dresidual = xp.empty_like(g)
        dx = xp.empty_like(g) if dropout_mask.threshold else None

        # A row has one warp or several, and the blocks all run at once.
        warps, count = _layer_norm_blocks(*h.shape)
        partial = xp.empty((count, 2, h.shape[1]), np.float32)
        gpu.launch(
            "layer_norm_backward",
            g.dtype,
            (1, count),
            dx,
            dresidual,
            partial,
            g,
            h,
            *statistics,
            gain,
            *size_of(h),
            *dropout_mask,
            block=(warps * WARP, WARPS // warps),
        )

        # Each block has summed its rows for the gradients of gain and bias.
        dgain, new_dgain = _gradient_of(gain)
        dbias, new_dbias = _gradient_of(bias)
        _add_partials(partial, (dgain, dbias))
        dresidual = dresidual.reshape(shape)
        dx = dresidual if dx is None else dx.reshape(shape)
        return dx, dresidual, new_dgain, new_dbias

    return out.reshape(shape), vjp


def _layer_norm_blocks(rows: int, width: int) -> tuple[int, int]:
    """Return the backward pass's warps for each row, and its blocks."""
    warps = -(-width // (WARP * ELEMENTS_HELD))
    at_once = BLOCKS_AT_ONCE * device.current().num_processors
    return warps, min(at_once, -(-rows * warps // WARPS))


def projected_cross_entropy(
    x: Array, weight: Array, targets: Array, *, label_smoothing: float, padding_id: int
) -> tuple[Array, Vjp]:
    """As `engine.ops.projected_cross_entropy`, but rows of padding are computed, too.

    They weigh 0. So no shape depends on data, which a CUDA graph could not follow.
    """
    xp, gpu = array_module(x), device.current()
    rows, vocab_size = rows_of(x), len(weight)
    targets = xp.ascontiguousarray(targets, dtype=np.int32).reshape(-1)
    losses = xp.empty(len(rows), np.float32)
    loss = xp.empty(1, np.float32)
    drows = xp.empty_like(rows)
    dweight = xp.empty(weight.shape, np.float32)

    # A chunk of rows has memory for its logits, whose rows begin at whole vectors.
    chunk = rows_per_chunk(len(rows), vocab_size)
    stride = -(-vocab_size // 8) * 8
    buffer = xp.empty((chunk, stride), x.dtype)
    warps = -(-num_vectors(vocab_size, x.dtype) // WARP)
    for start in range(0, len(rows), chunk):
        part = rows[start : start + chunk]
        logits = buffer[: len(part), :vocab_size]
        gpu.matmul(part, weight.T, logits)

        # The gradient of the logits takes their place, and passes through the product.
        gpu.launch(
            "cross_entropy",
            x.dtype,
            len(part),
            logits,
            losses[start:],
            targets[start:],
            1.0 - label_smoothing,
            label_smoothing / vocab_size,
            padding_id,
            vocab_size,
            stride,
            block=min(warps * WARP, LOSS_THREADS),
        )
        gpu.matmul(logits, weight, drows[start : start + chunk])
        gpu.matmul(logits.T, part, dweight, beta=1.0 if start else 0.0)
    gpu.launch("sum_all", np.float32, 1, loss, losses, len(losses))

    def vjp(g: Array) -> tuple[Array, Array, None]:
        _scale(drows, g)
        _scale(dweight, g)
        return drows.reshape(x.shape), dweight, None

    return loss.reshape(()), vjp


def _scale(x: Array, factor: Array) -> None:
    """Multiply by a scalar, in place."""
    grid, size = num_blocks(num_vectors(x.size, x.dtype)), np.int64(x.size)
    device.current().launch("scale", x.dtype, grid, x, factor.reshape(1), size)


def rows_per_chunk(rows: int, vocab_size: int) -> int:
    """Return of how many rows the logits are computed at a time."""
    chunks = max(1, round(rows * vocab_size / LOGITS_PER_CHUNK))
    return min(-(-rows // (chunks * ROWS_PER_TILE)) * ROWS_PER_TILE, rows)


def add_arrays(a: Array, b: Gradient) -> Array:
    """Return a + b, also of 16-bit numbers, with the type of a."""
    if isinstance(b, ProductGradient):
        total = b.plus(a)
        if total is not None:
            return total
        b = b.dense()
    xp = array_module(a)
    total = xp.empty(a.shape, a.dtype)
    device.current().launch(
        "add_arrays",
        total.dtype,
        num_blocks(num_vectors(total.size, total.dtype)),
        total,
        xp.ascontiguousarray(a),
        xp.ascontiguousarray(b, total.dtype),
        np.int64(total.size),
    )
    return total


@contextmanager
def adding_to(
    parameters: ParameterBuffer, sorted_tokens: dict[int, Array] | None = None
) -> Iterator[None]:
    """Have operations add to the gradients of these parameters: there are no others.

    Inside the block their vjps return None for them. Else they return an array, which
    is written and read once more. `sorted_tokens` gives the order that `sort_tokens`
    returns for ids, by their address.
    """
    gpu, tensors = device.current(), parameters.parameters.values()
    gpu.gradients = {_place(p.data): p.grad for p in tensors}
    gpu.sorted_tokens = sorted_tokens or {}
    try:
        yield
    finally:
        gpu.gradients, gpu.sorted_tokens = {}, {}


OPERATIONS: dict[str, Callable[..., tuple[Array, Vjp]]] = {
    "dropout": dropout,
    "linear": linear,
    "embedding": embedding,
    "attention": attention,
    "add_layer_norm": add_layer_norm,
    "projected_cross_entropy": projected_cross_entropy,
}
KERNELS: dict[str, Callable[..., Any]] = {**OPERATIONS, "add_arrays": add_arrays}


def _select_device(array: Array) -> None:
    array.device.use()


BACKEND = Backend(
    find_kernel=find_kernel,
    beam_search=start_search,
    logits_to_score=LOGITS_TO_SCORE,
    select_device=_select_device,
)


def _gradient_of(parameter: Array) -> tuple[Array, Array | None]:
    """Return what to add its gradient to, and what a vjp returns for it."""
    gradient = device.current().gradients.get(_place(parameter))
    if gradient is not None:
        return gradient, None
    gradient = array_module(parameter).zeros(parameter.shape, np.float32)
    return gradient, gradient


def _place(parameter: Array) -> tuple[int, ...]:
    """Return what tells a parameter from all others, also from its transpose."""
    return device.address(parameter), *parameter.strides


def _add_columns(kernel: str, x: Array, *others: Array, total: Array | None) -> None:
    """Add the sums of columns of what `kernel` makes of x to `total`, in two stages.

    If there is no total, the first stage alone is done.

    Shapes: x [N, D], total [D]
    """
    rows, width = x.shape
    count = min(MAX_PARTIAL_SUMS, -(-rows // WARPS))
    partial = array_module(x).empty((count, 1, width), np.float32)
    grid = -(-num_vectors(width, x.dtype) // WARP), count
    block = WARP, WARPS
    gpu = device.current()
    gpu.launch(kernel, x.dtype, grid, partial, x, *others, *size_of(x), block=block)
    if total is not None:
        _add_partials(partial, (total,))


def _add_partials(partial: Array, totals: tuple[Array, ...]) -> None:
    """Add the sum of partial sums to each total: the second stage.

    Shapes: partial [N, K, D], totals each [D]
    """
    count, _, width = partial.shape
    device.current().launch(
        "add_partials",
        np.float32,
        (-(-width // WARP), len(totals)),
        totals[0],
        totals[-1],
        partial,
        count,
        width,
        block=(WARP, MAX_THREADS // WARP),
    )
