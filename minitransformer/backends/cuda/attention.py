"""Attention on a GPU: in one kernel each way.

The kernels keep no scores in memory: they divide queries and keys into tiles, compute
these again in the backward pass, and dropout from counters. Activations of 16 bits are
multiplied on tensor cores. Wide heads are left to the reference, in float32.

Shapes: as in `engine/ops.py`
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from minitransformer.backends.cuda import device
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

# The numbers of a call: AttentionSizes in attention.cu.
STRIDES = [f"{name}_{axis}" for name in "qkv" for axis in ("batch", "row")]
INTEGERS = (
    "mask_batch mask_head mask_row counts_batch queries keys d_k d_v dropout_threshold"
).split()
SIZES = np.dtype(
    [
        *((name, np.int32) for name in (*STRIDES, *INTEGERS)),
        ("masked_score", np.float32),
        ("scale", np.float32),
        ("dropout_first", np.uint64),
    ],
    align=True,
)


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
    """Scores and sums are float32; weights are rounded where they are multiplied.

    In decoding, which has no backward pass, the mask may also be numbers of keys, one
    for each sentence or one for all, int32: a sentence attends to its first so many.
    """
    xp, head_width = array_module(q), max(q.shape[-1], v.shape[-1]) // num_heads
    if head_width > WIDTHS[-1] or len(q) > MAX_SENTENCES:
        if _counts_keys(mask):
            mask = xp.arange(k.shape[1], dtype=np.int32) < mask
        options = {"num_heads": num_heads, "rate": rate, "rng": rng}
        return in_float32(PRIMITIVES["attention"], q, k, v, mask, **options)
    shape = (len(q), num_heads, q.shape[1], k.shape[1])  # [B, H, T, S]
    given = _kernel_inputs((q, k, v), mask, shape, draw_mask(shape, rate, rng))
    return _in_one_kernel(given, shape, head_width)


def _in_one_kernel(
    given: KernelInputs, shape: tuple[int, ...], head_width: int
) -> tuple[Array, Vjp]:
    """Compute attention by the kernels of `attention.cu`; `shape` is (B, H, T, S)."""
    q, _, v = given.arrays
    xp, (sentences, heads, queries, keys) = array_module(q), shape

    # A kernel for the width of the heads divides queries and keys into tiles.
    width, tile = _tile_of(head_width, q.dtype)
    grid = heads, sentences, -(-queries // tile)
    launch = functools.partial(device.current().launch, block=TILE_THREADS)
    out = xp.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype)  # [B, T, H d_v]
    statistics = xp.empty((2, *shape[:-1]), np.float32)
    launch(
        f"attention_{width}",
        q.dtype,
        grid,
        out,
        statistics,
        *given.arrays,
        given.allowed,
        given.counts,
        given.seed,
        given.sizes,
    )

    def vjp(g: Array) -> tuple[Array | None, ...]:
        gradients = [xp.empty(x.shape, x.dtype) for x in given.arrays]
        # With several tiles of keys, the gradient of the queries is a sum over them.
        several = keys > tile
        launch(
            f"attention_backward_{width}",
            q.dtype,
            grid[:2],
            *gradients,
            xp.empty(q.shape, np.float32) if several else None,
            statistics,
            xp.ascontiguousarray(g),
            out,
            *given.arrays,
            given.allowed,
            given.seed,
            given.sizes,
        )
        return (*gradients, None)

    return out, vjp


def _tile_of(width: int, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the width that a kernel for such heads has, and how long its tiles are."""
    kernel_width = next(each for each in WIDTHS if each >= width)
    vectors = 4 if kernel_width == WIDTHS[0] else 2
    return kernel_width, vectors * (16 // dtype.itemsize)


class KernelInputs(NamedTuple):
    """What both kernels read: q, k and v, a mask or numbers of keys, and sizes."""

    arrays: list[Array]
    allowed: Array | None
    counts: Array | None
    seed: Array | None
    sizes: np.ndarray


def _kernel_inputs(
    arrays: tuple[Array, Array, Array],
    mask: Array | None,
    shape: tuple[int, ...],
    dropout: DropoutMask,
) -> KernelInputs:
    xp, heads = array_module(arrays[0]), shape[1]

    # Rows may have gaps between them, but there are none between numbers.
    q, k, v = inputs = [
        x if x.strides[-1] == x.itemsize else xp.ascontiguousarray(x) for x in arrays
    ]
    counts, allowed = (mask, None) if _counts_keys(mask) else (None, mask)
    allowed, mask_strides = _rows_of_mask(xp, allowed, shape)
    strides = [stride // x.itemsize for x in inputs for stride in x.strides[:2]]
    sizes = device.struct(
        SIZES,
        **dict(zip(STRIDES, strides, strict=True)),
        mask_batch=mask_strides[0],
        mask_head=mask_strides[1],
        mask_row=mask_strides[2],
        counts_batch=0 if counts is None or len(counts) == 1 else 1,
        masked_score=MASKED_SCORE,
        scale=1 / math.sqrt(q.shape[-1] // heads),
        queries=q.shape[1],
        keys=k.shape[1],
        d_k=q.shape[-1] // heads,
        d_v=v.shape[-1] // heads,
        dropout_first=dropout.first,
        dropout_threshold=dropout.threshold,
    )
    return KernelInputs(inputs, allowed, counts, dropout.seed, sizes)


def _counts_keys(mask: Array | None) -> bool:
    return mask is not None and mask.dtype == np.int32


def _rows_of_mask(
    xp: Any, mask: Array | None, shape: tuple[int, ...]
) -> tuple[Array | None, tuple[int, ...]]:
    """Return the mask, whose elements for a query's keys lie side by side, and strides.

    Those are along sentences, heads and queries; 0 repeats the mask.
    """
    if mask is None:
        return None, (0, 0, 0)
    if xp.broadcast_to(mask, shape).strides[-1] != 1:
        mask = xp.ascontiguousarray(
            xp.broadcast_to(mask, (*mask.shape[:-1], shape[-1]))
        )
    return mask, xp.broadcast_to(mask, shape).strides[:-1]
