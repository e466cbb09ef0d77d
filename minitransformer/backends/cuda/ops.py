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
from typing import Any

import numpy as np

from minitransformer.backends.cuda import blaslt, device
from minitransformer.backends.cuda.attention import attention
from minitransformer.backends.cuda.beam_search import WholeSearch
from minitransformer.backends.cuda.device import (
    WARP,
    WARPS,
    num_blocks,
    num_vectors,
    warp_blocks,
)
from minitransformer.backends.cuda.incremental_decoding import GraphDecoder
from minitransformer.backends.cuda.philox import DropoutMask, PhiloxStream, draw_mask
from minitransformer.backends.cuda.precision import in_float32
from minitransformer.engine.autograd import PRIMITIVES, Vjp
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

# The most threads of a block, which share a row of logits.
MAX_THREADS = 1024

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
    rows wider than MAX_WIDTH. CuPy lacks some operations on 16-bit numbers; those
    without a kernel are computed in float32.
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
        return (_dropout(g, mask),)

    return _dropout(x, mask), vjp


def linear(
    x: Array, weight: Array, bias: Array | None = None, *, relu: bool = False
) -> tuple[Array, Vjp]:
    """The product for the gradient of a parameter adds to it: see `adding_to`."""
    xp = array_module(x)
    rows = _rows(x)  # [N, n]
    out = xp.empty((len(rows), weight.shape[1]), dtype=x.dtype)
    blaslt.forward(rows, weight, bias, relu, out)
    activated = out if relu else None

    def vjp(g: Array) -> tuple[Array, Array | None, Array | None]:
        g, db = _rows(g), None
        if activated is not None:
            masked = xp.empty_like(g)
            db = _column_sums("relu_backward", g, activated, into=(masked,))
            g = masked
        elif bias is not None:
            db = _column_sums("column_sums", g)
        dx = xp.empty(rows.shape, x.dtype)
        device.current().matmul(g, weight.T, dx)
        total, dweight = _gradient_of(weight)
        device.current().matmul(rows.T, g, total, beta=1.0)
        return dx.reshape(x.shape), dweight, None if bias is None else db

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
    """The gradient of an id adds its tokens in their order, without atomics."""
    xp, gpu = array_module(table), device.current()
    ids_shape, width = ids.shape, table.shape[1]
    ids = xp.ascontiguousarray(ids, dtype=np.int32)
    out = xp.empty((*ids.shape, width), dtype=table.dtype)
    dropout_mask = draw_mask(out.shape, rate, rng)
    positions_32 = xp.ascontiguousarray(positions, dtype=np.float32)
    arrays = out, xp.ascontiguousarray(table), ids, positions_32
    options = float(scale), ids.size, ids_shape[-1], width, *dropout_mask
    gpu.launch("embedding", out.dtype, warp_blocks(ids.size), *arrays, *options)

    def vjp(g: Array) -> tuple[Array | None, None, Array]:
        g = _dropout(g, dropout_mask)
        total, dtable = _gradient_of(table)  # rows of other ids get nothing
        order, grid = xp.empty(ids.size, np.int32), num_blocks(ids.size)
        gpu.launch("sort_tokens", np.float32, grid, order, ids, ids.size)
        kernel_args = total, g, ids, order, float(scale), ids.size, width
        gpu.launch("embedding_backward", g.dtype, ids.size, *kernel_args)
        dpositions = xp.zeros_like(positions_32)  # needed only if they are learned
        sums = _column_sums("column_sums", g.reshape(-1, ids_shape[-1] * width))
        dpositions[: ids_shape[-1]] = sums.reshape(-1, width)
        return dtable, None, dpositions

    return out, vjp


def add_layer_norm(
    x: Array,
    residual: Array,
    gain: Array,
    bias: Array,
    *,
    rate: float = 0.0,
    rng: PhiloxStream | None = None,
) -> tuple[Array, Vjp]:
    """x + residual is rounded to the activations' type before it is normalised."""
    xp, gpu, shape = array_module(x), device.current(), x.shape
    rows, shortcut = _rows(x), _rows(residual)  # [N, D], which the vjp does not keep
    gain, bias = xp.ascontiguousarray(gain), xp.ascontiguousarray(bias)
    out, h = xp.empty_like(rows), xp.empty_like(rows)
    statistics = xp.empty((2, len(rows)), np.float32)
    dropout_mask = draw_mask(shape, rate, rng)
    arrays = out, h, *statistics, rows, shortcut, gain, bias
    grid, options = warp_blocks(len(rows)), (*_size(rows), *dropout_mask)
    epsilon = LAYER_NORM_EPSILON
    gpu.launch("add_layer_norm", x.dtype, grid, *arrays, epsilon, *options)

    def vjp(g: Array) -> tuple[Array, Array, Array, Array]:
        g = _rows(g)
        dresidual = xp.empty_like(g)
        dx = xp.empty_like(g) if dropout_mask.threshold else None
        # A row has one warp or several, and the blocks all run at once.
        warps = -(-h.shape[1] // (WARP * ELEMENTS_HELD))
        count = min(BLOCKS_AT_ONCE * gpu.num_processors, -(-len(h) * warps // WARPS))
        partial = xp.empty((count, 2 * h.shape[1]), np.float32)
        arrays = dx, dresidual, partial, g, h, *statistics, gain
        grid, block = (1, count), (warps * WARP, WARPS // warps)
        gpu.launch("layer_norm_backward", g.dtype, grid, *arrays, *options, block=block)
        dgain, dbias = _add_partials(partial).reshape(2, -1)
        dresidual = dresidual.reshape(shape)
        dx = dresidual if dx is None else dx.reshape(shape)
        return dx, dresidual, dgain, dbias

    return out.reshape(shape), vjp


def projected_cross_entropy(
    x: Array, weight: Array, targets: Array, *, label_smoothing: float, padding_id: int
) -> tuple[Array, Vjp]:
    """Rows of padding are computed too and weigh 0: shapes do not depend on data."""
    xp, gpu = array_module(x), device.current()
    rows, vocab_size = _rows(x), len(weight)
    targets = xp.ascontiguousarray(targets, dtype=np.int32).reshape(-1)
    chunk = rows_per_chunk(len(rows), vocab_size)
    threads = -(-num_vectors(vocab_size, x.dtype) // WARP) * WARP
    stride = -(-vocab_size // 8) * 8
    buffer = xp.empty((min(chunk, len(rows)), stride), dtype=x.dtype)
    losses, loss = (xp.empty(size, np.float32) for size in (len(rows), 1))
    drows, dweight = xp.empty_like(rows), xp.empty(weight.shape, np.float32)
    confidence, smoothing = 1.0 - label_smoothing, label_smoothing / vocab_size
    for start in range(0, len(rows), chunk):
        part = rows[start : start + chunk]
        logits = buffer[: len(part), :vocab_size]
        gpu.matmul(part, weight.T, logits)
        arrays = logits, losses[start:], targets[start:]
        options = confidence, smoothing, padding_id, vocab_size, stride
        block = min(threads, MAX_THREADS)
        gpu.launch("cross_entropy", x.dtype, len(part), *arrays, *options, block=block)
        gpu.matmul(logits, weight, drows[start : start + chunk])
        gpu.matmul(logits.T, part, dweight, beta=1.0 if start else 0.0)
    gpu.launch("sum_all", np.float32, 1, loss, losses, len(losses))

    def vjp(g: Array) -> tuple[Array, Array, None]:
        factor = g.reshape(1)
        for gradient in (drows, dweight):
            grid = num_blocks(num_vectors(gradient.size, gradient.dtype))
            size = np.int64(gradient.size)
            gpu.launch("scale", gradient.dtype, grid, gradient, factor, size)
        return drows.reshape(x.shape), dweight, None

    return loss.reshape(()), vjp


def rows_per_chunk(rows: int, vocab_size: int) -> int:
    """Return of how many rows the logits are computed at a time."""
    chunks = max(1, round(rows * vocab_size / LOGITS_PER_CHUNK))
    return -(-rows // (chunks * ROWS_PER_TILE)) * ROWS_PER_TILE


def add_arrays(a: Array, b: Array) -> Array:
    """Return a + b, also of 16-bit numbers, with the type of a."""
    xp = array_module(a)
    total = xp.empty(a.shape, a.dtype)
    terms = xp.ascontiguousarray(a), xp.ascontiguousarray(b, total.dtype)
    grid, size = num_blocks(num_vectors(total.size, total.dtype)), np.int64(total.size)
    device.current().launch("add_arrays", total.dtype, grid, total, *terms, size)
    return total


@contextmanager
def adding_to(parameters: ParameterBuffer) -> Iterator[None]:
    """Have linear layers and embeddings add to the gradients of these parameters.

    Inside the block their vjps return None for them. Else they return an array, which
    is written and read once more.
    """
    gpu, tensors = device.current(), parameters.parameters.values()
    gpu.gradients = {_place(p.data): p.grad for p in tensors}
    try:
        yield
    finally:
        gpu.gradients = {}


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
    beam_search=WholeSearch,
    incremental_decoder=GraphDecoder,
    logits_to_score=LOGITS_TO_SCORE,
    select_device=_select_device,
)


def _gradient_of(matrix: Array) -> tuple[Array, Array | None]:
    """Return what to add the gradient of a matrix to, and what a vjp returns for it."""
    if (gradient := device.current().gradients.get(_place(matrix))) is not None:
        return gradient, None
    gradient = array_module(matrix).zeros(matrix.shape, np.float32)
    return gradient, gradient


def _place(matrix: Array) -> tuple[int, ...]:
    """Return what tells a matrix from all others, also from its transpose."""
    return device.address(matrix), *matrix.strides


def _dropout(x: Array, mask: DropoutMask) -> Array:
    """Return a contiguous array: x, or a copy with the dropped elements set to 0."""
    rows = _rows(x)
    if mask.threshold:
        rows, dropped_from = array_module(x).empty_like(rows), rows
        kernel_args = rows, dropped_from, *_size(rows), *mask
        device.current().launch(
            "dropout", x.dtype, warp_blocks(len(rows)), *kernel_args
        )
    return rows.reshape(x.shape)


def _column_sums(
    kernel: str, x: Array, *others: Array, into: tuple[Array, ...] = ()
) -> Array:
    """Sum what `kernel` computes from x and others over the rows, in two stages.

    `into` are arrays that the kernel also fills.

    Shapes: x [N, D] -> [D]
    """
    rows, width = x.shape
    count = min(MAX_PARTIAL_SUMS, -(-rows // WARPS))
    partial = array_module(x).empty((count, width), np.float32)
    grid, block = (-(-num_vectors(width, x.dtype) // WARP), count), (WARP, WARPS)
    kernel_args = *into, partial, x, *others, *_size(x)
    device.current().launch(kernel, x.dtype, grid, *kernel_args, block=block)
    return _add_partials(partial)


def _add_partials(partial: Array) -> Array:
    """Add partial sums of columns: the second stage. Shapes: partial [N, D] -> [D]"""
    width = partial.shape[1]
    out = array_module(partial).empty(width, np.float32)
    grid = -(-num_vectors(width, np.float32) // WARP), 1
    kernel_args, block = (out, partial, *_size(partial)), (WARP, WARPS)
    device.current().launch("sum_partials", np.float32, grid, *kernel_args, block=block)
    return out


def _rows(x: Array) -> Array:
    """Return all rows of the last axis, contiguous. Shapes: x [..., D] -> [N, D]"""
    return array_module(x).ascontiguousarray(x).reshape(-1, x.shape[-1])


def _size(rows: Array) -> tuple[np.int64, int]:
    """Return the numbers of rows and columns, as kernels take them."""
    return np.int64(len(rows)), rows.shape[1]
