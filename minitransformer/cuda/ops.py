"""Operations of the same name and signature as in `ops.py`, by kernels and cuBLAS.

Activations and matrices are of one type: float32, float16 or bfloat16. Vectors
(biases, gains) are float32, and so are statistics, losses and all gradients of
parameters. What these bodies refuse (`find_kernel`), the reference computes. None waits for
the GPU, so that a CUDA graph can hold them; every sum is taken in a fixed order, so
that equal inputs give equal bits. The first comment of each kernel in `kernels.cu` has
its formula. Shapes: as in `ops.py`, N rows (tokens of all sentences together).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from minitransformer.cuda import device
from minitransformer.cuda.beam_search import beam_search
from minitransformer.cuda.device import THREADS, WARP, WARPS, blocks, packs
from minitransformer.cuda.steppers import graph_stepper
from minitransformer.engine.autograd import PRIMITIVES, Vjp
from minitransformer.engine.backend import Array, array_module, as_float32
from minitransformer.engine.ops import LAYER_NORM_EPSILON, MASKED_SCORE, split_heads
from minitransformer.engine.random_streams import PhiloxStream, dropout_threshold

# The widest row that the LayerNorm kernels hold in registers: MAX_WIDTH in kernels.cu.
MAX_WIDTH = 1024

# Logits computed at a time in the loss: large products, little memory.
LOGITS_PER_CHUNK = 1 << 27
MIN_ROWS_PER_CHUNK = 256

# Operations without a kernel, which the model does not use in training.
ELEMENTARY = ("add", "multiply", "matmul", "sum_all")

# Blocks that each sum a share of the rows of a matrix, at most.
NUM_SHARES = 256


def find_kernel(name: str, arrays: tuple[Array, ...]) -> Callable[..., Any] | None:
    """Return the fused body of operation `name`, or None if it does not take `arrays`.

    Refused are activations of another type than float32, float16 and bfloat16 (there
    is no kernel for doubles), matrices of another type than theirs, vectors that are
    not float32, and LayerNorm of rows wider than MAX_WIDTH. CuPy lacks some operations
    on 16-bit numbers: those without a kernel are computed in float32.
    """
    if name in DECODING:
        return DECODING[name] if device.is_real(arrays[0].dtype) else None
    if name == "accumulate":
        same = all(device.is_real(a.dtype) and a.flags.c_contiguous for a in arrays)
        return accumulate if same else None
    floats = [a for a in arrays if a is not None and a.dtype.kind not in "biu"]
    real = floats[0].dtype if floats else None
    if real is None or not device.is_real(real):
        return None
    wide = name == "add_layer_norm" and arrays[0].shape[-1] > MAX_WIDTH
    if real.itemsize == 2 and (wide or name in ELEMENTARY):
        return functools.partial(_in_float32, PRIMITIVES[name])
    if name not in OPERATIONS or wide:
        return None
    for array in floats[1:]:
        # Sinusoids are a matrix, too, but no parameter.
        either = name == "embedding" and array.dtype == np.float32
        if array.dtype != (np.float32 if array.ndim == 1 else real) and not either:
            return None
    return OPERATIONS[name]


def _in_float32(
    body: Callable[..., tuple[Array, Vjp]], *arrays: Array, **options: Any
) -> tuple[Array, Vjp]:
    def converted(array: Array, dtype: Any) -> Array:
        return None if array is None else array.astype(dtype)

    wide = [a if a is None else as_float32(a) for a in arrays]
    out, vjp = body(*wide, **options)

    def narrow_vjp(g: Array) -> tuple[Array | None, ...]:
        gradients = zip(vjp(as_float32(g)), arrays, strict=False)
        return tuple(converted(gradient, a.dtype) for gradient, a in gradients)

    return converted(out, arrays[0].dtype), narrow_vjp


def dropout(x: Array, *, rate: float, rng: PhiloxStream) -> tuple[Array, Vjp]:
    noise = _Noise(x.shape, rate, rng)

    def vjp(g: Array) -> tuple[Array]:
        return (_dropped(g, noise),)

    return _dropped(x, noise), vjp


def linear(
    x: Array, weight: Array, bias: Array | None = None, *, relu: bool = False
) -> tuple[Array, Vjp]:
    xp, gpu = array_module(x), device.current()
    rows = _rows(x)  # [N, n]
    out = xp.empty((len(rows), weight.shape[1]), dtype=x.dtype)
    gpu.matmul(rows, weight, out)
    if relu or bias is not None:
        grid = _row_blocks(out)
        size = np.int64(len(rows)), out.shape[1]
        gpu.launch("bias_relu", x.dtype, grid, THREADS, out, bias, *size, relu)
    activated = out if relu else None

    def vjp(g: Array) -> tuple[Array, Array, Array | None]:
        g, db = _rows(g), None
        if activated is not None:
            masked = xp.empty_like(g)
            db = _column_sums("relu_backward", g, activated, into=(masked,))
            g = masked
        elif bias is not None:
            db = _column_sums("column_sums", g)
        dx, dweight = xp.empty_like(rows), _empty(xp, weight.shape)
        gpu.matmul(g, weight.T, dx)
        gpu.matmul(rows.T, g, dweight)
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
    """The gradient of the table: tokens add up id by id, each in order, no atomics."""
    xp, gpu = array_module(table), device.current()
    ids_shape, width = ids.shape, table.shape[1]
    ids = xp.ascontiguousarray(ids, dtype=np.int32)
    out = xp.empty((*ids.shape, width), dtype=table.dtype)
    noise = _Noise(out.shape, rate, rng)
    gpu.launch(
        "embed",
        table.dtype,
        _row_blocks(out),
        THREADS,
        *(out, xp.ascontiguousarray(table), ids, _as_float32(positions), float(scale)),
        *(np.int64(ids.size), ids_shape[-1], width, *noise.arguments),
    )

    def vjp(g: Array) -> tuple[Array, None, Array]:
        g = _dropped(g, noise) if noise.threshold else xp.ascontiguousarray(g)
        sums = _column_sums("column_sums", g.reshape(-1, ids_shape[-1] * width))
        dpositions = xp.zeros(positions.shape, dtype=np.float32)
        dpositions[: ids_shape[-1]] = sums.reshape(-1, width)
        first = xp.full(len(table), ids.size, dtype=np.int32)
        gpu.launch(
            "first_tokens", g.dtype, blocks(ids.size), THREADS, first, ids, ids.size
        )
        dtable = xp.zeros(table.shape, dtype=np.float32)
        kernel_args = g, ids, first, float(scale), ids.size, width
        gpu.launch("embed_backward", g.dtype, ids.size, THREADS, dtable, *kernel_args)
        return dtable, None, dpositions

    return out, vjp


def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    *,
    num_heads: int,
    rate: float = 0.0,
    rng: PhiloxStream | None = None,
) -> tuple[Array, Vjp]:
    """Scores are products in the activations' type; the softmax is taken in place.

    Rows of scores begin at multiples of 16 bytes, as tensor cores like them.
    """
    xp, gpu = array_module(q), device.current()
    query, key, value = (split_heads(x, num_heads) for x in (q, k, v))
    scale = 1 / math.sqrt(query.shape[-1])
    shape = (*query.shape[:-1], key.shape[-2])  # [B, H, T, S]
    rows, stride = math.prod(shape[:-1]), -(-shape[-1] // 8) * 8
    noise = _Noise(shape, rate, rng)

    def scores() -> Array:
        return xp.empty((*shape[:-1], stride), dtype=q.dtype)[..., : shape[-1]]

    def dropped() -> Array:
        if not noise.threshold:
            return weights
        out, size = scores(), (np.int64(rows), shape[-1], stride)
        grid = _row_blocks(weights)
        gpu.launch(
            "dropout", q.dtype, grid, THREADS, out, weights, *size, *noise.arguments
        )
        return out

    weights = scores()
    gpu.matmul(query, key.swapaxes(-1, -2), weights, alpha=scale)
    strides = (0,) * 4 if mask is None else xp.broadcast_to(mask, shape).strides
    gpu.launch(
        "softmax",
        q.dtype,
        _warp_blocks(rows),
        THREADS,
        *(weights, mask, *strides, MASKED_SCORE),
        *(np.int64(rows), *shape[1:], stride),
    )
    out = xp.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype)  # [B, T, H d_v]
    gpu.matmul(dropped(), value, split_heads(out, num_heads))

    def vjp(g: Array) -> tuple[Array, Array, Array, None]:
        g = split_heads(xp.ascontiguousarray(g), num_heads)  # [B, H, T, d_v]
        dq, dk, dv = (_empty(xp, x.shape, x.dtype) for x in (q, k, v))
        gpu.matmul(dropped().swapaxes(-1, -2), g, split_heads(dv, num_heads))
        dscores = scores()
        gpu.matmul(g, value.swapaxes(-1, -2), dscores)
        size = np.int64(rows), shape[-1], stride
        kernel_args = dscores, weights, *size, *noise.arguments
        gpu.launch(
            "softmax_backward", q.dtype, _warp_blocks(rows), THREADS, *kernel_args
        )
        gpu.matmul(dscores, key, split_heads(dq, num_heads), alpha=scale)
        transposed = dscores.swapaxes(-1, -2)
        gpu.matmul(transposed, query, split_heads(dk, num_heads), alpha=scale)
        return dq, dk, dv, None

    return out, vjp


def add_layer_norm(
    x: Array,
    residual: Array,
    gain: Array,
    bias: Array,
    *,
    epsilon: float = LAYER_NORM_EPSILON,
    rate: float = 0.0,
    rng: PhiloxStream | None = None,
) -> tuple[Array, Vjp]:
    """The sum before the norm is rounded to the activations' type, as it is kept."""
    xp, gpu = array_module(x), device.current()
    rows, shortcut = _rows(x), _rows(residual)  # [N, D]
    gain, bias = xp.ascontiguousarray(gain), xp.ascontiguousarray(bias)
    out, h = xp.empty_like(rows), xp.empty_like(rows)
    statistics = _empty(xp, (2, len(rows)))
    size = np.int64(len(rows)), rows.shape[1]
    noise = _Noise(x.shape, rate, rng)
    gpu.launch(
        "add_layer_norm",
        x.dtype,
        _warp_blocks(len(rows)),
        THREADS,
        *(out, h, *statistics, rows, shortcut, gain, bias),
        *(float(epsilon), *size, *noise.arguments),
    )

    def vjp(g: Array) -> tuple[Array, Array, Array, Array]:
        g = _rows(g)
        dresidual = xp.empty_like(g)
        dx = xp.empty_like(g) if noise.threshold else None
        gpu.launch(
            "layer_norm_backward",
            g.dtype,
            _warp_blocks(len(g)),
            THREADS,
            *(dx, dresidual, g, h, *statistics, gain, *size, *noise.arguments),
        )
        dgain, dbias = _column_sums("norm_parameters", g, h, *statistics, sums=2)
        dresidual = dresidual.reshape(x.shape)
        dx = dresidual if dx is None else dx.reshape(x.shape)
        return dx, dresidual, dgain, dbias

    return out.reshape(x.shape), vjp


def projected_cross_entropy(
    x: Array, weight: Array, targets: Array, *, label_smoothing: float, padding_id: int
) -> tuple[Array, Vjp]:
    """All rows are computed, and those of padding weigh 0: shapes depend on no data."""
    xp, gpu = array_module(x), device.current()
    rows = _rows(x)
    targets = xp.ascontiguousarray(targets, dtype=np.int32).reshape(-1)
    vocab_size = len(weight)
    chunk = max(LOGITS_PER_CHUNK // vocab_size, MIN_ROWS_PER_CHUNK)
    stride = -(-vocab_size // 8) * 8
    buffer = xp.empty((min(chunk, len(rows)), stride), dtype=x.dtype)
    losses = _empty(xp, (len(rows),))
    drows = xp.empty_like(rows)
    dweight = _empty(xp, weight.shape)
    for start in range(0, len(rows), chunk):
        part = rows[start : start + chunk]
        logits = buffer[: len(part), :vocab_size]
        gpu.matmul(part, weight.T, logits)
        gpu.launch(
            "cross_entropy",
            x.dtype,
            len(part),
            THREADS,
            *(logits, losses[start:], targets[start:]),
            *(1.0 - label_smoothing, label_smoothing / vocab_size, padding_id),
            *(vocab_size, stride),
        )
        gpu.matmul(logits, weight, drows[start : start + chunk])
        gpu.matmul(logits.T, part, dweight, beta=1.0 if start else 0.0)
    loss = _empty(xp, (1,))
    gpu.launch("sum_all", np.float32, 1, THREADS, loss, losses, len(losses))

    def vjp(g: Array) -> tuple[Array, Array, None]:
        factor = g.reshape(1)
        for gradient in (drows, dweight):
            size = np.int64(gradient.size)
            grid = blocks(packs(gradient.size, gradient.dtype))
            gpu.launch("scale", gradient.dtype, grid, THREADS, gradient, factor, size)
        return drows.reshape(x.shape), dweight, None

    return loss.reshape(()), vjp


def accumulate(total: Array, share: Array, in_place: bool = True) -> Array:
    """total + share, which CuPy does not compute in bfloat16. Shapes: any, equal"""
    out = total if in_place else array_module(total).empty_like(total)
    grid = blocks(packs(total.size, total.dtype))
    kernel_args = out, total, share.astype(total.dtype, copy=False)
    device.current().launch(
        "accumulate", total.dtype, grid, THREADS, *kernel_args, np.int64(total.size)
    )
    return out


OPERATIONS: dict[str, Callable[..., tuple[Array, Vjp]]] = {
    body.__name__: body
    for body in (
        dropout,
        linear,
        embedding,
        attention,
        add_layer_norm,
        projected_cross_entropy,
    )
}
DECODING: dict[str, Callable[..., Any]] = {
    "beam_search": beam_search,
    "stepper": graph_stepper,
}


# What the bodies share


class _Noise:
    """A dropout mask as kernels take it: seed, first counter, threshold (0 for none).

    It holds no mask: each kernel computes the bytes again.
    """

    def __init__(
        self, shape: tuple[int, ...], rate: float, rng: PhiloxStream | None
    ) -> None:
        self.threshold = 0 if rng is None else dropout_threshold(rate)
        seed, first = None, 0
        if rng is not None and rate > 0:
            seed, first = rng.seed, rng.take(shape)
        self.arguments = seed, np.uint64(first), self.threshold


def _dropped(x: Array, noise: _Noise) -> Array:
    xp, rows = array_module(x), _rows(x)
    out = xp.empty_like(rows)
    grid = _row_blocks(rows)
    size = np.int64(len(rows)), rows.shape[1], rows.shape[1]
    kernel_args = out, rows, *size, *noise.arguments
    device.current().launch("dropout", x.dtype, grid, THREADS, *kernel_args)
    return out.reshape(x.shape)


def _column_sums(
    kernel: str, x: Array, *others: Array, into: tuple[Array, ...] = (), sums: int = 1
) -> Array:
    """Sum what a kernel makes of x over its rows, in two stages.

    Shapes: x [N, D] -> [D], or [sums, D]
    """
    xp, gpu, (rows, width) = array_module(x), device.current(), x.shape
    shares = min(NUM_SHARES, -(-rows // WARPS))
    partial, out = _empty(xp, (shares, sums * width)), _empty(xp, (sums, width))
    block = WARP, WARPS
    across, size = -(-packs(width, x.dtype) // WARP), (np.int64(rows), width)
    gpu.launch(
        kernel, x.dtype, (across, shares), block, *into, partial, x, *others, *size
    )
    grid = -(-sums * width // (4 * WARP)), 1
    size = shares, sums * width
    gpu.launch("sum_partials", np.float32, grid, block, out, partial, *size)
    return out if sums > 1 else out[0]


def _rows(x: Array) -> Array:
    """All rows of the last axis, contiguous. Shapes: [..., D] -> [N, D]"""
    return array_module(x).ascontiguousarray(x).reshape(-1, x.shape[-1])


def _as_float32(x: Array) -> Array:
    """A float32 copy, or x itself where it is one."""
    xp = array_module(x)
    x = xp.ascontiguousarray(x)
    if x.dtype == np.float32:
        return x
    out, size = _empty(xp, x.shape), np.int64(x.size)
    device.current().launch("widen", x.dtype, blocks(x.size), THREADS, out, x, size)
    return out


def _empty(xp: Any, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    return xp.empty(shape, dtype=dtype)


def _row_blocks(rows: Array) -> int:
    """Blocks of which each thread takes a pack of a row. Shapes: rows [N, D]"""
    width = rows.shape[-1]
    return blocks(rows.size // width * packs(width, rows.dtype))


def _warp_blocks(rows: int) -> int:
    """Blocks of which each warp takes a row."""
    return -(-rows // WARPS)
