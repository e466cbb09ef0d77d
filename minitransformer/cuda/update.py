"""What is computed with gradients: their sum and norm, and Adam, by kernels."""

from __future__ import annotations

import numpy as np

from minitransformer.backend import Array, array_module
from minitransformer.cuda import device
from minitransformer.cuda.device import THREADS, blocks, packs

# Blocks that each sum a part of the gradient, at most.
NUM_BLOCKS = 1024


def accumulate(total: Array, share: Array, in_place: bool = True) -> Array:
    """total + share, which CuPy does not compute in bfloat16. Shapes: any, equal"""
    out = total if in_place else array_module(total).empty_like(total)
    grid = blocks(packs(total.size, total.dtype))
    places = out, total, share.astype(total.dtype, copy=False), np.int64(total.size)
    device.current().launch("accumulate", total.dtype, grid, THREADS, *places)
    return out


def gradient_norm(gradient: Array) -> Array:
    """The Euclidean norm of the flat gradient, left on the device.

    Shapes: gradient [P] float32 -> [2] float32: the norm, and 1.0 if it is finite, 0.0
    if an element is not, or the sum of squares overflows
    """
    xp, gpu = array_module(gradient), device.current()
    count = min(blocks(gradient.size), NUM_BLOCKS)
    partial, norm = xp.empty(count, np.float32), xp.empty(2, np.float32)
    size = np.int64(gradient.size)
    gpu.launch("square_sums", np.float32, count, THREADS, partial, gradient, size)
    gpu.launch("gradient_norm", np.float32, 1, THREADS, norm, partial, count)
    return norm


def adam_update(
    parameters: Array,
    gradient: Array,
    mean: Array,
    square: Array,
    half: Array | None,
    scalars: Array,
    norm: Array,
) -> None:
    """One step of Adam in place, and the half-precision copy, in one pass (5.3).

    `scalars` is a float32 array on the device: learning rate, beta1, beta2, epsilon,
    1 - beta1^t, 1 - beta2^t, scale, clip. The gradient is multiplied by `scale` (the
    inverse of the loss scale) and, where clip > 0 and the norm of what results exceeds
    it, by clip / norm. `norm` is what `gradient_norm(gradient)` returned; where it says
    that the gradient is not finite, nothing changes.

    Shapes: parameters, gradient, mean, square [P] float32, half [P] float16 or
    bfloat16, scalars [8], norm [2]
    """
    device.current().launch(
        "adam",
        np.float32 if half is None else half.dtype,
        blocks(parameters.size),
        THREADS,
        *(parameters, gradient, mean, square, half, scalars, norm),
        np.int64(parameters.size),
    )
