"""Attention on a GPU: in one kernel each way.

The kernels keep no scores in memory: they divide queries and keys into tiles, compute
these again in the backward pass, and dropout from counters. Their products have two
bodies, in plain C++ and for tensor cores; the second is used where both agree. Wide
heads are left to the reference, in float32.

Shapes: as in `engine/ops.py`
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from minitransformer.backends.cuda import device, verdicts
from minitransformer.backends.cuda.philox import DropoutMask, PhiloxStream, draw_mask
from minitransformer.backends.cuda.precision import in_float32
from minitransformer.engine.autograd import PRIMITIVES, Vjp
from minitransformer.engine.backend import Array, array_module
from minitransformer.engine.ops import MASKED_SCORE

# The widths of heads that the kernels are compiled for; narrower ones are padded.
WIDTHS = 64, 128
TILE_THREADS = 128

# A grid of blocks is not wider than this along its second axis, that of sentences.
MAX_SENTENCES = 65_535


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
    """Scores and sums are float32; weights are rounded where they are multiplied."""
    too_wide = max(q.shape[-1], v.shape[-1]) // num_heads > WIDTHS[-1]
    if too_wide or len(q) > MAX_SENTENCES:
        options = {"num_heads": num_heads, "rate": rate, "rng": rng}
        return in_float32(PRIMITIVES["attention"], q, k, v, mask, **options)
    shape = (len(q), num_heads, q.shape[1], k.shape[1])  # [B, H, T, S]
    dropout_mask = draw_mask(shape, rate, rng)
    is_float32 = q.dtype == np.float32
    tensor_cores = not is_float32 and tensor_cores_agree(device.current(), q.dtype)
    return in_one_kernel(q, k, v, mask, shape, dropout_mask, tensor_cores)


def in_one_kernel(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    shape: tuple[int, ...],
    dropout_mask: DropoutMask,
    tensor_cores: bool,
) -> tuple[Array, Vjp]:
    """Compute attention, and its gradients, by the kernels of `attention.cu`."""
    xp, gpu = array_module(q), device.current()
    batch, num_heads, queries, keys = shape
    d_k, d_v = q.shape[-1] // num_heads, v.shape[-1] // num_heads
    width = next(width for width in WIDTHS if width >= max(d_k, d_v))
    tile = (4 if width == WIDTHS[0] else 2) * (16 // q.dtype.itemsize)
    inputs = [xp.ascontiguousarray(x) if _has_gaps(x) else x for x in (q, k, v)]
    rest: list[Any] = []
    for x in inputs:
        rest += [x, *(stride // x.itemsize for stride in x.strides[:2])]
    rest += _rows_of_mask(xp, mask, shape)
    rest += [MASKED_SCORE, 1 / math.sqrt(d_k), queries, keys, d_k, d_v]
    rest += dropout_mask
    out = xp.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype)  # [B, T, H d_v]
    statistics = xp.empty((2, *shape[:-1]), np.float32)
    launch = functools.partial(
        gpu.launch, block=TILE_THREADS, tensor_cores=tensor_cores
    )
    grid = num_heads, batch, -(-queries // tile)
    launch(f"attention_{width}", q.dtype, grid, out, statistics, *rest)

    def vjp(g: Array) -> tuple[Array, Array, Array, None]:
        g = xp.ascontiguousarray(g)
        dq, dk, dv = (xp.empty(x.shape, x.dtype) for x in (q, k, v))
        dq_sums = xp.empty(q.shape, np.float32) if keys > tile else None
        outputs = dq, dk, dv, dq_sums, statistics, g, out
        launch(f"attention_backward_{width}", q.dtype, grid[:2], *outputs, *rest)
        return dq, dk, dv, None

    return out, vjp


def _rows_of_mask(
    xp: Any, mask: Array | None, shape: tuple[int, ...]
) -> tuple[Array | None, int, int, int]:
    """Return the mask, whose elements for a query's keys lie side by side, and strides.

    Those are along sentences, heads and queries; 0 repeats the mask.
    """
    if mask is None:
        return None, 0, 0, 0
    if xp.broadcast_to(mask, shape).strides[-1] != 1:
        mask = xp.ascontiguousarray(
            xp.broadcast_to(mask, (*mask.shape[:-1], shape[-1]))
        )
    return mask, *xp.broadcast_to(mask, shape).strides[:-1]


def _has_gaps(x: Array) -> bool:
    """Return whether the numbers of a row do not lie side by side."""
    return x.strides[-1] != x.itemsize


def tensor_cores_agree(gpu: device.Device, dtype: np.dtype[Any]) -> bool:
    """Return whether tensor cores give what the plain body gives.

    Both compute two small cases with several tiles and a mask.
    """

    def results() -> Iterator[tuple[Array, Array]]:
        rng, xp = np.random.default_rng(0), gpu.xp
        for width in (48, 80):
            shape = 2, 2, 37, 45
            sizes = [(2, length, 2 * width) for length in (37, 45, 45, 37)]
            q, k, v, g = (
                xp.asarray(rng.standard_normal(size).astype(dtype)) for size in sizes
            )
            allowed, found = xp.asarray(np.tri(37, 45, 8, dtype=bool)), []
            for tensor_cores in (False, True):
                arrays = q, k, v, allowed, shape, draw_mask(shape, 0.0, None)
                out, vjp = in_one_kernel(*arrays, tensor_cores)
                found.append((out, *vjp(g)[:3]))
            yield from zip(*found, strict=True)

    fallback = "attention is computed without tensor cores"
    return verdicts.matches_reference(gpu, "tensor cores", dtype, results, fallback)
